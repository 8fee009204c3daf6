use jobq::job;

#[job]
async fn resize(_image_id: i64) {}

fn main() {}
