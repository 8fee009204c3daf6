//! SQLite 3.42 and newer, in a file, in WAL mode.
//!
//! One connection per process writes, each time in a transaction that holds the file's write lock
//! from its beginning (see [`writer`]); a few others read, which waits for nobody. The lock is what
//! PostgreSQL does with row locks: between its two ends nothing changes but by us.
//!
//! Plans must not depend on statistics: an `analyze` (or `pragma optimize`) while the queue is
//! nearly empty makes SQLite read the whole table for `id in (…)`, for joins by id, and instead of
//! an index, and the queue may hold a million jobs an hour later. So a statement either names its
//! index, or is about one row by its id, which leaves nothing to plan. What moves many rows is a
//! [verb](verbs).
//!
//! Times are microseconds since 1970, of the machine's clock, which SQLite reads to the
//! millisecond. Lists travel as JSON text.

mod claim;
mod insert;
mod keys;
mod limit;
mod look;
mod pause;
mod settle;
mod setup;
mod sweep;
#[cfg(test)]
mod tests;
mod unique;
mod writer;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64};
use std::time::{Duration, Instant};

use jobq_core::job::{JobId, Lease, SessionId};
use jobq_core::pause::PauseScope;
use jobq_core::time::Timestamp;
use jobq_migrations::SQLITE_NOW;
use sqlx::pool::PoolConnection;
use sqlx::sqlite::{
    Sqlite, SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqlitePool,
    SqlitePoolOptions, SqliteRow,
};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Decode, Row, SqlSafeStr, SqlStr};

use super::{
    AttemptInfo, Beat, BeatReply, BlockedKey, CancelReply, Claim, Claimed, DeadFilter, DeadJob,
    Floor, HeldJob, Horizon, Listener, LiveSession, Lookup, NewSession, Pause, Paused, Pulse,
    QueueCount, Redriven, Schema, Settled, Settlement, Shift, StaleGrants, Store, UnleasedJob,
    read_pauses,
};
use crate::enqueue::Enqueued;
use crate::error::{Error, Result};
use crate::handler::BoxFuture;
use crate::job::CheckedJob;
use crate::limit::{LimitedQueue, QueueLimit};
use crate::unique::UniqueKey;

use settle::complete_on;
use writer::{Locked, ONE_TRY, PATIENCE, Writer};

/// The longest the runtime waits for one operation: for the lock, and then a little.
const LIMIT: Duration = Duration::from_secs(PATIENCE.as_secs() + 5);

/// How long a live process that was kept from the file needs, at most, to extend its session once
/// the file is free again.
const HEARTBEATS_FIRST: Duration = Duration::from_millis(200);

/// How long a heartbeat tries to get in between others before it fails.
const BEAT_PATIENCE: Duration = Duration::from_secs(2);

/// jobq's tables in an SQLite file.
pub(crate) struct SqliteStore {
    /// The application's pool.
    pool: SqlitePool,
    /// What the store's own connections are opened with.
    options: SqliteConnectOptions,
    /// Connections for plain reads, opened when first used.
    readers: SqlitePool,
    writer: Writer,
    /// Whether the last claim brought something.
    found_last_time: AtomicBool,
    /// The database's time when this process last had the write lock, as far as is noted.
    locked_at: Arc<AtomicI64>,
    schema: Schema,
}

impl SqliteStore {
    /// Takes the file and its options from the application's pool.
    ///
    /// # Errors
    ///
    /// [`Error::BadUrl`] for a database in memory.
    pub(crate) fn new(pool: &SqlitePool, schema: Schema) -> Result<Self> {
        let options = pool.connect_options();
        if is_in_memory(&options) {
            return Err(Error::BadUrl {
                url: format!("sqlite:{}", options.get_filename().display()),
                problem: "a database in memory belongs to one connection: every other one would \
                          get an empty database of its own; use a file, as in \"sqlite:jobs.db\""
                    .to_owned(),
            });
        }
        let options = own_options(&options);
        let readers = SqlitePoolOptions::new()
            .max_connections(4)
            .min_connections(0)
            .acquire_timeout(PATIENCE)
            .test_before_acquire(false)
            .connect_lazy_with(options.clone());
        let writer = Writer::new(&options, verbs(&schema));
        Ok(Self {
            pool: pool.clone(),
            options,
            readers,
            writer,
            found_last_time: AtomicBool::new(false),
            locked_at: Arc::new(AtomicI64::new(i64::MIN)),
            schema,
        })
    }

    /// Statement text for this schema.
    fn sql(&self, text: &'static str) -> SqlStr {
        sql(&self.schema, text)
    }

    /// A connection for plain reads.
    async fn reader(&self) -> sqlx::Result<PoolConnection<Sqlite>> {
        self.readers.acquire().await
    }

    /// Does `work` in a transaction that holds the write lock; see [`Writer::write`].
    async fn write<T, W>(&self, work: W) -> sqlx::Result<T>
    where
        T: Send + 'static,
        W: AsyncFnOnce(&mut Locked) -> sqlx::Result<T> + Send + 'static,
    {
        self.writer.write(work).await
    }
}

/// Whether a connection would open a database that no other connection sees.
fn is_in_memory(options: &SqliteConnectOptions) -> bool {
    let file = options.get_filename();
    // SQLite reads a name that begins with `file:` as a URI.
    let uri = file.to_str().filter(|name| name.starts_with("file:"));
    file == Path::new("")
        || file == Path::new(":memory:")
        || uri.is_some_and(|uri| {
            uri.starts_with("file::memory:")
                || uri.contains("mode=memory")
                || uri.contains("vfs=memdb")
        })
        || options
            .clone()
            // The driver panics when it makes a URL of some file names; only the rest is wanted.
            .filename("jobs.db")
            .to_url_lossy()
            .query_pairs()
            .any(|(key, value)| matches!((&*key, &*value), ("mode", "memory") | ("vfs", "memdb")))
}

/// The options of the store's own connections.
///
/// `synchronous` stays as the application set it; SQLite's default keeps every commit.
fn own_options(options: &SqliteConnectOptions) -> SqliteConnectOptions {
    options
        .clone()
        .journal_mode(SqliteJournalMode::Wal)
        // Connections that share a cache lock each other out of tables, for reading too.
        .shared_cache(false)
        .busy_timeout(Duration::from_secs(10))
        // A claim's rows must not wait for the reader while the write lock is held.
        .row_buffer_size(1_000)
}

/// Statement text for a schema; texts are written for the default one and say `now_us()` for the
/// clock.
fn sql(schema: &Schema, text: &'static str) -> SqlStr {
    let mut text = text.replace("now_us()", SQLITE_NOW);
    if schema.as_str() != Schema::DEFAULT {
        text = text.replace("jobq_", &format!("{}_", schema.as_str()));
    }
    // The name was checked when the schema was made: letters, digits and '_' only.
    AssertSqlSafe(text).into_sql_str()
}

/// What the writing connection is taught: temporary views, of which each row that is inserted does
/// something to the one job that it names.
fn verbs(schema: &Schema) -> Vec<SqlStr> {
    let verbs = [
        claim::DO_LEASE,
        settle::DO_FINISH,
        settle::DO_REQUEUE,
        settle::DO_BURY,
        sweep::DO_MOVE,
        sweep::DO_PRUNE,
        look::DO_REDRIVE,
        keys::DO_GRANT,
        keys::DO_UNGRANT,
        keys::DO_PUT_ASIDE,
    ];
    verbs.into_iter().map(|verb| sql(schema, verb)).collect()
}

/// A list or table as the JSON text that a statement takes apart again.
fn json(list: impl serde::Serialize) -> String {
    serde_json::to_string(&list).expect("numbers and text always make JSON")
}

/// SQLite's result code, without its extension.
fn code(error: &sqlx::Error) -> Option<u32> {
    extended_code(error).map(|code| code & 0xff)
}

fn extended_code(error: &sqlx::Error) -> Option<u32> {
    match error {
        sqlx::Error::Database(error) => error.code()?.parse().ok(),
        _ => None,
    }
}

/// Whether somebody else was in the way: nothing was done, and the same may succeed later.
///
/// Busy (5), locked (6), and a lost race for the start of a read (15).
fn is_busy(error: &sqlx::Error) -> bool {
    matches!(code(error), Some(5 | 6 | 15))
}

/// Names what failed on a connection of the caller's.
fn on_callers(action: &'static str) -> impl FnOnce(sqlx::Error) -> Error {
    /// The transaction has read, and somebody has written since: it can never write any more.
    const BUSY_SNAPSHOT: u32 = 517;
    move |source| match extended_code(&source) {
        Some(BUSY_SNAPSHOT) => Error::Serialization(source),
        _ => Error::database(action)(source),
    }
}

/// Runs one operation under the time limit and names it in errors.
async fn within<T>(
    action: &'static str,
    work: impl Future<Output = sqlx::Result<T>> + Send,
) -> Result<T> {
    match tokio::time::timeout(LIMIT, work).await {
        Ok(done) => done.map_err(Error::database(action)),
        Err(_) => Err(Error::Timeout { action, after: LIMIT }),
    }
}

/// A value of whatever type was written, as the type asked for: SQLite's columns take anything.
fn get<'r, T: Decode<'r, Sqlite>>(row: &'r SqliteRow, column: &str) -> sqlx::Result<T> {
    row.try_get_unchecked(column)
}

/// A number that counts something.
fn count(row: &SqliteRow, column: &str) -> sqlx::Result<u32> {
    let number: i64 = get(row, column)?;
    Ok(u32::try_from(number.max(0)).unwrap_or(u32::MAX))
}

impl Store for SqliteStore {
    fn schema(&self) -> &Schema {
        &self.schema
    }

    fn database(&self) -> &'static str {
        "SQLite"
    }

    fn idle_poll(&self) -> Duration {
        Duration::from_millis(500)
    }

    fn migrate(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.migrate())
    }

    fn check(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.check())
    }

    fn insert(&self, jobs: Vec<CheckedJob>) -> BoxFuture<'_, Result<Vec<Enqueued>>> {
        Box::pin(self.insert(jobs))
    }

    fn open_session<'a>(&'a self, session: &'a NewSession) -> BoxFuture<'a, Result<()>> {
        Box::pin(within("open a session", self.open_session(session)))
    }

    fn close_session(&self, session: SessionId) -> BoxFuture<'_, Result<()>> {
        Box::pin(within("close a session", self.close_session(session)))
    }

    fn pulse(&self) -> BoxFuture<'static, Result<Box<dyn Pulse>>> {
        let options = self.options.clone().busy_timeout(ONE_TRY);
        let schema = self.schema.clone();
        Box::pin(async move {
            let connect = SqliteConnection::connect_with(&options);
            let connection = within("connect for heartbeats", connect).await?;
            Ok(Box::new(SqlitePulse { connection, schema }) as Box<dyn Pulse>)
        })
    }

    fn claim<'a>(&'a self, claim: &'a Claim) -> BoxFuture<'a, Result<Claimed>> {
        Box::pin(within("claim jobs", self.claim(claim)))
    }

    fn pass_on<'a>(&'a self, keys: &'a [String]) -> BoxFuture<'a, Result<u64>> {
        Box::pin(within("pass keys on", self.pass_on(keys)))
    }

    fn next_due<'a>(
        &'a self,
        queues: &'a [String],
        kinds: &'a [String],
    ) -> BoxFuture<'a, Result<Option<Duration>>> {
        Box::pin(within("look for the next due job", self.next_due(queues, kinds)))
    }

    fn held(&self, session: SessionId) -> BoxFuture<'_, Result<Vec<HeldJob>>> {
        Box::pin(within("list a session's jobs", async move {
            self.abandoned(&[session], false, u32::MAX).await
        }))
    }

    fn isolate(&self, lease: Lease) -> BoxFuture<'_, Result<bool>> {
        Box::pin(within("isolate a job", self.isolate(lease)))
    }

    fn settle<'a>(&'a self, settlements: &'a [Settlement]) -> BoxFuture<'a, Result<Vec<Settled>>> {
        Box::pin(within("settle jobs", self.settle(settlements)))
    }

    fn take_duty<'a>(
        &'a self,
        name: &'static str,
        holder: SessionId,
        span: Duration,
    ) -> BoxFuture<'a, Result<Option<String>>> {
        Box::pin(within("take a duty", self.take_duty(name, holder, span)))
    }

    fn duty_notes<'a>(&'a self, name: &'static str) -> BoxFuture<'a, Result<String>> {
        Box::pin(within("read a duty's notes", self.duty_notes(name)))
    }

    fn note_duty<'a>(
        &'a self,
        name: &'static str,
        holder: SessionId,
        notes: &'a str,
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(within("write a duty's notes", self.note_duty(name, holder, notes)))
    }

    fn close_expired_sessions(&self) -> BoxFuture<'_, Result<Vec<SessionId>>> {
        Box::pin(within("close expired sessions", self.close_expired_sessions()))
    }

    fn abandoned<'a>(
        &'a self,
        closed: &'a [SessionId],
        orphans: bool,
        limit: u32,
    ) -> BoxFuture<'a, Result<Vec<HeldJob>>> {
        Box::pin(within("find abandoned jobs", self.abandoned(closed, orphans, limit)))
    }

    fn forget_sessions<'a>(&'a self, closed: &'a [SessionId]) -> BoxFuture<'a, Result<()>> {
        Box::pin(within("forget closed sessions", self.forget_sessions(closed)))
    }

    fn live_sessions(&self) -> BoxFuture<'_, Result<Vec<LiveSession>>> {
        Box::pin(within("list live sessions", self.live_sessions()))
    }

    fn now(&self) -> BoxFuture<'_, Result<Timestamp>> {
        Box::pin(within("read the clock", self.now()))
    }

    fn horizon(&self) -> BoxFuture<'_, Result<Horizon>> {
        Box::pin(within("read the horizon", self.horizon()))
    }

    fn unleased<'a>(
        &'a self,
        queue: &'a str,
        band: i16,
        from: Floor,
        to: Floor,
        limit: u32,
    ) -> BoxFuture<'a, Result<Vec<UnleasedJob>>> {
        Box::pin(within("look for late jobs", self.unleased(queue, band, from, to, limit)))
    }

    fn shift<'a>(&'a self, jobs: &'a [UnleasedJob], shift: Shift) -> BoxFuture<'a, Result<u64>> {
        Box::pin(within("move late jobs", self.shift(jobs, shift)))
    }

    fn unpark<'a>(
        &'a self,
        queues: &'a [String],
        kinds: &'a [String],
        limit: u32,
    ) -> BoxFuture<'a, Result<u64>> {
        Box::pin(within("unpark jobs", self.unpark(queues, kinds, limit)))
    }

    fn take_expired(&self, session: SessionId, limit: u32) -> BoxFuture<'_, Result<Vec<HeldJob>>> {
        Box::pin(within("take expired jobs", self.take_expired(session, limit)))
    }

    fn prune(&self, limit: u32) -> BoxFuture<'_, Result<u64>> {
        Box::pin(within("prune finished jobs", self.prune(limit)))
    }

    fn prune_keys(
        &self,
        after: Option<UniqueKey>,
        limit: u32,
    ) -> BoxFuture<'_, Result<Option<UniqueKey>>> {
        Box::pin(within("prune unique keys", self.prune_keys(after, limit)))
    }

    fn stale_grants<'a>(
        &'a self,
        after: Option<&'a str>,
        limit: u32,
    ) -> BoxFuture<'a, Result<StaleGrants>> {
        Box::pin(within("look for keys to pass on", self.stale_grants(after, limit)))
    }

    fn blocked_keys<'a>(
        &'a self,
        after: Option<&'a str>,
        limit: u32,
    ) -> BoxFuture<'a, Result<Vec<BlockedKey>>> {
        Box::pin(self.blocked_keys(after, limit))
    }

    fn unblock_key<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<bool>> {
        Box::pin(within("unblock a key", self.unblock_key(key)))
    }

    fn pause<'a>(
        &'a self,
        scope: PauseScope,
        name: &'a str,
        reason: Option<&'a str>,
    ) -> BoxFuture<'a, Result<bool>> {
        Box::pin(within("pause", self.pause(scope, name, reason)))
    }

    fn resume<'a>(&'a self, scope: PauseScope, name: &'a str) -> BoxFuture<'a, Result<bool>> {
        Box::pin(within("resume", self.resume(scope, name)))
    }

    fn pauses(&self) -> BoxFuture<'_, Result<Vec<Pause>>> {
        Box::pin(async move { read_pauses(within("list pauses", self.pauses()).await?) })
    }

    fn limit_queue<'a>(
        &'a self,
        queue: &'a str,
        limit: &'a QueueLimit,
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(within("limit a queue", self.limit_queue(queue, limit)))
    }

    fn unlimit_queue<'a>(&'a self, queue: &'a str) -> BoxFuture<'a, Result<bool>> {
        Box::pin(within("end a queue's limit", self.unlimit_queue(queue)))
    }

    fn limits(&self) -> BoxFuture<'_, Result<Vec<LimitedQueue>>> {
        Box::pin(within("list limits", self.limits()))
    }

    fn job(&self, id: JobId) -> BoxFuture<'_, Result<Lookup>> {
        Box::pin(self.job(id))
    }

    fn counts(&self) -> BoxFuture<'_, Result<Vec<QueueCount>>> {
        Box::pin(self.counts())
    }

    fn dead<'a>(
        &'a self,
        filter: &'a DeadFilter,
        limit: u32,
    ) -> BoxFuture<'a, Result<Vec<DeadJob>>> {
        Box::pin(self.dead(filter, limit))
    }

    fn cancel(&self, id: JobId) -> BoxFuture<'_, Result<(CancelReply, Option<String>)>> {
        Box::pin(within("cancel a job", self.cancel(id)))
    }

    fn redrive<'a>(
        &'a self,
        filter: &'a DeadFilter,
        after: JobId,
        limit: u32,
    ) -> BoxFuture<'a, Result<Redriven>> {
        Box::pin(within("redrive jobs", self.redrive(filter, after, limit)))
    }

    /// SQLite sends nothing between processes; inside one, an enqueue pokes.
    fn listen(&self) -> BoxFuture<'_, Result<Option<Box<dyn Listener>>>> {
        Box::pin(std::future::ready(Ok(None)))
    }
}

struct SqlitePulse {
    connection: SqliteConnection,
    schema: Schema,
}

impl Pulse for SqlitePulse {
    fn beat<'a>(&'a mut self, beat: &'a Beat) -> BoxFuture<'a, Result<BeatReply>> {
        Box::pin(async move { self.beat(beat).await.map_err(Error::database("extend the lease")) })
    }
}

impl SqlitePulse {
    /// Blocked only if nobody at all wrote meanwhile: then nobody closed the session either. While
    /// others get in it tries again.
    async fn beat(&mut self, beat: &Beat) -> sqlx::Result<BeatReply> {
        let patience_ends = Instant::now() + BEAT_PATIENCE;
        loop {
            let before = data_version(&mut self.connection).await?;
            match claim::beat(&mut self.connection, &self.schema, beat).await {
                Err(error) if is_busy(&error) && Instant::now() < patience_ends => {}
                reply => return reply,
            }
            if data_version(&mut self.connection).await? == before {
                return Ok(BeatReply::Blocked);
            }
        }
    }
}

/// A number that changes with every commit of another connection.
async fn data_version(connection: &mut SqliteConnection) -> sqlx::Result<i64> {
    sqlx::query_scalar("pragma data_version").fetch_one(connection).await
}
