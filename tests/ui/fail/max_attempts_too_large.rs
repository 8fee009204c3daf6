use jobq::job;

#[job(max_attempts = 99999999999999999999999999999999999999999999)]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
