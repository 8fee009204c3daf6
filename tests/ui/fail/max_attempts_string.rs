use jobq::job;

#[job(max_attempts = "three")]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
