//! Completion in the handler's own transaction: effect and completion together or not at all.

use std::time::Duration;

use sqlx::Executor;

use super::bed::{Bed, LEASE, RETENTION, on_pool};
use super::settle::completed;
use crate::error::Error;
use crate::store::{CancelReply, ClaimedJob, Lookup, Settled};

/// A job that was claimed, and a table for its effects.
async fn claimed(bed: &Bed) -> ClaimedJob {
    bed.execute("create table if not exists jobq.effects (job bigint)").await;
    bed.one().await;
    bed.session(LEASE, &["k"]).await.claim_one().await
}

const EFFECT: &str = "insert into jobq.effects values (1)";

pub(super) async fn f7_effect_and_completion_commit_together(bed: Bed) {
    let job = claimed(&bed).await;
    let running = bed.job_row(job.lease.job).await;
    let context = bed.context(job.lease, RETENTION);
    on_pool!(bed, pool => {
        let mut tx = pool.begin_with(bed.begin()).await.expect("begins");
        sqlx::query(bed.statement(EFFECT)).execute(&mut *tx).await.expect("writes");
        context.complete_in(&mut tx).await.expect("completes");
        assert_eq!(bed.count("effects").await, 0);
        assert_eq!(bed.job_row(job.lease.job).await.number("token"), 1, "still running for all");
        tx.commit().await.expect("commits");
    });
    assert!(context.completed_in());
    assert_eq!(bed.count("effects").await, 1);
    let finished = bed.row("finished", job.lease.job).await.expect("completed");
    running.agrees(&finished, &[]);
    assert_eq!(finished.text("state"), "completed");
    assert!(finished.is_null("result"), "the job function has not returned yet");
    let kept = finished.number("expires_at") - finished.number("finished_at");
    assert!((kept - RETENTION.as_micros() as i64).abs() < 1_000_000);
}

pub(super) async fn f7_a_rollback_leaves_the_job_running(bed: Bed) {
    let job = claimed(&bed).await;
    let before = bed.everything(job.lease.job).await;
    on_pool!(bed, pool => {
        let mut tx = pool.begin_with(bed.begin()).await.expect("begins");
        sqlx::query(bed.statement(EFFECT)).execute(&mut *tx).await.expect("writes");
        bed.context(job.lease, RETENTION).complete_in(&mut tx).await.expect("completes");
        tx.rollback().await.expect("rolls back");
    });
    assert_eq!(bed.count("effects").await, 0);
    assert_eq!(before, bed.everything(job.lease.job).await);
    assert_eq!(bed.settle(job.lease, completed()).await, Settled::Written);
}

pub(super) async fn f7_a_retention_of_zero_leaves_nothing(bed: Bed) {
    let job = claimed(&bed).await;
    on_pool!(bed, pool => {
        let mut tx = pool.begin_with(bed.begin()).await.expect("begins");
        bed.context(job.lease, Duration::ZERO).complete_in(&mut tx).await.expect("completes");
        tx.commit().await.expect("commits");
    });
    assert_eq!(bed.count("jobs").await + bed.count("finished").await, 0);
    assert_eq!(bed.client.job(job.lease.job).await.expect("looks"), Lookup::Gone);
}

pub(super) async fn f7_every_kind_of_transaction_will_do(bed: Bed) {
    let mut jobs = Vec::new();
    for _ in 0..3 {
        jobs.push(claimed(&bed).await);
    }
    on_pool!(bed, pool => {
        let mut pooled = pool.acquire().await.expect("connects");
        for (n, job) in jobs.iter().enumerate() {
            let context = bed.context(job.lease, RETENTION);
            pooled.execute(bed.begin()).await.expect("begins");
            match n {
                0 => context.complete_in(&mut pooled).await.expect("through a pool's connection"),
                1 => context.complete_in(&mut *pooled).await.expect("through a connection"),
                _ => {
                    pooled.execute("rollback").await.expect("rolls back");
                    let mut tx = sqlx::Connection::begin(&mut *pooled).await.expect("begins");
                    context.complete_in(&mut tx).await.expect("through a transaction");
                    tx.commit().await.expect("commits");
                    continue;
                }
            }
            pooled.execute("commit").await.expect("commits");
        }
    });
    assert_eq!(bed.count("finished").await, 3);
}

/// The first attempt hangs, is rescued and run again; its late commit has no effect.
pub(super) async fn f7_a_late_attempt_has_no_effect(bed: Bed) {
    let late = claimed(&bed).await;
    bed.expire(late.lease.session).await;
    assert_eq!(crate::sweep::rescue(&*bed.store, false).await.expect("rescues"), 1);
    let second = bed.session(LEASE, &["k"]).await.claim_one().await;
    for job in [&late, &second, &late] {
        on_pool!(bed, pool => {
            let mut tx = pool.begin_with(bed.begin()).await.expect("begins");
            sqlx::query(bed.statement(EFFECT)).execute(&mut *tx).await.expect("writes");
            match bed.context(job.lease, RETENTION).complete_in(&mut tx).await {
                Ok(()) => tx.commit().await.expect("commits"),
                Err(error) => {
                    assert!(matches!(error, Error::LeaseLost { .. }), "{error:?}");
                    assert!(error.to_string().contains("no longer held"), "{error}");
                    tx.rollback().await.expect("rolls back");
                }
            }
        });
    }
    assert_eq!(bed.count("effects").await, 1, "exactly once");
    assert_eq!(bed.row("finished", late.lease.job).await.expect("done").number("token"), 2);
}

/// The settler does not know whether the handler's transaction was committed; it finds out.
pub(super) async fn f7_a_settlement_after_it_finds_the_completion(bed: Bed) {
    for retention in [Duration::ZERO, RETENTION] {
        let job = claimed(&bed).await;
        on_pool!(bed, pool => {
            let mut tx = pool.begin_with(bed.begin()).await.expect("begins");
            bed.context(job.lease, retention).complete_in(&mut tx).await.expect("completes");
            tx.commit().await.expect("commits");
        });
        let failure = super::settle::failed(job.counters, Duration::ZERO);
        let after = crate::store::Settlement {
            retention,
            doubtful: true,
            ..super::worker::settlement(job.lease, failure)
        };
        assert_eq!(bed.settle_all(&[after]).await, [Settled::Found]);
        assert_eq!(bed.count("jobs").await, 0);
    }
}

pub(super) async fn s3_a_job_that_completes_before_it_stops_is_completed(bed: Bed) {
    let job = claimed(&bed).await;
    let id = job.lease.job;
    assert_eq!(bed.client.cancel(id).await.expect("asks"), CancelReply::Requested);
    on_pool!(bed, pool => {
        let mut tx = pool.begin_with(bed.begin()).await.expect("begins");
        bed.context(job.lease, RETENTION).complete_in(&mut tx).await.expect("completes");
        tx.commit().await.expect("commits");
    });
    assert_eq!(bed.row("finished", id).await.expect("done").text("state"), "completed");
}

/// Whichever commits first: here a cancel meets a completion that is not committed yet.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) async fn s3_a_cancel_waits_for_an_open_complete_in(bed: Bed) {
    use jobq_core::job::JobState;

    for commit in [true, false] {
        let job = claimed(&bed).await;
        let id = job.lease.job;
        on_pool!(bed, pool => {
            let mut tx = pool.begin().await.expect("begins");
            bed.context(job.lease, RETENTION).complete_in(&mut tx).await.expect("completes");
            let client = bed.client.clone();
            let cancel = tokio::spawn(async move { client.cancel(id).await });
            bed.until_one_waits_for_a_lock().await;
            let expected = if commit {
                tx.commit().await.expect("commits");
                CancelReply::AlreadyFinal(JobState::Completed)
            } else {
                tx.rollback().await.expect("rolls back");
                CancelReply::Requested
            };
            assert_eq!(cancel.await.expect("no panic").expect("answers"), expected);
        });
    }
}

/// A handler longer than many heartbeats, at both levels that people use.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) async fn f7_heartbeats_do_not_disturb_it_at_any_isolation_level(bed: Bed) {
    use crate::store::{Beat, BeatReply};

    let levels = ["read committed", "repeatable read", "serializable"];
    for (n, level) in levels.into_iter().enumerate() {
        let job = claimed(&bed).await;
        let mut pulse = bed.store.pulse().await.expect("connects");
        let beat = Beat {
            session: job.lease.session.0,
            held: vec![(job.lease.job, job.lease.token)],
            floors: Vec::new(),
        };
        let alive = BeatReply::Extended { lost: Vec::new(), cancel_requested: Vec::new() };
        on_pool!(bed, pool => {
            let mut tx = pool.begin_with(bed.begin_at(level)).await.expect("begins");
            sqlx::query(bed.statement(EFFECT)).execute(&mut *tx).await.expect("writes");
            assert_eq!(pulse.beat(&beat).await.expect("beats"), alive);
            bed.context(job.lease, RETENTION).complete_in(&mut tx).await.expect(level);
            assert_eq!(pulse.beat(&beat).await.expect("beats"), alive, "{level}");
            tx.commit().await.expect("commits");
        });
        assert_eq!(bed.count("effects").await, n as i64 + 1);
        assert!(bed.row("finished", job.lease.job).await.is_some(), "{level}");
    }
}

/// At REPEATABLE READ the server refuses what READ COMMITTED looks at again.
#[cfg(feature = "postgres")]
pub(super) async fn f7_a_cancel_after_the_snapshot_is_a_serialization_failure(bed: Bed) {
    let job = claimed(&bed).await;
    on_pool!(bed, pool => {
        let mut tx = pool.begin_with("begin isolation level repeatable read").await.expect("begins");
        sqlx::query(bed.statement(EFFECT)).execute(&mut *tx).await.expect("writes");
        bed.client.cancel(job.lease.job).await.expect("asks");
        let error = bed.context(job.lease, RETENTION).complete_in(&mut tx).await;
        let error = error.expect_err("the row changed after the snapshot");
        assert!(matches!(error, Error::Serialization(_)), "{error:?}");
        drop(tx);
    });
    assert_eq!(bed.count("effects").await, 0);
}

/// A claim elsewhere, a cancel or an operator may have the row locked for a moment: that does not
/// take the lease away.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) async fn f7_a_row_that_is_locked_for_a_moment_is_waited_for(bed: Bed) {
    for touch in [false, true] {
        let job = claimed(&bed).await;
        let id = job.lease.job;
        on_pool!(bed, pool => {
            let mut other = pool.begin().await.expect("begins");
            let lock = if touch {
                format!("update jobq.jobs set cancel_requested = true where id = {id}")
            } else {
                format!("select id from jobq.jobs where id = {id} for update")
            };
            sqlx::query(bed.statement(&lock)).execute(&mut *other).await.expect("locks");
            let mut tx = pool.begin().await.expect("begins");
            let context = bed.context(job.lease, RETENTION);
            let handler = tokio::spawn(async move {
                context.complete_in(&mut tx).await.map(|()| tx)
            });
            bed.until_one_waits_for_a_lock().await;
            other.commit().await.expect("commits");
            let tx = handler.await.expect("no panic").expect("the lease was never lost");
            tx.commit().await.expect("commits");
        });
        assert!(bed.row("finished", id).await.is_some());
    }
}
