use jobq::job;

#[job]
fn resize(image_id: i64) -> Option<i64> {
    Some(image_id)
}

fn main() {}
