use jobq::job;

#[job(crate = "nowhere::jobq")]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
