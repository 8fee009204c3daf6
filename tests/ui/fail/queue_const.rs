use jobq::job;

const QUEUE: &str = "images";

#[job(queue = QUEUE)]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
