use jobq::job;

#[job(backoff = "2s")]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
