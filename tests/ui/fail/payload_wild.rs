use jobq::job;

#[job]
async fn resize(_: i64) {}

fn main() {}
