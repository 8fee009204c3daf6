use jobq::{JobContext, job};

#[job]
async fn resize(#[inject(ImageStore)] ctx: JobContext) {
    println!("{}", ctx.id());
}

fn main() {}
