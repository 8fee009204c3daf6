use jobq::job;

use std::time::Duration;

const BASE: Duration = Duration::from_secs(2);

#[job(backoff(base = BASE, cap = "1s"))]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
