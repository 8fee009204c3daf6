use jobq::job;

#[job]
async fn resize<const WIDTH: u32>(image_id: i64) {
    println!("{image_id} {WIDTH}");
}

fn main() {}
