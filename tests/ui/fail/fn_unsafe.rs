use jobq::job;

#[job]
async unsafe fn resize(image_id: i64) {
    println!("{image_id}");
}

fn main() {}
