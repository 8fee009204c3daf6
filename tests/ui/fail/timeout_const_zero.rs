use jobq::job;

#[job(timeout = std::time::Duration::from_secs(0))]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
