use jobq::job;

#[job]
async fn greet(name: &'static str) {
    println!("{name}");
}

fn main() {}
