use jobq::job;

#[job]
async fn greet(names: Vec<_>) {
    println!("{}", names.len());
}

fn main() {}
