use jobq::job;

#[job(max_attempts = 0)]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
