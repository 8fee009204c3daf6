use jobq::job;

#[job(key(image_id, image_id))]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
