use jobq::job;

const TIMEOUT: u64 = 30;

#[job(timeout = TIMEOUT)]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
