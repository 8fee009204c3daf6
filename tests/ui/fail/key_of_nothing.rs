use jobq::job;

#[job(key())]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
