use jobq::job;

#[job(queue = "images")]
#[job(max_attempts = 3)]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
