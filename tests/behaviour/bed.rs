//! Tables of their own for one test, and a runtime that runs only the jobs it is given.

use std::time::{Duration, Instant};

use jobq::{Client, ClientOptions, Ended, JobDef, JobId, JobInfo, Lookup, Runtime};

pub(crate) struct Bed {
    pub(crate) client: Client,
    /// Where the tables are to be dropped at the end.
    postgres: Option<(String, String)>,
    _folder: tempfile::TempDir,
}

impl Bed {
    pub(crate) async fn sqlite() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let url = format!("sqlite:{}", folder.path().join("jobs.db").display());
        let client = Client::connect(&url).await.expect("the file can be opened");
        client.migrate().await.expect("the tables can be made");
        Self { client, postgres: None, _folder: folder }
    }

    pub(crate) async fn postgres() -> Self {
        let url = std::env::var("JOBQ_TEST_POSTGRES_URL").expect(
            "these tests need a PostgreSQL server: run `scripts/test`, which starts one, or set \
             JOBQ_TEST_POSTGRES_URL",
        );
        let schema = format!("b{}_{}", std::process::id(), unique());
        let options = ClientOptions::new().schema(&schema);
        let client = options.connect(&url).await.expect("the server can be reached");
        client.migrate().await.expect("the tables can be made");
        let folder = tempfile::tempdir().expect("a temporary folder");
        Self { client, postgres: Some((url, schema)), _folder: folder }
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
        let Some((url, schema)) = self.postgres.take() else { return };
        let cleaned = std::thread::spawn(move || {
            use sqlx::{AssertSqlSafe, Connection, Executor};
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let Ok(runtime) = runtime else { return };
            runtime.block_on(async {
                if let Ok(mut admin) = sqlx::PgConnection::connect(&url).await {
                    let drop = format!("drop schema if exists {schema} cascade");
                    let _ = admin.execute("set lock_timeout = '5s'").await;
                    let _ = admin.execute(AssertSqlSafe(drop)).await;
                }
            });
        });
        let _ = cleaned.join();
    }
}

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
