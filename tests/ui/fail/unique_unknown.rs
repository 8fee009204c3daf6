use jobq::job;

#[job(unique(until = "1h"))]
async fn resize(image_id: i64, width: u32) {
    println!("{image_id} {width}");
}

fn main() {}
