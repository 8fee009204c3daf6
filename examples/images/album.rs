//! What all jobs of this process share: they take it as `State<Arc<Album>>`.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use jobq::JobId;

/// Remembers which jobs this run is about.
pub(crate) struct Album {
    /// This process, as jobq calls it.
    pub(crate) worker: String,
    jobs: Mutex<BTreeSet<JobId>>,
    running: AtomicU64,
}

impl Album {
    pub(crate) fn new(worker: &str) -> Self {
        Self { worker: worker.to_owned(), jobs: Mutex::default(), running: AtomicU64::new(0) }
    }

    /// Notes that a job runs here, until what this returns is dropped.
    pub(crate) fn enter(&self, job: JobId) -> Running<'_> {
        self.add([job]);
        self.running.fetch_add(1, Ordering::Relaxed);
        Running(&self.running)
    }

    pub(crate) fn add(&self, jobs: impl IntoIterator<Item = JobId>) {
        self.lock().extend(jobs);
    }

    /// The jobs enqueued here, and those that ran here: an earlier run may have enqueued them.
    pub(crate) fn jobs(&self) -> BTreeSet<JobId> {
        self.lock().clone()
    }

    /// How many jobs run here.
    pub(crate) fn running(&self) -> u64 {
        self.running.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<JobId>> {
        self.jobs.lock().expect("nobody panics while holding the lock")
    }
}

/// A job that runs in this process.
pub(crate) struct Running<'a>(&'a AtomicU64);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
