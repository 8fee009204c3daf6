//! The loop that claims jobs and starts them.
//!
//! It asks for as many jobs as there are free slots, never more. While claims come back full it
//! claims again as soon as a slot is free; when one comes back short it waits for a wake-up or for
//! the poll, which is the guarantee.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use jobq_core::lifecycle::{self, Transition, When};
use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::attempt::{self, Control};
use crate::error::{Error, Result};
use crate::key;
use crate::runtime::catch_panic;
use crate::settler::Finished;
use crate::store::{Claim, Claimed, ClaimedJob, QueueClaim, Settled, Settlement, Turn, WakeUp};
use crate::worker::{Pass, Slot, Worker, locked};

/// The first waits of an idle worker, doubling; a job enqueued in a transaction that is still open
/// is met soon after it commits.
const FIRST_POLL: Duration = Duration::from_millis(2);

/// The longest wait during the first seconds of idleness.
const POLL: Duration = Duration::from_millis(200);

/// How long a worker counts as only just idle.
const JUST_IDLE: Duration = Duration::from_secs(5);

/// The longest wait after a failed claim.
const LONGEST_BACKOFF: Duration = Duration::from_secs(5);

/// How long a crashed job waits for its process to become idle, which claims nothing meanwhile.
const ISOLATION_WAIT: Duration = Duration::from_secs(10);

/// How long a crashed job is given back for when its process did not become idle; doubles with each
/// time.
const ISOLATION_PAUSE: Duration = Duration::from_secs(5);

/// How often a crashed job is given back before it runs beside others all the same.
const ISOLATION_TRIES: u32 = 6;

/// After this long a statement whose reply was lost has ended on the server, one way or the other.
const REPLY_LOST: Duration = Duration::from_secs(20);

/// The pause before the next claim when a session has expired.
const EXPIRED_PAUSE: Duration = Duration::from_millis(50);

/// How often to look for jobs that the database says this process holds and that it never heard of,
/// even if no claim failed.
const RECONCILE_EVERY: Duration = Duration::from_secs(600);

/// The wait before looking again for jobs that could not be given back at once.
const RECONCILE_PAUSE: Duration = Duration::from_secs(1);

/// How long a stopping worker waits for the claim that is in flight.
const LAST_CLAIM: Duration = Duration::from_millis(250);

/// For how long a queue is not asked for, once it has given all that its limit allows: at least this, and
/// twice as long each time it gives nothing, up to [`POLL`].
const LIMIT_PAUSE: Duration = Duration::from_millis(50);

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

/// A claimed job that is not running yet: it crashed before and must run alone, or another one is
/// running alone.
struct Waiting {
    job: ClaimedJob,
    slot: Slot,
    control: Arc<Control>,
}

struct Claimer<'w> {
    worker: &'w Arc<Worker>,
    running: &'w TaskTracker,
    waiting: VecDeque<Waiting>,
    idle_since: Option<Instant>,
    poll: Duration,
    /// When the next pending job is due, as far as this process knows.
    next_due: Option<Instant>,
    backoff: Duration,
    /// When to look for jobs of a claim whose reply was lost.
    reconcile_at: Vec<Instant>,
    reconcile_anyway_at: Instant,
    /// Begin anew at the proven floors: the database was away, or what was paused and passed by is
    /// resumed.
    restart_floors: bool,
    /// Queues of which a limit has held up the last claim.
    held_up: HashMap<String, HeldUp>,
}

/// A queue that is not asked for: its limit allows nothing.
struct HeldUp {
    until: Instant,
    /// How long it is not asked for; longer each time that a claim brings nothing.
    pause: Duration,
    /// How many slots this process had free for it, where some that is run elsewhere holds it up. Where one
    /// more is free, a job has ended here.
    free: Option<usize>,
}

/// Claims and starts jobs until told to stop, or until idle.
pub(crate) async fn run(
    worker: &Arc<Worker>,
    running: &TaskTracker,
    wake_ups: &mut WakeUps,
    stop: &CancellationToken,
    until: Until,
) {
    let mut claimer = Claimer::new(worker, running);
    // A claim in flight is waited for, so that what it brought is started or given back; only a
    // database that does not answer must not hold up a stop.
    while !stop.is_cancelled() {
        if let Some(waiting) = claimer.waiting.pop_front() {
            claimer.admit(waiting, stop).await;
            continue;
        }
        // While a job runs alone in this process, others may run elsewhere.
        tokio::select! {
            pass = Pass::shared() => drop(pass),
            () = stop.cancelled() => break,
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
                let is_idle = worker.running_count() == 0 && claimer.next_start().is_none();
                if until == Until::Idle && is_idle {
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
        while let Some(waiting) = claimer.waiting.pop_front() {
            claimer.give_back(waiting, When::Next).await;
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

impl<'w> Claimer<'w> {
    fn new(worker: &'w Arc<Worker>, running: &'w TaskTracker) -> Self {
        Self {
            worker,
            running,
            waiting: VecDeque::new(),
            idle_since: None,
            poll: FIRST_POLL,
            next_due: None,
            backoff: Duration::ZERO,
            reconcile_at: Vec::new(),
            reconcile_anyway_at: Instant::now() + RECONCILE_EVERY.mul_f64(rand::random()),
            restart_floors: false,
            held_up: HashMap::new(),
        }
    }

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
        let mut all_taken = true;
        {
            let floors = locked(&worker.floors);
            far = floors.far_is_due(started);
            for queue in &worker.queues {
                let free = queue.slots.available_permits();
                all_taken &= free == 0;
                if free > 0 && !self.is_held_up(&queue.name, free, started) {
                    let free = u32::try_from(free).unwrap_or(u32::MAX);
                    claim.queues.push(floors.claim(&queue.name, free, far, started));
                }
            }
        }
        if claim.queues.is_empty() {
            return Ok(if all_taken { Looked::NoSlot } else { Looked::NothingDue });
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
            self.restart_floors |= floors.advance(&claim.queues, &claimed, ended);
            if far {
                floors.looked_far(ended - started, ended);
            }
        }
        let more = self.restart_floors || is_full(&claim.queues, &claimed.jobs);
        self.hold_up(&claim.queues, &claimed, ended);
        if !claimed.jobs.is_empty() {
            self.idle_since = None;
            self.poll = FIRST_POLL;
            self.next_due = None;
        }
        for job in claimed.jobs {
            match job.turn {
                Turn::Runs => self.start(job),
                Turn::Waits => locked(&worker.floors).expect_front(&job.queue, ended),
                // As nobody here knows of it, it is given back.
                Turn::Undecided => self.reconcile_at.insert(0, ended),
            }
        }
        Ok(if more { Looked::More } else { Looked::NothingDue })
    }

    /// Notes which queues have given all that their limits allow, and when to ask for them again.
    fn hold_up(&mut self, asked: &[QueueClaim], claimed: &Claimed, now: Instant) {
        for queue in asked {
            let before = self.held_up.remove(&queue.queue);
            let allowed = claimed.limited.iter().find(|allowed| allowed.queue == queue.queue);
            let Some(allowed) = allowed.filter(|allowed| allowed.jobs < queue.limit) else {
                continue;
            };
            let brought = claimed.jobs.iter().filter(|job| job.queue == queue.queue).count();
            if brought < allowed.jobs as usize {
                continue;
            }
            let pause = match before {
                Some(before) if brought == 0 => (before.pause * 2).min(POLL),
                _ => LIMIT_PAUSE,
            };
            let held_up = HeldUp {
                until: now + allowed.next.map_or(pause, |next| next.max(pause)),
                pause,
                free: allowed.next.is_none().then_some(queue.limit as usize - brought),
            };
            self.held_up.insert(queue.queue.clone(), held_up);
        }
    }

    fn is_held_up(&self, queue: &str, free: usize, now: Instant) -> bool {
        self.held_up.get(queue).is_some_and(|held_up| {
            now < held_up.until && held_up.free.is_none_or(|before| free <= before)
        })
    }

    /// When the next queue may start something again that its rate has held up.
    fn next_start(&self) -> Option<Instant> {
        let rates = self.held_up.values().filter(|held_up| held_up.free.is_none());
        rates.map(|held_up| held_up.until).min()
    }

    fn start(&mut self, job: ClaimedJob) {
        let queue = self.worker.queues.iter().find(|queue| queue.name == job.queue);
        let permit = queue.and_then(|queue| Arc::clone(&queue.slots).try_acquire_owned().ok());
        let permit =
            permit.expect("only this loop takes slots, and it claimed no more than are free");
        let (slot, control) = self.worker.hold(job.lease, permit);
        let mut waiting = Waiting { job, slot, control };
        match Pass::try_shared() {
            Some(pass) if waiting.job.counters.crashes == 0 => {
                waiting.slot.admit(pass);
                self.run(waiting);
            }
            _ => self.waiting.push_back(waiting),
        }
    }

    fn run(&self, Waiting { job, slot, control }: Waiting) {
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

    /// Runs a job that had to wait.
    async fn admit(&mut self, mut waiting: Waiting, stop: &CancellationToken) {
        if waiting.job.counters.crashes > 0 {
            return self.admit_suspect(waiting, stop).await;
        }
        tokio::select! {
            () = stop.cancelled() => self.give_back(waiting, When::Next).await,
            pass = Pass::shared() => {
                waiting.slot.admit(pass);
                self.run(waiting);
            }
        }
    }

    /// Runs a job that crashed before with nothing beside it in this process.
    ///
    /// Its process dies with it if it crashes again, but then nobody else was there to blame. Where
    /// no process becomes idle it runs beside others in the end: it must run some day, and is then
    /// blamed alone.
    async fn admit_suspect(&mut self, mut waiting: Waiting, stop: &CancellationToken) {
        let tries = waiting.job.counters.interruptions;
        if tries < ISOLATION_TRIES {
            tokio::select! {
                () = stop.cancelled() => return self.give_back(waiting, When::Next).await,
                pass = Pass::alone() => waiting.slot.admit(pass),
                () = sleep(ISOLATION_WAIT) => {
                    tracing::info!(id = waiting.job.lease.job.0,
                        "gave back a job that must run alone: this process does not become idle");
                    let pause = ISOLATION_PAUSE * 2_u32.pow(tries);
                    let pause = pause.mul_f64(1.0 + rand::random::<f64>());
                    return self.give_back(waiting, When::After(pause)).await;
                }
            }
        } else {
            tokio::select! {
                () = stop.cancelled() => return self.give_back(waiting, When::Next).await,
                pass = Pass::shared() => waiting.slot.admit(pass),
            }
        }
        loop {
            if stop.is_cancelled() || waiting.control.is_lost() {
                return self.give_back(waiting, When::Next).await;
            }
            let isolated = tokio::select! {
                isolated = self.worker.store.isolate(waiting.job.lease) => isolated,
                () = stop.cancelled() => continue,
            };
            match isolated {
                Ok(true) => break,
                Ok(false) => waiting.control.lose(),
                Err(error) => self.failed(&error, stop).await,
            }
        }
        tracing::info!(
            id = waiting.job.lease.job.0,
            crashes = waiting.job.counters.crashes,
            "running a job that crashed before"
        );
        self.run(waiting);
    }

    /// Gives a claimed job back unstarted; it costs no attempt.
    async fn give_back(&self, waiting: Waiting, when: When) {
        let Waiting { job, slot, control } = waiting;
        let transition = match lifecycle::release(job.counters) {
            Transition::Requeue { counters, record, .. } => {
                Transition::Requeue { when, counters, record }
            }
            other => other,
        };
        let retention = self.worker.retention(&job.queue, self.worker.registry.get(&job.kind));
        let settlement = Settlement {
            lease: job.lease,
            transition,
            retention,
            doubtful: false,
            key: job.key.clone(),
        };
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
        let now = Instant::now();
        if now >= self.reconcile_anyway_at {
            self.reconcile_anyway_at = now + RECONCILE_EVERY.mul_f64(0.5 + rand::random::<f64>());
            self.reconcile_at.insert(0, now);
        }
        if self.reconcile_at.first().is_none_or(|at| *at > now) {
            return Ok(());
        }
        let mut all_ended = true;
        let worker = self.worker;
        for session in worker.sessions.all_open() {
            let held = worker.store.held(session.id).await?;
            let unknown: Vec<Settlement> = held
                .into_iter()
                .filter(|job| !worker.holds(job.lease))
                .map(|job| Settlement {
                    lease: job.lease,
                    transition: if job.cancel_requested {
                        Transition::Cancel { reason: None }
                    } else {
                        lifecycle::release(job.counters)
                    },
                    retention: crate::store::DEFAULT_RETENTION,
                    doubtful: false,
                    key: job.key,
                })
                .collect();
            if !unknown.is_empty() {
                tracing::warn!(
                    jobs = unknown.len(),
                    "giving back jobs of a claim whose reply was lost"
                );
                let settled = key::settle(&*worker.store, &unknown).await?;
                all_ended &= !settled
                    .iter()
                    .any(|settled| matches!(settled, Settled::Busy | Settled::CancelRequested));
            }
        }
        if all_ended {
            self.reconcile_at.remove(0);
        } else {
            self.reconcile_at[0] = Instant::now() + RECONCILE_PAUSE;
        }
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

    /// Before ending as idle: takes back the jobs of dead workers, wakes those that waited for their
    /// kind, and looks once more from the proven floors. True if something is there.
    async fn rest(&mut self) -> Result<bool> {
        let worker = self.worker;
        // The rows that it has locked would be passed by here, and be due when we have ended.
        let _sweeping = worker.sweeping.lock().await;
        let rescued = crate::sweep::rescue(&*worker.store, false).await?;
        let passed_on = crate::sweep::pass_on_all_grants(&*worker.store).await?;
        if rescued + passed_on + worker.unpark().await? > 0 {
            return Ok(true);
        }
        self.held_up.clear();
        let proven = crate::sweep::proven_floors(&*self.worker.store).await?;
        {
            let mut floors = locked(&self.worker.floors);
            floors.restart(proven);
            for queue in &worker.queues {
                floors.expect_front(&queue.name, Instant::now());
            }
        }
        let looked = self.claim().await?;
        Ok(!matches!(looked, Looked::NothingDue)
            || self.next_start().is_some()
            || self.worker.running_count() > 0
            || !self.waiting.is_empty())
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
        let next = [self.next_due, self.next_start()].into_iter().flatten().filter(|at| *at > now);
        let until = next.fold(now + self.poll, Instant::min);
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
        let (queues, kinds) = (self.worker.queue_names(), self.worker.kind_names());
        self.worker.store.next_due(&queues, &kinds).await.ok().flatten()
    }
}

/// Whether a queue gave as many jobs as it was asked for, and so may have more.
fn is_full(asked: &[QueueClaim], jobs: &[ClaimedJob]) -> bool {
    asked.iter().any(|queue| {
        jobs.iter().filter(|job| job.queue == queue.queue).count() >= queue.limit as usize
    })
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use jobq_core::outcome::Outcome;
    use tokio::sync::Semaphore;

    use super::*;
    use crate::floors::Floors;
    use crate::handler::Handler;
    use crate::job::{CheckedDue, CheckedJob, JobDef, JobOptions};
    use crate::registry::Registry;
    use crate::worker::Queue;

    static DEF: JobDef = JobDef {
        kind: "k",
        aliases: &[],
        options: JobOptions::DEFAULT,
        file: file!(),
        line: line!(),
        module: module_path!(),
        needs: Vec::new,
        handler: Handler::Blocking(|_| Outcome::Completed { result: None }),
    };

    /// What the sweep of the same process has locked, and not committed yet, cannot be seen.
    #[tokio::test]
    async fn nothing_is_due_only_when_the_sweep_is_done() {
        let folder = tempfile::tempdir().expect("a folder");
        let url = format!("sqlite:{}", folder.path().join("jobs.db").display());
        let client = crate::Client::connect(&url).await.expect("a file");
        client.migrate().await.expect("tables");
        let (settler, _finished) = mpsc::channel(1);
        let queue = Queue {
            name: "default".to_owned(),
            retention: None,
            slots: Arc::new(Semaphore::new(1)),
        };
        let worker = Arc::new(Worker::new(
            "w".to_owned(),
            client.store(),
            Registry::new(vec![&DEF], &mut Vec::new()),
            Arc::default(),
            vec![queue],
            Floors::new(Vec::new(), Instant::now()),
            settler,
        ));
        worker.open_sessions().await.expect("opens");
        let running = TaskTracker::new();
        let mut claimer = Claimer::new(&worker, &running);
        assert!(!claimer.rest().await.expect("looks"), "nothing is due");
        let sweeping = worker.sweeping.lock().await;
        let mut rest = std::pin::pin!(claimer.rest());
        assert!(timeout(Duration::from_millis(200), &mut rest).await.is_err(), "it waits");
        let moved = CheckedJob {
            kind: "k".into(),
            queue: "default".into(),
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
        };
        worker.store.insert(vec![moved]).await.expect("the sweep commits");
        drop(sweeping);
        assert!(rest.await.expect("looks"), "a job is due");
    }
}
