use jobq::job;

#[job]
async fn resize<T: Send>(image: T) {
    drop(image);
}

fn main() {}
