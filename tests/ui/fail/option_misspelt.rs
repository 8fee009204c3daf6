use jobq::job;

#[job(queu = "images")]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
