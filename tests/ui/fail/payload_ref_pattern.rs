use jobq::job;

#[job]
async fn greet(ref name: String) {
    println!("{name}");
}

fn main() {}
