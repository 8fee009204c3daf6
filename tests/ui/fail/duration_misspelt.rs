use jobq::job;

#[job(lease = "3o s")]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
