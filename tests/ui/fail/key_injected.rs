use jobq::{JobContext, job};

#[job(key = ctx)]
async fn resize(image_id: i64, ctx: &JobContext) {
    println!("{image_id} {ctx:?}");
}

fn main() {}
