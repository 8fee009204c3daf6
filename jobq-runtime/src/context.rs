//! What a running job knows about itself and may do.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use jobq_core::job::{JobId, Lease, SessionId, Token};
use jobq_core::time::Timestamp;
use tokio_util::sync::CancellationToken;

use crate::error::{Error, Result};
use crate::store::{Completion, Schema};

/// One attempt of a job: its identity, its cancellation, and completion in your transaction.
///
/// Take it as a parameter of the job function, `ctx: &JobContext` or `ctx: JobContext`. It is
/// cheap to clone.
#[derive(Clone, Debug)]
pub struct JobContext(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    facts: Facts,
    cancelled: CancellationToken,
    completed_in: Arc<AtomicBool>,
}

/// What is known about an attempt when it starts.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    pub(crate) lease: Lease,
    pub(crate) kind: Arc<str>,
    pub(crate) queue: Arc<str>,
    pub(crate) attempt: u32,
    pub(crate) max_attempts: u32,
    pub(crate) created_at: Timestamp,
    pub(crate) tags: Vec<String>,
    pub(crate) metadata: serde_json::Map<String, serde_json::Value>,
    pub(crate) retention: Duration,
    /// Where jobq's tables are; `None` for a context outside a runtime.
    pub(crate) schema: Option<Schema>,
}

impl JobContext {
    pub(crate) fn new(
        facts: Facts,
        cancelled: CancellationToken,
        completed_in: Arc<AtomicBool>,
    ) -> Self {
        Self(Arc::new(Inner { facts, cancelled, completed_in }))
    }

    /// A context for calling a job function directly, as in a unit test.
    ///
    /// It is the first attempt of job 0 under token 0; nothing cancels it, and `complete_in` writes
    /// nothing.
    ///
    /// # Examples
    ///
    /// ```
    /// # use jobq_runtime as jobq;
    /// let ctx = jobq::JobContext::detached();
    /// assert_eq!(ctx.attempt(), 1);
    /// ```
    pub fn detached() -> Self {
        let lease = Lease { job: JobId(0), token: Token(0), session: SessionId(0) };
        let facts = Facts {
            lease,
            kind: "detached".into(),
            queue: jobq_core::queue::DEFAULT_QUEUE.into(),
            attempt: 1,
            max_attempts: 1,
            created_at: Timestamp(0),
            tags: Vec::new(),
            metadata: serde_json::Map::new(),
            retention: Duration::ZERO,
            schema: None,
        };
        Self::new(facts, CancellationToken::new(), Arc::default())
    }

    /// The job's id.
    pub fn id(&self) -> JobId {
        self.0.facts.lease.job
    }

    /// The fencing token of this attempt: higher than that of any earlier claim of this job.
    ///
    /// Pass it along when writing to another system, and let that system refuse a token lower
    /// than the highest it has seen for this job. It orders claims as long as the database loses
    /// no commit.
    pub fn token(&self) -> Token {
        self.0.facts.lease.token
    }

    /// The job's kind.
    pub fn kind(&self) -> &str {
        &self.0.facts.kind
    }

    /// The queue the job is in.
    pub fn queue(&self) -> &str {
        &self.0.facts.queue
    }

    /// The number of this attempt; the first is 1.
    pub fn attempt(&self) -> u32 {
        self.0.facts.attempt
    }

    /// The number of the last allowed attempt.
    pub fn max_attempts(&self) -> u32 {
        self.0.facts.max_attempts
    }

    /// When the job was enqueued, on the database's clock.
    pub fn created_at(&self) -> SystemTime {
        self.0.facts.created_at.to_system().unwrap_or(SystemTime::UNIX_EPOCH)
    }

    /// The tags given at enqueue.
    pub fn tags(&self) -> &[String] {
        &self.0.facts.tags
    }

    /// The metadata given at enqueue.
    pub fn metadata(&self) -> &serde_json::Map<String, serde_json::Value> {
        &self.0.facts.metadata
    }

    /// Completes when this attempt should stop: the job was cancelled, its lease lost, its time
    /// is over, or the worker stops. An async function whose lease is lost or whose time is over is
    /// dropped at once, and sees this only in what it has spawned; a plain one sees all of them.
    ///
    /// # Cancel safety
    ///
    /// Safe: it only waits.
    pub async fn cancelled(&self) {
        self.0.cancelled.cancelled().await;
    }

    /// Whether this attempt should stop; for loops that do not wait.
    pub fn is_cancelled(&self) -> bool {
        self.0.cancelled.is_cancelled()
    }

    /// The token behind [`cancelled`](Self::cancelled), to pass on.
    pub fn cancellation_token(&self) -> &CancellationToken {
        &self.0.cancelled
    }

    /// Completes the job inside your own transaction: your writes and the completion commit
    /// together or not at all.
    ///
    /// This gives effects in the same database **exactly once**: the completion is fenced by the
    /// job's lease, so a late attempt cannot commit. Commit the transaction and return `Ok`. If you
    /// return an error instead, or `Ok` without having committed, the attempt is a failure and
    /// nothing was written.
    ///
    /// The value of that `Ok` is not kept: the job is completed before there is one. Write what is
    /// to be kept in the transaction.
    ///
    /// On SQLite begin the transaction with `BEGIN IMMEDIATE`: it keeps every other writer
    /// out of the file while it is open.
    ///
    /// # Errors
    ///
    /// [`Error::LeaseLost`] when the job belongs to somebody else now: roll back. Database errors.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, roll the transaction back.
    pub async fn complete_in(&self, transaction: impl CompleteTarget) -> Result<()> {
        let facts = &self.0.facts;
        let Some(schema) = &facts.schema else { return Ok(()) };
        let completion = Completion { lease: facts.lease, retention: facts.retention };
        // Set first: from here on the row may be gone, by our own doing.
        self.0.completed_in.store(true, Ordering::SeqCst);
        if transaction.complete(completion, schema.clone()).await? {
            Ok(())
        } else {
            self.0.completed_in.store(false, Ordering::SeqCst);
            Err(Error::LeaseLost { job: facts.lease.job })
        }
    }

    /// Whether [`complete_in`](Self::complete_in) was called and did not report a lost lease.
    pub(crate) fn completed_in(&self) -> bool {
        self.0.completed_in.load(Ordering::SeqCst)
    }
}

/// A transaction in which a job can be completed: `&mut Transaction`, `&mut PoolConnection` or
/// `&mut Connection` of PostgreSQL, MySQL, MariaDB and SQLite.
#[diagnostic::on_unimplemented(
    message = "a job cannot be completed in `{Self}`",
    note = "pass your open transaction: `ctx.complete_in(&mut tx)`; its database's feature of \
            jobq (`postgres`, `mysql`, `sqlite`) must be on"
)]
pub trait CompleteTarget: crate::enqueue::sealed::Sealed + Send {
    /// Writes the completion; false when the lease was lost.
    #[doc(hidden)]
    fn complete(
        self,
        completion: Completion,
        schema: Schema,
    ) -> impl Future<Output = Result<bool>> + Send;
}
