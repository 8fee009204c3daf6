use jobq::job;

#[job(aliases("resize"))]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
