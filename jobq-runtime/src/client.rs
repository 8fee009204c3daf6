//! The way in: connect, migrate, enqueue, look, mend.

use std::sync::Arc;

use jobq_core::job::JobId;
use jobq_core::pause::PauseScope;
use jobq_core::payload::DEFAULT_LIMIT;
use jobq_core::queue::check_name;

use crate::enqueue::sealed::Sealed;
use crate::enqueue::{EnqueueTarget, Enqueued};
use crate::error::{Error, Result};
use crate::job::CheckedJob;
use crate::key;
use crate::limit::{LimitedQueue, QueueLimit};
use crate::store::{
    BlockedKey, CancelReply, DeadFilter, DeadJob, Lookup, Pause, QueueCount, Redriven, Schema,
    Store,
};

/// jobq in one database: enqueues jobs, shows and mends them, and is what a
/// [`Runtime`](crate::Runtime) runs on.
///
/// Cheap to clone; all clones share one pool.
#[derive(Clone)]
pub struct Client {
    store: Arc<dyn Store>,
    payload_limit: usize,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client")
            .field("database", &self.store.database())
            .field("schema", &self.store.schema().as_str())
            .finish_non_exhaustive()
    }
}

/// Settings of a [`Client`] that differ from the defaults.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    schema: Result<Schema, String>,
    payload_limit: usize,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self { schema: Ok(Schema::default()), payload_limit: DEFAULT_LIMIT }
    }
}

impl ClientOptions {
    /// The defaults: schema `jobq`, payloads up to 2 MiB.
    pub fn new() -> Self {
        Self::default()
    }

    /// Keeps the tables under another name, so that two applications can share a database: a
    /// PostgreSQL schema, or a prefix on the others. [`Schema::new`] says which names will do. Default:
    /// `jobq`.
    #[must_use]
    pub fn schema(mut self, name: &str) -> Self {
        self.schema = Schema::new(name).map_err(|_| name.to_owned());
        self
    }

    /// The largest payload taken, metadata and tags included, in bytes of JSON. Default: 2 MiB.
    #[must_use]
    pub fn payload_limit(mut self, bytes: usize) -> Self {
        self.payload_limit = bytes;
        self
    }

    /// Connects; see [`Client::connect`].
    ///
    /// # Errors
    ///
    /// As [`Client::connect`], and [`Error::BadOption`] for a schema name that cannot be used.
    pub async fn connect(self, url: &str) -> Result<Client> {
        let schema = self.checked_schema()?;
        let scheme = url.split(':').next().unwrap_or_default();
        let bad = |problem: &str| {
            Err(Error::BadUrl { url: without_password(url), problem: problem.to_owned() })
        };
        match scheme {
            #[cfg(feature = "postgres")]
            "postgres" | "postgresql" => {
                let store = connect_postgres(url, schema).await?;
                Ok(Client { store: Arc::new(store), payload_limit: self.payload_limit })
            }
            #[cfg(not(feature = "postgres"))]
            "postgres" | "postgresql" => {
                bad("this program was built without jobq's feature `postgres`; turn it on")
            }
            #[cfg(feature = "mysql")]
            "mysql" | "mariadb" => {
                let store = connect_mysql(url, schema).await?;
                Ok(Client { store: Arc::new(store), payload_limit: self.payload_limit })
            }
            #[cfg(not(feature = "mysql"))]
            "mysql" | "mariadb" => {
                bad("this program was built without jobq's feature `mysql`; turn it on")
            }
            #[cfg(feature = "sqlite")]
            "sqlite" => {
                let store = connect_sqlite(url, schema).await?;
                Ok(Client { store: Arc::new(store), payload_limit: self.payload_limit })
            }
            #[cfg(not(feature = "sqlite"))]
            "sqlite" => bad("this program was built without jobq's feature `sqlite`; turn it on"),
            _ => bad(
                "it must begin with `postgres://`, `mysql://`, `mariadb://` or `sqlite:`, as in \
                 \"postgres://user:password@host/database\" or \"sqlite:jobs.db\"",
            ),
        }
    }

    /// Uses a PostgreSQL pool that the application has already.
    ///
    /// The runtime opens a few connections of its own with the same options: heartbeats must not
    /// wait for the pool.
    ///
    /// # Errors
    ///
    /// [`Error::BadOption`] for a schema name that cannot be used.
    #[cfg(feature = "postgres")]
    pub fn postgres(self, pool: sqlx::PgPool) -> Result<Client> {
        let store = crate::store::postgres::PostgresStore::new(pool, self.checked_schema()?);
        Ok(Client { store: Arc::new(store), payload_limit: self.payload_limit })
    }

    /// Uses a MySQL or MariaDB pool that the application has already.
    ///
    /// The runtime opens a few connections of its own with the same options: heartbeats must not
    /// wait for the pool.
    ///
    /// # Errors
    ///
    /// [`Error::BadOption`] for a schema name that cannot be used.
    #[cfg(feature = "mysql")]
    pub fn mysql(self, pool: sqlx::MySqlPool) -> Result<Client> {
        let store = crate::store::mysql::MysqlStore::new(pool, self.checked_schema()?);
        Ok(Client { store: Arc::new(store), payload_limit: self.payload_limit })
    }

    /// Uses an SQLite pool that the application has already.
    ///
    /// jobq opens connections of its own to the same file.
    ///
    /// # Errors
    ///
    /// [`Error::BadOption`] for a schema name that cannot be used, [`Error::Unsupported`] for an
    /// in-memory database.
    #[cfg(feature = "sqlite")]
    #[allow(clippy::needless_pass_by_value, reason = "as with PostgreSQL's pool")]
    pub fn sqlite(self, pool: sqlx::SqlitePool) -> Result<Client> {
        let store = crate::store::sqlite::SqliteStore::new(&pool, self.checked_schema()?)?;
        Ok(Client { store: Arc::new(store), payload_limit: self.payload_limit })
    }

    fn checked_schema(&self) -> Result<Schema> {
        match &self.schema {
            Ok(schema) => Ok(schema.clone()),
            Err(name) => Schema::new(name),
        }
    }
}

#[cfg(feature = "postgres")]
async fn connect_postgres(
    url: &str,
    schema: Schema,
) -> Result<crate::store::postgres::PostgresStore> {
    use std::str::FromStr;
    use std::time::Duration;

    use sqlx::Connection;
    use sqlx::postgres::{PgConnectOptions, PgConnection, PgPoolOptions};

    let bad = |problem: &str| Error::BadUrl {
        url: without_password(url),
        problem: format!(
            "{problem}; write \"postgres://user:password@host/database\", with special characters \
             percent-encoded (`@` as `%40`, `/` as `%2F`, `?` as `%3F`, `#` as `%23`)"
        ),
    };
    // The driver would take parts of a password for names, which servers repeat in their errors.
    let (_, rest) = url.split_once("://").ok_or_else(|| bad("`//` is missing"))?;
    parts(rest).ok_or_else(|| bad("there is an `@` behind the host"))?;
    let options = PgConnectOptions::from_str(url).map_err(|error| bad(&error.to_string()))?;
    // A pool keeps trying to reach a server that refuses; the first connection tells at once.
    let patience = Duration::from_secs(10);
    let first = match tokio::time::timeout(patience, PgConnection::connect_with(&options)).await {
        Ok(first) => first,
        Err(_) => Err(sqlx::Error::PoolTimedOut),
    };
    let first = first.map_err(|source| Error::Connect { url: without_password(url), source })?;
    // The connection has served its purpose; whether it closes cleanly does not matter.
    drop(first.close().await);
    let pool = PgPoolOptions::new().acquire_timeout(patience).connect_lazy_with(options);
    Ok(crate::store::postgres::PostgresStore::new(pool, schema))
}

#[cfg(feature = "mysql")]
async fn connect_mysql(url: &str, schema: Schema) -> Result<crate::store::mysql::MysqlStore> {
    use std::str::FromStr;
    use std::time::Duration;

    use sqlx::Connection;
    use sqlx::mysql::{MySqlConnectOptions, MySqlConnection, MySqlPoolOptions};

    let bad = |problem: &str| Error::BadUrl {
        url: without_password(url),
        problem: format!("{problem}; write \"mysql://user:password@host/database\""),
    };
    let options = MySqlConnectOptions::from_str(url).map_err(|error| bad(&error.to_string()))?;
    if options.get_database().is_none() {
        return Err(bad("it names no database"));
    }
    // A pool keeps trying to reach a server that refuses; the first connection tells at once.
    let patience = Duration::from_secs(10);
    let connect = MySqlConnection::connect_with(&options);
    let first = match tokio::time::timeout(patience, connect).await {
        Ok(first) => first,
        Err(_) => Err(sqlx::Error::PoolTimedOut),
    };
    let first = first.map_err(|source| Error::Connect { url: without_password(url), source })?;
    // The connection has served its purpose; whether it closes cleanly does not matter.
    drop(first.close().await);
    let pool = MySqlPoolOptions::new().acquire_timeout(patience).connect_lazy_with(options);
    Ok(crate::store::mysql::MysqlStore::new(pool, schema))
}

#[cfg(feature = "sqlite")]
async fn connect_sqlite(url: &str, schema: Schema) -> Result<crate::store::sqlite::SqliteStore> {
    use std::str::FromStr;

    use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions};

    let options = SqliteConnectOptions::from_str(url).map_err(|error| Error::BadUrl {
        url: without_password(url),
        problem: format!("{error}; write \"sqlite:jobs.db\" or \"sqlite:///var/lib/app/jobs.db\""),
    })?;
    // The file is made if it is missing, unless the URL itself says how to open it.
    let options = if url.contains("mode=") { options } else { options.create_if_missing(true) };
    let pool = SqlitePoolOptions::new().connect_lazy_with(options);
    let store = crate::store::sqlite::SqliteStore::new(&pool, schema)?;
    // A file that cannot be used is told of now; tables may still be missing.
    match store.check().await {
        Ok(()) | Err(Error::Schema { .. }) => Ok(store),
        Err(error) => Err(error),
    }
}

/// A URL fit for messages: without its password and options, and only the scheme of one that may
/// be misread.
fn without_password(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once(':') else {
        return if is_plain(url, "/") { url.to_owned() } else { HIDDEN.to_owned() };
    };
    if scheme == "sqlite" {
        // It has no password.
        return url.split('?').next().unwrap_or_default().to_owned();
    }
    if !is_plain(scheme, "+") {
        return HIDDEN.to_owned();
    }
    let address = rest.strip_prefix("//").and_then(address).unwrap_or_else(|| HIDDEN.to_owned());
    format!("{scheme}://{address}")
}

/// What stands for text that may hold a password.
const HIDDEN: &str = "…";

/// User, server and database of what follows `://`; `None` if they may be something else.
fn address(rest: &str) -> Option<String> {
    let (authority, tail) = parts(rest)?;
    let database = tail.split('?').next()?;
    let (login, server) = match authority.rsplit_once('@') {
        Some((login, server)) => (Some(login), server),
        None => (None, authority),
    };
    let (host, port) = match server.rsplit_once(':') {
        Some(host_and_port) if !server.ends_with(']') => host_and_port,
        _ => (server, ""),
    };
    let user = login.map(|login| login.split(':').next().unwrap_or_default());
    let known = user.is_none_or(|user| is_plain(user, ""))
        && is_plain(host, if host.starts_with('[') { "[]:" } else { "" })
        && port.bytes().all(|b| b.is_ascii_digit())
        && is_plain(database, "/");
    known.then(|| match user {
        Some(user) => format!("{user}@{server}{database}"),
        None => format!("{server}{database}"),
    })
}

/// What follows `://` as login and server, and the rest. `None` if there is an `@` in the rest: then
/// a password may have a `/`, `?` or `#` in it, and what looks like a server is its beginning.
fn parts(rest: &str) -> Option<(&str, &str)> {
    let (authority, tail) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    (!tail.contains('@')).then_some((authority, tail))
}

fn is_plain(text: &str, also: &str) -> bool {
    text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c) || also.contains(c))
}

impl Client {
    /// Connects to the database that is the queue: `sqlite:jobs.db` (the file is made if it is
    /// missing), or `postgres://`, `mysql://` or `mariadb://` with `user:password@host/database`, special
    /// characters percent-encoded.
    ///
    /// # Errors
    ///
    /// [`Error::BadUrl`] for a URL jobq cannot use, [`Error::Connect`] when the database cannot be
    /// reached within 10 s or refuses the login.
    ///
    /// # Examples
    ///
    /// ```
    /// # use jobq_runtime as jobq;
    /// # async fn example() -> jobq::Result<()> {
    /// let client = jobq::Client::connect("sqlite:jobs.db").await?;
    /// client.migrate().await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn connect(url: &str) -> Result<Self> {
        ClientOptions::default().connect(url).await
    }

    /// Creates or upgrades jobq's tables.
    ///
    /// Safe to call from many processes at once and at every start: what is done is not done
    /// again. Where programs may not change tables, apply the SQL of [`jobq_migrations`] by hand,
    /// each step in one transaction: it leaves exactly what this does.
    ///
    /// # Errors
    ///
    /// Database errors, for instance a missing right to create tables.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, a step is applied whole or not at all.
    pub async fn migrate(&self) -> Result<()> {
        self.store.migrate().await
    }

    /// Fails unless the server and the tables fit this version of jobq. A runtime does this when
    /// it starts.
    ///
    /// # Errors
    ///
    /// [`Error::Connect`], [`Error::Unsupported`] and [`Error::Schema`] name what to do.
    pub async fn check(&self) -> Result<()> {
        self.store.check().await
    }

    /// Joins this client's settings (schema, payload limit) with your own open transaction:
    /// `resize::enqueue(client.within(&mut tx), 7, 640)`.
    pub fn within<T: EnqueueTarget>(&self, transaction: T) -> Within<'_, T> {
        Within { client: self, transaction }
    }

    /// Looks a job up, wherever it is in its life.
    ///
    /// # Errors
    ///
    /// Database errors.
    pub async fn job(&self, id: JobId) -> Result<Lookup> {
        self.store.job(id).await
    }

    /// How many jobs of each queue are in each state, history included.
    ///
    /// It reads every row: ask now and then, not in a loop.
    ///
    /// # Errors
    ///
    /// Database errors.
    pub async fn counts(&self) -> Result<Vec<QueueCount>> {
        self.store.counts().await
    }

    /// The dead letters that match, newest first, up to `limit`.
    ///
    /// # Errors
    ///
    /// Database errors.
    pub async fn dead(&self, filter: &DeadFilter, limit: u32) -> Result<Vec<DeadJob>> {
        self.store.dead(filter, limit).await
    }

    /// Cancels a job: at once if it is not running, else with its worker's next heartbeat.
    ///
    /// A running job function sees [`JobContext::cancelled`](crate::JobContext::cancelled) and is
    /// dropped if it has not returned 5 s later. If it fails meanwhile the job is cancelled, not
    /// retried; if it completes first, it is completed.
    ///
    /// A job that was not running is kept for [`DEFAULT_RETENTION`](crate::DEFAULT_RETENTION), 24 h,
    /// whatever its function or queue says: its row does not know of that, only workers do.
    ///
    /// # Errors
    ///
    /// Database errors.
    pub async fn cancel(&self, id: JobId) -> Result<CancelReply> {
        let (reply, key) = self.store.cancel(id).await?;
        key::pass_on(&*self.store, key.into_iter().collect()).await;
        Ok(reply)
    }

    /// Keys for which jobs wait, and what for: in order, those after `after`, up to `limit`.
    ///
    /// # Errors
    ///
    /// Database errors.
    pub async fn blocked_keys(&self, after: Option<&str>, limit: u32) -> Result<Vec<BlockedKey>> {
        self.store.blocked_keys(after, limit).await
    }

    /// Lets the jobs of a key go on that wait for a dead one: that one stays dead, and may still be
    /// redriven, but holds nobody up any more. False if the key is not held up by a dead job.
    ///
    /// # Errors
    ///
    /// Database errors.
    pub async fn unblock_key(&self, key: &str) -> Result<bool> {
        let unblocked = self.store.unblock_key(key).await?;
        key::pass_on(&*self.store, vec![key.to_owned()]).await;
        Ok(unblocked)
    }

    /// Makes dead jobs that match pending again, with their attempts counted anew; with
    /// [`DeadFilter::id`], and no reason, also one cancelled job. Returns their ids, which stay the
    /// same.
    ///
    /// Redriving twice makes one job. A unique job whose key another job has by now stays as it is;
    /// [`DeadJob::duplicate_of`] says which. Those that start anew hold their key again if they hold it
    /// until they are finished.
    ///
    /// # Errors
    ///
    /// Database errors. Jobs are redriven a thousand at a time: those of earlier thousands stay
    /// redriven.
    pub async fn redrive(&self, filter: &DeadFilter) -> Result<Vec<JobId>> {
        const BATCH: usize = 1_000;
        let mut all: Vec<JobId> = Vec::new();
        let mut after = JobId(i64::MIN);
        loop {
            // In id order and never back: a job that dies again meanwhile is left for the next call.
            let Redriven { jobs, duplicates } =
                self.store.redrive(filter, after, BATCH as u32).await?;
            let last = jobs.len() + duplicates.len() < BATCH;
            after = jobs.last().max(duplicates.last()).copied().unwrap_or(after);
            all.extend(jobs);
            if last {
                return Ok(all);
            }
        }
    }

    /// Pauses a queue for the whole fleet; false if it was paused already, which changes nothing.
    ///
    /// No claim that begins after this has returned takes a job of it, on whatever machine. Running
    /// jobs go on and end as usual; a retry of theirs waits with the others. Jobs can be enqueued,
    /// cancelled and redriven as before. The pause is kept in the database until
    /// [`resume_queue`](Self::resume_queue). The reason, of up to 1,000 bytes, is for people;
    /// [`paused`](Self::paused) shows it. Workers of a version without pauses do not keep to them.
    ///
    /// # Errors
    ///
    /// [`Error::BadName`] for a name that no queue can have, [`Error::BadOption`] for a reason that
    /// cannot be stored, and database errors.
    ///
    /// # Examples
    ///
    /// ```
    /// # use jobq_runtime as jobq;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = tempfile::tempdir()?;
    /// # let url = format!("sqlite:{}", folder.path().join("jobs.db").display());
    /// # let client = jobq::Client::connect(&url).await?;
    /// # client.migrate().await?;
    /// assert!(client.pause_queue("mail", Some("the provider is down")).await?);
    /// assert!(!client.pause_queue("mail", None).await?, "it is paused");
    /// for pause in client.paused().await? {
    ///     println!("{} {}: {}", pause.scope, pause.name, pause.reason.unwrap_or_default());
    /// }
    /// assert!(client.resume_queue("mail").await?);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn pause_queue(&self, queue: &str, reason: Option<&str>) -> Result<bool> {
        self.pause(PauseScope::Queue, queue, reason).await
    }

    /// Ends the pause of a queue; false if it was not paused.
    ///
    /// Its jobs go on in the order in which they would have been claimed, in this process at once
    /// and elsewhere with the next poll, a second later at most.
    ///
    /// # Errors
    ///
    /// [`Error::BadName`] for a name that no queue can have, and database errors.
    pub async fn resume_queue(&self, queue: &str) -> Result<bool> {
        self.resume(PauseScope::Queue, queue).await
    }

    /// Pauses a kind for the whole fleet, whatever the queues of its jobs; false if it was paused
    /// already, which changes nothing.
    ///
    /// As [`pause_queue`](Self::pause_queue). A pause is of the jobs that are stored under this name:
    /// of a job function with aliases, pause each of its names.
    ///
    /// Jobs of a paused kind that are due are set aside, waiting, so that claims of other kinds need
    /// not read past them for long. Where a queue has only this kind, pause the queue: then nothing
    /// has to be moved.
    ///
    /// # Errors
    ///
    /// [`Error::BadName`] for a name that no kind can have, [`Error::BadOption`] for a reason that
    /// cannot be stored, and database errors.
    ///
    /// # Examples
    ///
    /// ```
    /// # use jobq_runtime as jobq;
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = tempfile::tempdir()?;
    /// # let url = format!("sqlite:{}", folder.path().join("jobs.db").display());
    /// # let client = jobq::Client::connect(&url).await?;
    /// # client.migrate().await?;
    /// client.pause_kind("welcome_mail", None).await?;
    /// // The name is that of the job function, unless it has `name = "…"`: `welcome::NAME` is it.
    /// client.resume_kind("welcome_mail").await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn pause_kind(&self, kind: &str, reason: Option<&str>) -> Result<bool> {
        self.pause(PauseScope::Kind, kind, reason).await
    }

    /// Ends the pause of a kind; false if it was not paused.
    ///
    /// Jobs that were not set aside are claimed from their old place, or sooner. Those that were join
    /// the end of their queue, by priority and in the order of their ids: up to 10,000 before this
    /// returns, the rest with the sweeps of the next seconds. A queue that is paused itself stays so.
    ///
    /// # Errors
    ///
    /// [`Error::BadName`] for a name that no kind can have, and database errors.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the kind may be resumed; the sweep does what was left to do.
    pub async fn resume_kind(&self, kind: &str) -> Result<bool> {
        /// How many jobs one step moves, and how many steps are taken.
        const STEP: u32 = 1_000;
        const STEPS: usize = 10;

        let resumed = self.resume(PauseScope::Kind, kind).await?;
        // Where no worker is live none has to be told: a new one looks for what waits for its kinds.
        let sessions = self.store.live_sessions().await?;
        let mut queues: Vec<String> =
            sessions.into_iter().flat_map(|session| session.queues).collect();
        queues.sort_unstable();
        queues.dedup();
        let kinds = [kind.to_owned()];
        for _ in 0..STEPS {
            let moved = self.store.unpark(&queues, &kinds, STEP).await?;
            if moved > 0 {
                crate::wake::poke();
            }
            if moved < u64::from(STEP) {
                break;
            }
        }
        Ok(resumed)
    }

    /// What is paused, queues and kinds, by name.
    ///
    /// # Errors
    ///
    /// Database errors.
    pub async fn paused(&self) -> Result<Vec<Pause>> {
        self.store.pauses().await
    }

    /// Limits what a queue may do across the fleet: how many of its jobs run at once, how fast they
    /// start, or both. It replaces the limit that the queue has.
    ///
    /// It holds from the next claim on, on whatever machine, and is kept in the database until
    /// [`unlimit_queue`](Self::unlimit_queue): set it where you deploy, as often as you like. What runs
    /// goes on, also above a limit that was lowered; what was started before the queue had any limit
    /// is not counted. A job counts until its outcome is written, or, if its worker has died, until its
    /// lease has ended and it was rescued. Workers of a version without limits do not keep to them.
    ///
    /// Claims of a limited queue come one after the other, and each looks up as many running jobs as
    /// the limit allows: let thousands run at once, not more.
    ///
    /// # Errors
    ///
    /// [`Error::BadName`] for a name that no queue can have, [`Error::BadOption`] for a limit that
    /// cannot be, and database errors.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the queue has either limit, whole.
    ///
    /// # Examples
    ///
    /// ```
    /// # use jobq_runtime as jobq;
    /// use std::time::Duration;
    ///
    /// use jobq::{QueueLimit, Rate};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = tempfile::tempdir()?;
    /// # let url = format!("sqlite:{}", folder.path().join("jobs.db").display());
    /// # let client = jobq::Client::connect(&url).await?;
    /// # client.migrate().await?;
    /// client.limit_queue("reports", QueueLimit::running(3)).await?;
    /// let fast = Rate::new(50, Duration::from_secs(1)).burst(10);
    /// client.limit_queue("mail", QueueLimit::rate(fast)).await?;
    /// for limited in client.limits().await? {
    ///     println!("{}: {:?}", limited.queue, limited.limit);
    /// }
    /// assert!(client.unlimit_queue("reports").await?);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn limit_queue(&self, queue: &str, limit: QueueLimit) -> Result<()> {
        check_name("queue", queue)?;
        limit.check()?;
        self.store.limit_queue(queue, &limit).await?;
        crate::wake::poke();
        Ok(())
    }

    /// Ends the limit of a queue; false if it had none.
    ///
    /// # Errors
    ///
    /// [`Error::BadName`] for a name that no queue can have, and database errors.
    pub async fn unlimit_queue(&self, queue: &str) -> Result<bool> {
        check_name("queue", queue)?;
        let had_one = self.store.unlimit_queue(queue).await?;
        crate::wake::poke();
        Ok(had_one)
    }

    /// The queues that are limited, by name.
    ///
    /// # Errors
    ///
    /// Database errors.
    pub async fn limits(&self) -> Result<Vec<LimitedQueue>> {
        self.store.limits().await
    }

    async fn pause(&self, scope: PauseScope, name: &str, reason: Option<&str>) -> Result<bool> {
        const LONGEST_REASON: usize = 1_000;

        check_pausable(scope, name)?;
        let problem = match reason {
            Some(reason) if reason.len() > LONGEST_REASON => "is longer than 1,000 bytes",
            Some(reason) if reason.contains('\0') => "has a NUL character",
            _ => return self.store.pause(scope, name, reason).await,
        };
        Err(Error::BadOption { option: "reason", problem: problem.to_owned() })
    }

    async fn resume(&self, scope: PauseScope, name: &str) -> Result<bool> {
        check_pausable(scope, name)?;
        let resumed = self.store.resume(scope, name).await?;
        if resumed {
            crate::wake::poke();
        }
        Ok(resumed)
    }

    #[cfg(feature = "runtime")]
    pub(crate) fn store(&self) -> Arc<dyn Store> {
        Arc::clone(&self.store)
    }
}

fn check_pausable(scope: PauseScope, name: &str) -> Result<()> {
    let what = match scope {
        PauseScope::Queue => "queue",
        PauseScope::Kind => "job",
    };
    Ok(check_name(what, name)?)
}

impl Sealed for &Client {}
impl EnqueueTarget for &Client {
    fn settings(&self) -> (Schema, usize) {
        (self.store.schema().clone(), self.payload_limit)
    }

    async fn write(self, jobs: Vec<CheckedJob>, _: Schema) -> Result<Vec<Enqueued>> {
        self.store.insert(jobs).await
    }
}

/// A transaction seen through a client's settings; made by [`Client::within`].
#[derive(Debug)]
pub struct Within<'c, T> {
    client: &'c Client,
    transaction: T,
}

impl<T> Sealed for Within<'_, T> {}
impl<T: EnqueueTarget> EnqueueTarget for Within<'_, T> {
    fn settings(&self) -> (Schema, usize) {
        self.client.settings()
    }

    async fn write(self, jobs: Vec<CheckedJob>, schema: Schema) -> Result<Vec<Enqueued>> {
        self.transaction.write(jobs, schema).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_shown_without_its_password_and_options() {
        for (url, shown) in [
            ("postgres://me:se@cret@db:1/x", "postgres://me@db:1/x"),
            ("postgres://me:se%2Fcret@db/x?sslmode=require", "postgres://me@db/x"),
            ("postgres://me:secret@[::1]:1/x", "postgres://me@[::1]:1/x"),
            ("postgres://me@[::1]", "postgres://me@[::1]"),
            ("postgres://db/x?password=se", "postgres://db/x"),
            ("postgres://db:5432/x", "postgres://db:5432/x"),
            ("postgres:///x", "postgres:///x"),
            ("sqlite:jobs.db", "sqlite:jobs.db"),
            ("sqlite:/var/lib/my app/jobs.db?key=secret", "sqlite:/var/lib/my app/jobs.db"),
            ("db/jobs", "db/jobs"),
        ] {
            assert_eq!(without_password(url), shown);
        }
    }

    #[test]
    fn of_a_url_that_may_be_misread_only_the_scheme_is_shown() {
        for (url, shown) in [
            ("postgres://me:secret?x@db", "postgres://…"),
            ("postgres://me:1/secret@db", "postgres://…"),
            ("postgres://me:se#cret@db", "postgres://…"),
            ("postgres://me:secret", "postgres://…"),
            ("postgres://me:se:1", "postgres://…"),
            ("postgres://me%3Asecret@db/x", "postgres://…"),
            ("postgres://db/x?user=me@cloud&password=secret", "postgres://…"),
            ("postgres:me:secret@db/x", "postgres://…"),
            ("me:secret@db/x", "me://…"),
            ("secret@db:1/x", "…"),
            ("host=db password=secret", "…"),
        ] {
            assert_eq!(without_password(url), shown);
        }
    }
}
