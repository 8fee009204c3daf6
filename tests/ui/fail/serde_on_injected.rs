use jobq::{State, job};

#[job]
async fn resize(image_id: i64, #[serde(default)] State(store): State<String>) {
    println!("{image_id} {store}");
}

fn main() {}
