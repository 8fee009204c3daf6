use jobq::job;

#[job]
async fn resize(image_id: i64) -> Result<impl Send, String> {
    Ok(image_id)
}

fn main() {}
