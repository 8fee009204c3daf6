use jobq::job;

#[job(backoff(bse = "2s", jitter = true))]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
