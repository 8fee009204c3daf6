//! The object a `main` starts: it claims jobs, runs them, keeps their leases and writes what
//! became of them, until it is told to stop.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use jobq_core::queue::check_name;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;
use tokio::time::{sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::attempt::Control;
use crate::claimer::{self, Until, WakeUps};
use crate::client::Client;
use crate::error::{Error, Result, StartProblem};
use crate::floors::Floors;
use crate::handler::States;
use crate::heartbeat::Heartbeat;
use crate::job::{Job, JobDef};
use crate::registry::Registry;
use crate::settler::{self, Inbox};
use crate::store::{Store, WakeUp};
use crate::worker::{Queue, Worker};
use crate::{sweep, wake};

/// How many jobs of a queue run at once in a process that says nothing else.
pub const DEFAULT_CONCURRENCY: usize = 32;

/// How long a stopping runtime waits for running jobs unless it says otherwise.
pub const DEFAULT_SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(25);

/// After the shutdown timeout: how long job functions may take to notice their cancellation, and
/// how long what is left may take to be written.
const LAST_WORDS: Duration = Duration::from_millis(300);

/// Outcomes that may wait to be written; each also holds a slot.
const INBOX: usize = 1_024;

/// Runs jobs in this process.
///
/// By default it runs every `#[job]` that is linked into the program and serves every queue that
/// these name, each with [`DEFAULT_CONCURRENCY`] slots.
///
/// # Examples
///
/// ```
/// # use jobq_runtime as jobq;
/// # async fn example(client: jobq::Client) -> jobq::Result<()> {
/// let ended = jobq::Runtime::new(client)
///     .queue("images", 8)
///     .state(std::sync::Arc::new(String::from("what jobs take as State<Arc<String>>")))
///     .run()
///     .await?;
/// assert!(ended.is_clean());
/// # Ok(())
/// # }
/// ```
#[must_use = "a runtime does nothing until it runs"]
pub struct Runtime {
    client: Client,
    name: String,
    states: States,
    queues: Vec<(String, QueueOptions)>,
    only: Option<Vec<String>>,
    jobs: Vec<&'static JobDef>,
    expected: Vec<&'static JobDef>,
    linked: bool,
    shutdown_timeout: Duration,
    problems: Vec<StartProblem>,
}

impl std::fmt::Debug for Runtime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Runtime")
            .field("name", &self.name)
            .field("queues", &self.queues)
            .finish_non_exhaustive()
    }
}

/// Settings of a queue in one process; a number stands for its concurrency.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueOptions {
    concurrency: usize,
    retention: Option<Duration>,
}

impl Default for QueueOptions {
    fn default() -> Self {
        Self { concurrency: DEFAULT_CONCURRENCY, retention: None }
    }
}

impl From<usize> for QueueOptions {
    fn from(concurrency: usize) -> Self {
        Self { concurrency, ..Self::default() }
    }
}

impl QueueOptions {
    /// The defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// How many jobs of the queue run at once in this process. Default:
    /// [`DEFAULT_CONCURRENCY`].
    #[must_use]
    pub fn concurrency(mut self, jobs: usize) -> Self {
        self.concurrency = jobs;
        self
    }

    /// How long completed and cancelled jobs are kept, unless their function says otherwise; zero
    /// deletes them at once. Default: 24 h.
    #[must_use]
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = Some(retention);
        self
    }
}

/// How a run ended, and what it did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Ended {
    /// Jobs completed.
    pub completed: u64,
    /// Attempts that failed and are retried.
    pub failed: u64,
    /// Jobs that became dead letters.
    pub dead: u64,
    /// Jobs cancelled while they ran.
    pub cancelled: u64,
    /// Jobs given back unfinished; another worker runs them.
    pub released: u64,
    /// Jobs left to the expiry of their lease: they could not even be given back in time.
    pub abandoned: u64,
    /// Attempts whose lease was lost and whose outcome was dropped.
    pub leases_lost: u64,
    /// Jobs of dead workers that this one rescued.
    pub rescued: u64,
}

impl Ended {
    /// Whether every job that was started was also ended: nothing was given back or abandoned.
    pub fn is_clean(&self) -> bool {
        self.released == 0 && self.abandoned == 0
    }

    /// Success after a clean end, 1 otherwise.
    pub fn exit_code(&self) -> ExitCode {
        if self.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

impl Runtime {
    /// A runtime on the client's database.
    pub fn new(client: Client) -> Self {
        Self {
            client,
            name: default_name(),
            states: States::default(),
            queues: Vec::new(),
            only: None,
            jobs: Vec::new(),
            expected: Vec::new(),
            linked: true,
            shutdown_timeout: DEFAULT_SHUTDOWN_TIMEOUT,
            problems: Vec::new(),
        }
    }

    /// Gives jobs a value that they take as `State<T>`; one for each type.
    pub fn state<T: Clone + Send + Sync + 'static>(mut self, value: T) -> Self {
        self.states.insert(value);
        self
    }

    /// Serves a queue with these settings, also if no job names it: `.queue("images", 8)`.
    pub fn queue(mut self, name: impl Into<String>, options: impl Into<QueueOptions>) -> Self {
        let (name, options) = (name.into(), options.into());
        let problem = if let Err(error) = check_name("queue", &name) {
            Some(error.to_string())
        } else if self.queues.iter().any(|(known, _)| *known == name) {
            Some("is set up twice; keep one `.queue(...)`".to_owned())
        } else if options.concurrency == 0 || options.concurrency > 100_000 {
            Some(format!("has a concurrency of {}; use 1 to 100000", options.concurrency))
        } else {
            None
        };
        if let Some(problem) = problem {
            self.problems.push(StartProblem::BadQueue { queue: name.clone(), problem });
        }
        self.queues.push((name, options));
        self
    }

    /// Serves only these queues, whatever others jobs name.
    pub fn only_queues<Q: Into<String>>(mut self, queues: impl IntoIterator<Item = Q>) -> Self {
        self.only.get_or_insert_default().extend(queues.into_iter().map(Into::into));
        self
    }

    /// Registers jobs by hand: `.jobs(jobq::jobs![resize, thumbnail])`.
    ///
    /// Together with those the linker finds; see [`only_listed_jobs`](Self::only_listed_jobs).
    pub fn jobs(mut self, jobs: &[&'static JobDef]) -> Self {
        self.jobs.extend_from_slice(jobs);
        self
    }

    /// Runs only the jobs given to [`jobs`](Self::jobs), and none that the linker finds.
    pub fn only_listed_jobs(mut self) -> Self {
        self.linked = false;
        self
    }

    /// Fails to start unless this job is registered: a guard against a crate that is not linked.
    pub fn expect<J: Job>(mut self) -> Self {
        self.expected.push(J::DEF);
        self
    }

    /// The worker's name in the database and the logs. Default: host name and process id.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = jobq_core::text::storable(&name.into()).chars().take(200).collect();
        self
    }

    /// How long running jobs may go on after a stop. Default: 25 s. What then still runs is
    /// cancelled and given back, which costs it no attempt; the runtime ends within two more seconds.
    pub fn shutdown_timeout(mut self, timeout: Duration) -> Self {
        self.shutdown_timeout = timeout.min(jobq_core::duration::MAX);
        self
    }

    /// Runs jobs until SIGTERM or SIGINT (Ctrl-C).
    ///
    /// The first signal stops claiming and waits for running jobs; a second one stops at once.
    ///
    /// # Errors
    ///
    /// [`Error::Start`] lists everything that keeps the runtime from starting; [`Error::Connect`],
    /// [`Error::Unsupported`] and [`Error::Schema`] name what the database lacks. Once started it
    /// does not fail: it waits for the database to come back.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, running jobs are dropped too: given back if there is time, else
    /// rescued when their lease expires.
    pub async fn run(self) -> Result<Ended> {
        let mut signals = Signals::new()?;
        let (stop, stop_now) = (CancellationToken::new(), CancellationToken::new());
        let ends = self.run_with(&stop, &stop_now, Until::Stopped);
        let follow = async {
            signals.next().await;
            tracing::info!("stopping: waiting for running jobs; a second signal stops at once");
            stop.cancel();
            signals.next().await;
            stop_now.cancel();
            std::future::pending::<()>().await;
        };
        tokio::select! {
            ended = ends => ended,
            () = follow => unreachable!("it never ends"),
        }
    }

    /// Runs jobs until `stop` completes, then stops as after the first signal.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    ///
    /// # Cancel safety
    ///
    /// As [`run`](Self::run).
    pub async fn run_until(self, stop: impl Future<Output = ()>) -> Result<Ended> {
        let (stopped, stop_now) = (CancellationToken::new(), CancellationToken::new());
        let ends = self.run_with(&stopped, &stop_now, Until::Stopped);
        let follow = async {
            stop.await;
            stopped.cancel();
            std::future::pending::<()>().await;
        };
        tokio::select! {
            ended = ends => ended,
            () = follow => unreachable!("it never ends"),
        }
    }

    /// Runs jobs until nothing is due and nothing runs: for tests and one-shot processes.
    ///
    /// Jobs that are scheduled for later, retries included, are left alone; so are those of a queue
    /// whose [limit](crate::Client::limit_queue) other processes use up. What only its rate holds up is
    /// waited for.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    ///
    /// # Cancel safety
    ///
    /// As [`run`](Self::run).
    pub async fn run_until_idle(self) -> Result<Ended> {
        let never = CancellationToken::new();
        self.run_with(&never, &never, Until::Idle).await
    }

    /// Checks everything, starts the parts, and stops them in the right order.
    async fn run_with(
        mut self,
        stop: &CancellationToken,
        stop_now: &CancellationToken,
        until: Until,
    ) -> Result<Ended> {
        let (registry, queues) = self.plan()?;
        let store = self.client.store();
        let check = async {
            store.check().await?;
            sweep::proven_floors(&*store).await
        };
        let proven = tokio::select! {
            proven = check => proven?,
            () = stop.cancelled() => return Ok(Ended::default()),
        };
        let (to_settler, finished) = mpsc::channel(INBOX);
        let worker = Arc::new(Worker::new(
            self.name,
            Arc::clone(&store),
            registry,
            Arc::new(self.states),
            queues,
            Floors::new(proven, Instant::now()),
            to_settler,
        ));
        tokio::select! {
            opened = worker.open_sessions() => opened?,
            () = stop.cancelled() => return Ok(Ended::default()),
        }
        // Dropped with this future: what runs then must not go on under a lease nobody extends.
        let _abandon = Abandon(Arc::clone(&worker));
        let heartbeat =
            Heartbeat::start(Arc::clone(&worker)).map_err(|source| Error::Database {
                action: "start the heartbeat thread",
                source: sqlx::Error::Io(source),
            })?;
        announce(&worker);

        let parts = Parts::start(&worker, finished);
        let running = TaskTracker::new();
        let (listener, sent) = listen(&worker, &parts.stop);
        let mut wake_ups = WakeUps { pokes: wake::pokes(), sent };
        claim_until(&worker, &running, &mut wake_ups, stop, until).await;
        drop(listener);
        let deadline = Instant::now() + self.shutdown_timeout;
        drain(&worker, &running, stop_now, deadline).await;
        parts.finish(&worker, stop_now, deadline).await;
        close_sessions(&worker).await;
        drop(heartbeat);
        let ended = summary(&worker);
        tracing::info!(?ended, "stopped");
        Ok(ended)
    }

    /// The jobs and queues of this run; every problem at once.
    fn plan(&mut self) -> Result<(Registry, Vec<Queue>)> {
        let mut problems = std::mem::take(&mut self.problems);
        let mut defs = std::mem::take(&mut self.jobs);
        if self.linked {
            defs.extend(Registry::linked());
        }
        let registry = Registry::new(defs, &mut problems);
        registry.check_states(&self.states, &mut problems);
        for def in &self.expected {
            if !registry.has(def) {
                problems.push(StartProblem::NotRegistered { kind: def.kind });
            }
        }
        let mut queues = std::mem::take(&mut self.queues);
        for def in registry.defs() {
            if !queues.iter().any(|(name, _)| name == def.options.queue) {
                queues.push((def.options.queue.to_owned(), QueueOptions::default()));
            }
        }
        if let Some(only) = &self.only {
            for queue in only {
                if !queues.iter().any(|(name, _)| name == queue) {
                    problems.push(StartProblem::BadQueue {
                        queue: queue.clone(),
                        problem: "is to be served, but no registered job names it and no \
                                  `.queue(...)` sets it up; is it misspelt?"
                            .to_owned(),
                    });
                }
            }
            queues.retain(|(name, _)| only.contains(name));
            if only.is_empty() {
                problems.push(StartProblem::NoQueues);
            }
        }
        if !problems.is_empty() {
            return Err(Error::Start(problems));
        }
        let queues = queues
            .into_iter()
            .map(|(name, options)| Queue {
                name,
                retention: options.retention,
                slots: Arc::new(Semaphore::new(options.concurrency)),
            })
            .collect();
        Ok((registry, queues))
    }
}

/// Drops every running job when the runtime's future is dropped.
struct Abandon(Arc<Worker>);

impl Drop for Abandon {
    fn drop(&mut self) {
        self.0.tell(|_| true, Control::lose);
    }
}

/// Says what will be run.
fn announce(worker: &Worker) {
    for queue in &worker.queues {
        let jobs: Vec<String> = worker
            .registry
            .defs()
            .iter()
            .filter(|def| def.options.queue == queue.name)
            .map(|def| format!("{} ({})", def.kind, crate::registry::place(def)))
            .collect();
        tracing::info!(
            worker = worker.name,
            database = worker.store.database(),
            queue = queue.name,
            slots = queue.slots.available_permits(),
            jobs = jobs.join(", "),
            "serving"
        );
    }
}

/// Runs the claimer until it ends by itself; if it panics it is started again.
async fn claim_until(
    worker: &Arc<Worker>,
    running: &TaskTracker,
    wake_ups: &mut WakeUps,
    stop: &CancellationToken,
    until: Until,
) {
    loop {
        let claim = claimer::run(worker, running, wake_ups, stop, until);
        if catch_panic(claim).await.is_ok() {
            return;
        }
        // What it had claimed and not started is lost sight of: let it be rescued.
        for session in worker.sessions.all_open() {
            worker.lose_session(session.id, "the claimer panicked");
        }
        restarted(worker, "the claimer").await;
    }
}

/// The parts that run beside the claimer.
struct Parts {
    settler: JoinHandle<()>,
    sweeper: JoinHandle<()>,
    /// Dropping the runtime's future stops what it started.
    stop: CancellationToken,
    _stops: tokio_util::sync::DropGuard,
}

impl Parts {
    fn start(worker: &Arc<Worker>, finished: mpsc::Receiver<settler::Finished>) -> Self {
        let stop = CancellationToken::new();
        let inbox = Inbox::new(finished);
        let settling = Arc::clone(worker);
        let settler = supervised(worker, "the settler", &stop, move || {
            settler::run(Arc::clone(&settling), Arc::clone(&inbox))
        });
        let sweeping = Arc::clone(worker);
        let sweeper =
            supervised(worker, "the sweep", &stop, move || sweep::run(Arc::clone(&sweeping)));
        Self { settler, sweeper, _stops: stop.clone().drop_guard(), stop }
    }

    /// Waits until every outcome is written, at least for a moment, then ends the parts.
    async fn finish(self, worker: &Worker, stop_now: &CancellationToken, deadline: Instant) {
        let hurry = async {
            stop_now.cancelled().await;
            sleep(LAST_WORDS).await;
        };
        let written = async {
            while worker.running_count() > 0 {
                // One told for many; the pause covers what slips between.
                let _ = timeout(Duration::from_millis(20), worker.freed.notified()).await;
            }
        };
        let deadline = deadline.max(Instant::now() + LAST_WORDS);
        tokio::select! {
            () = written => {}
            () = hurry => {}
            () = sleep_until(deadline.into()) => {}
        }
        self.sweeper.abort();
        self.settler.abort();
    }
}

/// Runs a part in a task of its own; if it panics it is started again.
fn supervised<F>(
    worker: &Arc<Worker>,
    part: &'static str,
    stop: &CancellationToken,
    start: impl Fn() -> F + Send + 'static,
) -> JoinHandle<()>
where
    F: Future<Output = ()> + Send + 'static,
{
    let (worker, stop) = (Arc::clone(worker), stop.clone());
    tokio::spawn(async move {
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                ended = catch_panic(start()) => if ended.is_ok() { return },
            }
            restarted(&worker, part).await;
        }
    })
}

async fn restarted(worker: &Worker, part: &str) {
    worker.stats.restarts.fetch_add(1, Ordering::Relaxed);
    tracing::error!("{part} panicked; starting it again");
    sleep(Duration::from_millis(100)).await;
}

/// The future's value, or an error if it panicked.
pub(crate) async fn catch_panic<T>(future: impl Future<Output = T>) -> Result<T, ()> {
    let mut future = std::pin::pin!(future);
    std::future::poll_fn(|context| {
        let poll = std::panic::AssertUnwindSafe(|| future.as_mut().poll(context));
        match std::panic::catch_unwind(poll) {
            Ok(std::task::Poll::Ready(value)) => std::task::Poll::Ready(Ok(value)),
            Ok(std::task::Poll::Pending) => std::task::Poll::Pending,
            Err(_) => std::task::Poll::Ready(Err(())),
        }
    })
    .await
}

/// Passes on wake-ups from other processes, for as long as the receiver lives.
fn listen(
    worker: &Arc<Worker>,
    stop: &CancellationToken,
) -> (tokio_util::sync::DropGuard, mpsc::Receiver<WakeUp>) {
    let (send, sent) = mpsc::channel(64);
    let store = Arc::clone(&worker.store);
    let child = stop.child_token();
    let listening = child.clone();
    tokio::spawn(async move {
        tokio::select! {
            () = listening.cancelled() => (),
            () = forward(&*store, &send) => (),
        }
        // Where there is nothing to listen to, the channel must stay open all the same.
        listening.cancelled().await;
        drop(send);
    });
    (child.drop_guard(), sent)
}

/// After this much silence the connection for wake-ups is made anew.
const DEAF: Duration = Duration::from_secs(120);

async fn forward(store: &dyn Store, send: &mpsc::Sender<WakeUp>) {
    let mut wait = Duration::from_millis(100);
    loop {
        match store.listen().await {
            Ok(None) => return,
            Ok(Some(mut listener)) => {
                wait = Duration::from_millis(100);
                // What was sent while nobody listened is met by looking now.
                wake::poke();
                loop {
                    match timeout(DEAF, listener.wait()).await {
                        // When the claimer is behind, one more hint tells it nothing new.
                        Ok(Ok(wake_up)) => drop(send.try_send(wake_up)),
                        // Silence may be a server that vanished without a word: connect anew.
                        Err(_) => break,
                        Ok(Err(error)) => {
                            tracing::warn!(
                                error = &error as &dyn std::error::Error,
                                "wake-ups are interrupted; polling goes on"
                            );
                            break;
                        }
                    }
                }
            }
            Err(error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "cannot listen for wake-ups; polling goes on"
                );
            }
        }
        sleep(wait.mul_f64(0.5 + 0.5 * rand::random::<f64>())).await;
        wait = (wait * 2).min(Duration::from_secs(10));
    }
}

/// Waits for running jobs; those that outlast the timeout are told, then given back.
async fn drain(
    worker: &Worker,
    running: &TaskTracker,
    stop_now: &CancellationToken,
    deadline: Instant,
) {
    running.close();
    let drained = tokio::select! {
        () = running.wait() => true,
        () = sleep_until(deadline.into()) => false,
        () = stop_now.cancelled() => false,
    };
    if drained {
        return;
    }
    tracing::warn!(
        jobs = worker.running_count(),
        "cancelling jobs that still run, and giving them back"
    );
    worker.tell(|_| true, Control::warn);
    if timeout(LAST_WORDS, running.wait()).await.is_ok() {
        return;
    }
    worker.tell(|_| true, Control::interrupt);
    // Dropped futures end at once; a thread that does not return is left behind.
    let _ = timeout(LAST_WORDS, running.wait()).await;
}

/// Ends the sessions, so that nobody waits for their leases; not for long.
async fn close_sessions(worker: &Worker) {
    let close = async {
        // Taken first: a heartbeat must not meet a closed session and call it lost.
        for session in worker.sessions.take_all() {
            if let Err(error) = worker.store.close_session(session.id).await {
                tracing::debug!(
                    error = &error as &dyn std::error::Error,
                    "a session was not closed; its lease will expire"
                );
            }
        }
    };
    if timeout(LAST_WORDS, close).await.is_err() {
        tracing::warn!("the database does not answer; the sessions' leases will expire");
    }
}

fn summary(worker: &Worker) -> Ended {
    let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    let stats = &worker.stats;
    Ended {
        completed: count(&stats.completed),
        failed: count(&stats.failed),
        dead: count(&stats.dead),
        cancelled: count(&stats.cancelled),
        released: count(&stats.released),
        abandoned: worker.abandoned(),
        leases_lost: count(&stats.leases_lost),
        rescued: count(&stats.rescued),
    }
}

/// `host:pid`, so that two workers on one machine are told apart.
fn default_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname")
        .ok()
        .map(|host| host.trim().to_owned())
        .or_else(|| std::env::var("HOSTNAME").ok())
        .or_else(|| std::env::var("COMPUTERNAME").ok())
        .filter(|host| !host.is_empty())
        .unwrap_or_else(|| "worker".to_owned());
    format!("{host}:{}", std::process::id())
}

/// SIGTERM and SIGINT, or Ctrl-C where there are no signals.
struct Signals {
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> Result<Self> {
        #[cfg(unix)]
        {
            use tokio::signal::unix::{SignalKind, signal};
            let failed = |source| Error::Database {
                action: "watch for signals",
                source: sqlx::Error::Io(source),
            };
            Ok(Self {
                terminate: signal(SignalKind::terminate()).map_err(failed)?,
                interrupt: signal(SignalKind::interrupt()).map_err(failed)?,
            })
        }
        #[cfg(not(unix))]
        Ok(Self {})
    }

    async fn next(&mut self) {
        #[cfg(unix)]
        tokio::select! {
            _ = self.terminate.recv() => (),
            _ = self.interrupt.recv() => (),
        }
        #[cfg(not(unix))]
        let _ = tokio::signal::ctrl_c().await;
    }
}
