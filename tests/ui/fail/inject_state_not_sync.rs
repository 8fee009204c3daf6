use jobq::{State, job};

use std::rc::Rc;

#[job]
fn resize(image_id: i64, State(store): State<Rc<str>>) {
    println!("{image_id} {store}");
}

fn main() {}
