//! PostgreSQL 15 and newer.
//!
//! Enqueueing and looking use the application's pool; the runtime's own operations use a few
//! connections of their own with their own settings: READ COMMITTED (SKIP LOCKED needs it),
//! no sequential scans and generic plans (a plan made while the table was empty must still be
//! right when it is full), and time limits. Times are compared with `statement_timestamp()`, which
//! an index can use, and written with `clock_timestamp()`.

mod claim;
mod insert;
mod keys;
mod limit;
mod look;
mod pause;
mod rules;
mod settle;
mod setup;
mod sweep;
mod unique;

use std::ops::{Deref, DerefMut};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use jobq_core::job::{JobId, Lease, SessionId};
use jobq_core::pause::PauseScope;
use jobq_core::time::Timestamp;
use sqlx::encode::IsNull;
use sqlx::postgres::types::Oid;
use sqlx::postgres::{
    PgArgumentBuffer, PgConnectOptions, PgConnection, PgHasArrayType, PgListener, PgPool,
    PgPoolOptions, PgTypeInfo, PgValueFormat, PgValueRef, Postgres,
};
use sqlx::{AssertSqlSafe, Connection, Decode, Encode, SqlSafeStr, SqlStr, Type};

use super::{
    AttemptInfo, Beat, BeatReply, BlockedKey, CancelReply, Claim, Claimed, DeadFilter, DeadJob,
    HeldJob, Horizon, Listener, LiveSession, Lookup, NewSession, Pause, Paused, Pulse, QueueCount,
    Redriven, Schema, Settled, Settlement, Shift, StaleGrants, Store, UnleasedJob, WakeUp,
    read_pauses,
};
use crate::enqueue::Enqueued;
use crate::error::{Error, Result, is_connection_loss};
use crate::handler::BoxFuture;
use crate::job::CheckedJob;
use crate::limit::{LimitedQueue, QueueLimit};
use crate::store::Floor;
use crate::unique::UniqueKey;

use rules::Remembered;
use settle::complete_on;

/// What the plan tests explain.
#[cfg(test)]
pub(crate) mod statements {
    pub(crate) use super::claim::{
        CLAIM, CLAIM_LIMITED, CLAIM_LIMITED_WITH_KEYS, CLAIM_WITH_KEYS, EXTEND, HELD, NEXT_DUE,
        Reply, claim_on,
    };
    pub(crate) use super::keys::{
        Claimant, DECIDE_GRANTS, LOCK_GRANTS, PASS_ON, STALE_GRANTS, TAKE_GRANTS, turns_on,
    };
    pub(crate) use super::limit::{LOCK_LIMITS, SLOTS};
    pub(crate) use super::look::REVIVE_DEAD;
    pub(crate) use super::own_options;
    pub(crate) use super::rules::{RULES, Rules};
    pub(crate) use super::settle::{
        BURY, FINISH, FINISH_AND_LOCK, LOOK_AT_CRASHED, LOOK_AT_ENDED, LOOK_AT_JOBS, REQUEUE,
    };
    pub(crate) use super::sweep::{PRUNE, SHIFT, TAKE_EXPIRED, UNLEASED, UNPARK};
    pub(crate) use super::unique::{KEYS_AFTER, LOCK, LOOK, OWN, PRUNE_KEYS, TAKE, TAKE_OVER};
}

/// The longest the runtime waits for one operation; the server gives up a little earlier.
const PATIENCE: Duration = Duration::from_secs(15);

/// After this the server ends a statement of ours, in milliseconds: a little before we stop waiting.
const STATEMENT_TIMEOUT: &str = "14000";

/// jobq's tables in a PostgreSQL database.
pub(crate) struct PostgresStore {
    /// The application's pool.
    pool: PgPool,
    /// The runtime's own connections, opened when first used.
    own: PgPool,
    /// Whether a claim has met a job with a key: then the next ones grant keys.
    meets_keys: AtomicBool,
    /// What claims go by, as long as it has not changed.
    rules: Remembered,
    schema: Schema,
}

impl PostgresStore {
    pub(crate) fn new(pool: PgPool, schema: Schema) -> Self {
        let own = PgPoolOptions::new()
            .max_connections(4)
            .min_connections(0)
            .acquire_timeout(PATIENCE)
            .test_before_acquire(false)
            .connect_lazy_with(own_options(&pool.connect_options()));
        Self { pool, own, meets_keys: AtomicBool::new(false), rules: Remembered::default(), schema }
    }

    /// Statement text for this schema.
    fn sql(&self, text: &'static str) -> SqlStr {
        sql(&self.schema, text)
    }

    /// One of the runtime's own connections.
    async fn own(&self) -> sqlx::Result<Checkout> {
        Ok(Checkout(Some(self.own.acquire().await?)))
    }

    /// A connection of the application's pool.
    async fn shared(&self) -> sqlx::Result<Checkout> {
        Ok(Checkout(Some(self.pool.acquire().await?)))
    }
}

/// The options of the runtime's own connections.
pub(crate) fn own_options(options: &PgConnectOptions) -> PgConnectOptions {
    options.clone().application_name("jobq").options([
        ("default_transaction_isolation", "read committed"),
        ("default_transaction_read_only", "off"),
        ("enable_seqscan", "off"),
        // It has no order: of a page of 500 it would read, and sort, all that comes after.
        ("enable_bitmapscan", "off"),
        ("plan_cache_mode", "force_generic_plan"),
        ("jit", "off"),
        ("statement_timeout", STATEMENT_TIMEOUT),
        ("idle_in_transaction_session_timeout", STATEMENT_TIMEOUT),
        ("tcp_keepalives_idle", "10"),
        ("tcp_keepalives_interval", "5"),
        ("tcp_keepalives_count", "3"),
    ])
}

/// Statement text for a schema; texts are written for the default one.
fn sql(schema: &Schema, text: &'static str) -> SqlStr {
    if schema.as_str() == Schema::DEFAULT {
        text.into_sql_str()
    } else {
        // The name was checked when the schema was made: letters, digits and '_' only. It may be a
        // word of SQL.
        AssertSqlSafe(text.replace("jobq.", &format!("\"{}\".", schema.as_str()))).into_sql_str()
    }
}

/// A connection that goes back to its pool only if it is handed back.
///
/// When an operation fails or its future is dropped, the connection is closed: nothing is known
/// about the state it is in.
struct Checkout(Option<sqlx::pool::PoolConnection<Postgres>>);

impl Checkout {
    /// Returns the connection to its pool.
    fn hand_back(mut self) {
        self.0.take();
    }
}

impl Deref for Checkout {
    type Target = PgConnection;
    fn deref(&self) -> &PgConnection {
        self.0.as_ref().expect("taken only by hand_back and drop")
    }
}

impl DerefMut for Checkout {
    fn deref_mut(&mut self) -> &mut PgConnection {
        self.0.as_mut().expect("taken only by hand_back and drop")
    }
}

impl Drop for Checkout {
    fn drop(&mut self) {
        if let Some(connection) = self.0.take() {
            drop(connection.detach());
        }
    }
}

/// Runs one operation under the time limit and names it in errors.
async fn within<T>(
    action: &'static str,
    work: impl Future<Output = sqlx::Result<T>> + Send,
) -> Result<T> {
    match tokio::time::timeout(PATIENCE, work).await {
        Ok(done) => done.map_err(Error::database(action)),
        Err(_) => Err(Error::Timeout { action, after: PATIENCE }),
    }
}

/// Does a whole transaction again as long as the server ends it for the sake of another one.
async fn again<T, F>(transaction: impl FnMut() -> F) -> sqlx::Result<T>
where
    F: Future<Output = sqlx::Result<T>>,
{
    super::again(is_conflict, transaction).await
}

/// A deadlock, or at REPEATABLE READ and above a row that was written after the snapshot.
fn is_conflict(error: &sqlx::Error) -> bool {
    let sqlx::Error::Database(error) = error else { return false };
    matches!(error.code().as_deref(), Some("40001" | "40P01"))
}

/// [`Timestamp`] as `timestamptz`: microseconds since 2000-01-01, infinities at the ends.
#[derive(Clone, Copy, Debug)]
struct Time(Timestamp);

/// 2000-01-01 in microseconds since 1970-01-01.
const POSTGRES_EPOCH: i64 = 946_684_800_000_000;

impl Type<Postgres> for Time {
    fn type_info() -> PgTypeInfo {
        PgTypeInfo::with_oid(Oid(1184))
    }
}

impl PgHasArrayType for Time {
    fn array_type_info() -> PgTypeInfo {
        PgTypeInfo::with_oid(Oid(1185))
    }
}

impl Encode<'_, Postgres> for Time {
    fn encode_by_ref(
        &self,
        buffer: &mut PgArgumentBuffer,
    ) -> std::result::Result<IsNull, sqlx::error::BoxDynError> {
        let micros = match self.0 {
            Timestamp::NEG_INFINITY | Timestamp::INFINITY => self.0.0,
            Timestamp(micros) => micros.saturating_sub(POSTGRES_EPOCH),
        };
        Encode::<Postgres>::encode(micros, buffer)
    }
}

impl Decode<'_, Postgres> for Time {
    fn decode(value: PgValueRef<'_>) -> std::result::Result<Self, sqlx::error::BoxDynError> {
        if value.format() != PgValueFormat::Binary {
            return Err("a timestamp in text form".into());
        }
        let micros = <i64 as Decode<Postgres>>::decode(value)?;
        Ok(Self(match micros {
            i64::MIN => Timestamp::NEG_INFINITY,
            i64::MAX => Timestamp::INFINITY,
            micros => Timestamp(micros.saturating_add(POSTGRES_EPOCH)),
        }))
    }
}

impl Store for PostgresStore {
    fn schema(&self) -> &Schema {
        &self.schema
    }

    fn database(&self) -> &'static str {
        "PostgreSQL"
    }

    fn idle_poll(&self) -> Duration {
        Duration::from_secs(1)
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
        let options = own_options(&self.pool.connect_options());
        let schema = self.schema.clone();
        Box::pin(async move {
            let connect = PgConnection::connect_with(&options);
            let connection = within("connect for heartbeats", connect).await?;
            Ok(Box::new(PostgresPulse { connection, schema }) as Box<dyn Pulse>)
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
        Box::pin(async move { self.abandoned(&[session], false, u32::MAX).await })
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
        Box::pin(self.abandoned(closed, orphans, limit))
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

    fn listen(&self) -> BoxFuture<'_, Result<Option<Box<dyn Listener>>>> {
        Box::pin(within("listen for wake-ups", async move {
            let pool = PgPoolOptions::new()
                .max_connections(1)
                .test_before_acquire(false)
                .connect_lazy_with(own_options(&self.pool.connect_options()));
            let mut listener = PgListener::connect_with(&pool).await?;
            listener.eager_reconnect(false);
            listener.listen(&channel(&self.schema)).await?;
            Ok(Some(Box::new(PostgresListener(listener)) as Box<dyn Listener>))
        }))
    }
}

/// The notification channel of a schema: two installations do not wake each other.
fn channel(schema: &Schema) -> String {
    format!("{}_wake", schema.as_str())
}

struct PostgresListener(PgListener);

impl Listener for PostgresListener {
    fn wait(&mut self) -> BoxFuture<'_, Result<WakeUp>> {
        Box::pin(async move {
            loop {
                let notification =
                    self.0.try_recv().await.map_err(Error::database("wait for a wake-up"))?.ok_or(
                        Error::Database {
                            action: "wait for a wake-up",
                            source: sqlx::Error::WorkerCrashed,
                        },
                    )?;
                // Anybody may send on the channel: what cannot be read is ignored.
                if let Some(wake_up) = parse_wake_up(notification.payload()) {
                    return Ok(wake_up);
                }
            }
        })
    }
}

/// Reads `band,run_after in microseconds,queue`.
fn parse_wake_up(text: &str) -> Option<WakeUp> {
    let mut parts = text.splitn(3, ',');
    Some(WakeUp {
        band: parts.next()?.parse().ok()?,
        run_after: Timestamp(parts.next()?.parse().ok()?),
        queue: parts.next()?.to_owned(),
    })
}

struct PostgresPulse {
    connection: PgConnection,
    schema: Schema,
}

impl Pulse for PostgresPulse {
    fn beat<'a>(&'a mut self, beat: &'a Beat) -> BoxFuture<'a, Result<BeatReply>> {
        Box::pin(async move {
            claim::beat(&mut self.connection, &self.schema, beat)
                .await
                .map_err(Error::database("extend the lease"))
        })
    }
}
