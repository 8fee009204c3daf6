use jobq::job;

#[job]
const fn resize(image_id: i64) {
    let _ = image_id;
}

fn main() {}
