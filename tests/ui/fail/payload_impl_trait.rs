use jobq::job;

#[job]
async fn greet(name: impl ToString + Send) {
    println!("{}", name.to_string());
}

fn main() {}
