use jobq::job;

#[job]
fn resize(image_ids: ...) {}

fn main() {}
