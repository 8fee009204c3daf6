use jobq::{JobContext, job};

#[job(unique(by(ctx)))]
async fn resize(image_id: i64, ctx: &JobContext) {
    println!("{image_id} {ctx:?}");
}

fn main() {}
