use jobq::job;

#[job(priority = 1.5)]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
