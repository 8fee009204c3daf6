use jobq::job;

#[derive(Debug)]
struct Name<'a>(&'a str);

#[job]
async fn greet(name: Name) {
    println!("{name:?}");
}

fn main() {}
