use jobq::job;

#[job(timeout = "0s")]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
