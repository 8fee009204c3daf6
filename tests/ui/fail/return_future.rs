use jobq::job;

#[job]
fn resize(image_id: i64) -> impl Future<Output = ()> {
    async move { println!("{image_id}") }
}

fn main() {}
