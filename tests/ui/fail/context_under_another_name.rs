use jobq::job;

use jobq::JobContext as Ctx;

#[job]
async fn resize(ctx: &Ctx) {
    println!("{}", ctx.id());
}

fn main() {}
