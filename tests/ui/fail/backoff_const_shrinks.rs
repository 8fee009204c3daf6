use jobq::job;

#[job(backoff(factor = 1.0 / 2.0))]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
