use jobq::job;

#[job]
async fn resize(width: u32, #[serde(rename = "width")] height: u32) {
    println!("{width}x{height}");
}

fn main() {}
