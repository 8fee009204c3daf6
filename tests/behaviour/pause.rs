//! What is paused, and what comes of it once it is resumed.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use jobq::{JobId, JobState, PauseScope, State, job, jobs};
use tokio_util::sync::CancellationToken;

use crate::bed::{Bed, on_every_database};

on_every_database! {
    o6_two_runtimes_start_nothing_that_is_paused_and_everything_once_it_is_resumed
    s7_run_until_idle_ends_when_all_that_is_due_is_paused
}

type Started = Arc<AtomicUsize>;

#[job(queue = "paused_queue", register = false)]
async fn in_a_paused_queue(State(started): State<Started>) {
    started.fetch_add(1, Ordering::SeqCst);
}

#[job(queue = "shared_queue", register = false)]
async fn of_a_paused_kind(State(started): State<Started>) {
    started.fetch_add(1, Ordering::SeqCst);
}

#[job(queue = "shared_queue", register = false)]
async fn beside_it() {}

async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let end = std::time::Instant::now() + Duration::from_secs(60);
    while !holds().await {
        assert!(std::time::Instant::now() < end, "it never came to be that {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn o6_two_runtimes_start_nothing_that_is_paused_and_everything_once_it_is_resumed(bed: Bed) {
    const EACH: usize = 30;
    let all = jobs![in_a_paused_queue, of_a_paused_kind, beside_it];
    let (started, stop) = (Started::default(), CancellationToken::new());
    let runtimes: Vec<_> = (0..2)
        .map(|_| {
            let stopped = stop.clone();
            let runtime = bed.runtime(all).state(Arc::clone(&started));
            tokio::spawn(runtime.run_until(async move { stopped.cancelled().await }))
        })
        .collect();
    let enqueue_beside = async || {
        let id = beside_it::enqueue(&bed.client).await.expect("enqueued").id();
        until("another job runs", async || is_completed(&bed, id).await).await;
    };
    enqueue_beside().await;
    bed.client.pause_queue("paused_queue", Some("a test")).await.expect("paused");
    bed.client.pause_kind(of_a_paused_kind::NAME, None).await.expect("paused");
    let scopes: Vec<_> =
        bed.client.paused().await.expect("listed").iter().map(|pause| pause.scope).collect();
    assert_eq!(scopes, [PauseScope::Kind, PauseScope::Queue]);
    let mut ids = Vec::new();
    for _ in 0..EACH {
        ids.push(in_a_paused_queue::enqueue(&bed.client).await.expect("enqueued").id());
        ids.push(of_a_paused_kind::enqueue(&bed.client).await.expect("enqueued").id());
    }
    // Jobs that come later run meanwhile, and one of the sweeps has been there.
    until("jobs are set aside", async || {
        enqueue_beside().await;
        bed.job(ids[1]).await.state == JobState::Waiting
    })
    .await;
    assert_eq!(started.load(Ordering::SeqCst), 0);
    for id in &ids {
        assert_eq!(bed.job(*id).await.attempt, 0);
    }
    bed.client.resume_queue("paused_queue").await.expect("resumed");
    let expected = || started.load(Ordering::SeqCst);
    until("the queue's jobs run", async || expected() == EACH).await;
    bed.client.resume_kind(of_a_paused_kind::NAME).await.expect("resumed");
    until("the kind's jobs run", async || expected() == 2 * EACH).await;
    for id in ids {
        until("each ends", async || is_completed(&bed, id).await).await;
        assert_eq!(bed.job(id).await.attempt, 1);
    }
    stop.cancel();
    for run in runtimes {
        run.await.expect("no panic").expect("no error");
    }
}

async fn is_completed(bed: &Bed, id: JobId) -> bool {
    bed.job(id).await.state == JobState::Completed
}

async fn s7_run_until_idle_ends_when_all_that_is_due_is_paused(bed: Bed) {
    let started = Started::default();
    let queue = in_a_paused_queue::enqueue(&bed.client).await.expect("enqueued").id();
    let kind = of_a_paused_kind::enqueue(&bed.client).await.expect("enqueued").id();
    let beside = beside_it::enqueue(&bed.client).await.expect("enqueued").id();
    bed.client.pause_queue("paused_queue", None).await.expect("paused");
    bed.client.pause_kind(of_a_paused_kind::NAME, None).await.expect("paused");
    let run = async || {
        let all = jobs![in_a_paused_queue, of_a_paused_kind, beside_it];
        let runtime = bed.runtime(all).state(Arc::clone(&started));
        runtime.run_until_idle().await.expect("it runs").completed
    };
    assert_eq!(run().await, 1);
    assert!(is_completed(&bed, beside).await);
    for id in [queue, kind] {
        assert_eq!(bed.job(id).await.state, JobState::Pending);
    }
    bed.client.resume_queue("paused_queue").await.expect("resumed");
    assert_eq!(run().await, 1);
    bed.client.resume_kind(of_a_paused_kind::NAME).await.expect("resumed");
    assert_eq!(run().await, 1);
}
