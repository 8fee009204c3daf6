use jobq::job;

#[job(queue = "images", lease = "10s", queue = "pictures")]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
