//! The fence: no write without the lease, by whatever path, and how a lost lease is told apart.

use std::time::Duration;

use jobq_core::job::{Lease, SessionId};
use jobq_core::lifecycle::{self, Transition};

use super::bed::{Bed, LEASE, RETENTION, on_pool};
use super::settle::{buried, cancelled, completed, failed, snoozed};
use super::worker::settlement;
use crate::error::Error;
use crate::store::{ClaimedJob, DeadFilter, Settled, Settlement};

/// Every way to write for a running job.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Path {
    Complete,
    Requeue,
    Snooze,
    Release,
    Bury,
    Cancel,
    Isolate,
    CompleteIn,
}

const PATHS: [Path; 8] = [
    Path::Complete,
    Path::Requeue,
    Path::Snooze,
    Path::Release,
    Path::Bury,
    Path::Cancel,
    Path::Isolate,
    Path::CompleteIn,
];

impl Path {
    fn transition(self, job: &ClaimedJob) -> Option<Transition> {
        Some(match self {
            Self::Complete => completed(),
            Self::Requeue => failed(job.counters, Duration::ZERO),
            Self::Snooze => snoozed(job.counters),
            Self::Release => lifecycle::release(job.counters),
            Self::Bury => buried(job.counters),
            Self::Cancel => cancelled(),
            Self::Isolate | Self::CompleteIn => return None,
        })
    }

    /// Tries to write; `None` for a path that says no more than that nothing was written.
    async fn take(self, bed: &Bed, job: &ClaimedJob, lease: Lease) -> Option<Settled> {
        match (self, self.transition(job)) {
            (_, Some(transition)) => Some(bed.settle(lease, transition).await),
            (Self::Isolate, None) => {
                assert!(!bed.store.isolate(lease).await.expect("reaches the database"));
                None
            }
            (_, None) => on_pool!(bed, pool => {
                let mut tx = pool.begin_with(bed.begin()).await.expect("begins");
                let context = bed.context(lease, RETENTION);
                let error = context.complete_in(&mut tx).await.expect_err("the lease is lost");
                assert!(matches!(error, Error::LeaseLost { job } if job == lease.job), "{error:?}");
                assert!(!context.completed_in());
                tx.commit().await.expect("nothing was written, so this may commit");
                None
            }),
        }
    }
}

/// Tries every path with a lease that does not hold: nothing changes, and each says so.
async fn assert_fenced(bed: &Bed, job: &ClaimedJob, lease: Lease) {
    let before = bed.everything(lease.job).await;
    for path in PATHS {
        let settled = path.take(bed, job, lease).await;
        assert_eq!(before, bed.everything(lease.job).await, "{path:?} wrote");
        assert!(
            settled.is_none_or(|settled| settled == Settled::LeaseLost),
            "{path:?}: {settled:?}"
        );
    }
}

pub(super) async fn f2_an_older_token_writes_nothing(bed: Bed) {
    bed.one().await;
    let worker = bed.session(LEASE, &["k"]).await;
    let older = worker.claim_one().await;
    bed.settle(older.lease, snoozed(older.counters)).await;
    assert_fenced(&bed, &older, older.lease).await;
    // The same worker claims it again, and is a stranger to its own older claim.
    let newer = worker.claim_one().await;
    assert_eq!(newer.lease.session, older.lease.session);
    assert_fenced(&bed, &older, older.lease).await;
    assert_eq!(bed.settle(newer.lease, completed()).await, Settled::Written);
    assert_fenced(&bed, &older, older.lease).await;
}

pub(super) async fn f2_the_right_token_of_another_session_writes_nothing(bed: Bed) {
    bed.one().await;
    let job = bed.session(LEASE, &["k"]).await.claim_one().await;
    let other = bed.session(LEASE, &["k"]).await;
    for session in [other.id, SessionId(0), SessionId(-job.lease.session.0)] {
        assert_fenced(&bed, &job, Lease { session, ..job.lease }).await;
    }
    assert_eq!(bed.settle(job.lease, completed()).await, Settled::Written);
}

pub(super) async fn f2_a_token_from_the_future_writes_nothing(bed: Bed) {
    bed.one().await;
    let job = bed.session(LEASE, &["k"]).await.claim_one().await;
    let token = jobq_core::job::Token(job.lease.token.0 + 1);
    assert_fenced(&bed, &job, Lease { token, ..job.lease }).await;
}

async fn rescue(bed: &Bed, session: SessionId) {
    bed.expire(session).await;
    assert_eq!(crate::sweep::rescue(&*bed.store, false).await.expect("rescues"), 1);
}

pub(super) async fn f2_after_a_rescue_nothing_is_written(bed: Bed) {
    bed.one().await;
    let stale = bed.session(LEASE, &["k"]).await.claim_one().await;
    rescue(&bed, stale.lease.session).await;
    assert_fenced(&bed, &stale, stale.lease).await;
    let newer = bed.session(LEASE, &["k"]).await.claim_one().await;
    assert_fenced(&bed, &stale, stale.lease).await;
    assert_eq!(bed.settle(newer.lease, completed()).await, Settled::Written);
    assert_fenced(&bed, &stale, stale.lease).await;
}

pub(super) async fn f2_after_a_rescue_buried_the_job_nothing_is_written(bed: Bed) {
    let mut once = super::worker::job("k");
    once.max_attempts = 1;
    bed.enqueue(vec![once]).await;
    let stale = bed.session(LEASE, &["k"]).await.claim_one().await;
    rescue(&bed, stale.lease.session).await;
    assert_eq!(bed.count("dead").await, 1);
    assert_fenced(&bed, &stale, stale.lease).await;
}

/// The settler that lost is told so, or finds its own outcome written: never that it wrote.
pub(super) async fn f2_after_completion_nothing_is_written(bed: Bed) {
    for end in [Path::Complete, Path::Cancel, Path::Bury] {
        bed.one().await;
        let job = bed.session(LEASE, &["k"]).await.claim_one().await;
        let transition = end.transition(&job).expect("it settles");
        assert_eq!(bed.settle(job.lease, transition).await, Settled::Written);
        let before = bed.everything(job.lease.job).await;
        for path in PATHS {
            let settled = path.take(&bed, &job, job.lease).await;
            assert_eq!(before, bed.everything(job.lease.job).await, "{path:?} after {end:?} wrote");
            let told = settled != Some(Settled::Written) && settled != Some(Settled::Busy);
            assert!(told, "{path:?} after {end:?}: {settled:?}");
        }
        let older = Lease { token: jobq_core::job::Token(0), ..job.lease };
        assert_fenced(&bed, &job, older).await;
    }
}

pub(super) async fn f2_after_completion_without_history_nothing_is_written(bed: Bed) {
    bed.one().await;
    let job = bed.session(LEASE, &["k"]).await.claim_one().await;
    let end = Settlement { retention: Duration::ZERO, ..settlement(job.lease, completed()) };
    assert_eq!(bed.settle_all(&[end]).await, [Settled::Written]);
    assert_fenced(&bed, &job, job.lease).await;
}

/// A redriven job has the token it died with, and is nobody's.
pub(super) async fn f2_after_a_redrive_nothing_is_written(bed: Bed) {
    let id = bed.one().await;
    let job = bed.session(LEASE, &["k"]).await.claim_one().await;
    bed.settle(job.lease, buried(job.counters)).await;
    assert_eq!(bed.client.redrive(&DeadFilter::id(id)).await.expect("redrives"), [id]);
    assert_fenced(&bed, &job, job.lease).await;
    let newer = bed.session(LEASE, &["k"]).await.claim_one().await;
    assert!(newer.lease.token > job.lease.token);
    assert_fenced(&bed, &job, job.lease).await;
}

/// An id is never given to another job, so that a stale write cannot meet a stranger.
pub(super) async fn f2_an_id_is_never_used_again(bed: Bed) {
    let first = bed.one().await;
    let job = bed.session(LEASE, &["k"]).await.claim_one().await;
    let end = Settlement { retention: Duration::ZERO, ..settlement(job.lease, completed()) };
    bed.settle_all(&[end]).await;
    assert!(bed.one().await > first);
}

/// A job that never ran must not be called poison because its session ended.
pub(super) async fn f6_a_job_of_a_closed_session_is_not_isolated(bed: Bed) {
    bed.one().await;
    let worker = bed.session(LEASE, &["k"]).await;
    let job = worker.claim_one().await;
    bed.expire(worker.id).await;
    bed.store.close_expired_sessions().await.expect("closes");
    assert!(!bed.store.isolate(job.lease).await.expect("reaches the database"));
    assert_eq!(bed.number("select count(*) from jobq.jobs where isolated").await, 0);
}

pub(super) async fn s3_a_job_to_be_cancelled_is_not_buried(bed: Bed) {
    let id = bed.one().await;
    let worker = bed.session(LEASE, &["k"]).await;
    let job = worker.claim_one().await;
    bed.client.cancel(id).await.expect("answers");
    let settled = bed.settle(job.lease, buried(job.counters)).await;
    assert_eq!(settled, Settled::CancelRequested);
    assert_eq!(bed.settle(job.lease, cancelled()).await, Settled::Written);
    assert_eq!((bed.count("dead").await, bed.count("finished").await), (0, 1));
}
