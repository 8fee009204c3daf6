use jobq::job;

#[job(lease = , priority = 1)]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
