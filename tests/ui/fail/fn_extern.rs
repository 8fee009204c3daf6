use jobq::job;

#[job]
extern "C" fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
