use jobq::job;

#[job(key = image_id, on_block = "wait")]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
