//! The seam to the databases: whole operations, each atomic by itself.
//!
//! All SQL of jobq is below this module, one file per database, each with the same operations
//! in the same order. Every operation that writes for a running job is guarded by its
//! [`Lease`]; every time that decides something is the database's own.

use std::sync::Arc;
use std::time::Duration;

use jobq_core::job::{JobId, JobState, Lease, SessionId, Token};
use jobq_core::key::OnBlock;
use jobq_core::lifecycle::{Counters, Limits, Transition};
use jobq_core::outcome::DeathReason;
use jobq_core::pause::PauseScope;
use jobq_core::time::Timestamp;

use crate::enqueue::Enqueued;
use crate::error::Result;
use crate::handler::BoxFuture;
use crate::job::CheckedJob;
use crate::key::JobKey;
use crate::limit::{LimitedQueue, QueueLimit};
use crate::unique::UniqueKey;

/// Makes targets of what a transaction can be open on. Used in a store's `insert`, where
/// `insert_on` is how it writes on one, and `super::complete_on` how it completes there.
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
macro_rules! targets {
    ($($target:ty),+) => {
        $(
            impl Sealed for $target {}
            impl EnqueueTarget for $target {
                async fn write(
                    self,
                    jobs: Vec<CheckedJob>,
                    schema: Schema,
                ) -> Result<Vec<Enqueued>> {
                    insert_on(&mut *self, &schema, &jobs).await
                }
            }
            impl CompleteTarget for $target {
                async fn complete(self, completion: Completion, schema: Schema) -> Result<bool> {
                    super::complete_on(&mut *self, completion, &schema).await
                }
            }
        )+
    };
}

#[cfg(feature = "mysql")]
pub(crate) mod mysql;
#[cfg(feature = "postgres")]
pub(crate) mod postgres;
#[cfg(feature = "sqlite")]
pub(crate) mod sqlite;
pub(crate) mod twins;

/// Where jobq's tables are in a database: a PostgreSQL schema, or a prefix on the others.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Schema(Arc<str>);

impl Schema {
    /// The name used unless the client says otherwise.
    pub const DEFAULT: &'static str = "jobq";

    /// Takes a name of 1 to 40 lower-case letters, digits and `_`, not beginning with a digit.
    ///
    /// A name may be a word of SQL, such as `order`; in SQL of your own it must be quoted then. Not
    /// taken are names that a database keeps for itself (`pg_…`, `information_schema`, `sqlite`,
    /// `sqlite_…`), and those that end in `_closed`, whose tables would meet those of the name before
    /// it on SQLite.
    ///
    /// # Errors
    ///
    /// [`Error::BadOption`](crate::Error::BadOption) for any other name: it becomes part of SQL
    /// text.
    pub fn new(name: &str) -> Result<Self> {
        match problem_of(name) {
            None => Ok(Self(name.into())),
            Some(problem) => Err(crate::Error::BadOption {
                option: "schema",
                problem: format!("{name:?} {problem}"),
            }),
        }
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Why a name cannot be the schema's, and what to do.
fn problem_of(name: &str) -> Option<&'static str> {
    let is_identifier = (1..=40).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
        && !name.starts_with(|c: char| c.is_ascii_digit());
    if !is_identifier {
        return Some("is not 1 to 40 lower-case letters, digits and '_', beginning with a letter");
    }
    let is_reserved = ["information_schema", "sqlite"].contains(&name)
        || ["pg_", "sqlite_"].iter().any(|prefix| name.starts_with(prefix));
    if is_reserved {
        return Some("is a name that databases keep for themselves; put `my_` before it");
    }
    // `app_closed` and `app` would share the table `app_closed_sessions`.
    if name.ends_with("_closed") {
        return Some("ends in `_closed`, as one of jobq's tables does; put `_jobs` behind it");
    }
    None
}

impl Default for Schema {
    fn default() -> Self {
        Self(Self::DEFAULT.into())
    }
}

/// How long completed and cancelled jobs are kept unless the job or its queue says otherwise.
pub const DEFAULT_RETENTION: Duration = Duration::from_secs(24 * 3600);

/// Every operation that jobq asks of a database.
pub(crate) trait Store: Send + Sync + 'static {
    /// Where the tables are.
    fn schema(&self) -> &Schema;

    /// Which database this is, for messages.
    fn database(&self) -> &'static str;

    /// The longest wait between two looks of an idle worker.
    fn idle_poll(&self) -> Duration;

    // ---- set-up -----------------------------------------------------------------------------

    /// Creates or upgrades the tables. Safe to run from many processes at once, and again.
    fn migrate(&self) -> BoxFuture<'_, Result<()>>;

    /// Fails unless the server and the tables fit this version of jobq.
    fn check(&self) -> BoxFuture<'_, Result<()>>;

    // ---- enqueue ----------------------------------------------------------------------------

    /// Writes new jobs in a transaction of its own, all or none, and tells of each in order.
    fn insert(&self, jobs: Vec<CheckedJob>) -> BoxFuture<'_, Result<Vec<Enqueued>>>;

    // ---- claim ------------------------------------------------------------------------------

    /// Registers a session, live from now for its lease.
    fn open_session<'a>(&'a self, session: &'a NewSession) -> BoxFuture<'a, Result<()>>;

    /// Ends a session that holds no job any more.
    fn close_session(&self, session: SessionId) -> BoxFuture<'_, Result<()>>;

    /// Opens the connection that extends sessions; it is used from a thread of its own.
    fn pulse(&self) -> BoxFuture<'static, Result<Box<dyn Pulse>>>;

    /// Moves due jobs from pending to running and leases them to the caller's sessions.
    ///
    /// No two callers are given the same job. Each claim raises the job's token. None is of a queue
    /// or kind whose pause was there when the claim began; the reply says which were. Of jobs with one
    /// key only the one that has the grant may run; see [`Turn`]. Of a limited queue it takes no more
    /// than its limit leaves.
    fn claim<'a>(&'a self, claim: &'a Claim) -> BoxFuture<'a, Result<Claimed>>;

    /// Decides who has the grants of keys, and makes those who wait for theirs claimable; returns how
    /// many.
    ///
    /// Whatever the grants were before, they are right afterwards: of each key the first job that may
    /// run, or that the others must wait for.
    fn pass_on<'a>(&'a self, keys: &'a [String]) -> BoxFuture<'a, Result<u64>>;

    /// How long until the next pending job of these queues and kinds that is not due yet is due;
    /// what is paused does not count.
    fn next_due<'a>(
        &'a self,
        queues: &'a [String],
        kinds: &'a [String],
    ) -> BoxFuture<'a, Result<Option<Duration>>>;

    /// Every job that a session holds.
    fn held(&self, session: SessionId) -> BoxFuture<'_, Result<Vec<HeldJob>>>;

    /// Notes that a job now runs alone in its process. False when the lease was lost.
    fn isolate(&self, lease: Lease) -> BoxFuture<'_, Result<bool>>;

    // ---- settle -----------------------------------------------------------------------------

    /// Writes transitions, each guarded by its lease, and says what became of each, in order.
    ///
    /// Each is written by itself: one that cannot be written does not hold up the others. In the same
    /// transaction the keys of those that end are passed on.
    fn settle<'a>(&'a self, settlements: &'a [Settlement]) -> BoxFuture<'a, Result<Vec<Settled>>>;

    // ---- sweep ------------------------------------------------------------------------------

    /// Takes or keeps a duty for `span`; the duty's notes if it is ours, else `None`.
    fn take_duty<'a>(
        &'a self,
        name: &'static str,
        holder: SessionId,
        span: Duration,
    ) -> BoxFuture<'a, Result<Option<String>>>;

    /// A duty's notes, whoever holds it; empty if nobody ever did.
    fn duty_notes<'a>(&'a self, name: &'static str) -> BoxFuture<'a, Result<String>>;

    /// Stores a duty's notes if it is still the holder's.
    fn note_duty<'a>(
        &'a self,
        name: &'static str,
        holder: SessionId,
        notes: &'a str,
    ) -> BoxFuture<'a, Result<()>>;

    /// Closes sessions whose lease expired, so that they cannot claim or be extended, and returns
    /// every closed session. A lease that ends later than its length and ten seconds from now is of
    /// a clock that has stepped back since, and counts as expired too.
    fn close_expired_sessions(&self) -> BoxFuture<'_, Result<Vec<SessionId>>>;

    /// Jobs held by closed sessions, up to `limit`, and, if `orphans`, also those held by sessions
    /// that do not exist.
    fn abandoned<'a>(
        &'a self,
        closed: &'a [SessionId],
        orphans: bool,
        limit: u32,
    ) -> BoxFuture<'a, Result<Vec<HeldJob>>>;

    /// Forgets closed sessions that hold no job any more.
    fn forget_sessions<'a>(&'a self, closed: &'a [SessionId]) -> BoxFuture<'a, Result<()>>;

    /// The live sessions, with what they know and how far they have claimed.
    fn live_sessions(&self) -> BoxFuture<'_, Result<Vec<LiveSession>>>;

    /// The database's time.
    fn now(&self) -> BoxFuture<'_, Result<Timestamp>>;

    /// The database's time, and what proves that no transaction is still writing before it.
    fn horizon(&self) -> BoxFuture<'_, Result<Horizon>>;

    /// Pending jobs of a band after `from` and up to `to`, in claim order, up to `limit`.
    fn unleased<'a>(
        &'a self,
        queue: &'a str,
        band: i16,
        from: Floor,
        to: Floor,
        limit: u32,
    ) -> BoxFuture<'a, Result<Vec<UnleasedJob>>>;

    /// Puts pending jobs first in line, or parks them; those claimed meanwhile are left alone.
    fn shift<'a>(&'a self, jobs: &'a [UnleasedJob], shift: Shift) -> BoxFuture<'a, Result<u64>>;

    /// Makes jobs of these queues that were parked for their kind claimable, if it is one of these
    /// and not paused; up to `limit`.
    fn unpark<'a>(
        &'a self,
        queues: &'a [String],
        kinds: &'a [String],
        limit: u32,
    ) -> BoxFuture<'a, Result<u64>>;

    /// Leases jobs to a session that were not started in time and that nobody has, up to `limit`: they
    /// are to be buried.
    fn take_expired(&self, session: SessionId, limit: u32) -> BoxFuture<'_, Result<Vec<HeldJob>>>;

    /// Deletes finished jobs past their retention, up to `limit`.
    fn prune(&self, limit: u32) -> BoxFuture<'_, Result<u64>>;

    /// Looks through `limit` keys of unique jobs, those after `after`, and forgets which keep nobody
    /// out any more. Returns the last one looked at, if there may be more.
    fn prune_keys(
        &self,
        after: Option<UniqueKey>,
        limit: u32,
    ) -> BoxFuture<'_, Result<Option<UniqueKey>>>;

    /// Looks through `limit` grants of keys, those after `after`, for such as must be passed on: their
    /// job is gone, or waits without knowing of its grant.
    fn stale_grants<'a>(
        &'a self,
        after: Option<&'a str>,
        limit: u32,
    ) -> BoxFuture<'a, Result<StaleGrants>>;

    // ---- pause ------------------------------------------------------------------------------

    /// Keeps every claim that begins from now on from a queue or kind. False if it was paused
    /// already; then nothing changes.
    fn pause<'a>(
        &'a self,
        scope: PauseScope,
        name: &'a str,
        reason: Option<&'a str>,
    ) -> BoxFuture<'a, Result<bool>>;

    /// Ends a pause. False if there was none.
    fn resume<'a>(&'a self, scope: PauseScope, name: &'a str) -> BoxFuture<'a, Result<bool>>;

    /// Everything that is paused, by scope and name.
    fn pauses(&self) -> BoxFuture<'_, Result<Vec<Pause>>>;

    // ---- limits -----------------------------------------------------------------------------

    /// Limits a queue, from the next claim on. What it had as a limit before is replaced.
    fn limit_queue<'a>(
        &'a self,
        queue: &'a str,
        limit: &'a QueueLimit,
    ) -> BoxFuture<'a, Result<()>>;

    /// Ends a queue's limit. False if there was none.
    fn unlimit_queue<'a>(&'a self, queue: &'a str) -> BoxFuture<'a, Result<bool>>;

    /// Every queue that is limited, by name.
    fn limits(&self) -> BoxFuture<'_, Result<Vec<LimitedQueue>>>;

    // ---- seeing and mending -----------------------------------------------------------------

    /// Looks a job up wherever it is.
    fn job(&self, id: JobId) -> BoxFuture<'_, Result<Lookup>>;

    /// How many jobs of each queue are in each state. Reads everything: for people, not loops.
    fn counts(&self) -> BoxFuture<'_, Result<Vec<QueueCount>>>;

    /// Dead letters that match, newest first, up to `limit`.
    fn dead<'a>(
        &'a self,
        filter: &'a DeadFilter,
        limit: u32,
    ) -> BoxFuture<'a, Result<Vec<DeadJob>>>;

    /// Asks for a job to be cancelled. Also returns the key of one that is cancelled.
    fn cancel(&self, id: JobId) -> BoxFuture<'_, Result<(CancelReply, Option<String>)>>;

    /// Keys for which jobs wait, in order and after `after`, up to `limit`.
    fn blocked_keys<'a>(
        &'a self,
        after: Option<&'a str>,
        limit: u32,
    ) -> BoxFuture<'a, Result<Vec<BlockedKey>>>;

    /// Makes the dead job that has the grant of a key step aside; false if there is none. The grant
    /// is still to be passed on.
    fn unblock_key<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<bool>>;

    /// Makes dead jobs that match, or one dead or cancelled job, pending again: up to `limit` of
    /// those with an id above `after`, in id order. One whose key another job has stays dead.
    fn redrive<'a>(
        &'a self,
        filter: &'a DeadFilter,
        after: JobId,
        limit: u32,
    ) -> BoxFuture<'a, Result<Redriven>>;

    // ---- wake-up ----------------------------------------------------------------------------

    /// Opens a stream of wake-ups from other processes; `None` where the database has none.
    fn listen(&self) -> BoxFuture<'_, Result<Option<Box<dyn Listener>>>>;
}

/// The connection that keeps sessions alive.
pub(crate) trait Pulse: Send {
    /// Extends a session by its lease and brings news of its jobs.
    fn beat<'a>(&'a mut self, beat: &'a Beat) -> BoxFuture<'a, Result<BeatReply>>;
}

/// Wake-ups sent by other processes.
pub(crate) trait Listener: Send {
    /// Waits for the next one. An error means that the connection is gone.
    fn wait(&mut self) -> BoxFuture<'_, Result<WakeUp>>;
}

/// A hint that something became claimable.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct WakeUp {
    pub(crate) queue: String,
    pub(crate) band: i16,
    /// The earliest `run_after` written.
    pub(crate) run_after: Timestamp,
}

/// A session to be registered.
#[derive(Clone, Debug)]
pub(crate) struct NewSession {
    pub(crate) id: SessionId,
    /// The worker's name, for people.
    pub(crate) worker: String,
    pub(crate) lease: Duration,
    /// The kinds its process can run, aliases included.
    pub(crate) kinds: Vec<String>,
    /// The queues its process serves.
    pub(crate) queues: Vec<String>,
}

/// One heartbeat.
#[derive(Clone, Debug, Default)]
pub(crate) struct Beat {
    pub(crate) session: i64,
    /// The jobs the process believes it holds under this session.
    pub(crate) held: Vec<(JobId, Token)>,
    /// How far the process has claimed, for the sweep.
    pub(crate) floors: Vec<QueueFloor>,
}

/// What a heartbeat brought back.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum BeatReply {
    /// The session lives for another lease.
    Extended {
        /// Jobs that the session does not hold any more.
        lost: Vec<JobId>,
        /// Jobs that somebody asked to cancel.
        cancel_requested: Vec<JobId>,
    },
    /// The session is closed: its jobs belong to others now.
    Closed,
    /// Another writer keeps the database locked (SQLite). Nobody can claim meanwhile either, so
    /// the lease is as good as extended while the lock is held.
    #[cfg_attr(not(feature = "sqlite"), allow(dead_code))]
    Blocked,
}

/// A place in a band's order: the claim looks at what comes after it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Floor {
    pub(crate) run_after: Timestamp,
    pub(crate) id: i64,
}

impl Floor {
    /// Before everything.
    pub(crate) const START: Self = Self { run_after: Timestamp::NEG_INFINITY, id: 0 };
}

/// A floor and the band it belongs to.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct QueueFloor {
    pub(crate) queue: String,
    pub(crate) band: i16,
    #[serde(with = "floor_as_pair")]
    pub(crate) floor: Floor,
}

mod floor_as_pair {
    use jobq_core::time::Timestamp;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::Floor;

    pub(super) fn serialize<S: Serializer>(floor: &Floor, s: S) -> Result<S::Ok, S::Error> {
        (floor.run_after.0, floor.id).serialize(s)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Floor, D::Error> {
        let (run_after, id) = Deserialize::deserialize(d)?;
        Ok(Floor { run_after: Timestamp(run_after), id })
    }
}

/// What to claim.
#[derive(Clone, Debug)]
pub(crate) struct Claim {
    /// For each kind this process can run, the session whose lease its jobs are given.
    pub(crate) kinds: Vec<(String, SessionId)>,
    pub(crate) queues: Vec<QueueClaim>,
}

impl Claim {
    /// The sessions, each once, in order.
    pub(crate) fn sessions(&self) -> Vec<i64> {
        let mut sessions: Vec<i64> = self.kinds.iter().map(|(_, session)| session.0).collect();
        sessions.sort_unstable();
        sessions.dedup();
        sessions
    }
}

/// How much to claim from a queue.
#[derive(Clone, Debug)]
pub(crate) struct QueueClaim {
    pub(crate) queue: String,
    /// At most this many jobs.
    pub(crate) limit: u32,
    /// Where to begin in each band, in the order in which bands are looked at.
    pub(crate) floors: Vec<(i16, Floor)>,
}

/// What a claim brought back.
#[derive(Clone, Debug)]
pub(crate) struct Claimed {
    /// Up to when, on the database's clock, this claim has seen everything: all that is due by
    /// then, but for transactions that were still open.
    pub(crate) seen_to: Timestamp,
    /// False when one of the sessions is closed or expired; then there are no jobs.
    pub(crate) sessions_live: bool,
    /// What it did not look at.
    pub(crate) paused: Paused,
    /// What the limits of queues let it take.
    pub(crate) limited: Vec<Allowed>,
    /// The jobs, in claim order within each queue.
    pub(crate) jobs: Vec<ClaimedJob>,
}

#[cfg(feature = "postgres")]
impl Claimed {
    /// With what another statement has brought from the other queues of the same claim.
    fn and(mut self, other: Self) -> Self {
        self.seen_to = self.seen_to.min(other.seen_to);
        self.sessions_live &= other.sessions_live;
        self.limited.extend(other.limited);
        self.jobs.extend(other.jobs);
        // Each says it of its own queues, and both of all kinds.
        self.paused.queues.extend(other.paused.queues);
        self.paused.kinds = other.paused.kinds;
        self
    }
}

/// What of a claim's queues and kinds is paused.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Paused {
    pub(crate) queues: Vec<String>,
    pub(crate) kinds: Vec<String>,
}

/// What a queue's limit lets a claim take. Of a queue that allows none, nothing is looked at.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Allowed {
    pub(crate) queue: String,
    pub(crate) jobs: u32,
    /// How long until its rate lets one more start, if that is what held it up.
    pub(crate) next: Option<Duration>,
}

/// A job that was claimed.
#[derive(Clone, Debug)]
pub(crate) struct ClaimedJob {
    pub(crate) lease: Lease,
    pub(crate) kind: String,
    pub(crate) queue: String,
    pub(crate) band: i16,
    pub(crate) run_after: Timestamp,
    pub(crate) counters: Counters,
    pub(crate) limits: Limits,
    /// It was to have been started by now, and is claimed to be buried only.
    pub(crate) expired: bool,
    pub(crate) created_at: Timestamp,
    pub(crate) tags: Vec<String>,
    pub(crate) metadata: serde_json::Map<String, serde_json::Value>,
    pub(crate) payload: String,
    pub(crate) key: Option<JobKey>,
    pub(crate) turn: Turn,
}

/// Whether a job that a claim has met may run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Turn {
    /// It has no key, or has the grant of its key.
    Runs,
    /// It was put aside until it has the grant, and is not leased.
    Waits,
    /// It is leased, and must be given back: whether it has the grant could not be decided.
    #[cfg_attr(not(feature = "postgres"), allow(dead_code))]
    Undecided,
}

/// Grants that must be passed on.
#[derive(Clone, Debug, Default)]
pub(crate) struct StaleGrants {
    pub(crate) keys: Vec<String>,
    /// The last key looked at, if there may be more.
    pub(crate) next: Option<String>,
}

impl StaleGrants {
    /// Of a page of keys, each with whether it is stale.
    pub(crate) fn of(page: Vec<(String, bool)>, limit: u32) -> Self {
        let last = page.last().map(|(key, _)| key.clone());
        let next = if page.len() < limit as usize { None } else { last };
        let keys = page.into_iter().filter(|(_, stale)| *stale).map(|(key, _)| key);
        Self { keys: keys.collect(), next }
    }
}

/// A job that a session holds, as the sweep sees it.
#[derive(Clone, Debug)]
pub(crate) struct HeldJob {
    pub(crate) lease: Lease,
    pub(crate) counters: Counters,
    pub(crate) limits: Limits,
    pub(crate) isolated: bool,
    pub(crate) cancel_requested: bool,
    pub(crate) key: Option<JobKey>,
}

/// A transition to be written.
#[derive(Clone, Debug)]
pub(crate) struct Settlement {
    pub(crate) lease: Lease,
    pub(crate) transition: Transition,
    /// How long to keep the job once it is completed or cancelled; zero keeps nothing.
    pub(crate) retention: Duration,
    /// An earlier try broke off and may have been written.
    pub(crate) doubtful: bool,
    /// The job's key, to be passed on when it ends.
    pub(crate) key: Option<JobKey>,
}

impl Settlement {
    /// The key that the job leaves to others, once this is written.
    pub(crate) fn leaves(&self) -> Option<&str> {
        let key = self.key.as_ref()?;
        let keeps =
            key.on_block == OnBlock::Block && matches!(self.transition, Transition::Requeue { .. });
        (!keeps).then_some(&*key.text)
    }
}

/// What became of a settlement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Settled {
    /// It is written.
    Written,
    /// It was written before, by an earlier try whose reply was lost or by the handler itself.
    Found,
    /// The lease was lost: nothing was written, and nothing may be.
    LeaseLost,
    /// Somebody else has the row locked; the job is still ours: try again.
    Busy,
    /// The job is still ours, but is to be cancelled instead of requeued.
    CancelRequested,
}

/// The completion of a job inside its handler's transaction.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    pub(crate) lease: Lease,
    pub(crate) retention: Duration,
}

/// A live session, as the sweep sees it.
#[derive(Clone, Debug)]
pub(crate) struct LiveSession {
    pub(crate) kinds: Vec<String>,
    pub(crate) queues: Vec<String>,
    pub(crate) floors: Vec<QueueFloor>,
}

/// The database's time and the state of its transactions.
///
/// Once `oldest_running` of a later horizon has reached `newest` of an earlier one, every
/// transaction that was running at the earlier one has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Horizon {
    pub(crate) now: Timestamp,
    pub(crate) oldest_running: i64,
    pub(crate) newest: i64,
}

/// A pending job, as the sweep sees it.
#[derive(Clone, Debug)]
pub(crate) struct UnleasedJob {
    pub(crate) id: JobId,
    pub(crate) token: Token,
    pub(crate) kind: String,
    pub(crate) run_after: Timestamp,
}

/// What the sweep does with a pending job.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Shift {
    /// First in line: it was found late.
    Hurry,
    /// Waiting: no live session knows its kind.
    Park,
    /// Waiting: its kind is paused.
    Pause,
}

impl Shift {
    /// What the job waits for then.
    pub(crate) fn wait_reason(self) -> Option<&'static str> {
        match self {
            Self::Hurry => None,
            Self::Park => Some("kind"),
            Self::Pause => Some("paused"),
        }
    }
}

/// A queue or kind that is paused.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Pause {
    /// Whether it is a queue or a kind.
    pub scope: PauseScope,
    /// Its name.
    pub name: String,
    /// When it was paused, on the database's clock.
    pub since: Timestamp,
    /// Why, as whoever paused it has said.
    pub reason: Option<String>,
}

/// What is known of a job that was looked up.
#[derive(Clone, PartialEq, Debug)]
pub enum Lookup {
    /// It is there.
    Found(Box<JobInfo>),
    /// It was there, is finished, and its retention is over; or the id was reserved by an enqueue
    /// that wrote nothing (it was rolled back, or see [`CommitUnknown`](crate::Error::CommitUnknown)).
    Gone,
    /// No job ever had this id, and none was to have it.
    NotFound,
}

/// A job, as people see it.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct JobInfo {
    /// Its id.
    pub id: JobId,
    /// Where it is in its life.
    pub state: JobState,
    /// Its kind.
    pub kind: String,
    /// Its queue.
    pub queue: String,
    /// Attempts so far; the running one included.
    pub attempt: u32,
    /// The last allowed attempt.
    pub max_attempts: u32,
    /// Attempts whose lease expired.
    pub crashes: u32,
    /// Times it was given back unfinished.
    pub interruptions: u32,
    /// The fencing token of its last claim.
    pub token: Token,
    /// The earliest time of its next run; `None` when it is waiting or final.
    pub run_after: Option<Timestamp>,
    /// When it was enqueued.
    pub created_at: Timestamp,
    /// When it reached its final state.
    pub finished_at: Option<Timestamp>,
    /// The worker that runs it, and until when that worker's lease is valid.
    pub leased_by: Option<(String, Timestamp)>,
    /// Its key: of jobs with one key, one runs at a time.
    pub key: Option<String>,
    /// Its payload: JSON text, exactly as enqueued.
    pub payload: String,
    /// The JSON of the value its function returned; `None` if it completed in its own transaction.
    pub result: Option<String>,
    /// Why it is dead.
    pub death_reason: Option<DeathReason>,
    /// Every attempt that did not complete it, oldest first.
    pub attempts: Vec<AttemptInfo>,
}

/// An attempt that did not complete its job.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct AttemptInfo {
    /// The attempt's number.
    pub attempt: u32,
    /// The token of its claim.
    pub token: Token,
    /// Why it ended.
    pub reason: jobq_core::outcome::AttemptReason,
    /// The error's text.
    pub error: String,
    /// When it ended.
    pub at: Timestamp,
    /// The worker it ran on.
    pub worker: Option<String>,
}

/// How many jobs of a queue are in a state.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct QueueCount {
    /// The queue.
    pub queue: String,
    /// The state.
    pub state: JobState,
    /// How many.
    pub count: u64,
}

/// What a redrive did, in id order.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Redriven {
    /// Jobs that are pending again.
    pub(crate) jobs: Vec<JobId>,
    /// Jobs that stay dead, for another job has their key.
    pub(crate) duplicates: Vec<JobId>,
}

/// Which dead letters are meant; an empty filter means all.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeadFilter {
    pub(crate) id: Option<JobId>,
    pub(crate) queue: Option<String>,
    pub(crate) kind: Option<String>,
    pub(crate) reason: Option<DeathReason>,
}

impl DeadFilter {
    /// All dead letters.
    pub fn all() -> Self {
        Self::default()
    }

    /// The one with this id.
    pub fn id(id: JobId) -> Self {
        Self { id: Some(id), ..Self::default() }
    }

    /// Only those of this queue.
    #[must_use]
    pub fn queue(mut self, queue: impl Into<String>) -> Self {
        self.queue = Some(queue.into());
        self
    }

    /// Only those of this kind.
    #[must_use]
    pub fn kind(mut self, kind: impl Into<String>) -> Self {
        self.kind = Some(kind.into());
        self
    }

    /// Only those that died for this reason.
    #[must_use]
    pub fn reason(mut self, reason: DeathReason) -> Self {
        self.reason = Some(reason);
        self
    }
}

/// A dead letter.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct DeadJob {
    /// Its id.
    pub id: JobId,
    /// Its kind.
    pub kind: String,
    /// The queue it came from.
    pub queue: String,
    /// Why it is dead.
    pub reason: DeathReason,
    /// When it died.
    pub died_at: Timestamp,
    /// Attempts it had.
    pub attempt: u32,
    /// The text of its last error.
    pub error: String,
    /// Its payload: JSON text, exactly as enqueued.
    pub payload: String,
    /// The job that had its key when it was last to be redriven, if it is unique: why it stayed dead.
    pub duplicate_of: Option<JobId>,
}

/// A key for which jobs wait.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct BlockedKey {
    /// The key.
    pub key: String,
    /// The job that they wait for.
    pub holder: JobId,
    /// Why they wait: the job is running, or pending (also until a retry's time, see `run_after`), or
    /// dead, until it is redriven or the key is let go. `None` if it has just ended.
    pub holder_state: Option<JobState>,
    /// The earliest time of that job's next run, if it is pending.
    pub run_after: Option<Timestamp>,
    /// How many jobs wait.
    pub waiting: u64,
}

impl BlockedKey {
    /// As the databases say it.
    pub(crate) fn of(
        key: String,
        holder: i64,
        state: Option<String>,
        is_dead: bool,
        run_after: Option<Timestamp>,
        waiting: i64,
    ) -> Result<Self> {
        let state =
            if is_dead { Some(JobState::Dead) } else { state.map(|it| it.parse()).transpose()? };
        Ok(Self {
            key,
            holder: JobId(holder),
            holder_state: state,
            run_after: run_after
                .filter(|time| state == Some(JobState::Pending) && *time != Timestamp::INFINITY),
            waiting: waiting.unsigned_abs(),
        })
    }
}

/// What a request to cancel a job did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CancelReply {
    /// It was not running and is cancelled now; its row is kept for [`DEFAULT_RETENTION`].
    Cancelled,
    /// It is running: its worker will stop it with its next heartbeat.
    Requested,
    /// It had already ended, in this state.
    AlreadyFinal(JobState),
    /// There is no such job, or not any more.
    NotFound,
}

/// Runs an insert in a task of its own: when the caller drops its future, it still ends whole.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) async fn in_a_task(
    insert: impl Future<Output = Result<Vec<Enqueued>>> + Send + 'static,
) -> Result<Vec<Enqueued>> {
    match tokio::spawn(insert).await {
        Ok(written) => written,
        Err(ended) => match ended.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The async runtime is being shut down, and has dropped the insert.
            Err(_) => Err(crate::Error::CommitUnknown {
                ids: Vec::new(),
                source: sqlx::Error::WorkerCrashed,
            }),
        },
    }
}

/// Cuts settlements into rounds in which each job occurs once, each in id order.
pub(crate) fn rounds(settlements: &[Settlement]) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..settlements.len()).collect();
    order.sort_by_key(|index| settlements[*index].lease.job);
    let mut rounds: Vec<Vec<usize>> = Vec::new();
    for index in order {
        let job = settlements[index].lease.job;
        let free = rounds
            .iter_mut()
            .find(|round| round.last().is_none_or(|last| settlements[*last].lease.job != job));
        match free {
            Some(round) => round.push(index),
            None => rounds.push(vec![index]),
        }
    }
    rounds
}

/// Says what became of a settlement that changed no row.
///
/// `row` is the job's token, session and cancel request, if it is unfinished; `ended` says that it
/// is in the history or among the dead under this settlement's token; `crashed` that it was
/// rescued from this settlement's claim.
pub(crate) fn judge(
    settlement: &Settlement,
    row: Option<(i64, i64, bool)>,
    ended: bool,
    crashed: bool,
) -> Settled {
    let lease = settlement.lease;
    match row {
        Some((token, by, cancel_requested)) if token == lease.token.0 && by == lease.session.0 => {
            let yields = matches!(
                settlement.transition,
                Transition::Requeue { .. } | Transition::Bury { .. }
            );
            if cancel_requested && yields { Settled::CancelRequested } else { Settled::Busy }
        }
        // Given back under this token, and not by a rescue: an earlier try of this was written.
        Some((token, 0, _)) if token == lease.token.0 && !crashed && settlement.doubtful => {
            Settled::Found
        }
        None if ended && !crashed => Settled::Found,
        // Completed without history, by an earlier try whose reply was lost or by the handler.
        None if settlement.doubtful && settlement.retention.is_zero() && !crashed => Settled::Found,
        // Somebody else's by now; a rescue may also have buried it under this very token.
        Some(_) | None => Settled::LeaseLost,
    }
}

/// A key as it was stored.
pub(crate) fn job_key(text: Option<String>, on_block: Option<&str>) -> Option<JobKey> {
    let on_block =
        if on_block == Some(OnBlock::Skip.as_str()) { OnBlock::Skip } else { OnBlock::Block };
    text.map(|text| JobKey { text, on_block })
}

/// Does a whole transaction again as long as it ends with a conflict: the server has ended it for the
/// sake of another one.
#[cfg(any(feature = "postgres", feature = "mysql"))]
async fn again<T, F>(
    is_conflict: fn(&sqlx::Error) -> bool,
    mut transaction: impl FnMut() -> F,
) -> sqlx::Result<T>
where
    F: Future<Output = sqlx::Result<T>>,
{
    /// Tries at one transaction.
    const TRIES: u32 = 8;
    let mut tried = 0;
    loop {
        tried += 1;
        match transaction().await {
            Err(error) if is_conflict(&error) && tried < TRIES => {
                tracing::debug!(tried, "a conflict; doing the transaction again");
                let wait = Duration::from_millis(1 << tried).mul_f64(rand::random());
                tokio::time::sleep(wait).await;
            }
            done => return done,
        }
    }
}

/// A pause as it is stored: its scope's word, its name, since when in microseconds, and why.
pub(crate) type StoredPause = (String, String, i64, Option<String>);

/// Pauses as they were stored.
pub(crate) fn read_pauses(stored: Vec<StoredPause>) -> Result<Vec<Pause>> {
    stored
        .into_iter()
        .map(|(scope, name, since, reason)| {
            Ok(Pause { scope: scope.parse()?, name, since: Timestamp(since), reason })
        })
        .collect()
}

/// Tags as they are stored: a JSON array, or nothing.
pub(crate) fn tags_json(tags: &[String]) -> Option<String> {
    if tags.is_empty() { None } else { serde_json::to_string(tags).ok() }
}

/// Tags as they were stored; what cannot be read counts as none.
pub(crate) fn tags_list(text: Option<String>) -> Vec<String> {
    text.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default()
}

/// Metadata as it was stored; what cannot be read counts as none.
pub(crate) fn metadata_map(text: Option<String>) -> serde_json::Map<String, serde_json::Value> {
    text.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default()
}
