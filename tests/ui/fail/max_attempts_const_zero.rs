use jobq::job;

const ATTEMPTS: u32 = 0;

#[job(max_attempts = ATTEMPTS)]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
