use jobq::job;

#[job(backoff(factor = "2"))]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
