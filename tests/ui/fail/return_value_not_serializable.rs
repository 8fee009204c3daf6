use jobq::job;

struct Image;

#[job]
async fn resize(image_id: i64) -> Result<Image, String> {
    Err(image_id.to_string())
}

fn main() {}
