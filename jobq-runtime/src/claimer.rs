//! The loop that claims jobs and starts them.
//!
//! It asks for as many jobs as there are free slots, never more. While claims come back full it
//! claims again as soon as a slot is free; when one comes back short it waits for a wake-up or for
//! the poll, which is the guarantee.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jobq_core::lifecycle::{self, Transition, When};
use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::attempt::{self, Control};
use crate::error::{Error, Result};
use crate::runtime::catch_panic;
use crate::settler::Finished;
use crate::store::{Claim, ClaimedJob, QueueClaim, Settlement, WakeUp};
use crate::worker::{Slot, Worker, locked};

/// The first waits of an idle worker, doubling; a job enqueued in a transaction that is still open
/// is met soon after it commits.
const FIRST_POLL: Duration = Duration::from_millis(2);

/// The longest wait during the first seconds of idleness.
const POLL: Duration = Duration::from_millis(200);

/// How long a worker counts as only just idle.
const JUST_IDLE: Duration = Duration::from_secs(5);

/// The longest wait after a failed claim.
const LONGEST_BACKOFF: Duration = Duration::from_secs(5);

/// How long a crashed job waits for its process to become idle before another one may try; doubles
/// with each time.
const ISOLATION_WAIT: Duration = Duration::from_secs(30);

/// After this long a statement whose reply was lost has ended on the server, one way or the other.
const REPLY_LOST: Duration = Duration::from_secs(20);

/// The pause before the next claim when a session has expired.
const EXPIRED_PAUSE: Duration = Duration::from_millis(50);

/// How long a stopping worker waits for the claim that is in flight.
const LAST_CLAIM: Duration = Duration::from_millis(250);

/// How the loop is to end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Until {
    /// When it is told to.
    Stopped,
    /// When nothing is due and nothing runs.
    Idle,
}

/// What wakes a waiting claimer.
pub(crate) struct WakeUps {
    pub(crate) pokes: watch::Receiver<u64>,
    pub(crate) sent: mpsc::Receiver<WakeUp>,
}

/// A claimed job that has crashed before and waits to run alone.
struct Suspect {
    job: ClaimedJob,
    slot: Slot,
    control: Arc<Control>,
    patience_ends: Instant,
}

struct Claimer<'w> {
    worker: &'w Arc<Worker>,
    running: &'w TaskTracker,
    suspects: VecDeque<Suspect>,
    idle_since: Option<Instant>,
    poll: Duration,
    /// When the next pending job is due, as far as this process knows.
    next_due: Option<Instant>,
    backoff: Duration,
    /// When to look for jobs of a claim whose reply was lost.
    reconcile_at: Vec<Instant>,
    /// The database was away: begin anew at the proven floors.
    restart_floors: bool,
}

/// Claims and starts jobs until told to stop, or until idle.
pub(crate) async fn run(
    worker: &Arc<Worker>,
    running: &TaskTracker,
    wake_ups: &mut WakeUps,
    stop: &CancellationToken,
    until: Until,
) {
    let mut claimer = Claimer {
        worker,
        running,
        suspects: VecDeque::new(),
        idle_since: None,
        poll: FIRST_POLL,
        next_due: None,
        backoff: Duration::ZERO,
        reconcile_at: Vec::new(),
        restart_floors: false,
    };
    // A claim in flight is waited for, so that what it brought is started or given back; only a
    // database that does not answer must not hold up a stop.
    while !stop.is_cancelled() {
        if let Some(suspect) = claimer.suspects.pop_front() {
            claimer.run_alone(suspect, stop).await;
            continue;
        }
        let looked = tokio::select! {
            looked = claimer.claim() => looked,
            () = async { stop.cancelled().await; sleep(LAST_CLAIM).await } => {
                claimer.reconcile_at = vec![Instant::now()];
                break;
            }
        };
        match looked {
            Ok(Looked::More) => {}
            Ok(Looked::NoSlot) => tokio::select! {
                () = stop.cancelled() => {}
                () = worker.freed.notified() => {}
                () = claimer.reconcile_is_due() => {}
            },
            Ok(Looked::NothingDue) => {
                if until == Until::Idle && worker.running_count() == 0 {
                    match claimer.rest().await {
                        Ok(true) => {}
                        Ok(false) => break,
                        Err(error) => claimer.failed(&error, stop).await,
                    }
                } else {
                    claimer.wait(wake_ups, stop).await;
                }
            }
            Err(error) => claimer.failed(&error, stop).await,
        }
    }
    let give_back = async {
        while let Some(suspect) = claimer.suspects.pop_front() {
            claimer.give_back(suspect, When::Next).await;
        }
    };
    drop(timeout(LAST_CLAIM, give_back).await);
    if !claimer.reconcile_at.is_empty() {
        claimer.reconcile_at[0] = Instant::now();
        drop(timeout(LAST_CLAIM, claimer.reconcile()).await);
    }
}

enum Looked {
    /// There may be more to claim at once.
    More,
    /// Every slot is taken.
    NoSlot,
    /// Less was due than there are slots.
    NothingDue,
}

impl Claimer<'_> {
    /// One claim, for all free slots; starts what it brings.
    async fn claim(&mut self) -> Result<Looked> {
        let worker = self.worker;
        if worker.sessions.by_lease().is_none() {
            worker.open_sessions().await?;
        }
        if let Err(error) = self.reconcile().await {
            // Claiming goes on: the jobs of a lost reply wait, all others need not.
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "looking for jobs of a lost claim reply failed; trying again"
            );
            self.reconcile_at[0] = Instant::now() + LONGEST_BACKOFF;
        }
        if std::mem::take(&mut self.restart_floors) {
            let proven = crate::sweep::proven_floors(&*worker.store).await;
            if proven.is_err() {
                self.restart_floors = true;
            }
            locked(&worker.floors).restart(proven?);
        }
        let Some(sessions) = worker.sessions.by_lease() else { return Ok(Looked::More) };
        let started = Instant::now();
        let mut claim = Claim { kinds: Vec::new(), queues: Vec::new() };
        for (kind, def) in worker.registry.kinds() {
            if let Some(session) = sessions.get(&def.options.lease) {
                claim.kinds.push((kind.to_owned(), *session));
            }
        }
        let far;
        {
            let floors = locked(&worker.floors);
            far = floors.far_is_due(started);
            for queue in &worker.queues {
                let free = u32::try_from(queue.slots.available_permits()).unwrap_or(u32::MAX);
                if free > 0 {
                    claim.queues.push(floors.claim(&queue.name, free, far, started));
                }
            }
        }
        if claim.queues.is_empty() {
            return Ok(Looked::NoSlot);
        }
        let claimed = worker.store.claim(&claim).await.inspect_err(|_| {
            // It may have happened all the same: look now, and again when it must have ended.
            self.reconcile_at = vec![Instant::now(), Instant::now() + REPLY_LOST];
        })?;
        let ended = Instant::now();
        self.backoff = Duration::ZERO;
        if !claimed.sessions_live {
            // One of the sessions has expired or was closed. Which, and whether it can still be
            // extended, the heartbeat finds out.
            sleep(EXPIRED_PAUSE).await;
            return Ok(Looked::More);
        }
        {
            let mut floors = locked(&worker.floors);
            floors.advance(&claim.queues, &claimed, ended);
            if far {
                floors.looked_far(ended - started, ended);
            }
        }
        let full = is_full(&claim.queues, &claimed.jobs);
        if !claimed.jobs.is_empty() {
            self.idle_since = None;
            self.poll = FIRST_POLL;
            self.next_due = None;
        }
        for job in claimed.jobs {
            self.start(job);
        }
        Ok(if full { Looked::More } else { Looked::NothingDue })
    }

    fn start(&mut self, job: ClaimedJob) {
        let queue = self.worker.queues.iter().find(|queue| queue.name == job.queue);
        let permit = queue.and_then(|queue| Arc::clone(&queue.slots).try_acquire_owned().ok());
        let permit =
            permit.expect("only this loop takes slots, and it claimed no more than are free");
        let (slot, control) = self.worker.hold(job.lease, permit);
        if job.counters.crashes > 0 {
            let doublings = job.counters.interruptions.min(5);
            let patience_ends = Instant::now() + ISOLATION_WAIT * 2_u32.pow(doublings);
            self.suspects.push_back(Suspect { job, slot, control, patience_ends });
        } else {
            self.run(job, slot, control);
        }
    }

    fn run(&self, job: ClaimedJob, slot: Slot, control: Arc<Control>) {
        let worker = Arc::clone(self.worker);
        let session = job.lease.session;
        self.running.spawn(async move {
            let attempt = attempt::run(Arc::clone(&worker), job, slot, control);
            if catch_panic(attempt).await.is_err() {
                // Not the job function, whose panics are outcomes: a fault of ours. Its job must
                // not stay leased for ever.
                worker.lose_session(session, "an attempt panicked outside its job function");
            }
        });
    }

    /// Runs a job that crashed before, with nothing beside it in this process.
    ///
    /// Its process dies with it if it crashes again, but then nobody else was there to blame.
    async fn run_alone(&mut self, suspect: Suspect, stop: &CancellationToken) {
        // The job itself and those waiting behind it are claimed but not running.
        let waiting = self.suspects.len() + 1;
        while self.worker.running_count() > waiting {
            tokio::select! {
                () = stop.cancelled() => return self.give_back(suspect, When::Next).await,
                () = self.worker.freed.notified() => {}
                () = sleep_until(suspect.patience_ends.into()) => {
                    tracing::info!(id = suspect.job.lease.job.0,
                        "gave back a job that must run alone: this process does not become idle");
                    let wait = Duration::from_secs(5).mul_f64(1.0 + rand::random::<f64>());
                    return self.give_back(suspect, When::After(wait)).await;
                }
            }
        }
        loop {
            let isolated = tokio::select! {
                isolated = self.worker.store.isolate(suspect.job.lease) => isolated,
                () = stop.cancelled() => return self.give_back(suspect, When::Next).await,
            };
            match isolated {
                Ok(true) => break,
                Ok(false) => {
                    suspect.control.lose();
                    break;
                }
                Err(error) => self.failed(&error, stop).await,
            }
            if stop.is_cancelled() || suspect.control.is_lost() {
                return self.give_back(suspect, When::Next).await;
            }
        }
        tracing::info!(
            id = suspect.job.lease.job.0,
            crashes = suspect.job.counters.crashes,
            "running a job that crashed before alone in this process"
        );
        let Suspect { job, slot, control, .. } = suspect;
        let lease = job.lease;
        self.run(job, slot, Arc::clone(&control));
        while self.worker.holds(lease) && !control.is_lost() {
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.worker.freed.notified() => {}
            }
        }
    }

    /// Gives a claimed job back unstarted; it costs no attempt.
    async fn give_back(&self, suspect: Suspect, when: When) {
        let Suspect { job, slot, control, .. } = suspect;
        let transition = match lifecycle::release(job.counters) {
            Transition::Requeue { counters, record, .. } => {
                Transition::Requeue { when, counters, record }
            }
            other => other,
        };
        let retention = self.worker.retention(&job.queue, self.worker.registry.get(&job.kind));
        let settlement = Settlement { lease: job.lease, transition, retention, doubtful: false };
        let span = tracing::info_span!("job", id = job.lease.job.0, kind = %job.kind);
        let finished = Finished { settlement, control, slot, span, refused: false };
        self.worker.settle(finished).await;
    }

    /// Waits until [`reconcile`](Self::reconcile) is to be called, if ever.
    async fn reconcile_is_due(&self) {
        match self.reconcile_at.first() {
            Some(at) => sleep_until((*at).into()).await,
            None => std::future::pending().await,
        }
    }

    /// Gives back jobs that the database says this process holds, but that it never heard of: the
    /// reply to their claim was lost.
    async fn reconcile(&mut self) -> Result<()> {
        if self.reconcile_at.first().is_none_or(|at| *at > Instant::now()) {
            return Ok(());
        }
        let worker = self.worker;
        for session in worker.sessions.all_open() {
            let held = worker.store.held(session.id).await?;
            let unknown: Vec<Settlement> = held
                .into_iter()
                .filter(|job| !worker.holds(job.lease))
                .map(|job| Settlement {
                    lease: job.lease,
                    transition: lifecycle::release(job.counters),
                    retention: crate::store::DEFAULT_RETENTION,
                    doubtful: false,
                })
                .collect();
            if !unknown.is_empty() {
                tracing::warn!(
                    jobs = unknown.len(),
                    "giving back jobs of a claim whose reply was lost"
                );
                worker.store.settle(&unknown).await?;
            }
        }
        self.reconcile_at.remove(0);
        Ok(())
    }

    /// Waits after a failed operation, longer each time.
    async fn failed(&mut self, error: &Error, stop: &CancellationToken) {
        self.backoff = (self.backoff * 2).clamp(Duration::from_millis(50), LONGEST_BACKOFF);
        self.restart_floors = true;
        tracing::warn!(error = error as &dyn std::error::Error, "claiming failed; trying again");
        tokio::select! {
            () = stop.cancelled() => {}
            () = sleep(self.backoff.mul_f64(0.5 + 0.5 * rand::random::<f64>())) => {}
        }
    }

    /// Before ending as idle: looks once more from the proven floors. True if something is there.
    async fn rest(&mut self) -> Result<bool> {
        let proven = crate::sweep::proven_floors(&*self.worker.store).await?;
        locked(&self.worker.floors).restart(proven);
        let looked = self.claim().await?;
        Ok(!matches!(looked, Looked::NothingDue)
            || self.worker.running_count() > 0
            || !self.suspects.is_empty())
    }

    /// Waits until there may be something to claim.
    async fn wait(&mut self, wake_ups: &mut WakeUps, stop: &CancellationToken) {
        let now = Instant::now();
        let idle_since = *self.idle_since.get_or_insert(now);
        if self.poll >= POLL && self.next_due.is_none_or(|due| due <= now) {
            // Only now and then: a timer for the next scheduled job, so that it starts on time.
            tokio::select! {
                ahead = self.look_ahead() => self.next_due = ahead.map(|wait| Instant::now() + wait),
                () = stop.cancelled() => return,
                Ok(()) = wake_ups.pokes.changed() => return self.woken(),
            }
        }
        let until = match self.next_due {
            Some(due) if due > now => due.min(now + self.poll),
            _ => now + self.poll,
        };
        let longest =
            if now - idle_since < JUST_IDLE { POLL } else { self.worker.store.idle_poll() };
        self.poll = (self.poll * 2).min(longest.max(POLL));
        tokio::select! {
            () = stop.cancelled() => {}
            () = sleep_until(until.into()) => {}
            // A slot that becomes free does not make a job due, but its end may have: a requeued
            // job, or a row that another worker held locked.
            () = self.worker.freed.notified() => {}
            Ok(()) = wake_ups.pokes.changed() => self.woken(),
            Some(wake_up) = wake_ups.sent.recv() => {
                locked(&self.worker.floors).lower(&wake_up.queue, wake_up.band, wake_up.run_after);
                self.woken();
            }
        }
    }

    fn woken(&mut self) {
        self.poll = FIRST_POLL;
        self.idle_since = None;
        self.next_due = None;
    }

    async fn look_ahead(&self) -> Option<Duration> {
        let queues: Vec<String> =
            self.worker.queues.iter().map(|queue| queue.name.clone()).collect();
        let kinds: Vec<String> =
            self.worker.registry.kinds().into_iter().map(|(kind, _)| kind.to_owned()).collect();
        self.worker.store.next_due(&queues, &kinds).await.ok().flatten()
    }
}

/// Whether a queue gave as many jobs as it was asked for, and so may have more.
fn is_full(asked: &[QueueClaim], jobs: &[ClaimedJob]) -> bool {
    asked.iter().any(|queue| {
        jobs.iter().filter(|job| job.queue == queue.queue).count() >= queue.limit as usize
    })
}
