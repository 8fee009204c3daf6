use jobq::job;

#[job(register = "no")]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
