// The only errors are those of the job itself: what uses the job goes on compiling.
use jobq::{EnqueueTarget, Job, JobDef, NewJob, job};

/// Greets.
#[job(lease = "3o s")]
pub async fn greet(name: &str, times: u32) -> Result<(), String> {
    println!("{name} {times}");
    Ok(())
}

pub static JOBS: &[&JobDef] = &[greet::DEF];

pub async fn on_signup(target: impl EnqueueTarget) -> jobq::Result<()> {
    greet("Ada", 1).await.expect("it prints");
    let _: NewJob = greet::new("Ada".to_owned(), 1).priority(1);
    greet::enqueue(target, "Ada", 1).await?;
    println!("{}", greet::NAME);
    Ok(())
}

fn main() {}
