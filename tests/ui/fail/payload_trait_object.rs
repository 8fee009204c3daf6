use jobq::job;

trait Shape: Send {}

#[job]
async fn draw(shape: Box<dyn Shape>) {
    drop(shape);
}

fn main() {}
