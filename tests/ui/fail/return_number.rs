use jobq::job;

#[job]
async fn resize(image_id: i64) -> i64 {
    image_id
}

fn main() {}
