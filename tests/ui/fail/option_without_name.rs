use jobq::job;

#[job("images")]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
