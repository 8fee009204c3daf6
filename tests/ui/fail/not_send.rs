use jobq::job;

use std::rc::Rc;

#[job]
async fn resize(image_id: i64) {
    let shared = Rc::new(image_id);
    std::future::ready(()).await;
    println!("{shared}");
}

fn main() {}
