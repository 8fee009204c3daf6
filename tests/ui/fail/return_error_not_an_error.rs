use jobq::job;

struct NotAnError;

#[job]
async fn resize(image_id: i64) -> Result<(), NotAnError> {
    println!("{image_id}");
    Err(NotAnError)
}

fn main() {}
