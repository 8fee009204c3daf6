//! The second look: what a settlement that changed no row is told, and how batches share locks.

use std::time::Duration;

use jobq_core::lifecycle::{self, Transition};

use super::bed::{Bed, LEASE};
use super::settle::{buried, cancelled, completed, failed, snoozed};
use super::wait::join_all;
use super::worker::{job, settlement};
use crate::store::{CancelReply, ClaimedJob, DeadFilter, Settled, Settlement};

/// One transition of every sort.
fn every_sort(job: &ClaimedJob) -> [Transition; 6] {
    [
        completed(),
        cancelled(),
        buried(job.counters),
        failed(job.counters, Duration::from_secs(60)),
        snoozed(job.counters),
        lifecycle::release(job.counters),
    ]
}

/// Claims jobs that are alone in the tables.
async fn claim(bed: &Bed, jobs: usize) -> Vec<ClaimedJob> {
    bed.enqueue((0..jobs).map(|_| job("k")).collect()).await;
    let claimed = bed.session(LEASE, &["k"]).await.claim(jobs as u32).await;
    assert_eq!(claimed.len(), jobs);
    claimed
}

pub(super) async fn f2_what_a_lost_reply_had_written_is_found(bed: Bed) {
    for retention in [Duration::ZERO, LEASE] {
        for sort in 0..6 {
            let job = &claim(&bed, 1).await[0];
            let transition = every_sort(job)[sort].clone();
            let first = Settlement { retention, ..settlement(job.lease, transition.clone()) };
            let again = Settlement { doubtful: true, ..first.clone() };
            assert_eq!(bed.settle_all(&[first]).await, [Settled::Written]);
            let before = bed.everything(job.lease.job).await;
            let settled = bed.settle_all(&[again]).await;
            assert_eq!(settled, [Settled::Found], "{transition:?} kept for {retention:?}");
            assert_eq!(before, bed.everything(job.lease.job).await);
            bed.execute("delete from jobq.jobs").await;
        }
    }
}

pub(super) async fn f2_what_a_lost_request_had_not_written_is_written(bed: Bed) {
    for sort in 0..6 {
        let job = &claim(&bed, 1).await[0];
        let transition = every_sort(job)[sort].clone();
        let doubtful = Settlement { doubtful: true, ..settlement(job.lease, transition) };
        assert_eq!(bed.settle_all(&[doubtful]).await, [Settled::Written]);
        bed.execute("delete from jobq.jobs").await;
    }
}

/// A doubtful write that did not happen, and then the lease was lost: that is not "found".
pub(super) async fn f2_a_rescue_is_not_mistaken_for_a_lost_reply(bed: Bed) {
    for max_attempts in [3, 1] {
        for sort in 0..6 {
            let mut new = job("k");
            new.max_attempts = max_attempts;
            bed.enqueue(vec![new]).await;
            let stale = bed.session(LEASE, &["k"]).await.claim_one().await;
            bed.expire(stale.lease.session).await;
            assert_eq!(crate::sweep::rescue(&*bed.store, false).await.expect("rescues"), 1);
            let transition = every_sort(&stale)[sort].clone();
            let doubtful =
                Settlement { doubtful: true, ..settlement(stale.lease, transition.clone()) };
            let settled = bed.settle_all(&[doubtful]).await;
            assert_eq!(settled, [Settled::LeaseLost], "{transition:?} of {max_attempts}");
            bed.execute("delete from jobq.jobs").await;
        }
    }
}

/// A requeue that was written, and whose job went on: it was claimed, cancelled, or is dead.
pub(super) async fn f2_a_lost_reply_whose_job_went_on_writes_nothing(bed: Bed) {
    let stale = &claim(&bed, 1).await[0];
    assert_eq!(bed.settle(stale.lease, snoozed(stale.counters)).await, Settled::Written);
    let again = Settlement { doubtful: true, ..settlement(stale.lease, snoozed(stale.counters)) };
    let newer = bed.session(LEASE, &["k"]).await.claim_one().await;
    let before = bed.everything(stale.lease.job).await;
    assert_eq!(bed.settle_all(&[again]).await, [Settled::LeaseLost]);
    assert_eq!(before, bed.everything(stale.lease.job).await);

    assert_eq!(bed.settle(newer.lease, snoozed(newer.counters)).await, Settled::Written);
    let reply = bed.client.cancel(newer.lease.job).await.expect("cancels");
    assert_eq!(reply, CancelReply::Cancelled);
    let again = Settlement { doubtful: true, ..settlement(newer.lease, snoozed(newer.counters)) };
    assert_eq!(bed.settle_all(&[again]).await, [Settled::Found]);
}

pub(super) async fn f2_a_burial_that_was_redriven_is_found(bed: Bed) {
    let job = &claim(&bed, 1).await[0];
    let first = settlement(job.lease, buried(job.counters));
    let again = Settlement { doubtful: true, ..first.clone() };
    assert_eq!(bed.settle_all(&[first]).await, [Settled::Written]);
    bed.client.redrive(&DeadFilter::id(job.lease.job)).await.expect("redrives");
    assert_eq!(bed.settle_all(&[again]).await, [Settled::Found]);
}

pub(super) async fn s3_a_job_to_be_cancelled_is_not_requeued(bed: Bed) {
    let job = &claim(&bed, 1).await[0];
    let reply = bed.client.cancel(job.lease.job).await.expect("asks");
    assert_eq!(reply, CancelReply::Requested);
    let before = bed.everything(job.lease.job).await;
    for requeue in &every_sort(job)[3..] {
        let settled = bed.settle(job.lease, requeue.clone()).await;
        assert_eq!(settled, Settled::CancelRequested, "{requeue:?}");
        assert_eq!(before, bed.everything(job.lease.job).await, "it is still ours");
    }
    assert_eq!(bed.settle(job.lease, cancelled()).await, Settled::Written);
    let row = bed.row("finished", job.lease.job).await.expect("finished");
    assert_eq!(row.text("state"), "cancelled");
}

pub(super) async fn s3_a_job_that_ends_before_it_is_cancelled_has_ended(bed: Bed) {
    let job = &claim(&bed, 1).await[0];
    let reply = bed.client.cancel(job.lease.job).await.expect("asks");
    assert_eq!(reply, CancelReply::Requested);
    assert_eq!(bed.settle(job.lease, completed()).await, Settled::Written);
    let finished = bed.row("finished", job.lease.job).await.expect("it is there");
    assert_eq!(finished.text("state"), "completed");
}

pub(super) async fn f2_one_job_twice_in_a_batch_is_written_once(bed: Bed) {
    let jobs = claim(&bed, 2).await;
    let batch = [
        settlement(jobs[0].lease, failed(jobs[0].counters, Duration::ZERO)),
        settlement(jobs[1].lease, completed()),
        settlement(jobs[0].lease, completed()),
        settlement(jobs[1].lease, completed()),
        settlement(jobs[0].lease, buried(jobs[0].counters)),
    ];
    let settled = bed.settle_all(&batch).await;
    let written: Vec<bool> = settled.iter().map(|s| *s == Settled::Written).collect();
    assert_eq!(written, [true, true, false, false, false], "{settled:?}");
    assert_eq!(bed.job_row(jobs[0].lease.job).await.number("leased_by"), 0);
    assert_eq!(bed.count("finished").await, 1);
    assert_eq!(bed.count("dead").await, 0);
}

/// Every third settlement of a shuffled batch is for a lease that is lost.
pub(super) async fn f2_a_batch_of_300_in_any_order_is_written_job_by_job(bed: Bed) {
    let jobs = claim(&bed, 300).await;
    let mut batch: Vec<Settlement> = jobs
        .iter()
        .enumerate()
        .map(|(n, job)| settlement(job.lease, every_sort(job)[n % 6].clone()))
        .collect();
    for lost in batch.iter_mut().step_by(3) {
        lost.lease.token.0 += 1;
    }
    // Any fixed shuffle will do: 113 has no factor in common with 300.
    let shuffled: Vec<Settlement> = (0..300).map(|n| batch[n * 113 % 300].clone()).collect();
    let settled = bed.settle_all(&shuffled).await;
    for (n, settled) in settled.into_iter().enumerate() {
        let n = n * 113 % 300;
        let expected = if n % 3 == 0 { Settled::LeaseLost } else { Settled::Written };
        assert_eq!(settled, expected, "settlement {n}");
        let id = jobs[n].lease.job;
        let row = bed.row(
            if n % 6 == 2 {
                "dead"
            } else if n % 6 == 1 {
                "finished"
            } else {
                "jobs"
            },
            id,
        );
        let row = row.await.unwrap_or_else(|| panic!("job {n} is not where it belongs"));
        if n % 3 == 0 {
            assert_eq!(row.number("leased_by"), jobs[n].lease.session.0, "job {n} still runs");
        }
    }
}

/// Six tasks settle the same jobs, half of them from the other end.
pub(super) async fn d4_overlapping_batches_never_deadlock_and_write_each_job_once(bed: Bed) {
    bed.enqueue((0..120).map(|_| job("k")).collect()).await;
    let worker = bed.session(LEASE, &["k"]).await;
    for round in 0..20 {
        let jobs = worker.claim(200).await;
        assert_eq!(jobs.len(), 120, "round {round}");
        let tasks: Vec<_> = (0..6)
            .map(|task| {
                let mut batch: Vec<Settlement> =
                    jobs.iter().map(|job| settlement(job.lease, snoozed(job.counters))).collect();
                if task % 2 == 1 {
                    batch.reverse();
                }
                let store = bed.store.clone();
                tokio::spawn(async move {
                    let mut written = 0;
                    while !batch.is_empty() {
                        let settled = store.settle(&batch).await.expect("no deadlock");
                        written += settled.iter().filter(|s| **s == Settled::Written).count();
                        let mut settled = settled.into_iter();
                        batch.retain(|_| settled.next() == Some(Settled::Busy));
                    }
                    written
                })
            })
            .collect();
        let written: usize = join_all(tasks).await.into_iter().map(|n| n.expect("no panic")).sum();
        assert_eq!(written, 120, "round {round}");
    }
}

/// An operator's open session holds up one job and not the batch.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) async fn f2_a_locked_row_holds_up_nobody_else(bed: Bed) {
    let jobs = claim(&bed, 12).await;
    let batch: Vec<Settlement> = jobs
        .iter()
        .enumerate()
        .map(|(n, job)| settlement(job.lease, every_sort(job)[n % 6].clone()))
        .collect();
    super::bed::on_pool!(bed, pool => {
        let mut operator = pool.begin().await.expect("begins");
        // One by one: for a list of ids MySQL may read, and lock, the other rows too.
        for job in &jobs[..6] {
            let lock = format!("select id from jobq.jobs where id = {} for update", job.lease.job);
            sqlx::query(bed.statement(&lock)).execute(&mut *operator).await.expect("locks");
        }
        let settled = bed.settle_all(&batch).await;
        assert_eq!(settled[..6], [Settled::Busy; 6]);
        assert_eq!(settled[6..], [Settled::Written; 6]);
        operator.rollback().await.expect("rolls back");
    });
    assert_eq!(bed.settle_all(&batch[..6]).await, [Settled::Written; 6]);
}
