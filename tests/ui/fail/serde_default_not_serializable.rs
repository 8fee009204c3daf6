use jobq::job;

#[derive(Default)]
struct Size {
    width: u32,
}

#[job]
async fn resize(image_id: i64, #[serde(default)] size: Size) {
    println!("{image_id} {}", size.width);
}

fn main() {}
