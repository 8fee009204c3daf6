//! Writing new jobs: through a client, a pool, a connection, or the caller's own transaction.

use jobq_core::job::JobId;

use crate::error::Result;
use crate::job::NewJob;

/// A job that was written.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct Enqueued {
    /// Its id.
    pub id: JobId,
}

/// Where jobs can be enqueued: a `&Client`, a `&PgPool` or `&SqlitePool`, or `&mut` a
/// connection, pool connection or **transaction** of these databases.
///
/// A pool, connection or transaction writes to jobq's tables under their default name;
/// [`Client::within`](crate::Client::within) joins a client's settings with a transaction.
#[diagnostic::on_unimplemented(
    message = "jobs cannot be enqueued through `{Self}`",
    label = "not a client, pool, connection or transaction",
    note = "pass `&client`, `&pool`, or your own open transaction as `&mut tx`; its database's \
            feature of jobq (`postgres`, `sqlite`) must be on"
)]
pub trait EnqueueTarget: sealed::Sealed + Send {
    /// Writes the jobs, all or none, and returns them in the order given.
    #[doc(hidden)]
    fn insert(self, jobs: Vec<NewJob>) -> impl Future<Output = Result<Vec<Enqueued>>> + Send;
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
/// If the future is dropped, the jobs are written all or none.
pub async fn enqueue_many(
    target: impl EnqueueTarget,
    jobs: impl IntoIterator<Item = NewJob>,
) -> Result<Vec<Enqueued>> {
    target.insert(jobs.into_iter().collect()).await
}
