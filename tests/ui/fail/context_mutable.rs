use jobq::{JobContext, job};

#[job]
async fn resize(ctx: &mut JobContext) {
    println!("{}", ctx.id());
}

fn main() {}
