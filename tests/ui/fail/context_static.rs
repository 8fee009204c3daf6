use jobq::{JobContext, job};

#[job]
async fn resize(ctx: &'static JobContext) {
    println!("{}", ctx.id());
}

fn main() {}
