use jobq::job;

#[job]
async fn resize(image_id: i64);

fn main() {}
