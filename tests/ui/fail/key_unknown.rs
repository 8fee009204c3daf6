use jobq::job;

#[job(key = image)]
async fn resize(image_id: i64, width: u32) {
    println!("{image_id} {width}");
}

fn main() {}
