use jobq::job;

#[job(max_retries = 3)]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
