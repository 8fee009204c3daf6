use jobq::job;

#[job]
async fn resize(#[serde(rename(serialize = "w", deserialize = "width"))] width: u32) {
    println!("{width}");
}

fn main() {}
