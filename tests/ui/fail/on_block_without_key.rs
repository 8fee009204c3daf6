use jobq::job;

#[job(on_block = "skip")]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
