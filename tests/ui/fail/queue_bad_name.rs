use jobq::job;

#[job(queue = "my images")]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
