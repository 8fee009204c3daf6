use jobq::job;

mod axum {
    pub struct State<T>(pub T);
}

#[job]
async fn resize(image_id: i64, axum::State(store): axum::State<String>) {
    println!("{image_id} {store}");
}

fn main() {}
