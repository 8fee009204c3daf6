//! Writing new jobs: through a client, a pool, a connection, or the caller's own transaction.

use jobq_core::job::JobId;
use jobq_core::payload::DEFAULT_LIMIT;

use crate::error::Result;
use crate::job::{CheckedJob, NewJob};
use crate::store::Schema;

/// What became of a job that was enqueued.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Enqueued {
    /// It was written, under this id.
    Inserted(JobId),
    /// It is unique and has a twin, which keeps it out: it was not written.
    Existing {
        /// The twin's id.
        id: JobId,
        /// Whether the twin was given this job's payload, time and priority, as
        /// [`OnConflict::Replace`](crate::OnConflict::Replace) asks for. It was not if it is running.
        replaced: bool,
    },
}

impl Enqueued {
    /// The id of the job that was written, or of its twin.
    pub fn id(self) -> JobId {
        match self {
            Self::Inserted(id) | Self::Existing { id, .. } => id,
        }
    }

    /// Whether the job was written, and has not met a twin.
    pub fn is_new(self) -> bool {
        matches!(self, Self::Inserted(_))
    }
}

/// Where jobs can be enqueued: a `&Client`, a `&PgPool`, `&MySqlPool` or `&SqlitePool`, or `&mut` a
/// connection, pool connection or **transaction** of these databases.
///
/// A pool, connection or transaction writes to jobq's tables under their default name;
/// [`Client::within`](crate::Client::within) joins a client's settings with a transaction.
#[diagnostic::on_unimplemented(
    message = "jobs cannot be enqueued through `{Self}`",
    label = "not a client, pool, connection or transaction",
    note = "pass `&client`, `&pool`, or your own open transaction as `&mut tx`; its database's \
            feature of jobq (`postgres`, `mysql`, `sqlite`) must be on"
)]
pub trait EnqueueTarget: sealed::Sealed + Send + Sized {
    /// Where the tables are, and how large a job's payload may be, metadata and tags included.
    #[doc(hidden)]
    fn settings(&self) -> (Schema, usize) {
        (Schema::default(), DEFAULT_LIMIT)
    }

    /// Writes jobs that were checked, all or none, and tells of each in the order given.
    #[doc(hidden)]
    fn write(
        self,
        jobs: Vec<CheckedJob>,
        schema: Schema,
    ) -> impl Future<Output = Result<Vec<Enqueued>>> + Send;
}

/// Checks and writes jobs; the one road for every target.
pub(crate) async fn enqueue(
    target: impl EnqueueTarget,
    jobs: Vec<NewJob>,
) -> Result<Vec<Enqueued>> {
    let (schema, limit) = target.settings();
    let jobs = jobs.into_iter().map(|job| job.check(limit)).collect::<Result<Vec<_>>>()?;
    target.write(jobs, schema).await
}

pub(crate) mod sealed {
    /// Keeps the list of targets ours, so that it can grow without breaking anybody.
    pub trait Sealed {}
}

/// Writes many jobs, of any mix of kinds, all or none.
///
/// The result is in the order of the jobs. One statement writes up to a few thousand jobs, so
/// this is many times faster than one `enqueue` for each.
///
/// # Errors
///
/// As [`NewJob::enqueue`]; the first job that cannot be written fails the call, and none is
/// written.
///
/// # Cancel safety
///
/// If the future is dropped, the jobs are written all or none. But in a transaction of yours, unique
/// jobs, and on MySQL and MariaDB any, may be written in part: roll it back. On those two close the
/// connection: their driver may wait for ever for the reply to a dropped query.
pub async fn enqueue_many(
    target: impl EnqueueTarget,
    jobs: impl IntoIterator<Item = NewJob>,
) -> Result<Vec<Enqueued>> {
    enqueue(target, jobs.into_iter().collect()).await
}
