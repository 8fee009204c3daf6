use jobq::job;

#[job(backoff(factor = 0.5))]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
