use jobq::job;

use std::time::Duration;

const LEASE: Duration = Duration::from_millis(500);

#[job(lease = LEASE, register = false)]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
