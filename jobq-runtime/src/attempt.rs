//! One attempt: decode, call, watch, and turn what happens into an outcome.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::task::Poll;
use std::time::Duration;

use jobq_core::lifecycle::{self, Transition};
use jobq_core::outcome::{AttemptReason, Outcome};
use jobq_core::text::storable;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use crate::context::{Facts, JobContext};
use crate::handler::{BoxFuture, Call, Handler};
use crate::job::JobDef;
use crate::settler::Finished;
use crate::store::{ClaimedJob, Settlement};
use crate::worker::{Slot, Worker};

/// How long a job function may go on after it was told to stop, before it is dropped.
pub(crate) const GRACE: Duration = Duration::from_secs(5);

/// How often a job function that cannot be dropped is complained about.
const STUCK_EVERY: Duration = Duration::from_secs(10);

/// How long a job waits that found no thread to run on.
const NO_THREAD_WAIT: Duration = Duration::from_secs(5);

/// A running attempt, as seen from outside: what the heartbeat and the shutdown can do to it.
#[derive(Debug, Default)]
pub(crate) struct Control {
    /// Seen by the job function as its cancellation.
    pub(crate) cancelled: CancellationToken,
    /// The attempt ends now, whatever the job function does.
    ended: CancellationToken,
    verdict: AtomicU8,
    /// The job function called `complete_in`: its row may be gone by its own doing.
    pub(crate) completing: Arc<AtomicBool>,
}

/// Verdicts on a running attempt; a higher one overrules a lower one.
const WARNED: u8 = 1;
const CANCEL: u8 = 2;
const INTERRUPT: u8 = 3;
const LOST: u8 = 4;

impl Control {
    /// The job is to be cancelled; its function gets [`GRACE`] to return.
    pub(crate) fn cancel(&self) {
        self.raise(CANCEL);
        self.cancelled.cancel();
    }

    /// The worker stops: the job function is told, and given until [`interrupt`](Self::interrupt).
    pub(crate) fn warn(&self) {
        self.raise(WARNED);
        self.cancelled.cancel();
    }

    /// The worker stops now: the job is given back.
    pub(crate) fn interrupt(&self) {
        self.raise(INTERRUPT);
        self.cancelled.cancel();
        self.ended.cancel();
    }

    /// The lease is lost: the attempt ends and writes nothing.
    pub(crate) fn lose(&self) {
        self.raise(LOST);
        self.cancelled.cancel();
        self.ended.cancel();
    }

    /// The row is not held any more. If the job function may have completed it in its own
    /// transaction it goes on: settling tells what became of the row.
    pub(crate) fn lose_unless_completing(&self) {
        if !self.completing.load(Ordering::SeqCst) {
            self.lose();
        }
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.verdict.load(Ordering::SeqCst) == LOST
    }

    fn raise(&self, verdict: u8) {
        self.verdict.fetch_max(verdict, Ordering::SeqCst);
    }

    fn verdict(&self) -> u8 {
        self.verdict.load(Ordering::SeqCst)
    }
}

/// Runs a claimed job and hands its outcome to the settler.
pub(crate) async fn run(worker: Arc<Worker>, job: ClaimedJob, slot: Slot, control: Arc<Control>) {
    let span = tracing::info_span!(
        "job",
        id = job.lease.job.0,
        kind = %job.kind,
        queue = %job.queue,
        attempt = job.counters.attempt,
        token = job.lease.token.0,
    );
    let lease = job.lease;
    let settlement = attempt(&worker, job, &control).instrument(span.clone()).await;
    if let Some(settlement) = settlement {
        worker.settle(Finished { settlement, control, slot, span, refused: false }).await;
    } else {
        worker.lost(lease, &span);
        Slot::free(vec![slot]);
    }
}

/// One attempt; `None` when the lease was lost and nothing may be written.
async fn attempt(worker: &Worker, job: ClaimedJob, control: &Control) -> Option<Settlement> {
    let def = worker.registry.get(&job.kind);
    let retention = worker.retention(&job.queue, def);
    let (lease, key) = (job.lease, job.key.clone());
    let settlement =
        |transition| Settlement { lease, transition, retention, doubtful: false, key: key.clone() };
    if let Some(transition) = lifecycle::admit(job.counters, job.limits, job.expired) {
        return Some(settlement(transition));
    }
    // Claims ask for known kinds only.
    let Some(def) = def else { return Some(settlement(lifecycle::release(job.counters))) };
    let facts = Facts {
        lease: job.lease,
        kind: job.kind.as_str().into(),
        queue: job.queue.as_str().into(),
        attempt: job.counters.attempt,
        max_attempts: job.limits.max_attempts,
        created_at: job.created_at,
        tags: job.tags,
        metadata: job.metadata,
        retention,
        schema: Some(worker.store.schema().clone()),
    };
    let context =
        JobContext::new(facts, control.cancelled.child_token(), Arc::clone(&control.completing));
    let states = Arc::clone(&worker.states);
    let call = Call { context: context.clone(), payload: job.payload, states };
    let outcome = watch(def, call, control).await?;
    let unit = rand::random::<f64>();
    let decide =
        |outcome| lifecycle::settle(outcome, job.counters, job.limits, &def.options.backoff, unit);
    if context.completed_in() && matches!(outcome, Outcome::Completed { .. }) {
        // The handler's own transaction has completed the job, if it was committed. If the row is
        // still ours it was not, and this failure is what gets written.
        let error = "the job function returned Ok, but the transaction that it called complete_in \
                     with was not committed";
        let outcome = Outcome::Failed {
            reason: AttemptReason::Failed,
            error: error.to_owned(),
            retry_after: None,
        };
        return Some(Settlement { doubtful: true, ..settlement(decide(outcome)) });
    }
    Some(Settlement { doubtful: context.completed_in(), ..settlement(decide(outcome)) })
}

/// Runs the job function until it returns, panics, takes too long, is cancelled or loses its lease.
async fn watch(def: &'static JobDef, call: Call, control: &Control) -> Option<Outcome> {
    // Told before it began, for instance because its lease was lost on the way here. Unless somebody
    // else has the job by now it can be given back.
    if control.ended.is_cancelled() {
        return Some(Outcome::Interrupted);
    }
    let mut handler = match def.handler {
        Handler::Async(function) => Running::Async(guard(function, call)),
        Handler::Blocking(function) => Running::Blocking(on_a_thread(function, call)),
    };
    let deadline = def.options.timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let mut timeout = pin!(async {
        match deadline {
            Some(deadline) => sleep_until(deadline).await,
            None => std::future::pending().await,
        }
    });
    let mut grace = pin!(async {
        control.cancelled.cancelled().await;
        if control.verdict() == CANCEL {
            sleep(GRACE).await;
        } else {
            // A stopping worker says when it is over.
            std::future::pending::<()>().await;
        }
    });
    let ended = tokio::select! {
        biased;
        () = control.ended.cancelled() => None,
        outcome = handler.outcome() => Some(outcome),
        () = &mut timeout => {
            control.cancelled.cancel();
            Some(Outcome::Failed {
                reason: AttemptReason::TimedOut,
                error: format!(
                    "timed out after {}",
                    jobq_core::duration::display(def.options.timeout.unwrap_or_default())
                ),
                retry_after: None,
            })
        }
        () = &mut grace => Some(Outcome::Cancelled { reason: None }),
    };
    let (gone, ended) = match handler.end(control).await {
        // It did not stop but finish.
        Gone::Returned(done @ Outcome::Completed { .. }) => (true, Some(done)),
        Gone::Yes | Gone::Returned(_) => (true, ended),
        Gone::LeftBehind => (false, ended),
    };
    match (control.verdict(), ended) {
        // What is done is done, also when somebody wanted it stopped.
        (_, Some(done @ (Outcome::Completed { .. } | Outcome::Cancelled { .. }))) => Some(done),
        // Unless somebody else has the job by now it can be given back: it is not to blame.
        (LOST, _) => gone.then_some(Outcome::Interrupted),
        (CANCEL, _) => Some(Outcome::Cancelled { reason: None }),
        // It failed because it was told to stop: that costs no attempt.
        (WARNED | INTERRUPT, Some(Outcome::Failed { .. })) | (_, None) => {
            Some(Outcome::Interrupted)
        }
        (_, Some(outcome)) => Some(outcome),
    }
}

/// What became of a job function that was to end.
enum Gone {
    Yes,
    /// Its thread came back, with this.
    Returned(Outcome),
    /// Its thread still runs.
    LeftBehind,
}

/// A job function that is running.
enum Running {
    Async(BoxFuture<'static, Outcome>),
    Blocking(oneshot::Receiver<Outcome>),
    Ended,
}

impl Running {
    async fn outcome(&mut self) -> Outcome {
        let outcome = match self {
            Self::Async(future) => future.await,
            // A thread that could not be started is not the job's fault, nor will it be had at once.
            Self::Blocking(thread) => {
                thread.await.unwrap_or(Outcome::Snoozed { delay: NO_THREAD_WAIT })
            }
            Self::Ended => std::future::pending().await,
        };
        *self = Self::Ended;
        outcome
    }

    /// Makes sure that the function does not run any more.
    ///
    /// A future is dropped. A thread cannot be: its slot and its lease are kept until it returns,
    /// so that the job never runs twice at once, unless the attempt has to end now.
    async fn end(&mut self, control: &Control) -> Gone {
        match std::mem::replace(self, Self::Ended) {
            Self::Async(future) => {
                if catch_unwind(AssertUnwindSafe(|| drop(future))).is_err() {
                    tracing::error!("dropping a cancelled job function panicked");
                }
                Gone::Yes
            }
            Self::Blocking(mut thread) => loop {
                tokio::select! {
                    biased;
                    returned = &mut thread => return returned.map_or(Gone::Yes, Gone::Returned),
                    () = control.ended.cancelled() => {
                        tracing::warn!("the job function still runs on its thread and is left behind");
                        return Gone::LeftBehind;
                    }
                    () = sleep(STUCK_EVERY) => {
                        tracing::warn!("the job function was told to stop and does not return");
                    }
                }
            },
            Self::Ended => Gone::Yes,
        }
    }
}

/// Runs a plain function on a thread of its own.
///
/// Not on the runtime's pool of blocking threads: that is shared and limited, and a runtime waits
/// for its threads when it ends, so that one stuck function would keep a stopped process alive.
fn on_a_thread(function: fn(Call) -> Outcome, call: Call) -> oneshot::Receiver<Outcome> {
    let (send, outcome) = oneshot::channel();
    // The span is carried over, so that what the function logs is found with its job; the runtime
    // too, so that it can call `Handle::current().block_on(..)`.
    let (span, runtime) = (tracing::Span::current(), tokio::runtime::Handle::current());
    let name = format!("jobq-{}", call.context.kind());
    let started = std::thread::Builder::new().name(name).spawn(move || {
        let _runtime = runtime.enter();
        let run = AssertUnwindSafe(|| span.in_scope(|| function(call)));
        // Nobody may be waiting any more.
        let _ = send.send(catch_unwind(run).unwrap_or_else(panicked));
    });
    if let Err(error) = started {
        tracing::error!(%error, "no thread for a job function");
    }
    outcome
}

/// The function's future, with panics turned into outcomes.
fn guard(
    function: fn(Call) -> BoxFuture<'static, Outcome>,
    call: Call,
) -> BoxFuture<'static, Outcome> {
    let mut future = match catch_unwind(AssertUnwindSafe(|| function(call))) {
        Ok(future) => future,
        Err(panic) => return Box::pin(std::future::ready(panicked(panic))),
    };
    Box::pin(std::future::poll_fn(move |context| {
        match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
            Ok(Poll::Ready(outcome)) => Poll::Ready(outcome),
            Ok(Poll::Pending) => Poll::Pending,
            Err(panic) => Poll::Ready(panicked(panic)),
        }
    }))
}

/// The outcome of a panic, with its message.
fn panicked(panic: Box<dyn Any + Send>) -> Outcome {
    let message = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a value that is no text".to_owned());
    // The value is the job function's too, and its end may panic like anything else of it.
    if catch_unwind(AssertUnwindSafe(|| drop(panic))).is_err() {
        tracing::error!("dropping what a job function panicked with panicked");
    }
    Outcome::Failed {
        reason: AttemptReason::Panicked,
        error: storable(&format!("panicked: {message}")),
        retry_after: None,
    }
}

/// Whether a transition keeps the job alive, for the log.
pub(crate) fn describe(transition: &Transition) -> &'static str {
    match transition {
        Transition::Complete { .. } => "completed",
        Transition::Requeue { record: Some(record), .. } => record.reason.as_str(),
        Transition::Requeue { record: None, .. } => "snoozed",
        Transition::Bury { .. } => "dead",
        Transition::Cancel { .. } => "cancelled",
    }
}

#[cfg(test)]
mod tests {
    use super::{Control, watch};
    use crate::context::JobContext;
    use crate::handler::{Call, Handler};
    use crate::job::{JobDef, JobOptions};
    use jobq_core::outcome::Outcome;
    use std::sync::Arc;

    static UNTOUCHED: JobDef = JobDef {
        kind: "untouched",
        aliases: &[],
        options: JobOptions::DEFAULT,
        file: file!(),
        line: line!(),
        module: module_path!(),
        needs: Vec::new,
        handler: Handler::Async(|_| unreachable!("it was told before it began")),
    };

    #[tokio::test]
    async fn a_job_that_ends_before_it_began_is_given_back() {
        for tell in [Control::lose, Control::interrupt] {
            let control = Control::default();
            tell(&control);
            let call = Call {
                context: JobContext::detached(),
                payload: String::new(),
                states: Arc::default(),
            };
            let outcome = watch(&UNTOUCHED, call, &control).await;
            assert_eq!(outcome, Some(Outcome::Interrupted));
        }
    }
}
