use jobq::job;

#[job(queue = "images" lease = "10s")]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
