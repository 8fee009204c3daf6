use jobq::job;

#[job(aliases("old", "older", "old"))]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
