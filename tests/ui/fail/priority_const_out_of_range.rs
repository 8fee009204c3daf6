use jobq::job;

const LAST: i16 = -5;

#[job(priority = LAST)]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
