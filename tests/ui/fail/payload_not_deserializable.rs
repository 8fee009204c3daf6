use jobq::job;

#[derive(serde::Serialize)]
struct Size {
    width: u32,
}

#[job]
async fn resize(image_id: i64, size: Option<Size>) {
    println!("{image_id} {:?}", size.map(|size| size.width));
}

fn main() {}
