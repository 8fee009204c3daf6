use jobq::job;

#[job]
async fn resize((width, height): (u32, u32)) {
    println!("{width}x{height}");
}

fn main() {}
