//! Jobs that have to be started in a time, in a runtime.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use jobq::{DeadFilter, DeathReason, JobOptions, State, job, jobs};
use tokio_util::sync::CancellationToken;

use crate::bed::{Bed, on_every_database};

on_every_database! {
    e9_a_job_that_waited_too_long_does_not_run
    e9_a_job_of_a_paused_queue_expires_too
}

type Ran = Arc<Mutex<Vec<u32>>>;

#[job(expires = "1h", register = false)]
async fn soon(n: u32, State(ran): State<Ran>) {
    ran.lock().expect("no panic").push(n);
}

/// Until the shortest time is over on every clock; SQLite's has milliseconds only.
async fn a_moment() {
    tokio::time::sleep(Duration::from_millis(20)).await;
}

async fn e9_a_job_that_waited_too_long_does_not_run(bed: Bed) {
    const _: () = assert!(matches!(
        <soon as jobq::Job>::DEF.options,
        JobOptions { expires: Some(time), .. } if time.as_secs() == 3_600
    ));
    let short = Duration::from_millis(1);
    soon::enqueue(&bed.client, 1).await.expect("enqueued");
    let late = soon::new(2).expires(short).enqueue(&bed.client).await.expect("enqueued").id();
    soon::new(3).expires(short).without_expiry().enqueue(&bed.client).await.expect("enqueued");
    a_moment().await;
    let ran = Ran::default();
    let ended = bed.runtime(jobs![soon]).state(Arc::clone(&ran)).run_until_idle().await;
    let ended = ended.expect("it runs");
    assert_eq!((ended.completed, ended.dead), (2, 1));
    let mut ran = ran.lock().expect("no panic").clone();
    ran.sort_unstable();
    assert_eq!(ran, [1, 3]);
    let filter = DeadFilter::all().reason(DeathReason::Expired);
    let dead = bed.client.dead(&filter, 10).await.expect("listed");
    assert_eq!(dead.iter().map(|job| job.id).collect::<Vec<_>>(), [late]);
}

async fn e9_a_job_of_a_paused_queue_expires_too(bed: Bed) {
    bed.client.pause_queue("default", None).await.expect("paused");
    let (ran, stop) = (Ran::default(), CancellationToken::new());
    let stopped = stop.clone();
    let runtime = bed.runtime(jobs![soon]).state(Arc::clone(&ran));
    let running = tokio::spawn(runtime.run_until(async move { stopped.cancelled().await }));
    let late = soon::new(1).expires(Duration::from_millis(1));
    let late = late.enqueue(&bed.client).await.expect("enqueued").id();
    let end = Instant::now() + Duration::from_secs(60);
    while bed.client.dead(&DeadFilter::id(late), 1).await.expect("listed").is_empty() {
        assert!(Instant::now() < end, "nobody buries it");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    stop.cancel();
    running.await.expect("no panic").expect("it ran");
    assert!(ran.lock().expect("no panic").is_empty());
}
