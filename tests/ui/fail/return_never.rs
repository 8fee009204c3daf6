use jobq::job;

#[job]
async fn resize(image_id: i64) -> ! {
    panic!("{image_id}")
}

fn main() {}
