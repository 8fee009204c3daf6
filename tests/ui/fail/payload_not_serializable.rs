use jobq::job;

struct ImageStore;

#[job]
async fn resize(image_id: i64, store: ImageStore) {
    let _ = (image_id, store);
}

fn main() {}
