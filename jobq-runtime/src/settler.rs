//! Writing outcomes down, many at once.
//!
//! Outcomes that end while one batch is being written make up the next batch: under load batches
//! grow by themselves, and a lone outcome waits for nobody. An outcome that cannot be written
//! stays here and is tried again until the database says that it is, or that somebody else has the
//! job: whatever this process may believe of its leases, the row decides.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use jobq_core::lifecycle::Transition;
use tokio::sync::{Mutex, mpsc};
use tokio::time::{sleep, timeout};
use tracing::Span;

use crate::attempt::{Control, describe};
use crate::key;
use crate::store::{Settled, Settlement};
use crate::worker::{Slot, Worker};

/// The most outcomes written at once.
const BATCH: usize = 200;

/// How long a batch waits for attempts that are about to end too.
const GATHER: Duration = Duration::from_millis(1);

/// The waits between tries: the first, and the longest.
const FIRST_WAIT: Duration = Duration::from_millis(50);
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// The first wait for a row that somebody else has locked; it doubles up to [`FIRST_WAIT`]. Most
/// often it is a claim that had read the row before it was taken, and has it locked for as long as
/// it runs.
const LOCKED_WAIT: Duration = Duration::from_millis(2);

/// An attempt that has ended and is not written yet. Its slot stays taken until it is.
pub(crate) struct Finished {
    pub(crate) settlement: Settlement,
    pub(crate) control: Arc<Control>,
    pub(crate) slot: Slot,
    pub(crate) span: Span,
    /// The database refused it, and not for a passing reason; said once.
    pub(crate) refused: bool,
}

/// The outcomes on their way to the database; outlives a settler that is restarted.
pub(crate) struct Inbox {
    finished: mpsc::Receiver<Finished>,
    batch: Vec<Finished>,
}

impl Inbox {
    pub(crate) fn new(finished: mpsc::Receiver<Finished>) -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Self { finished, batch: Vec::new() }))
    }
}

/// Writes outcomes until every sender is gone.
pub(crate) async fn run(worker: Arc<Worker>, inbox: Arc<Mutex<Inbox>>) {
    let mut inbox = inbox.lock().await;
    let (mut wait, mut locked_wait) = (FIRST_WAIT, LOCKED_WAIT);
    while inbox.gather(&worker).await {
        let before = inbox.batch.len();
        match write(&worker, &mut inbox.batch).await {
            Ok(()) if inbox.batch.is_empty() => (wait, locked_wait) = (FIRST_WAIT, LOCKED_WAIT),
            // Rows that somebody else has locked: the others are written, these wait a little.
            Ok(()) => {
                sleep(locked_wait).await;
                locked_wait = (locked_wait * 2).min(FIRST_WAIT);
            }
            Err(error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    jobs = before,
                    "outcomes could not be written; trying again"
                );
                sleep(wait.mul_f64(0.5 + 0.5 * rand::random::<f64>())).await;
                wait = (wait * 2).min(LONGEST_WAIT);
            }
        }
    }
}

impl Inbox {
    /// Fills the batch; false when there is nothing and nothing will come.
    async fn gather(&mut self, worker: &Worker) -> bool {
        if self.batch.is_empty() {
            match self.finished.recv().await {
                Some(finished) => self.batch.push(finished),
                None => return false,
            }
        }
        while self.batch.len() < BATCH {
            if let Ok(finished) = self.finished.try_recv() {
                self.batch.push(finished);
            } else if worker.running_count() > self.batch.len() {
                match timeout(GATHER, self.finished.recv()).await {
                    Ok(Some(finished)) => self.batch.push(finished),
                    Ok(None) | Err(_) => break,
                }
            } else {
                break;
            }
        }
        true
    }
}

/// Writes what can be written, and leaves the rest in the batch.
async fn write(worker: &Worker, batch: &mut Vec<Finished>) -> crate::Result<()> {
    let settlements: Vec<Settlement> =
        batch.iter().map(|finished| finished.settlement.clone()).collect();
    let mut settled = key::settle(&*worker.store, &settlements).await;
    if settled.as_ref().is_err_and(|error| !error.is_transient()) {
        // One that the database refuses must not hold up the others.
        let mut each = Vec::with_capacity(settlements.len());
        for (settlement, finished) in settlements.iter().zip(batch.iter_mut()) {
            match key::settle(&*worker.store, std::slice::from_ref(settlement)).await {
                Ok(one) => each.extend(one),
                Err(error) => {
                    finished.settlement.doubtful = true;
                    let refused = !error.is_transient();
                    if refused && !std::mem::replace(&mut finished.refused, true) {
                        tracing::error!(
                            error = &error as &dyn std::error::Error,
                            id = settlement.lease.job.0,
                            "an outcome is refused by the database; trying again"
                        );
                    }
                    each.push(Settled::Busy);
                }
            }
        }
        settled = Ok(each);
    }
    let settled = match settled {
        Ok(settled) => settled,
        Err(error) => {
            for finished in batch.iter_mut() {
                finished.settlement.doubtful = true;
            }
            return Err(error);
        }
    };
    let (mut ended, mut rest) = (Vec::new(), Vec::new());
    for (mut finished, settled) in batch.drain(..).zip(settled) {
        match settled {
            Settled::Written => {
                report(worker, &finished);
                ended.push(finished.slot);
            }
            Settled::Found => {
                // By the job function itself, or by an earlier try whose reply was lost.
                if finished.control.completing.load(Ordering::SeqCst) {
                    worker.stats.completed.fetch_add(1, Ordering::Relaxed);
                } else {
                    worker.stats.count(&finished.settlement.transition);
                }
                finished.span.in_scope(|| tracing::debug!("written before"));
                ended.push(finished.slot);
            }
            Settled::LeaseLost => {
                worker.lost(finished.settlement.lease, &finished.span);
                ended.push(finished.slot);
            }
            Settled::Busy => rest.push(finished),
            Settled::CancelRequested => {
                finished.settlement.transition = Transition::Cancel { reason: None };
                rest.push(finished);
            }
        }
    }
    *batch = rest;
    Slot::free(ended);
    Ok(())
}

/// Logs what was written.
fn report(worker: &Worker, finished: &Finished) {
    let transition = &finished.settlement.transition;
    let outcome = describe(transition);
    finished.span.in_scope(|| match transition {
        Transition::Requeue { record: Some(record), .. } => {
            tracing::info!(outcome, error = %record.error, "attempt failed");
        }
        Transition::Bury { reason, record, .. } => {
            tracing::warn!(outcome, %reason, error = %record.error, "job is dead");
        }
        Transition::Complete { .. } | Transition::Cancel { .. } | Transition::Requeue { .. } => {
            tracing::debug!(outcome, "settled");
        }
    });
    worker.stats.count(transition);
}
