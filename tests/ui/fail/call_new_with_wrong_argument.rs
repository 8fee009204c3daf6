use jobq::{EnqueueTarget, job};

#[job]
async fn resize(image_id: i64, width: u32) {
    println!("{image_id} {width}");
}

async fn upload(target: impl EnqueueTarget) {
    let _ = resize::new("seven", 640);
    let _ = resize::enqueue(target, 7).await;
}

fn main() {}
