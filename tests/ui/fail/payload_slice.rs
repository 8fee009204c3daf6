use jobq::job;

#[job]
async fn resize(image_ids: &[i64]) {
    println!("{image_ids:?}");
}

fn main() {}
