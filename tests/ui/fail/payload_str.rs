use jobq::job;

#[job]
async fn greet(name: &str) {
    println!("{name}");
}

fn main() {}
