use jobq::{JobContext, job};

#[job]
async fn resize(ctx: &JobContext) -> Result<&str, String> {
    Ok(ctx.kind())
}

fn main() {}
