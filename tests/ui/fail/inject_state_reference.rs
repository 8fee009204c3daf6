use jobq::{State, job};

#[job]
async fn resize(store: &State<String>) {
    println!("{}", store.0);
}

fn main() {}
