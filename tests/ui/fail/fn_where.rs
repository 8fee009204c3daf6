use jobq::job;

#[job]
async fn greet(name: String)
where
    String: Clone,
{
    println!("{name}");
}

fn main() {}
