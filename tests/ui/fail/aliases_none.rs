use jobq::job;

#[job(aliases())]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
