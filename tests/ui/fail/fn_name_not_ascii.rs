use jobq::job;

#[job]
async fn größe(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
