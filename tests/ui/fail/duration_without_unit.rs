use jobq::job;

#[job(timeout = "30")]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
