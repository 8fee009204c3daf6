use jobq::job;

use std::rc::Rc;

#[derive(serde::Serialize, serde::Deserialize)]
struct Shared {
    #[serde(skip)]
    count: Rc<u32>,
}

#[job]
async fn resize(shared: Shared) {
    println!("{}", shared.count);
}

fn main() {}
