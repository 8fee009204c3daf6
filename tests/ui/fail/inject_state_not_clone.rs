use jobq::{State, job};

struct ImageStore;

#[job]
async fn resize(image_id: i64, State(store): State<ImageStore>) {
    let _ = (image_id, store);
}

fn main() {}
