//! A fresh set of tables in a real database, and what cases need to poke at them.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use jobq_core::job::{JobId, Lease, SessionId};
use jobq_core::lifecycle::Transition;
use jobq_core::queue::bands;

use crate::client::{Client, ClientOptions};
use crate::job::{CheckedDue, CheckedJob};
use crate::store::{
    Claim, Claimed, ClaimedJob, Floor, NewSession, QueueClaim, Settled, Settlement, Store,
};

/// Tables of their own for one case.
pub(crate) struct Bed {
    pub(crate) client: Client,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) database: Database,
    schema: String,
    _folder: Option<tempfile::TempDir>,
}

/// A second way into the database, for what the store has no operation for.
#[derive(Clone)]
pub(crate) enum Database {
    #[cfg(feature = "postgres")]
    Postgres(sqlx::PgPool),
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
            _folder: Some(folder),
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
        Self { client, store, database: Database::Postgres(pool), schema, _folder: None }
    }

    pub(crate) fn is_sqlite(&self) -> bool {
        self.store.database() == "SQLite"
    }

    /// Text written for PostgreSQL's default schema, for this bed's tables.
    pub(crate) fn sql(&self, text: &str) -> String {
        if self.is_sqlite() {
            text.replace("jobq.", "jobq_")
        } else {
            text.replace("jobq.", &format!("{}.", self.schema))
        }
    }

    /// Runs a statement; `jobq.` stands for the tables' place.
    pub(crate) async fn execute(&self, text: &str) -> u64 {
        let sql = sqlx::AssertSqlSafe(self.sql(text));
        match &self.database {
            #[cfg(feature = "postgres")]
            Database::Postgres(pool) => {
                sqlx::query(sql).execute(pool).await.expect("the statement runs").rows_affected()
            }
            #[cfg(feature = "sqlite")]
            Database::Sqlite(pool) => {
                sqlx::query(sql).execute(pool).await.expect("the statement runs").rows_affected()
            }
        }
    }

    /// The one number that a query gives.
    pub(crate) async fn number(&self, text: &str) -> i64 {
        let sql = sqlx::AssertSqlSafe(self.sql(text));
        match &self.database {
            #[cfg(feature = "postgres")]
            Database::Postgres(pool) => {
                sqlx::query_scalar(sql).fetch_one(pool).await.expect("the query gives a number")
            }
            #[cfg(feature = "sqlite")]
            Database::Sqlite(pool) => {
                sqlx::query_scalar(sql).fetch_one(pool).await.expect("the query gives a number")
            }
        }
    }

    /// Opens a session that knows `kinds`.
    pub(crate) async fn session(&self, lease: Duration, kinds: &[&str]) -> Worker<'_> {
        static NEXT: AtomicI64 = AtomicI64::new(1_000);
        let id = SessionId(NEXT.fetch_add(1, Ordering::Relaxed));
        let session = NewSession {
            id,
            worker: format!("worker-{id}"),
            lease,
            kinds: kinds.iter().map(|kind| (*kind).to_owned()).collect(),
            queues: vec!["default".to_owned()],
        };
        self.store.open_session(&session).await.expect("a session can be opened");
        Worker { bed: self, id, kinds: session.kinds }
    }

    /// Writes jobs and returns their ids.
    pub(crate) async fn enqueue(&self, jobs: Vec<CheckedJob>) -> Vec<JobId> {
        self.store.insert(jobs).await.expect("jobs can be written")
    }

    /// Writes one plain job of kind `k`.
    pub(crate) async fn one(&self) -> JobId {
        self.enqueue(vec![job("k")]).await[0]
    }

    pub(crate) async fn settle(&self, lease: Lease, transition: Transition) -> Settled {
        let settlement = Settlement {
            lease,
            transition,
            retention: Duration::from_secs(3600),
            doubtful: false,
        };
        self.store.settle(&[settlement]).await.expect("settling reaches the database")[0]
    }
}

#[cfg(feature = "postgres")]
impl Drop for Bed {
    fn drop(&mut self) {
        // The server may be the user's own: leave nothing behind.
        if let Database::Postgres(pool) = &self.database {
            let options = (*pool.connect_options()).clone();
            let drop_schema = format!("drop schema {} cascade", self.schema);
            let cleaned = std::thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                runtime.map(|runtime| {
                    runtime.block_on(async {
                        use sqlx::{ConnectOptions, Executor};
                        if let Ok(mut connection) = options.connect().await {
                            let statement = sqlx::AssertSqlSafe(drop_schema);
                            let _ = connection.execute("set lock_timeout = '5s'").await;
                            let _ = connection.execute(statement).await;
                        }
                    });
                })
            });
            let _ = cleaned.join();
        }
    }
}

/// A session that claims, as a worker's process would.
pub(crate) struct Worker<'b> {
    bed: &'b Bed,
    pub(crate) id: SessionId,
    kinds: Vec<String>,
}

impl Worker<'_> {
    /// Claims up to `limit` jobs of the default queue, looking from the beginning.
    pub(crate) async fn claim(&self, limit: u32) -> Vec<ClaimedJob> {
        self.claim_from(limit, Floor::START).await.jobs
    }

    /// Claims from a floor, the same in every band.
    pub(crate) async fn claim_from(&self, limit: u32, floor: Floor) -> Claimed {
        let claim = Claim {
            kinds: self.kinds.iter().map(|kind| (kind.clone(), self.id)).collect(),
            queues: vec![QueueClaim {
                queue: "default".to_owned(),
                limit,
                floors: bands().map(|band| (band, floor)).collect(),
            }],
        };
        self.bed.store.claim(&claim).await.expect("claiming reaches the database")
    }

    /// Claims exactly one job.
    pub(crate) async fn claim_one(&self) -> ClaimedJob {
        let mut jobs = self.claim(1).await;
        assert_eq!(jobs.len(), 1, "one job is due");
        jobs.remove(0)
    }
}

/// A job of the default queue, due now.
pub(crate) fn job(kind: &'static str) -> CheckedJob {
    CheckedJob {
        kind: Cow::Borrowed(kind),
        queue: Cow::Borrowed("default"),
        payload: "{}".to_owned(),
        due: CheckedDue::After(Duration::ZERO),
        priority: 0,
        max_attempts: 3,
        max_crashes: 3,
        tags: Vec::new(),
        metadata: None,
    }
}

/// Waits until a condition holds; fails after 20 s.
pub(crate) async fn until<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) {
    let end = Instant::now() + Duration::from_secs(20);
    while !holds().await {
        assert!(Instant::now() < end, "it never came to be that {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
