use jobq::job;

#[job]
async fn greet(names: Vec<Option<&str>>) {
    println!("{names:?}");
}

fn main() {}
