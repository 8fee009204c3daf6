use jobq::job;

#[job(aliases(old, "an other"))]
async fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
