use jobq::job;

/// An image.
#[job]
pub struct Resize {
    image_id: i64,
}

fn main() {}
