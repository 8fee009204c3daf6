use jobq::job;

use std::borrow::Cow;

#[job]
async fn greet(name: Cow<'_, str>) {
    println!("{name}");
}

fn main() {}
