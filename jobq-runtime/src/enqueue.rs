//! Writing new jobs: through a client, a pool, a connection, or the caller's own transaction.

use jobq_core::job::JobId;
use jobq_core::payload::DEFAULT_LIMIT;

use crate::error::Result;
use crate::job::{CheckedJob, NewJob};
use crate::store::Schema;

/// A job that was written.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct Enqueued {
    /// Its id.
    pub id: JobId,
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

    /// Writes jobs that were checked, all or none, and returns their ids in the order given.
    #[doc(hidden)]
    fn write(
        self,
        jobs: Vec<CheckedJob>,
        schema: Schema,
    ) -> impl Future<Output = Result<Vec<JobId>>> + Send;
}

/// Checks and writes jobs; the one road for every target.
pub(crate) async fn enqueue(
    target: impl EnqueueTarget,
    jobs: Vec<NewJob>,
) -> Result<Vec<Enqueued>> {
    let (schema, limit) = target.settings();
    let jobs = jobs.into_iter().map(|job| job.check(limit)).collect::<Result<Vec<_>>>()?;
    let ids = target.write(jobs, schema).await?;
    Ok(ids.into_iter().map(|id| Enqueued { id }).collect())
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
/// If the future is dropped, the jobs are written all or none. Only on MySQL and MariaDB, in a
/// transaction of yours, more than 500 of them may be written in part: roll it back.
pub async fn enqueue_many(
    target: impl EnqueueTarget,
    jobs: impl IntoIterator<Item = NewJob>,
) -> Result<Vec<Enqueued>> {
    enqueue(target, jobs.into_iter().collect()).await
}
