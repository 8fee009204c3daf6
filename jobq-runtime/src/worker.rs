//! What the parts of a running worker share: its jobs, its slots, its sessions.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use jobq_core::job::{JobId, Lease, SessionId, Token};
use jobq_core::lifecycle::Transition;
use jobq_core::outcome::AttemptReason;
use tokio::sync::{
    Notify, OwnedRwLockReadGuard, OwnedRwLockWriteGuard, OwnedSemaphorePermit, RwLock, Semaphore,
    mpsc,
};
use tracing::Span;

use crate::attempt::Control;
use crate::floors::Floors;
use crate::handler::States;
use crate::job::JobDef;
use crate::registry::Registry;
use crate::settler::Finished;
use crate::store::{DEFAULT_RETENTION, NewSession, Store};

/// One process's share of the work.
pub(crate) struct Worker {
    pub(crate) name: String,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) registry: Registry,
    pub(crate) states: Arc<States>,
    pub(crate) queues: Vec<Queue>,
    pub(crate) floors: Mutex<Floors>,
    pub(crate) sessions: Sessions,
    pub(crate) stats: Stats,
    /// Told when a slot becomes free.
    pub(crate) freed: Notify,
    /// Held by the sweep while it moves jobs: what it has in hand is due in a moment.
    pub(crate) sweeping: tokio::sync::Mutex<()>,
    running: Mutex<HashMap<(JobId, Token), Run>>,
    settler: mpsc::Sender<Finished>,
}

/// A queue that this process serves.
pub(crate) struct Queue {
    pub(crate) name: String,
    pub(crate) retention: Option<Duration>,
    pub(crate) slots: Arc<Semaphore>,
}

/// A job that this process holds: from its claim until its outcome is written or dropped.
struct Run {
    session: SessionId,
    control: Arc<Control>,
}

/// Held shared by every job that runs in this process, whichever runtime runs it, and exclusively by
/// one that must run alone.
static ALONE: LazyLock<Arc<RwLock<()>>> = LazyLock::new(Arc::default);

/// A running job's part of [`ALONE`].
pub(crate) enum Pass {
    Shared { _guard: OwnedRwLockReadGuard<()> },
    Alone { _guard: OwnedRwLockWriteGuard<()> },
}

impl Pass {
    /// At once, unless a job runs alone or is about to.
    pub(crate) fn try_shared() -> Option<Self> {
        Some(Self::Shared { _guard: Arc::clone(&ALONE).try_read_owned().ok()? })
    }

    /// When no job runs alone.
    pub(crate) async fn shared() -> Self {
        Self::Shared { _guard: Arc::clone(&ALONE).read_owned().await }
    }

    /// When no other job runs; none is started while this waits.
    pub(crate) async fn alone() -> Self {
        Self::Alone { _guard: Arc::clone(&ALONE).write_owned().await }
    }
}

/// A job that this process holds, and its place among those that may run at once. However the
/// attempt ends, the job is forgotten and the place is free again with the end of this.
pub(crate) struct Slot {
    /// Does not keep it alive: an outcome that is sent while the settler goes away may stay in the
    /// channel for as long as the worker, which sends, is there.
    worker: Weak<Worker>,
    lease: Lease,
    permit: Option<OwnedSemaphorePermit>,
    pass: Option<Pass>,
}

impl Slot {
    /// Lets the job run.
    pub(crate) fn admit(&mut self, pass: Pass) {
        self.pass = Some(pass);
    }

    /// Frees the slots of jobs whose outcome is written, or is somebody else's to write. All are
    /// told of at once, so that the next claim asks for as many.
    pub(crate) fn free(mut slots: Vec<Self>) {
        for slot in &mut slots {
            slot.end(false);
        }
        if let Some(worker) = slots.first().and_then(|slot| slot.worker.upgrade()) {
            worker.freed.notify_one();
        }
    }

    fn end(&mut self, abandoned: bool) {
        let Some(permit) = self.permit.take() else { return };
        if let Some(worker) = self.worker.upgrade() {
            let mut running = locked(&worker.running);
            running.remove(&(self.lease.job, self.lease.token));
            if abandoned {
                worker.stats.abandoned.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.pass = None;
        drop(permit);
    }
}

impl Drop for Slot {
    /// Nobody writes the outcome any more: the job is left to be rescued.
    fn drop(&mut self) {
        if self.permit.is_some() {
            self.end(true);
            if let Some(worker) = self.worker.upgrade() {
                worker.freed.notify_one();
            }
        }
    }
}

impl Worker {
    #[allow(clippy::too_many_arguments, reason = "called once, by the runtime that starts it")]
    pub(crate) fn new(
        name: String,
        store: Arc<dyn Store>,
        registry: Registry,
        states: Arc<States>,
        queues: Vec<Queue>,
        floors: Floors,
        settler: mpsc::Sender<Finished>,
    ) -> Self {
        let sessions = Sessions::new(&registry);
        Self {
            name,
            store,
            registry,
            states,
            queues,
            floors: Mutex::new(floors),
            sessions,
            stats: Stats::default(),
            freed: Notify::new(),
            sweeping: tokio::sync::Mutex::default(),
            running: Mutex::new(HashMap::new()),
            settler,
        }
    }

    /// How long a finished job of this queue and function is kept.
    pub(crate) fn retention(&self, queue: &str, def: Option<&JobDef>) -> Duration {
        def.and_then(|def| def.options.retention)
            .or_else(|| self.queues.iter().find(|known| known.name == queue)?.retention)
            .unwrap_or(DEFAULT_RETENTION)
    }

    /// Notes a job that was claimed; its control is how it can be stopped.
    pub(crate) fn hold(
        self: &Arc<Self>,
        lease: Lease,
        permit: OwnedSemaphorePermit,
    ) -> (Slot, Arc<Control>) {
        let control = Arc::new(Control::default());
        let run = Run { session: lease.session, control: Arc::clone(&control) };
        locked(&self.running).insert((lease.job, lease.token), run);
        // Its session may have been lost while the claim's reply was on its way.
        if !self.sessions.is_open(lease.session) {
            control.lose();
        }
        let slot = Slot { worker: Arc::downgrade(self), lease, permit: Some(permit), pass: None };
        (slot, control)
    }

    pub(crate) fn holds(&self, lease: Lease) -> bool {
        locked(&self.running).contains_key(&(lease.job, lease.token))
    }

    pub(crate) fn running_count(&self) -> usize {
        locked(&self.running).len()
    }

    /// How many jobs were left, or will be if the process ends now.
    pub(crate) fn abandoned(&self) -> u64 {
        let running = locked(&self.running);
        running.len() as u64 + self.stats.abandoned.load(Ordering::Relaxed)
    }

    /// The jobs this process believes it holds under a session.
    pub(crate) fn held(&self, session: SessionId) -> Vec<(JobId, Token)> {
        locked(&self.running)
            .iter()
            .filter(|(_, run)| run.session == session)
            .map(|(key, _)| *key)
            .collect()
    }

    /// Calls `tell` with the control of each running job that `wanted` picks.
    pub(crate) fn tell(&self, wanted: impl Fn((JobId, Token)) -> bool, tell: impl Fn(&Control)) {
        for (key, run) in locked(&self.running).iter() {
            if wanted(*key) {
                tell(&run.control);
            }
        }
    }

    /// Gives an ended attempt to the settler.
    pub(crate) async fn settle(&self, finished: Finished) {
        if let Err(mpsc::error::SendError(finished)) = self.settler.send(finished).await {
            // The worker is being torn down past its deadline: the lease will expire.
            finished.span.in_scope(|| tracing::warn!("the outcome came too late to be written"));
        }
    }

    /// Notes that a lease was lost and an outcome dropped.
    pub(crate) fn lost(&self, lease: Lease, span: &Span) {
        self.stats.leases_lost.fetch_add(1, Ordering::Relaxed);
        span.in_scope(|| {
            tracing::warn!(
                id = lease.job.0,
                token = lease.token.0,
                "the lease was lost; the attempt's outcome is dropped"
            );
        });
    }

    /// Gives up a session: everything that runs under it is lost.
    pub(crate) fn lose_session(&self, session: SessionId, why: &str) {
        if self.sessions.lose(session) {
            tracing::error!(session = session.0, "session lost: {why}");
            for run in locked(&self.running).values().filter(|run| run.session == session) {
                run.control.lose();
            }
            self.freed.notify_one();
        }
    }

    /// Opens the sessions that are missing.
    pub(crate) async fn open_sessions(&self) -> crate::Result<()> {
        let (kinds, queues) = (self.kind_names(), self.queue_names());
        for lease in self.sessions.missing() {
            let session = NewSession {
                // 62 random bits: never zero, never negative, never twice.
                id: SessionId((rand::random::<i64>() & (i64::MAX >> 1)) + 1),
                worker: self.name.clone(),
                lease,
                kinds: kinds.clone(),
                queues: queues.clone(),
            };
            let before = Instant::now();
            self.store.open_session(&session).await?;
            self.sessions.open(lease, session.id, before + lease);
        }
        if let Err(error) = self.unpark().await {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "parked jobs were not woken; the sweep will"
            );
        }
        Ok(())
    }

    /// Wakes jobs that waited for somebody to know their kind; if there are many, the sweep wakes
    /// the rest.
    pub(crate) async fn unpark(&self) -> crate::Result<u64> {
        self.store.unpark(&self.queue_names(), &self.kind_names(), 1_000).await
    }

    pub(crate) fn queue_names(&self) -> Vec<String> {
        self.queues.iter().map(|queue| queue.name.clone()).collect()
    }

    pub(crate) fn kind_names(&self) -> Vec<String> {
        self.registry.kinds().into_iter().map(|(kind, _)| kind.to_owned()).collect()
    }
}

/// The sessions of this process, one for each lease length among its jobs.
pub(crate) struct Sessions(Mutex<Vec<Session>>);

struct Session {
    lease: Duration,
    open: Option<OpenSession>,
}

/// A session that may hold jobs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenSession {
    pub(crate) id: SessionId,
    pub(crate) lease: Duration,
    /// Until when, on this machine's monotonic clock, the lease is known to be valid.
    pub(crate) valid_until: Instant,
}

impl Sessions {
    fn new(registry: &Registry) -> Self {
        let mut leases: Vec<Duration> =
            registry.defs().iter().map(|def| def.options.lease).collect();
        leases.sort_unstable();
        leases.dedup();
        Self(Mutex::new(leases.into_iter().map(|lease| Session { lease, open: None }).collect()))
    }

    fn missing(&self) -> Vec<Duration> {
        let sessions = locked(&self.0);
        sessions.iter().filter(|session| session.open.is_none()).map(|s| s.lease).collect()
    }

    fn open(&self, lease: Duration, id: SessionId, valid_until: Instant) {
        for session in locked(&self.0).iter_mut().filter(|session| session.lease == lease) {
            session.open = Some(OpenSession { id, lease, valid_until });
        }
    }

    /// The open sessions.
    pub(crate) fn all_open(&self) -> Vec<OpenSession> {
        locked(&self.0).iter().filter_map(|session| session.open).collect()
    }

    /// The open sessions, which nobody else finds from now on.
    pub(crate) fn take_all(&self) -> Vec<OpenSession> {
        locked(&self.0).iter_mut().filter_map(|session| session.open.take()).collect()
    }

    /// For each lease length its session; `None` while one is missing.
    pub(crate) fn by_lease(&self) -> Option<HashMap<Duration, SessionId>> {
        locked(&self.0).iter().map(|s| s.open.map(|open| (s.lease, open.id))).collect()
    }

    fn is_open(&self, id: SessionId) -> bool {
        locked(&self.0).iter().any(|session| session.open.is_some_and(|open| open.id == id))
    }

    /// Notes until when a session's lease is valid, unless it was lost meanwhile.
    pub(crate) fn extend(&self, id: SessionId, valid_until: Instant) {
        for open in locked(&self.0).iter_mut().filter_map(|session| session.open.as_mut()) {
            if open.id == id {
                open.valid_until = open.valid_until.max(valid_until);
            }
        }
    }

    fn lose(&self, id: SessionId) -> bool {
        let mut sessions = locked(&self.0);
        let found =
            sessions.iter_mut().find(|session| session.open.is_some_and(|open| open.id == id));
        found.is_some_and(|session| session.open.take().is_some())
    }

    /// When the first lease ends.
    pub(crate) fn first_end(&self) -> Option<Instant> {
        self.all_open().iter().map(|open| open.valid_until).min()
    }
}

/// What a worker has counted since it started.
#[derive(Debug, Default)]
pub(crate) struct Stats {
    pub(crate) completed: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) dead: AtomicU64,
    pub(crate) cancelled: AtomicU64,
    pub(crate) released: AtomicU64,
    pub(crate) abandoned: AtomicU64,
    pub(crate) leases_lost: AtomicU64,
    pub(crate) rescued: AtomicU64,
    pub(crate) restarts: AtomicU64,
}

impl Stats {
    pub(crate) fn count(&self, transition: &Transition) {
        let counter = match transition {
            Transition::Complete { .. } => &self.completed,
            Transition::Requeue { record: Some(record), .. }
                if record.reason == AttemptReason::Interrupted =>
            {
                &self.released
            }
            Transition::Requeue { record: Some(_), .. } => &self.failed,
            Transition::Requeue { record: None, .. } => return,
            Transition::Bury { .. } => &self.dead,
            Transition::Cancel { .. } => &self.cancelled,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// Locks a mutex whose data stays right even if a holder panicked: no change here has a middle.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use jobq_core::lifecycle::{self, Counters};
    use tokio::time::timeout;

    use super::*;
    use crate::store::Settlement;

    /// As when a runtime is dropped on one thread while a job function ends on another.
    #[tokio::test]
    async fn an_outcome_that_nobody_receives_any_more_holds_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let url = format!("sqlite:{}", folder.path().join("jobs.db").display());
        let client = crate::Client::connect(&url).await.expect("a file");
        let (settler, finished) = mpsc::channel(1);
        let worker = Arc::new(Worker::new(
            "w".to_owned(),
            client.store(),
            Registry::default(),
            Arc::default(),
            Vec::new(),
            Floors::new(Vec::new(), Instant::now()),
            settler,
        ));
        let slots = Arc::new(Semaphore::new(1));
        let permit = Arc::clone(&slots).try_acquire_owned().expect("it is free");
        let lease = Lease { job: JobId(1), token: Token(1), session: SessionId(1) };
        let (mut slot, control) = worker.hold(lease, permit);
        slot.admit(Pass::shared().await);
        let transition = lifecycle::release(Counters::default());
        let settlement = Settlement {
            lease,
            transition,
            retention: DEFAULT_RETENTION,
            doubtful: false,
            key: None,
        };
        let span = Span::none();
        let sent = worker.settler.clone().reserve_owned().await.expect("the settler is there");
        drop(finished);
        sent.send(Finished { settlement, control, slot, span, refused: false });
        drop(worker);
        let alone = timeout(Duration::from_secs(30), Pass::alone()).await;
        assert!(alone.is_ok(), "other jobs of the process may run alone");
        assert_eq!(slots.available_permits(), 1);
    }
}
