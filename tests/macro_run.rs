use jobq::{JobContext, State, job, Job, CancellationToken};

#[derive(Clone)]
struct Store;

/// Docs.
#[job(queue = "images", aliases("shrink", "old"), lease = "10s", timeout = "5m", max_attempts = 5, max_crashes = 2, priority = -2, backoff(base = "2s", factor = 3, cap = "10m"), retention = "0s")]
async fn resize(image_id: i64, width: u32, State(_store): State<Store>, ctx: &JobContext, _stop: CancellationToken) -> Result<i64, String> {
    let _ = ctx.attempt();
    Ok(image_id * i64::from(width))
}

#[tokio::test]
async fn calls() {
    assert_eq!(resize(2, 3, State(Store), &JobContext::detached(), CancellationToken::new()).await, Ok(6));
    println!("{:?} {:?}", resize::new(1, 2), resize::DEF);
}
