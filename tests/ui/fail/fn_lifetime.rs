use jobq::job;

#[job]
async fn greet<'a>(name: &'a str) {
    println!("{name}");
}

fn main() {}
