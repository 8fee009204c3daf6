use jobq::job;

#[job(max_crashes = 1 << 15)]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
