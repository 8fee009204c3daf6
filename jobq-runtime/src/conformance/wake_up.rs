//! PostgreSQL's wake-ups across processes: hints, sent at commit, and not too many.

use std::time::Duration;

use jobq_core::time::Timestamp;

use super::bed::{Bed, on_pool};
use super::sample::plain;
use super::worker::job;
use crate::enqueue::EnqueueTarget;
use crate::store::Listener;

async fn listen(bed: &Bed) -> Box<dyn Listener> {
    bed.store.listen().await.expect("connects").expect("PostgreSQL has wake-ups")
}

pub(super) async fn e6_an_enqueue_says_where_something_became_claimable(bed: Bed) {
    let mut listener = listen(&bed).await;
    let mut first = job("k");
    first.priority = 3;
    let id = bed.enqueue(vec![first]).await[0];
    let wake_up = listener.wait().await.expect("the connection lives");
    assert_eq!((&*wake_up.queue, wake_up.band), ("default", 3));
    assert_eq!(wake_up.run_after, Timestamp(bed.job_row(id).await.number("run_after")));
}

pub(super) async fn e6_a_wake_up_comes_with_the_commit_and_not_before(bed: Bed) {
    let mut listener = listen(&bed).await;
    on_pool!(bed, pool => {
        let mut gone = pool.begin().await.expect("begins");
        plain().queue("gone").enqueue(bed.client.within(&mut gone)).await.expect("enqueues");
        gone.rollback().await.expect("rolls back");
        // The gate is open again when that much time has passed.
        bed.execute("select setval('jobq.wake_gate', 0)").await;
        let mut tx = pool.begin().await.expect("begins");
        plain().queue("there").enqueue(bed.client.within(&mut tx)).await.expect("enqueues");
        let early = tokio::time::timeout(Duration::from_millis(50), listener.wait()).await;
        assert!(early.is_err(), "{early:?} before the commit");
        tx.commit().await.expect("commits");
    });
    assert_eq!(listener.wait().await.expect("the connection lives").queue, "there");
}

/// A NOTIFY makes all commits wait for each other: a flood of enqueues sends a few.
pub(super) async fn e6_a_flood_of_enqueues_sends_few_wake_ups(bed: Bed) {
    let mut listener = listen(&bed).await;
    let ahead = "select setval('jobq.wake_gate', (extract(epoch from now()) * 1000)::int8 + 60000)";
    bed.execute(ahead).await;
    for _ in 0..50 {
        bed.one().await;
    }
    bed.execute("select setval('jobq.wake_gate', 0)").await;
    let mut last = job("k");
    last.queue = "last".into();
    bed.enqueue(vec![last]).await;
    let wake_up = listener.wait().await.expect("the connection lives");
    assert_eq!(wake_up.queue, "last", "the first to come is the last that was sent");
}

/// One call with jobs in many places sends a wake-up for each of them.
pub(super) async fn e6_every_queue_and_band_of_a_call_is_woken(bed: Bed) {
    let mut listener = listen(&bed).await;
    let mut jobs = Vec::new();
    for queue in ["a", "b,c"] {
        for priority in [-1, 4] {
            let mut job = job("k");
            (job.queue, job.priority) = (queue.into(), priority);
            jobs.extend([job.clone(), job]);
        }
    }
    bed.client.write(jobs, bed.store.schema().clone()).await.expect("enqueues");
    let mut woken = Vec::new();
    for _ in 0..4 {
        let wake_up = listener.wait().await.expect("the connection lives");
        woken.push((wake_up.queue, wake_up.band));
    }
    woken.sort();
    let expected = [("a", -1), ("a", 4), ("b,c", -1), ("b,c", 4)];
    assert_eq!(woken, expected.map(|(queue, band)| (queue.to_owned(), band)));
}

/// Anybody may send on the channel.
pub(super) async fn e6_what_is_no_wake_up_is_ignored(bed: Bed) {
    let mut listener = listen(&bed).await;
    for text in ["", "hello", "1,2", "x,1,q", "99999999,1,q"] {
        on_pool!(bed, pool => {
            sqlx::query("select pg_notify($1, $2)")
                .bind(format!("{}_wake", bed.schema))
                .bind(text)
                .execute(pool)
                .await
                .expect("notifies");
        });
    }
    bed.one().await;
    assert_eq!(listener.wait().await.expect("the connection lives").queue, "default");
}

/// A lost connection is an error, so that the caller looks for itself and listens anew.
pub(super) async fn s2_a_listener_whose_connection_is_cut_says_so(bed: Bed) {
    let mut listener = listen(&bed).await;
    let cut = "select count(pg_terminate_backend(pid)) from pg_stat_activity
               where query like '%jobq_wake%' and query like 'LISTEN%'"
        .replace("jobq_wake", &format!("{}_wake", bed.schema));
    assert_eq!(bed.number(&cut).await, 1);
    listener.wait().await.expect_err("the connection is gone");
    bed.one().await;
    let mut again = listen(&bed).await;
    bed.execute("select setval('jobq.wake_gate', 0)").await;
    bed.one().await;
    again.wait().await.expect("it hears again");
}
