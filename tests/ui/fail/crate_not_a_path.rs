use jobq::job;

#[job(crate = "my jobq")]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
