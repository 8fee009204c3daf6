//! Limited queues in a runtime.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use jobq::{QueueLimit, Rate, State, job, jobs};

use crate::bed::{Bed, on_every_database};

on_every_database! {
    o3_two_runtimes_run_no_more_than_the_limit_lets
    s7_run_until_idle_waits_for_a_rate_and_does_all
}

#[derive(Default)]
struct Seen {
    running: AtomicUsize,
    most: AtomicUsize,
}

#[job(queue = "few", register = false)]
async fn one_of_few(State(seen): State<Arc<Seen>>) {
    let running = seen.running.fetch_add(1, Ordering::SeqCst) + 1;
    seen.most.fetch_max(running, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_millis(5)).await;
    seen.running.fetch_sub(1, Ordering::SeqCst);
}

async fn o3_two_runtimes_run_no_more_than_the_limit_lets(bed: Bed) {
    const JOBS: u64 = 60;
    bed.client.limit_queue("few", QueueLimit::running(2)).await.expect("limited");
    for _ in 0..JOBS {
        one_of_few::enqueue(&bed.client).await.expect("enqueued");
    }
    let seen = Arc::new(Seen::default());
    let run = || bed.runtime(jobs![one_of_few]).state(Arc::clone(&seen)).run_until_idle();
    let (one, other) = tokio::join!(run(), run());
    let mut completed = one.expect("it runs").completed + other.expect("it runs").completed;
    // One ends when all places are the other's; that one goes on to the end.
    assert_eq!(completed, JOBS);
    assert_eq!(seen.most.load(Ordering::SeqCst), 2);
    assert!(bed.client.unlimit_queue("few").await.expect("ended"));
    for _ in 0..JOBS {
        one_of_few::enqueue(&bed.client).await.expect("enqueued");
    }
    completed = run().await.expect("it runs").completed;
    assert_eq!(completed, JOBS);
    assert!(seen.most.load(Ordering::SeqCst) > 2, "nothing holds it up any more");
}

async fn s7_run_until_idle_waits_for_a_rate_and_does_all(bed: Bed) {
    let rate = Rate::new(20, Duration::from_secs(1)).burst(1);
    bed.client.limit_queue("few", QueueLimit::rate(rate)).await.expect("limited");
    for _ in 0..8 {
        one_of_few::enqueue(&bed.client).await.expect("enqueued");
    }
    let runtime = bed.runtime(jobs![one_of_few]).state(Arc::new(Seen::default()));
    assert_eq!(runtime.run_until_idle().await.expect("it runs").completed, 8);
}
