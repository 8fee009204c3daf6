//! Sessions that claim, and the jobs and settlements that cases are made of.

use std::borrow::Cow;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use jobq_core::job::{Lease, SessionId};
use jobq_core::lifecycle::Transition;
use jobq_core::queue::bands_with_fronts;

use super::bed::{Bed, RETENTION};
use crate::job::{CheckedDue, CheckedJob};
use crate::store::{Claim, Claimed, ClaimedJob, Floor, NewSession, QueueClaim, Settlement};

impl Bed {
    /// Opens a session that knows `kinds`.
    pub(crate) async fn session(&self, lease: Duration, kinds: &[&str]) -> Worker<'_> {
        static NEXT: AtomicI64 = AtomicI64::new(1_000);
        let id = SessionId(NEXT.fetch_add(1, Ordering::Relaxed));
        let session = NewSession {
            id,
            worker: format!("worker-{id}"),
            lease,
            kinds: kinds.iter().map(|kind| (*kind).to_owned()).collect(),
            queues: vec!["default".to_owned()],
        };
        self.store.open_session(&session).await.expect("a session can be opened");
        Worker { bed: self, id, kinds: session.kinds }
    }
}

/// A session that claims, as a worker's process would.
pub(crate) struct Worker<'b> {
    bed: &'b Bed,
    pub(crate) id: SessionId,
    kinds: Vec<String>,
}

impl Worker<'_> {
    /// Claims up to `limit` jobs of the default queue, looking from the beginning.
    pub(crate) async fn claim(&self, limit: u32) -> Vec<ClaimedJob> {
        self.claim_from(limit, Floor::START).await.jobs
    }

    /// Claims from a floor, the same in every band.
    pub(crate) async fn claim_from(&self, limit: u32, floor: Floor) -> Claimed {
        self.claim_as(&self.asking("default", limit, floor)).await
    }

    pub(crate) async fn claim_as(&self, claim: &Claim) -> Claimed {
        self.bed.store.claim(claim).await.expect("claiming reaches the database")
    }

    /// A claim of this session.
    pub(crate) fn asking(&self, queue: &str, limit: u32, floor: Floor) -> Claim {
        Claim {
            kinds: self.kinds.iter().map(|kind| (kind.clone(), self.id)).collect(),
            queues: vec![QueueClaim {
                queue: queue.to_owned(),
                limit,
                floors: bands_with_fronts().map(|band| (band, floor)).collect(),
            }],
        }
    }

    /// Claims exactly one job.
    pub(crate) async fn claim_one(&self) -> ClaimedJob {
        let mut jobs = self.claim(1).await;
        assert_eq!(jobs.len(), 1, "one job is due");
        jobs.remove(0)
    }
}

/// A job of the default queue, due now.
pub(crate) fn job(kind: &'static str) -> CheckedJob {
    CheckedJob {
        kind: Cow::Borrowed(kind),
        queue: Cow::Borrowed("default"),
        payload: "{}".to_owned(),
        due: CheckedDue::After(Duration::ZERO),
        priority: 0,
        max_attempts: 3,
        max_crashes: 3,
        expires: None,
        tags: Vec::new(),
        metadata: None,
        unique: None,
        key: None,
    }
}

/// A transition to be written for a lease, with the usual retention.
pub(crate) fn settlement(lease: Lease, transition: Transition) -> Settlement {
    Settlement { lease, transition, retention: RETENTION, doubtful: false, key: None }
}
