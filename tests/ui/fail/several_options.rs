use jobq::job;

#[job(queu = "images", lease = "3o s", max_attempts = 0, priority = 9, lease = "10s", backoff(base = 2, cup = "1h"))]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
