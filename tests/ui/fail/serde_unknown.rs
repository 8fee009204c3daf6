use jobq::job;

#[job]
async fn resize(#[serde(optional)] width: u32) {
    println!("{width}");
}

fn main() {}
