//! A fresh database, worker processes on it, and an independent log of what they did.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use jobq::{Client, JobContext};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};
use sqlx::{AssertSqlSafe, Connection, Executor, MySqlPool, PgPool, SqlitePool};

/// A database of its own for one test.
pub(crate) struct Bed {
    pub(crate) url: String,
    pub(crate) client: Client,
    pub(crate) db: Db,
    /// A server, and the statement that leaves nothing behind there.
    leftover: Option<(String, String)>,
    folder: tempfile::TempDir,
}

/// The application's own way into the database.
#[derive(Clone, Debug)]
pub(crate) enum Db {
    Postgres(PgPool),
    Mysql(MySqlPool),
    Sqlite(SqlitePool),
}

/// Runs the same lines on the pool of any database.
macro_rules! on_pool {
    ($db:expr, $pool:ident => $body:expr) => {
        match $db {
            $crate::bed::Db::Postgres($pool) => $body,
            $crate::bed::Db::Mysql($pool) => $body,
            $crate::bed::Db::Sqlite($pool) => $body,
        }
    };
}
pub(crate) use on_pool;

impl Db {
    pub(crate) async fn connect(url: &str, connections: u32) -> Self {
        if url.starts_with("postgres") {
            let options = sqlx::postgres::PgPoolOptions::new().max_connections(connections);
            Self::Postgres(options.connect(url).await.expect("the server can be reached"))
        } else if !url.starts_with("sqlite") {
            let options = sqlx::mysql::MySqlPoolOptions::new().max_connections(connections);
            Self::Mysql(options.connect(url).await.expect("the server can be reached"))
        } else {
            let options = url
                .parse::<SqliteConnectOptions>()
                .expect("a good URL")
                .create_if_missing(true)
                .journal_mode(SqliteJournalMode::Wal)
                .busy_timeout(Duration::from_secs(60));
            let pool = SqlitePoolOptions::new().max_connections(connections).connect_with(options);
            Self::Sqlite(pool.await.expect("the file can be opened"))
        }
    }

    /// A statement; `jobq.` stands for jobq's tables.
    fn sql(&self, text: &str) -> AssertSqlSafe<String> {
        AssertSqlSafe(match self {
            Self::Postgres(_) => text.to_owned(),
            Self::Mysql(_) | Self::Sqlite(_) => text.replace("jobq.", "jobq_"),
        })
    }

    /// The SQL for the time, as jobq stores it.
    pub(crate) fn now(&self) -> &'static str {
        match self {
            Self::Postgres(_) => "clock_timestamp()",
            Self::Mysql(_) => jobq_migrations::MYSQL_NOW,
            Self::Sqlite(_) => jobq_migrations::SQLITE_NOW,
        }
    }

    /// The SQL for the time of what waits.
    pub(crate) fn never(&self) -> &'static str {
        match self {
            Self::Postgres(_) => "'infinity'",
            Self::Mysql(_) | Self::Sqlite(_) => "9223372036854775807",
        }
    }

    /// The isolation levels that the application may have in its transactions.
    pub(crate) fn isolations(&self) -> &'static [&'static str] {
        match self {
            Self::Postgres(_) | Self::Mysql(_) => {
                &["read committed", "repeatable read", "serializable"]
            }
            Self::Sqlite(_) => &["serializable"],
        }
    }

    /// How a transaction begins that is going to write.
    pub(crate) fn begin(&self) -> &'static str {
        match self {
            Self::Postgres(_) | Self::Mysql(_) => "begin",
            Self::Sqlite(_) => "begin immediate",
        }
    }

    /// The same at one of the isolation levels.
    pub(crate) fn begin_at(&self, isolation: &str) -> AssertSqlSafe<String> {
        AssertSqlSafe(match self {
            Self::Postgres(_) => format!("begin isolation level {isolation}"),
            Self::Mysql(_) => format!("set transaction isolation level {isolation}; begin"),
            Self::Sqlite(_) => self.begin().to_owned(),
        })
    }

    /// Runs a statement.
    pub(crate) async fn execute(&self, sql: &str) -> Result<u64, sqlx::Error> {
        let sql = self.sql(sql);
        on_pool!(self, pool => Ok(pool.execute(sql).await?.rows_affected()))
    }

    /// The one number that a query gives.
    pub(crate) async fn number(&self, sql: &str) -> i64 {
        let text = self.sql(sql);
        let number = on_pool!(self, pool => sqlx::query_scalar(text).fetch_one(pool).await);
        number.unwrap_or_else(|error| panic!("{sql}: {error}"))
    }

    /// Notes that something happened in an attempt, outside every transaction.
    pub(crate) async fn log(&self, ctx: &JobContext, what: &str) -> Result<(), sqlx::Error> {
        let worker = std::env::var("JOBQ_WORKER_NAME").unwrap_or_default();
        let sql = format!(
            "insert into log (job_id, token, worker, what) values ({}, {}, '{worker}', '{what}')",
            ctx.id(),
            ctx.token()
        );
        self.execute(&sql).await.map(drop)
    }
}

impl Bed {
    pub(crate) async fn sqlite() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let url = format!("sqlite:{}", folder.path().join("jobs.db").display());
        Self::new(url, None, folder).await
    }

    pub(crate) async fn postgres() -> Self {
        Self::at(&server("PostgreSQL", "JOBQ_TEST_POSTGRES_URL")).await
    }

    pub(crate) async fn mysql() -> Self {
        Self::at(&server("MySQL", "JOBQ_TEST_MYSQL_URL")).await
    }

    pub(crate) async fn mariadb() -> Self {
        Self::at(&server("MariaDB", "JOBQ_TEST_MARIADB_URL")).await
    }

    /// Where there is one; scripts/test says when there is none.
    pub(crate) async fn mariadb118() -> Option<Self> {
        match std::env::var("JOBQ_TEST_MARIADB118_URL") {
            Ok(url) => Some(Self::at(&url).await),
            Err(_) => None,
        }
    }

    /// A database of its own on a server.
    pub(crate) async fn at(server: &str) -> Self {
        let name = format!("jobq_test_{}_{}", std::process::id(), unique());
        let create = AssertSqlSafe(format!("create database {name}"));
        let mut drop = format!("drop database if exists {name}");
        let created = if server.starts_with("postgres") {
            drop += " with (force)";
            let mut admin = sqlx::PgConnection::connect(server).await.expect("reachable");
            admin.execute(create).await.map(|_| ())
        } else {
            let mut admin = sqlx::MySqlConnection::connect(server).await.expect("reachable");
            admin.execute(create).await.map(|_| ())
        };
        created.expect("tests may create databases");
        let (address, _) = server.rsplit_once('/').expect("the URL names a database");
        let folder = tempfile::tempdir().expect("a temporary folder");
        Self::new(format!("{address}/{name}"), Some((server.to_owned(), drop)), folder).await
    }

    async fn new(
        url: String,
        leftover: Option<(String, String)>,
        folder: tempfile::TempDir,
    ) -> Self {
        let client = Client::connect(&url).await.expect("the database can be reached");
        let db = Db::connect(&url, 10).await;
        let bed = Self { url, client, db, leftover, folder };
        bed.client.migrate().await.expect("the tables can be made");
        for table in [
            "create table effects (job_id bigint unique, worker text)",
            "create table log (job_id bigint, token bigint, worker text, what text)",
            "create table gates (name varchar(200) primary key)",
        ] {
            bed.db.execute(table).await.expect("a table can be made");
        }
        bed
    }

    /// A file in the test's own folder.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Starts a worker process; it is killed when the handle is dropped.
    pub(crate) fn worker(&self, name: &str, settings: &[(&str, &str)]) -> Worker {
        let program = std::env::current_exe().expect("this program has a path");
        let log = std::fs::File::create(self.file(&format!("{name}.log"))).expect("a log file");
        let child = Command::new(program)
            .args(["jobs::worker_process", "--exact", "--nocapture"])
            .env("JOBQ_WORKER_URL", &self.url)
            .env("JOBQ_WORKER_NAME", name)
            .envs(settings.iter().copied())
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("the log file can be shared"))
            .stderr(log)
            .spawn()
            .expect("a worker process can be started");
        Worker { child, name: name.to_owned() }
    }

    /// Pauses a worker process, but not while it has the whole file locked (SQLite): then nobody could do
    /// anything until it goes on.
    pub(crate) async fn pause(&self, worker: &Worker) {
        loop {
            worker.signal(SIGSTOP);
            let Db::Sqlite(pool) = &self.db else { return };
            let options = (*pool.connect_options()).clone().busy_timeout(Duration::from_secs(1));
            let mut own = sqlx::SqliteConnection::connect_with(&options).await.expect("opens");
            if own.execute("begin immediate; rollback").await.is_ok() {
                return;
            }
            worker.signal(SIGCONT);
            tokio::time::sleep(Duration::from_millis(7)).await;
        }
    }

    /// Opens a gate that job functions wait for.
    pub(crate) async fn open_gate(&self, name: &str) {
        let sql = format!("insert into gates values ('{name}')");
        self.db.execute(&sql).await.expect("a gate can be opened");
    }

    /// Waits until a job function has made a file.
    pub(crate) async fn until_there_is(&self, file: &str) {
        let end = Instant::now() + Duration::from_secs(90);
        while !std::path::Path::new(file).exists() {
            assert!(Instant::now() < end, "{file} is not made; see {:?}", self.logs());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits until a query gives a number that satisfies `holds`.
    pub(crate) async fn until(&self, sql: &str, holds: impl Fn(i64) -> bool) -> i64 {
        let end = Instant::now() + Duration::from_secs(90);
        loop {
            let number = self.db.number(sql).await;
            if holds(number) {
                return number;
            }
            assert!(Instant::now() < end, "{sql} stays at {number}; see {:?}", self.logs());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// What the workers printed, for a failing test.
    pub(crate) fn logs(&self) -> Vec<String> {
        let files = std::fs::read_dir(self.folder.path()).into_iter().flatten().flatten();
        files
            .filter(|file| file.path().extension().is_some_and(|extension| extension == "log"))
            .filter_map(|file| std::fs::read_to_string(file.path()).ok())
            .map(|text| text.lines().rev().take(15).collect::<Vec<_>>().join(" <- "))
            .collect()
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let Some((server, statement)) = self.leftover.take() else { return };
        let cleaned = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let Ok(runtime) = runtime else { return };
            runtime.block_on(async {
                let statement = AssertSqlSafe(statement);
                if server.starts_with("postgres") {
                    if let Ok(mut admin) = sqlx::PgConnection::connect(&server).await {
                        let _ = admin.execute(statement).await;
                    }
                } else if let Ok(mut admin) = sqlx::MySqlConnection::connect(&server).await {
                    let _ = admin.execute("set lock_wait_timeout = 5").await;
                    let _ = admin.execute(statement).await;
                }
            });
        });
        let _ = cleaned.join();
    }
}

/// The URL of a server that scripts/test has started.
fn server(name: &str, variable: &str) -> String {
    std::env::var(variable).unwrap_or_else(|_| {
        panic!(
            "these tests need a {name} server: run `scripts/test`, which starts one, or set \
             {variable}"
        )
    })
}

/// A worker process.
pub(crate) struct Worker {
    child: Child,
    pub(crate) name: String,
}

impl Worker {
    /// Sends a signal, as `kill` does.
    pub(crate) fn signal(&self, signal: i32) {
        let status = Command::new("kill")
            .args([format!("-{signal}"), self.child.id().to_string()])
            .status()
            .expect("kill can be run");
        assert!(status.success(), "the process is there");
    }

    /// Waits for the process to end by itself.
    pub(crate) async fn ended(&mut self) -> std::process::ExitStatus {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(status) = self.child.try_wait().expect("the process can be asked") {
                return status;
            }
            assert!(Instant::now() < end, "{} does not end", self.name);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("the process can be asked").is_none()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) const SIGKILL: i32 = 9;
pub(crate) const SIGTERM: i32 = 15;
pub(crate) const SIGCONT: i32 = 18;
pub(crate) const SIGSTOP: i32 = 19;

/// A number that no other test of this process was given.
pub(crate) fn unique() -> u64 {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

/// Makes a test of each case for every database.
macro_rules! on_every_database {
    ($($case:ident)+) => {
        $crate::bed::on_database! { sqlite: $($case)+ }
        $crate::bed::on_every_server! { $($case)+ }
    };
}
pub(crate) use on_every_database;

/// Makes a test of each case for every database that is a server: SQLite is no process of its own
/// that could be stopped or cut off.
macro_rules! on_every_server {
    ($($case:ident)+) => {
        $crate::bed::on_database! { postgres: $($case)+ }
        $crate::bed::on_database! { mysql: $($case)+ }
        $crate::bed::on_database! { mariadb: $($case)+ }
    };
}
pub(crate) use on_every_server;

macro_rules! on_database {
    ($database:ident: $($case:ident)+) => {
        mod $database {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() { super::$case($crate::bed::Bed::$database().await).await }
            )+
        }
    };
}
pub(crate) use on_database;

/// Makes a test of each case for MariaDB 11.8, too. What differs there from 10.11 is what a
/// transaction may lock after it has read; the rest the conformance suite covers.
macro_rules! on_mariadb118 {
    ($($case:ident)+) => {
        mod mariadb118 {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() {
                    if let Some(bed) = $crate::bed::Bed::mariadb118().await {
                        super::$case(bed).await;
                    }
                }
            )+
        }
    };
}
pub(crate) use on_mariadb118;
