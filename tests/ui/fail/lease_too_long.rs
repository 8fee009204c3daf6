use jobq::job;

#[job(lease = "31d")]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
