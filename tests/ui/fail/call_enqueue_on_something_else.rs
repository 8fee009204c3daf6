use jobq::job;

#[job]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

async fn upload() {
    let _ = resize::enqueue("postgres://", 7).await;
}

fn main() {}
