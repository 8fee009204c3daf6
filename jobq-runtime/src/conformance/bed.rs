//! A fresh set of tables in a real database, and what cases need to poke at them.

use std::sync::Arc;
use std::time::Duration;

use jobq_core::job::{JobId, Lease, SessionId};
use jobq_core::lifecycle::Transition;
use tokio_util::sync::CancellationToken;

use super::sample::ids_of;
use super::worker::{job, settlement};
use crate::client::{Client, ClientOptions};
use crate::context::{Facts, JobContext};
use crate::job::CheckedJob;
use crate::store::{Settled, Settlement, Store};

/// Longer than any case takes.
pub(crate) const LEASE: Duration = Duration::from_secs(60);

/// How long settled jobs are kept unless a case says otherwise.
pub(crate) const RETENTION: Duration = Duration::from_secs(3600);

/// Tables of their own for one case.
pub(crate) struct Bed {
    pub(crate) client: Client,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) database: Database,
    pub(crate) schema: String,
    /// What is to be done when the bed is dropped: the server may be the user's own.
    #[cfg(any(feature = "postgres", feature = "mysql"))]
    leftover: Option<Leftover>,
    #[cfg(feature = "sqlite")]
    folder: Option<tempfile::TempDir>,
}

/// Runs the same lines on the pool of any database.
macro_rules! on_pool {
    ($bed:expr, $pool:ident => $body:expr) => {
        match &$bed.database {
            #[cfg(feature = "postgres")]
            $crate::conformance::bed::Database::Postgres($pool) => $body,
            #[cfg(feature = "mysql")]
            $crate::conformance::bed::Database::Mysql($pool) => $body,
            #[cfg(feature = "sqlite")]
            $crate::conformance::bed::Database::Sqlite($pool) => $body,
        }
    };
}
pub(crate) use on_pool;

/// A second way into the database, for what the store has no operation for.
#[derive(Clone)]
pub(crate) enum Database {
    #[cfg(feature = "postgres")]
    Postgres(sqlx::PgPool),
    #[cfg(feature = "mysql")]
    Mysql(sqlx::MySqlPool),
    #[cfg(feature = "sqlite")]
    Sqlite(sqlx::SqlitePool),
}

impl Bed {
    #[cfg(feature = "sqlite")]
    pub(crate) async fn sqlite() -> Self {
        use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};

        let folder = tempfile::tempdir().expect("a temporary folder");
        let options = SqliteConnectOptions::new()
            .filename(folder.path().join("jobs.db"))
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .busy_timeout(Duration::from_secs(30));
        let pool = SqlitePoolOptions::new().max_connections(8).connect_lazy_with(options);
        let client = ClientOptions::new().sqlite(pool.clone()).expect("a file can be used");
        client.migrate().await.expect("the tables can be made");
        let store = client.store();
        Self {
            client,
            store,
            database: Database::Sqlite(pool),
            schema: "jobq".to_owned(),
            #[cfg(any(feature = "postgres", feature = "mysql"))]
            leftover: None,
            folder: Some(folder),
        }
    }

    #[cfg(feature = "postgres")]
    pub(crate) async fn postgres() -> Self {
        let url = std::env::var("JOBQ_TEST_POSTGRES_URL").expect(
            "these tests need a PostgreSQL server: run `scripts/test`, which starts one, or set \
             JOBQ_TEST_POSTGRES_URL",
        );
        Self::postgres_at(&url).await
    }

    #[cfg(feature = "postgres")]
    pub(crate) async fn postgres18() -> Option<Self> {
        match std::env::var("JOBQ_TEST_POSTGRES18_URL") {
            Ok(url) => Some(Self::postgres_at(&url).await),
            Err(_) => None,
        }
    }

    /// A schema of its own in the server's database, so that cases run side by side.
    #[cfg(feature = "postgres")]
    async fn postgres_at(url: &str) -> Self {
        let schema = format!("t{:x}", rand::random::<u64>());
        let pool = sqlx::postgres::PgPoolOptions::new()
            .max_connections(12)
            .connect(url)
            .await
            .expect("the server of JOBQ_TEST_POSTGRES_URL can be reached");
        let client =
            ClientOptions::new().schema(&schema).postgres(pool.clone()).expect("a good name");
        client.migrate().await.expect("the tables can be made");
        let store = client.store();
        let options = (*pool.connect_options()).clone();
        let leftover = Some(Leftover::Postgres(options, format!("drop schema {schema} cascade")));
        Self {
            client,
            store,
            database: Database::Postgres(pool),
            schema,
            leftover,
            #[cfg(feature = "sqlite")]
            folder: None,
        }
    }

    #[cfg(feature = "mysql")]
    pub(crate) async fn mysql() -> Self {
        let url = std::env::var("JOBQ_TEST_MYSQL_URL").expect(
            "these tests need a MySQL server: run `scripts/test`, which starts one, or set \
             JOBQ_TEST_MYSQL_URL to one where databases can be created",
        );
        Self::mysql_at(&url).await
    }

    #[cfg(feature = "mysql")]
    pub(crate) async fn mariadb() -> Self {
        let url = std::env::var("JOBQ_TEST_MARIADB_URL").expect(
            "these tests need a MariaDB server: run `scripts/test`, which starts one, or set \
             JOBQ_TEST_MARIADB_URL to one where databases can be created",
        );
        Self::mysql_at(&url).await
    }

    #[cfg(feature = "mysql")]
    pub(crate) async fn mariadb118() -> Option<Self> {
        match std::env::var("JOBQ_TEST_MARIADB118_URL") {
            Ok(url) => Some(Self::mysql_at(&url).await),
            Err(_) => None,
        }
    }

    /// A database of its own on the server, so that cases run side by side.
    #[cfg(feature = "mysql")]
    async fn mysql_at(url: &str) -> Self {
        use std::str::FromStr;

        use sqlx::mysql::{MySqlConnectOptions, MySqlConnection, MySqlPoolOptions};
        use sqlx::{Connection, Executor};

        let outside = MySqlConnectOptions::from_str(url).expect("a MySQL URL");
        let name = format!("jobq_t{:x}", rand::random::<u64>());
        let mut first =
            MySqlConnection::connect_with(&outside).await.expect("the server can be reached");
        let create = sqlx::AssertSqlSafe(format!("create database {name}"));
        first.execute(create).await.expect("databases can be created");
        first.close().await.expect("closes");
        let pool = MySqlPoolOptions::new()
            .max_connections(12)
            .connect_lazy_with(outside.clone().database(&name));
        let client = ClientOptions::new().mysql(pool.clone()).expect("a good name");
        client.migrate().await.expect("the tables can be made");
        Self {
            store: client.store(),
            client,
            database: Database::Mysql(pool),
            schema: "jobq".to_owned(),
            leftover: Some(Leftover::Mysql(outside, format!("drop database {name}"))),
            #[cfg(feature = "sqlite")]
            folder: None,
        }
    }

    /// The same database with the tables under their default name: what a pool or a transaction
    /// that no client was asked about writes to.
    pub(crate) async fn with_default_names(self) -> Self {
        match &self.database {
            #[cfg(feature = "postgres")]
            Database::Postgres(pool) => {
                let name = format!("jobq_{}", self.schema);
                self.execute(&format!("create database {name}")).await;
                let outside = (*pool.connect_options()).clone();
                let inside = outside.clone().database(&name);
                let pool = sqlx::postgres::PgPoolOptions::new()
                    .max_connections(12)
                    .connect_lazy_with(inside);
                let client = ClientOptions::new().postgres(pool.clone()).expect("a good name");
                client.migrate().await.expect("the tables can be made");
                Self {
                    store: client.store(),
                    client,
                    database: Database::Postgres(pool),
                    schema: "jobq".to_owned(),
                    leftover: Some(Leftover::Postgres(
                        outside,
                        format!("drop database {name} with (force)"),
                    )),
                    #[cfg(feature = "sqlite")]
                    folder: None,
                }
            }
            #[cfg(feature = "mysql")]
            Database::Mysql(_) => self,
            #[cfg(feature = "sqlite")]
            Database::Sqlite(_) => self,
        }
    }

    /// A client of its own, as another process would have, for tables of another name.
    pub(crate) fn another_client(&self, schema: &str) -> Client {
        self.client_with(ClientOptions::new().schema(schema))
    }

    /// A client of the same database.
    pub(crate) fn client_with(&self, options: ClientOptions) -> Client {
        match &self.database {
            #[cfg(feature = "postgres")]
            Database::Postgres(pool) => options.postgres(pool.clone()).expect("a good name"),
            #[cfg(feature = "mysql")]
            Database::Mysql(pool) => options.mysql(pool.clone()).expect("a good name"),
            #[cfg(feature = "sqlite")]
            Database::Sqlite(pool) => options.sqlite(pool.clone()).expect("a good name"),
        }
    }

    /// The pool of a case that is for PostgreSQL only.
    #[cfg(feature = "postgres")]
    pub(crate) fn postgres_pool(&self) -> &sqlx::PgPool {
        match &self.database {
            Database::Postgres(pool) => pool,
            #[cfg(any(feature = "mysql", feature = "sqlite"))]
            _ => panic!("the case is for PostgreSQL only"),
        }
    }

    /// The pool of a case that is for MySQL and MariaDB only.
    #[cfg(feature = "mysql")]
    pub(crate) fn mysql_pool(&self) -> &sqlx::MySqlPool {
        match &self.database {
            Database::Mysql(pool) => pool,
            #[cfg(any(feature = "postgres", feature = "sqlite"))]
            _ => panic!("the case is for MySQL and MariaDB only"),
        }
    }

    /// The pool of a case that is for SQLite only.
    #[cfg(feature = "sqlite")]
    pub(crate) fn sqlite_pool(&self) -> &sqlx::SqlitePool {
        match &self.database {
            Database::Sqlite(pool) => pool,
            #[cfg(any(feature = "postgres", feature = "mysql"))]
            _ => panic!("the case is for SQLite only"),
        }
    }

    /// The folder of an SQLite file.
    #[cfg(feature = "sqlite")]
    pub(crate) fn folder(&self) -> &std::path::Path {
        self.folder.as_ref().expect("only SQLite's cases ask").path()
    }

    pub(crate) fn is_sqlite(&self) -> bool {
        self.store.database() == "SQLite"
    }

    /// Whether tables are in a schema and times have a type; else names have a prefix, and times
    /// are microseconds.
    pub(crate) fn is_postgres(&self) -> bool {
        self.store.database() == "PostgreSQL"
    }

    pub(crate) fn is_mysql(&self) -> bool {
        self.store.database() == "MySQL"
    }

    /// Text written for PostgreSQL's default schema, for this bed's tables.
    pub(crate) fn sql(&self, text: &str) -> String {
        if self.is_postgres() {
            // Quoted, as in the store's statements: some cases look for these.
            text.replace("jobq.", &format!("\"{}\".", self.schema))
        } else {
            text.replace("jobq.", "jobq_")
        }
    }

    /// How a transaction begins that is going to write.
    pub(crate) fn begin(&self) -> &'static str {
        if self.is_sqlite() { "begin immediate" } else { "begin" }
    }

    /// How a transaction of an isolation level begins.
    #[cfg(any(feature = "postgres", feature = "mysql"))]
    pub(crate) fn begin_at(&self, level: &str) -> sqlx::AssertSqlSafe<String> {
        sqlx::AssertSqlSafe(if self.is_mysql() {
            format!("set transaction isolation level {level}; begin")
        } else {
            format!("begin isolation level {level}")
        })
    }

    /// The SQL for the time of what waits.
    pub(crate) fn for_ever(&self) -> &'static str {
        if self.is_postgres() { "'infinity'" } else { "9223372036854775807" }
    }

    /// The SQL for a time that many seconds from now, as it is stored.
    pub(crate) fn seconds_away(&self, seconds: i64) -> String {
        if self.is_sqlite() {
            format!("({} + {seconds} * 1000000)", jobq_migrations::SQLITE_NOW)
        } else if self.is_mysql() {
            format!("({} + {seconds} * 1000000)", jobq_migrations::MYSQL_NOW)
        } else {
            format!("(clock_timestamp() + interval '{seconds} seconds')")
        }
    }

    /// The SQL for a stored time in microseconds since 1970.
    pub(crate) fn micros(&self, time: &str) -> String {
        if self.is_postgres() {
            format!("(extract(epoch from {time}) * 1000000)::int8")
        } else {
            time.to_owned()
        }
    }

    /// The database's time in microseconds.
    pub(crate) async fn now(&self) -> i64 {
        self.number(&format!("select {}", self.micros(&self.seconds_away(0)))).await
    }

    /// A statement's text for sqlx.
    pub(crate) fn statement(&self, text: &str) -> sqlx::AssertSqlSafe<String> {
        sqlx::AssertSqlSafe(self.sql(text))
    }

    /// Runs a statement; `jobq.` stands for the tables' place.
    pub(crate) async fn execute(&self, text: &str) -> u64 {
        let sql = self.statement(text);
        on_pool!(self, pool => {
            sqlx::query(sql).execute(pool).await.expect("the statement runs").rows_affected()
        })
    }

    /// The one number that a query gives.
    pub(crate) async fn number(&self, text: &str) -> i64 {
        let sql = self.statement(text);
        on_pool!(self, pool => {
            sqlx::query_scalar(sql).fetch_one(pool).await.expect("the query gives a number")
        })
    }

    /// The texts of the one column that a query gives.
    pub(crate) async fn texts(&self, text: &str) -> Vec<String> {
        let sql = self.statement(text);
        on_pool!(self, pool => {
            sqlx::query_scalar(sql).fetch_all(pool).await.expect("the query gives texts")
        })
    }

    /// How many rows a table has.
    pub(crate) async fn count(&self, table: &str) -> i64 {
        self.number(&format!("select count(*) from jobq.{table}")).await
    }

    /// Writes jobs and returns their ids.
    pub(crate) async fn enqueue(&self, jobs: Vec<CheckedJob>) -> Vec<JobId> {
        ids_of(self.store.insert(jobs).await.expect("jobs can be written"))
    }

    /// Writes one plain job of kind `k`.
    pub(crate) async fn one(&self) -> JobId {
        self.enqueue(vec![job("k")]).await[0]
    }

    pub(crate) async fn settle(&self, lease: Lease, transition: Transition) -> Settled {
        self.settle_all(&[settlement(lease, transition)]).await[0]
    }

    pub(crate) async fn settle_all(&self, settlements: &[Settlement]) -> Vec<Settled> {
        self.store.settle(settlements).await.expect("settling reaches the database")
    }

    /// What a job function that runs a claimed job is given.
    pub(crate) fn context(&self, lease: Lease, retention: Duration) -> JobContext {
        let facts = Facts {
            lease,
            kind: "k".into(),
            queue: "default".into(),
            attempt: 1,
            max_attempts: 3,
            created_at: jobq_core::time::Timestamp(0),
            tags: Vec::new(),
            metadata: serde_json::Map::new(),
            retention,
            schema: Some(self.store.schema().clone()),
        };
        JobContext::new(facts, CancellationToken::new(), Arc::default())
    }

    /// Lets a session's lease run out.
    pub(crate) async fn expire(&self, session: SessionId) {
        let past = self.seconds_away(-1);
        let done = self
            .execute(&format!(
                "update jobq.sessions set leased_until = {past} where id = {session}"
            ))
            .await;
        assert_eq!(done, 1, "the session is open");
    }

    /// Waits until a statement about these tables waits for a row or a table.
    #[cfg(any(feature = "postgres", feature = "mysql"))]
    pub(crate) async fn until_one_waits_for_a_lock(&self) {
        super::wait::until("somebody waits for a lock", || self.one_waits_for_a_lock()).await;
    }

    #[cfg(any(feature = "postgres", feature = "mysql"))]
    async fn one_waits_for_a_lock(&self) -> bool {
        match &self.database {
            #[cfg(feature = "postgres")]
            Database::Postgres(_) => {
                let waiting = "select count(*) from pg_stat_activity
                     where wait_event_type = 'Lock' and query like '%jobq.%'";
                self.number(waiting).await > 0
            }
            // The list of transactions is a copy that gets no newer while somebody asks for it
            // all the time; this is none.
            #[cfg(feature = "mysql")]
            Database::Mysql(pool) => {
                use sqlx::Row;

                let row = sqlx::raw_sql("show engine innodb status").fetch_one(pool).await;
                let text: String = row.expect("shows").try_get("Status").expect("a text");
                let options = pool.connect_options();
                let ours = format!("`{}`", options.get_database().expect("of its own"));
                text.lines().any(|line| line.contains(&ours) && line.ends_with("waiting"))
            }
            #[cfg(feature = "sqlite")]
            Database::Sqlite(_) => panic!("on SQLite nobody waits for a row"),
        }
    }

    /// Runs a statement that the tables' checks would refuse, as a newer version's would not.
    pub(crate) async fn without_checks(&self, text: &str) {
        match &self.database {
            #[cfg(feature = "postgres")]
            Database::Postgres(_) => {
                let check = "finished drop constraint finished_state_check";
                self.execute(&format!("alter table jobq.{check}")).await;
                self.execute(text).await;
            }
            #[cfg(feature = "mysql")]
            Database::Mysql(_) => {
                let check = "finished drop constraint jobq_finished_state_check";
                self.execute(&format!("alter table jobq.{check}")).await;
                self.execute(text).await;
            }
            #[cfg(feature = "sqlite")]
            Database::Sqlite(pool) => {
                let mut connection = pool.acquire().await.expect("connects").detach();
                let off = "pragma ignore_check_constraints = on";
                sqlx::query(off).execute(&mut connection).await.expect("a setting");
                sqlx::query(self.statement(text)).execute(&mut connection).await.expect("writes");
            }
        }
    }

    /// Lets a pending job's time come.
    pub(crate) async fn make_due(&self, job: JobId) {
        let past = self.seconds_away(-1);
        self.execute(&format!("update jobq.jobs set run_after = {past} where id = {job}")).await;
    }
}

/// Where to say what, so that nothing is left behind.
#[cfg(any(feature = "postgres", feature = "mysql"))]
enum Leftover {
    #[cfg(feature = "postgres")]
    Postgres(sqlx::postgres::PgConnectOptions, String),
    #[cfg(feature = "mysql")]
    Mysql(sqlx::mysql::MySqlConnectOptions, String),
}

#[cfg(any(feature = "postgres", feature = "mysql"))]
impl Leftover {
    async fn clean(self) {
        use sqlx::{ConnectOptions, Executor};

        match self {
            #[cfg(feature = "postgres")]
            Self::Postgres(options, statement) => {
                if let Ok(mut connection) = options.connect().await {
                    let _ = connection.execute("set lock_timeout = '5s'").await;
                    let _ = connection.execute(sqlx::AssertSqlSafe(statement)).await;
                }
            }
            #[cfg(feature = "mysql")]
            Self::Mysql(options, statement) => {
                if let Ok(mut connection) = options.connect().await {
                    let _ = connection.execute("set session lock_wait_timeout = 5").await;
                    let _ = connection.execute(sqlx::AssertSqlSafe(statement)).await;
                }
            }
        }
    }
}

#[cfg(any(feature = "postgres", feature = "mysql"))]
impl Drop for Bed {
    fn drop(&mut self) {
        let Some(leftover) = self.leftover.take() else { return };
        let cleaned = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.map(|runtime| runtime.block_on(leftover.clean()))
        });
        let _ = cleaned.join();
    }
}
