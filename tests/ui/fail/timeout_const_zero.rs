use jobq::job;

#[job(timeout = std::time::Duration::from_secs(1 - 1))]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
