use jobq::job;

#[job]
async fn resize(#[inject] #[payload] image_id: i64) {
    println!("{image_id}");
}

fn main() {}
