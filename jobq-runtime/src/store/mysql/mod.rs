//! MySQL 8 and MariaDB 10.6, and newer.
//!
//! Enqueueing uses the application's connections as they are; the runtime's own operations use a
//! few connections of their own with their own settings: READ COMMITTED (above it, a claim's locks
//! on the gaps between rows make an enqueue wait), a short patience for locks, and nothing that the
//! application or an administrator may have set.
//!
//! Neither database has arrays, and each statement costs a round trip. So what is sent on our own
//! connections is text, several statements at once, with lists of numbers in it, and with every
//! other value as a literal that reads the same whatever the settings (see [`literal`]). Plans must
//! not depend on statistics, which may be from when the table was empty: every statement names its
//! index, or is about one row by its key.
//!
//! Times are microseconds since 1970, of the server's UTC clock at the beginning of the statement.

mod claim;
mod due;
mod insert;
mod keys;
mod limit;
mod look;
mod pause;
mod settle;
mod setup;
mod sweep;
mod unique;

use std::fmt::Write;
use std::ops::{Deref, DerefMut};
use std::time::Duration;

use jobq_core::job::{JobId, Lease, SessionId};
use jobq_core::pause::PauseScope;
use jobq_core::time::Timestamp;
use jobq_migrations::{MYSQL_INSERT_NOW, MYSQL_NOW};
use sqlx::mysql::{
    MySql, MySqlConnectOptions, MySqlConnection, MySqlDatabaseError, MySqlPool, MySqlPoolOptions,
    MySqlRow,
};
use sqlx::{AssertSqlSafe, Connection, Decode, Executor, Row, SqlSafeStr, SqlStr, Type};

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

/// The longest the runtime waits for one operation; the server gives up a little earlier.
const PATIENCE: Duration = Duration::from_secs(15);

/// What our own connections are set to. Comments that begin with a version are for one of the two
/// databases only.
///
/// A lock is waited for 2 s at most: only claims, heartbeats and the closing of sessions wait for
/// each other at all. Newer versions of MariaDB refuse to lock a row that was written since the
/// statement began; we want the row as it is. With `mrr` MySQL reads tens of thousands of keys ahead
/// to learn whether there is one row; on index conditions see `due`.
pub(crate) const OWN_SETTINGS: &str = "
    set session transaction isolation level read committed;
    set session transaction read write;
    set session autocommit = 1,
        time_zone = '+00:00',
        sql_mode = 'STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION',
        optimizer_switch = 'default,mrr=off,index_condition_pushdown=off',
        innodb_lock_wait_timeout = 2,
        lock_wait_timeout = 10,
        sql_safe_updates = 0,
        completion_type = 'NO_CHAIN',
        sql_select_limit = 18446744073709551615
        /*!80000 , max_execution_time = 14000, information_schema_stats_expiry = 0 */
        /*M!100600 , max_statement_time = 14 */
        /*M!110602 , innodb_snapshot_isolation = off */";

/// What those of the pool are set to besides, where a transaction may take several texts: if we stop
/// in the middle of one (the process is paused, the network cut), the server rolls it back before
/// anybody has waited long. By itself it would keep the locks for hours.
const POOL_SETTINGS: &str = "
    set session wait_timeout = 14,
        net_read_timeout = 14,
        net_write_timeout = 14";

/// What those are set to besides, on which people ask: to count ten million jobs may take long. But
/// the server does not hear that whoever has asked has gone, and goes on.
const QUESTION_SETTINGS: &str = "
    set session sql_big_selects = 1
        /*!80000 , max_execution_time = 60000 */
        /*M!100600 , max_statement_time = 60 */";

/// A connection that was idle for longer is not used any more: the server may be about to close it.
const FRESH: Duration = Duration::from_secs(7);

/// Fails unless the statement before it has written so many rows.
fn written(rows: usize) -> String {
    check(&format!("row_count() = {rows}"))
}

/// Fails unless a condition holds.
///
/// MariaDB may answer a write that was killed (`KILL QUERY`, a time limit) with success and no rows. If
/// what comes after it were committed, a job would be in two tables, or run without being leased.
fn check(condition: &str) -> String {
    format!("select case when {condition} then 1 else (select 1 union all select 2) end as checked")
}

/// How a [`check`] fails: a subquery has more than one row.
const CHECK_FAILED: u16 = 1242;

/// What a write has done that should have written and has not.
fn killed() -> sqlx::Error {
    sqlx::Error::Protocol("the server says that a statement succeeded that it has not run".into())
}

/// The most ids in one list: MariaDB makes a join of a longer one.
const LIST: usize = 500;

/// jobq's tables in a MySQL or MariaDB database.
pub(crate) struct MysqlStore {
    /// The application's pool.
    pool: MySqlPool,
    /// The runtime's own connections, opened when first used.
    own: MySqlPool,
    /// Some for what people ask, and one for counting: no claim has to wait behind that.
    questions: MySqlPool,
    counting: MySqlPool,
    schema: Schema,
    met: claim::Met,
}

impl MysqlStore {
    pub(crate) fn new(pool: MySqlPool, schema: Schema) -> Self {
        let options = own_options(&pool.connect_options());
        let own =
            Self::pool_of(4, &[OWN_SETTINGS, POOL_SETTINGS]).connect_lazy_with(options.clone());
        let asked = |size| {
            Self::pool_of(size, &[OWN_SETTINGS, POOL_SETTINGS, QUESTION_SETTINGS])
                .connect_lazy_with(options.clone())
        };
        let (questions, counting) = (asked(2), asked(1));
        Self { pool, own, questions, counting, schema, met: claim::Met::default() }
    }

    fn pool_of(connections: u32, settings: &'static [&'static str]) -> MySqlPoolOptions {
        MySqlPoolOptions::new()
            .max_connections(connections)
            .min_connections(0)
            .acquire_timeout(PATIENCE)
            .idle_timeout(FRESH)
            .test_before_acquire(false)
            // The pool's own look at idle connections waits for a thread that has time for it.
            .before_acquire(|_, idle| Box::pin(std::future::ready(Ok(idle.idle_for < FRESH))))
            .after_connect(move |connection, _| {
                Box::pin(async move {
                    for some in settings {
                        connection.execute(*some).await?;
                    }
                    Ok(())
                })
            })
    }

    /// One of the runtime's own connections.
    async fn own(&self) -> sqlx::Result<Checkout> {
        Ok(Checkout(Some(self.own.acquire().await?)))
    }

    /// Sends statements on a connection of our own and returns their rows.
    async fn rows(&self, text: &str) -> sqlx::Result<Vec<MySqlRow>> {
        self.rows_on(self.own().await?, text).await
    }

    /// The same for what people ask.
    async fn answer(&self, text: &str) -> sqlx::Result<Vec<MySqlRow>> {
        self.rows_on(Checkout(Some(self.questions.acquire().await?)), text).await
    }

    /// The same for counting.
    async fn count(&self, text: &str) -> sqlx::Result<Vec<MySqlRow>> {
        self.rows_on(Checkout(Some(self.counting.acquire().await?)), text).await
    }

    async fn rows_on(&self, mut connection: Checkout, text: &str) -> sqlx::Result<Vec<MySqlRow>> {
        let rows = rows(&mut connection, &self.schema, text).await?;
        connection.hand_back();
        Ok(rows)
    }
}

/// Opens a connection that is set up as our own are and belongs to no pool.
async fn apart(options: MySqlConnectOptions) -> sqlx::Result<MySqlConnection> {
    let mut connection = MySqlConnection::connect_with(&options).await?;
    connection.execute(OWN_SETTINGS).await?;
    Ok(connection)
}

/// The options of the runtime's own connections.
pub(crate) fn own_options(options: &MySqlConnectOptions) -> MySqlConnectOptions {
    options
        .clone()
        .charset("utf8mb4")
        .set_names(true)
        .timezone(Some("+00:00".to_owned()))
        .pipes_as_concat(false)
        .no_engine_substitution(false)
}

/// Statement text for a schema; texts are written for the default one and say `now_us()` for the
/// clock.
pub(crate) fn sql(schema: &Schema, text: &str) -> SqlStr {
    let mut text = text.replace("insert_now_us()", MYSQL_INSERT_NOW).replace("now_us()", MYSQL_NOW);
    if schema.as_str() != Schema::DEFAULT {
        text = text.replace("jobq_", &format!("{}_", schema.as_str()));
    }
    // Numbers, literals, and the schema's name, which was checked when the schema was made.
    AssertSqlSafe(text).into_sql_str()
}

/// Sends statements as text and returns the rows of all of them.
async fn rows(
    connection: &mut MySqlConnection,
    schema: &Schema,
    text: &str,
) -> sqlx::Result<Vec<MySqlRow>> {
    sqlx::raw_sql(sql(schema, text)).fetch_all(connection).await
}

/// Sends statements as text and returns how many rows they wrote.
async fn execute(
    connection: &mut MySqlConnection,
    schema: &Schema,
    text: &str,
) -> sqlx::Result<u64> {
    Ok(sqlx::raw_sql(sql(schema, text)).execute(connection).await?.rows_affected())
}

/// Numbers as a list, for `in (…)`.
pub(crate) fn list(numbers: impl IntoIterator<Item = i64>) -> String {
    let mut text = String::new();
    for number in numbers {
        let separator = if text.is_empty() { "" } else { ", " };
        write!(text, "{separator}{number}").expect("text grows");
    }
    // An empty list is a syntax error; no id is negative.
    if text.is_empty() { "-1".to_owned() } else { text }
}

/// Texts as a list, for `in (…)`.
fn literals<'t>(texts: impl IntoIterator<Item = &'t str>) -> String {
    let texts: Vec<String> = texts.into_iter().map(literal).collect();
    if texts.is_empty() { "null".to_owned() } else { texts.join(", ") }
}

/// Any text as a literal: names as they are, the rest as hexadecimal digits, in which no setting
/// and no text can mean anything else, and in which no table's name is found.
fn literal(text: &str) -> String {
    let plain = text.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.:/".contains(&b));
    if plain && !text.contains("jobq_") {
        return format!("'{text}'");
    }
    let mut literal = String::with_capacity(text.len() * 2 + 12);
    literal.push_str("_utf8mb4 x'");
    for byte in text.bytes() {
        write!(literal, "{byte:02x}").expect("text grows");
    }
    literal.push('\'');
    literal
}

/// A literal, or null.
fn literal_or_null(text: Option<&str>) -> String {
    text.map_or_else(|| "null".to_owned(), literal)
}

/// A list as the JSON text that is stored.
fn json(list: impl serde::Serialize) -> String {
    serde_json::to_string(&list).expect("numbers and text always make JSON")
}

/// The number of a server's error.
pub(super) fn number(error: &sqlx::Error) -> Option<u16> {
    match error {
        sqlx::Error::Database(error) => {
            Some(error.try_downcast_ref::<MySqlDatabaseError>()?.number())
        }
        _ => None,
    }
}

/// The whole transaction was rolled back for the sake of another one.
const DEADLOCK: u16 = 1213;
/// MariaDB: the row was written after the snapshot.
const CHANGED_SINCE_SNAPSHOT: u16 = 1020;

/// Does a whole transaction again as long as the server ends it for the sake of another one.
async fn again<T, F>(transaction: impl FnMut() -> F) -> sqlx::Result<T>
where
    F: Future<Output = sqlx::Result<T>>,
{
    super::again(is_conflict, transaction).await
}

fn is_conflict(error: &sqlx::Error) -> bool {
    matches!(number(error), Some(DEADLOCK | CHANGED_SINCE_SNAPSHOT))
}

/// Names what failed on a connection of the caller's.
fn on_callers(action: &'static str) -> impl FnOnce(sqlx::Error) -> Error {
    move |source| {
        if is_conflict(&source) {
            Error::Serialization(source)
        } else {
            Error::database(action)(source)
        }
    }
}

/// A connection that goes back to its pool only if it is handed back.
///
/// When an operation fails or its future is dropped, the connection is closed: nothing is known
/// about the state it is in.
struct Checkout(Option<sqlx::pool::PoolConnection<MySql>>);

impl Checkout {
    /// Returns the connection to its pool.
    fn hand_back(mut self) {
        self.0.take();
    }
}

impl Deref for Checkout {
    type Target = MySqlConnection;
    fn deref(&self) -> &MySqlConnection {
        self.0.as_ref().expect("taken only by hand_back and drop")
    }
}

impl DerefMut for Checkout {
    fn deref_mut(&mut self) -> &mut MySqlConnection {
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

/// A value of a row.
fn get<'r, T: Decode<'r, MySql> + Type<MySql>>(row: &'r MySqlRow, column: &str) -> sqlx::Result<T> {
    row.try_get(column)
}

/// A number that counts something.
fn count(row: &MySqlRow, column: &str) -> sqlx::Result<u32> {
    let number: i64 = get(row, column)?;
    Ok(u32::try_from(number.max(0)).unwrap_or(u32::MAX))
}

/// A number that says yes or no.
fn is_set(row: &MySqlRow, column: &str) -> sqlx::Result<bool> {
    Ok(get::<i64>(row, column)? != 0)
}

impl Store for MysqlStore {
    fn schema(&self) -> &Schema {
        &self.schema
    }

    fn database(&self) -> &'static str {
        "MySQL"
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
        let options = own_options(&self.pool.connect_options());
        let schema = self.schema.clone();
        Box::pin(async move {
            let connection = within("connect for heartbeats", apart(options)).await?;
            Ok(Box::new(MysqlPulse { connection, schema }) as Box<dyn Pulse>)
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

    /// MySQL sends nothing between processes; inside one, an enqueue pokes.
    fn listen(&self) -> BoxFuture<'_, Result<Option<Box<dyn Listener>>>> {
        Box::pin(std::future::ready(Ok(None)))
    }
}

struct MysqlPulse {
    connection: MySqlConnection,
    schema: Schema,
}

impl Pulse for MysqlPulse {
    fn beat<'a>(&'a mut self, beat: &'a Beat) -> BoxFuture<'a, Result<BeatReply>> {
        Box::pin(async move {
            claim::beat(&mut self.connection, &self.schema, beat)
                .await
                .map_err(Error::database("extend the lease"))
        })
    }
}

/// What the plan tests explain.
#[cfg(test)]
pub(crate) mod statements {
    pub(crate) use super::claim::{Wanted, lease_statement, look_statement, next_due_statement};
    pub(crate) use super::keys::{
        behind_statement, lock_waiting_statement, next_statement, stale_statement,
        take_grants_statement,
    };
    pub(crate) use super::limit::{LIMITED, lock_limit_statement, slots_statements};
    pub(crate) use super::look::redrivable_statement;
    pub(crate) use super::pause::PAUSED;
    pub(crate) use super::settle::{finish_statement, forget_statement, held_statement};
    pub(crate) use super::sweep::{
        expired_statement, expiring_statement, parked_statement, unleased_statement,
    };
    pub(crate) use super::unique::{
        held_keys_statement, keys_after_statement, lock_keys_statement,
    };
    pub(crate) use super::{OWN_SETTINGS, list, own_options, sql};
}
