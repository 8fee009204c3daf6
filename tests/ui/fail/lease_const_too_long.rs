use jobq::job;

const MONTHS: std::time::Duration = std::time::Duration::from_secs(60 * 86_400);

#[job(lease = MONTHS)]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
