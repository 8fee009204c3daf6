//! A fresh database, worker processes on it, and an independent log of what they did.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use jobq::{Client, JobContext};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};
use sqlx::{AssertSqlSafe, Connection, Executor, PgPool, SqlitePool};

/// A database of its own for one test.
pub(crate) struct Bed {
    pub(crate) url: String,
    pub(crate) client: Client,
    pub(crate) db: Db,
    /// Where the database is to be dropped at the end.
    admin_url: Option<(String, String)>,
    folder: tempfile::TempDir,
}

/// The application's own way into the database.
#[derive(Clone, Debug)]
pub(crate) enum Db {
    Postgres(PgPool),
    Sqlite(SqlitePool),
}

impl Db {
    pub(crate) async fn connect(url: &str, connections: u32) -> Self {
        if url.starts_with("postgres") {
            let options = sqlx::postgres::PgPoolOptions::new().max_connections(connections);
            Self::Postgres(options.connect(url).await.expect("the server can be reached"))
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

    /// Runs a statement; `jobq.` stands for jobq's tables.
    pub(crate) async fn execute(&self, sql: &str) -> Result<u64, sqlx::Error> {
        match self {
            Self::Postgres(pool) => {
                let sql = AssertSqlSafe(sql.to_owned());
                Ok(pool.execute(sql).await?.rows_affected())
            }
            Self::Sqlite(pool) => {
                let sql = AssertSqlSafe(sql.replace("jobq.", "jobq_"));
                Ok(pool.execute(sql).await?.rows_affected())
            }
        }
    }

    /// The one number that a query gives.
    pub(crate) async fn number(&self, sql: &str) -> i64 {
        let number = match self {
            Self::Postgres(pool) => {
                sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(pool).await
            }
            Self::Sqlite(pool) => {
                let sql = AssertSqlSafe(sql.replace("jobq.", "jobq_"));
                sqlx::query_scalar(sql).fetch_one(pool).await
            }
        };
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
        let url = std::env::var("JOBQ_TEST_POSTGRES_URL").expect(
            "these tests need a PostgreSQL server: run `scripts/test`, which starts one, or set \
             JOBQ_TEST_POSTGRES_URL",
        );
        Self::postgres_at(&url).await
    }

    pub(crate) async fn postgres_at(url: &str) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let name = format!("jobq_test_{}_{}", std::process::id(), unique());
        let mut admin = sqlx::PgConnection::connect(url).await.expect("the server can be reached");
        admin
            .execute(AssertSqlSafe(format!("create database {name}")))
            .await
            .expect("tests may create databases");
        let (server, _) = url.rsplit_once('/').expect("the URL names a database");
        Self::new(format!("{server}/{name}"), Some((url.to_owned(), name)), folder).await
    }

    async fn new(
        url: String,
        admin_url: Option<(String, String)>,
        folder: tempfile::TempDir,
    ) -> Self {
        let client = Client::connect(&url).await.expect("the database can be reached");
        client.migrate().await.expect("the tables can be made");
        let db = Db::connect(&url, 10).await;
        for table in [
            "create table effects (job_id bigint unique, worker text)",
            "create table log (job_id bigint, token bigint, worker text, what text)",
            "create table gates (name text primary key)",
        ] {
            db.execute(table).await.expect("a table can be made");
        }
        Self { url, client, db, admin_url, folder }
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

    /// Opens a gate that job functions wait for.
    pub(crate) async fn open_gate(&self, name: &str) {
        let sql = format!("insert into gates values ('{name}')");
        self.db.execute(&sql).await.expect("a gate can be opened");
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
        let Some((admin_url, name)) = self.admin_url.take() else { return };
        let cleaned = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let Ok(runtime) = runtime else { return };
            runtime.block_on(async {
                if let Ok(mut admin) = sqlx::PgConnection::connect(&admin_url).await {
                    let drop = format!("drop database if exists {name} with (force)");
                    let _ = admin.execute(AssertSqlSafe(drop)).await;
                }
            });
        });
        let _ = cleaned.join();
    }
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

/// Makes a test of a case for SQLite and one for PostgreSQL.
macro_rules! on_every_database {
    ($($case:ident)+) => {
        mod sqlite {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() { super::$case($crate::bed::Bed::sqlite().await).await }
            )+
        }
        mod postgres {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() { super::$case($crate::bed::Bed::postgres().await).await }
            )+
        }
    };
}
pub(crate) use on_every_database;
