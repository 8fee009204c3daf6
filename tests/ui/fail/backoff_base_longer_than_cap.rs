use jobq::job;

#[job(backoff(base = "2h"))]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
