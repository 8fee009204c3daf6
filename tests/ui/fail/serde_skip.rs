use jobq::job;

#[job]
async fn resize(image_id: i64, #[serde(skip)] width: u32) {
    println!("{image_id} {width}");
}

fn main() {}
