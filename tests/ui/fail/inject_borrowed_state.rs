use jobq::{State, job};

#[job]
async fn resize(State(name): State<&str>) {
    println!("{name}");
}

fn main() {}
