use jobq::job;

#[job(colour = "blue")]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
