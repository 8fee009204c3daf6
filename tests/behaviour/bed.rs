//! Tables of their own for one test, and a runtime that runs only the jobs it is given.

use std::time::{Duration, Instant};

use jobq::{Client, ClientOptions, Ended, JobDef, JobId, JobInfo, Lookup, Runtime};
use sqlx::{AssertSqlSafe, Connection, Executor};

pub(crate) struct Bed {
    pub(crate) client: Client,
    /// Where its database is.
    pub(crate) url: String,
    /// A server, and the statement that leaves nothing behind there.
    leftover: Option<(String, String)>,
    _folder: tempfile::TempDir,
}

impl Bed {
    pub(crate) async fn sqlite() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let url = format!("sqlite:{}", folder.path().join("jobs.db").display());
        Self::new(ClientOptions::new(), url, None, folder).await
    }

    /// A schema of its own.
    pub(crate) async fn postgres() -> Self {
        let url = server("PostgreSQL", "JOBQ_TEST_POSTGRES_URL");
        let schema = format!("b{}_{}", std::process::id(), unique());
        let options = ClientOptions::new().schema(&schema);
        let leftover = (url.clone(), format!("drop schema if exists {schema} cascade"));
        let folder = tempfile::tempdir().expect("a temporary folder");
        Self::new(options, url, Some(leftover), folder).await
    }

    pub(crate) async fn mysql() -> Self {
        Self::mysql_at(server("MySQL", "JOBQ_TEST_MYSQL_URL")).await
    }

    pub(crate) async fn mariadb() -> Self {
        Self::mysql_at(server("MariaDB", "JOBQ_TEST_MARIADB_URL")).await
    }

    /// A database of its own.
    async fn mysql_at(server: String) -> Self {
        let name = format!("jobq_b{}_{}", std::process::id(), unique());
        let mut admin =
            sqlx::MySqlConnection::connect(&server).await.expect("the server can be reached");
        let create = AssertSqlSafe(format!("create database {name}"));
        admin.execute(create).await.expect("tests may create databases");
        let (address, _) = server.rsplit_once('/').expect("the URL names a database");
        let url = format!("{address}/{name}");
        let leftover = (server, format!("drop database if exists {name}"));
        let folder = tempfile::tempdir().expect("a temporary folder");
        Self::new(ClientOptions::new(), url, Some(leftover), folder).await
    }

    async fn new(
        options: ClientOptions,
        url: String,
        leftover: Option<(String, String)>,
        folder: tempfile::TempDir,
    ) -> Self {
        let client = options.connect(&url).await.expect("the database can be reached");
        let bed = Self { client, url, leftover, _folder: folder };
        bed.client.migrate().await.expect("the tables can be made");
        bed
    }

    /// A runtime that knows these jobs only.
    pub(crate) fn runtime(&self, jobs: &[&'static JobDef]) -> Runtime {
        Runtime::new(self.client.clone()).only_listed_jobs().jobs(jobs)
    }

    /// Runs these jobs until nothing is due.
    pub(crate) async fn run(&self, jobs: &[&'static JobDef]) -> Ended {
        self.runtime(jobs).run_until_idle().await.expect("a good runtime runs")
    }

    pub(crate) async fn job(&self, id: JobId) -> JobInfo {
        match self.client.job(id).await.expect("the database can be asked") {
            Lookup::Found(info) => *info,
            other => panic!("job {id} should be there, but is {other:?}"),
        }
    }

    /// Runs these jobs until one is in a final state.
    pub(crate) async fn run_until_final(&self, jobs: &[&'static JobDef], id: JobId) -> JobInfo {
        let client = self.client.clone();
        let ended = async move {
            let end = Instant::now() + Duration::from_secs(60);
            loop {
                if let Ok(Lookup::Found(info)) = client.job(id).await
                    && info.state.is_final()
                {
                    return;
                }
                assert!(Instant::now() < end, "job {id} does not end");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        self.runtime(jobs).run_until(ended).await.expect("a good runtime runs");
        self.job(id).await
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
                        let _ = admin.execute("set lock_timeout = '5s'").await;
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

/// A number that no other test of this process was given.
pub(crate) fn unique() -> u64 {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}

/// Makes a test of each case for every database.
macro_rules! on_every_database {
    ($($case:ident)+) => {
        $crate::bed::on_database! { sqlite: $($case)+ }
        $crate::bed::on_database! { postgres: $($case)+ }
        $crate::bed::on_database! { mysql: $($case)+ }
        $crate::bed::on_database! { mariadb: $($case)+ }
    };
}
pub(crate) use on_every_database;

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
