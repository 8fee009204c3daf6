use jobq::job;

#[job]
async fn resize(image_id: i64, #[cfg(unix)] mode: u32) {
    #[cfg(unix)]
    println!("{mode}");
    println!("{image_id}");
}

fn main() {}
