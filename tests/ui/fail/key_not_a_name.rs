use jobq::job;

#[job(key = "customer-42")]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
