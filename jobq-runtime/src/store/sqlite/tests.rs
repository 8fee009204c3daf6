//! What is special to SQLite: one file, one writer at a time, several processes.
//!
//! Two stores on one file stand for two processes: all they share is the file.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use jobq_core::job::{JobState, Token};
use jobq_core::key::OnBlock;
use jobq_core::lifecycle::{Counters, Transition, When};
use jobq_core::outcome::{AttemptReason, AttemptRecord, DeathReason};
use jobq_core::queue::bands;
use jobq_core::time::Timestamp;
use jobq_core::unique::{OnConflict, UniqueScope};
use sqlx::Executor;
use sqlx::sqlite::SqliteSynchronous;
use tempfile::TempDir;

use super::*;
use crate::context::CompleteTarget;
use crate::enqueue::EnqueueTarget;
use crate::enqueue::Enqueued;
use crate::job::{CheckedDue, CheckedUnique};
use crate::key::JobKey;
use crate::limit::QueueLimit;
use crate::store::{ClaimedJob, Completion, QueueClaim, Turn};

const LEASE: Duration = Duration::from_secs(60);

fn options(dir: &TempDir) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(dir.path().join("jobs.db"))
        .create_if_missing(true)
        .synchronous(SqliteSynchronous::Off)
}

fn store(dir: &TempDir) -> SqliteStore {
    let pool = SqlitePoolOptions::new().connect_lazy_with(options(dir));
    SqliteStore::new(&pool, Schema::default()).expect("a file")
}

async fn migrated(dir: &TempDir) -> SqliteStore {
    let store = store(dir);
    store.migrate().await.expect("a new file");
    store
}

async fn connection(dir: &TempDir) -> SqliteConnection {
    SqliteConnection::connect_with(&options(dir)).await.expect("the file is there")
}

/// Somebody else's transaction, which keeps every other writer out.
async fn foreign_lock(dir: &TempDir) -> SqliteConnection {
    let mut foreign = connection(dir).await;
    foreign.execute("begin immediate").await.expect("nobody else writes");
    foreign
}

fn job(n: usize) -> CheckedJob {
    CheckedJob {
        kind: "resize".into(),
        queue: "images".into(),
        payload: format!("{{\"n\":{n}}}"),
        due: CheckedDue::After(Duration::ZERO),
        priority: 0,
        max_attempts: 3,
        max_crashes: 3,
        expires: None,
        tags: Vec::new(),
        metadata: None,
        unique: None,
        key: None,
    }
}

fn jobs(count: usize) -> Vec<CheckedJob> {
    (0..count).map(job).collect()
}

fn claim(session: SessionId, limit: u32) -> Claim {
    claim_from(session, limit, Floor::START)
}

fn claim_from(session: SessionId, limit: u32, floor: Floor) -> Claim {
    Claim {
        kinds: vec![("resize".to_owned(), session), ("crop".to_owned(), session)],
        queues: vec![QueueClaim {
            queue: "images".to_owned(),
            limit,
            floors: bands().map(|band| (band, floor)).collect(),
        }],
    }
}

async fn session(store: &SqliteStore, id: i64, lease: Duration) -> SessionId {
    let session = NewSession {
        id: SessionId(id),
        worker: format!("worker {id}"),
        lease,
        kinds: vec!["resize".to_owned()],
        queues: vec!["images".to_owned()],
    };
    store.open_session(&session).await.expect("a new session");
    session.id
}

fn completed(lease: Lease) -> Settlement {
    Settlement {
        lease,
        transition: Transition::Complete { result: None },
        retention: Duration::from_secs(60),
        doubtful: false,
        key: None,
    }
}

async fn beat(pulse: &mut Box<dyn Pulse>, session: SessionId) -> BeatReply {
    let beat = Beat { session: session.0, held: Vec::new(), floors: Vec::new() };
    pulse.beat(&beat).await.expect("a heartbeat is answered")
}

#[tokio::test]
async fn a_database_in_memory_is_refused() {
    for url in ["sqlite::memory:", "sqlite://", "sqlite:a.db?mode=memory", "sqlite:a.db?vfs=memdb"]
    {
        let pool = SqlitePool::connect_lazy(url).expect("sqlx takes it");
        let error = SqliteStore::new(&pool, Schema::default()).err().expect(url);
        assert!(error.to_string().contains("use a file"), "{url}: {error}");
    }
    for name in [":memory:", "file::memory:?cache=shared", "file:a?mode=memory"] {
        let options = SqliteConnectOptions::new().filename(name);
        let pool = SqlitePoolOptions::new().connect_lazy_with(options);
        assert!(SqliteStore::new(&pool, Schema::default()).is_err(), "{name}");
    }
}

#[tokio::test]
async fn check_names_the_cure() {
    let dir = TempDir::new().expect("a directory");
    let check = async |options: SqliteConnectOptions| {
        let pool = SqlitePoolOptions::new().connect_lazy_with(options);
        let store = SqliteStore::new(&pool, Schema::default()).expect("a file");
        store.check().await
    };

    let missing = check(options(&dir).create_if_missing(false)).await.expect_err("no file");
    assert!(missing.to_string().contains("mode=rwc"), "{missing}");

    let empty = check(options(&dir)).await.expect_err("no tables");
    let all = jobq_migrations::needed(jobq_migrations::Dialect::Sqlite);
    assert!(matches!(empty, Error::Schema { found: 0, needed } if needed == all), "{empty}");

    migrated(&dir).await;
    check(options(&dir)).await.expect("everything is there");

    let read_only = check(options(&dir).read_only(true)).await.expect_err("read-only");
    assert!(read_only.to_string().contains("read_only(true)"), "{read_only}");

    let other_mode = options(&dir).journal_mode(SqliteJournalMode::Delete);
    let other_mode = check(other_mode).await.expect_err("the application leaves WAL");
    assert!(other_mode.to_string().contains("journal_mode"), "{other_mode}");

    // Elsewhere: a connection that is still being closed has the real one's pages in its log.
    let dir = TempDir::new().expect("a directory");
    std::fs::write(dir.path().join("jobs.db"), "this is a letter").expect("a writable directory");
    let letter = check(options(&dir)).await.expect_err("not a database");
    assert!(letter.to_string().contains("not an SQLite database"), "{letter}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn d1_processes_migrate_at_once_and_again() {
    let dir = TempDir::new().expect("a directory");
    for _ in 0..2 {
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let store = store(&dir);
            tasks.spawn(async move { store.migrate().await });
        }
        while let Some(migrated) = tasks.join_next().await {
            migrated.expect("no panic").expect("no error, busy or other");
        }
    }
    let steps: i64 = sqlx::query_scalar("select count(*) from jobq_migrations")
        .fetch_one(&mut connection(&dir).await)
        .await
        .expect("the table is there");
    assert_eq!(steps, jobq_migrations::needed(jobq_migrations::Dialect::Sqlite));
    store(&dir).check().await.expect("fit for use");
}

#[tokio::test]
async fn two_applications_share_a_file_under_two_names() {
    let dir = TempDir::new().expect("a directory");
    let ours = migrated(&dir).await;
    let pool = SqlitePoolOptions::new().connect_lazy_with(options(&dir));
    let schema = Schema::new("billing").expect("a name");
    let theirs = SqliteStore::new(&pool, schema).expect("a file");
    theirs.migrate().await.expect("another name");
    theirs.check().await.expect("fit for use");
    let id = theirs.insert(jobs(1)).await.expect("written")[0].id();
    assert!(matches!(theirs.job(id).await, Ok(Lookup::Found(_))));
    assert_eq!(ours.job(id).await.expect("readable"), Lookup::NotFound);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn d3_two_processes_claim_and_settle_without_doubles_or_busy() {
    const JOBS: usize = 2_000;
    let dir = TempDir::new().expect("a directory");
    let stores = [Arc::new(migrated(&dir).await), Arc::new(store(&dir))];
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..8 {
        let store = Arc::clone(&stores[n % 2]);
        tasks.spawn(async move {
            let session = session(&store, n as i64 + 1, LEASE).await;
            let mut claimed = Vec::new();
            for _ in 0..5 {
                store.insert(jobs(JOBS / 40)).await.expect("never busy");
            }
            let mut empty = 0;
            while empty < 20 {
                let found = store.claim(&claim(session, 7)).await.expect("never busy").jobs;
                if found.is_empty() {
                    empty += 1;
                    tokio::time::sleep(Duration::from_millis(10)).await;
                    continue;
                }
                empty = 0;
                let settlements: Vec<_> = found.iter().map(|job| completed(job.lease)).collect();
                let settled = store.settle(&settlements).await.expect("never busy");
                assert!(settled.iter().all(|settled| *settled == Settled::Written));
                claimed.extend(found.into_iter().map(|job| job.lease.job));
            }
            claimed
        });
    }
    let mut claims = Vec::new();
    while let Some(claimed) = tasks.join_next().await {
        claims.extend(claimed.expect("no panic"));
    }
    assert_eq!(claims.len(), JOBS);
    assert_eq!(claims.into_iter().collect::<HashSet<_>>().len(), JOBS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn d3_a_foreign_write_lock_is_waited_for_and_costs_no_lease() {
    let dir = TempDir::new().expect("a directory");
    let store = Arc::new(migrated(&dir).await);
    store.insert(jobs(2)).await.expect("written");
    let session = session(&store, 1, Duration::from_millis(500)).await;
    let mut pulse = store.pulse().await.expect("a connection");
    let held = store.claim(&claim(session, 1)).await.expect("claimed").jobs;

    let mut foreign = foreign_lock(&dir).await;
    let asked = Instant::now();
    assert_eq!(beat(&mut pulse, session).await, BeatReply::Blocked);
    assert!(asked.elapsed() < Duration::from_millis(300), "it must fit into the shortest lease");
    let claims = tokio::spawn({
        let store = Arc::clone(&store);
        async move { store.claim(&claim(session, 1)).await }
    });
    // Long enough for the lease to end.
    tokio::time::sleep(Duration::from_millis(1_000)).await;
    let sweeps = tokio::spawn({
        let store = Arc::clone(&store);
        async move { store.close_expired_sessions().await }
    });
    tokio::time::sleep(Duration::from_millis(1_000)).await;
    assert!(!claims.is_finished() && !sweeps.is_finished(), "they wait");
    let heart = tokio::spawn(async move {
        while beat(&mut pulse, session).await == BeatReply::Blocked {}
        pulse
    });
    foreign.execute("commit").await.expect("the lock was ours");

    assert_eq!(sweeps.await.expect("no panic").expect("no error"), []);
    let claimed = claims.await.expect("no panic").expect("no error");
    assert!(claimed.sessions_live, "a heartbeat that was kept waiting must not cost the session");
    assert_eq!(claimed.jobs.len(), 1);
    heart.await.expect("no panic");
    let settled = store.settle(&[completed(held[0].lease)]).await.expect("no error");
    assert_eq!(settled, [Settled::Written]);
}

#[tokio::test]
async fn f6_a_session_without_heartbeats_is_closed() {
    let dir = TempDir::new().expect("a directory");
    let store = migrated(&dir).await;
    store.insert(jobs(2)).await.expect("written");
    let session = session(&store, 1, Duration::from_millis(200)).await;
    let held = store.claim(&claim(session, 1)).await.expect("claimed").jobs;
    let mut pulse = store.pulse().await.expect("a connection");
    tokio::time::sleep(Duration::from_millis(250)).await;
    assert!(!store.claim(&claim(session, 1)).await.expect("no error").sessions_live);
    assert_eq!(store.close_expired_sessions().await.expect("no error"), [session]);
    assert_eq!(beat(&mut pulse, session).await, BeatReply::Closed);
    let abandoned = store.abandoned(&[session], false, 10).await.expect("readable");
    assert_eq!(abandoned.len(), 1);
    assert_eq!(abandoned[0].lease, held[0].lease);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_dropped_future_leaves_no_transaction_open() {
    let dir = TempDir::new().expect("a directory");
    let store = migrated(&dir).await;
    let session = session(&store, 1, LEASE).await;
    let mut foreign = connection(&dir).await;
    for round in 0..150 {
        let patience = Duration::from_micros(rand::random_range(0..3_000));
        let held = store.claim(&claim(session, 3)).await.expect("no error").jobs;
        let settlements: Vec<_> = held.iter().map(|job| completed(job.lease)).collect();
        let dropped = async {
            store.insert(jobs(50)).await.expect("no error");
            store.claim(&claim(session, 5)).await.expect("no error");
            store.settle(&settlements).await.expect("no error");
        };
        drop(tokio::time::timeout(patience, dropped).await);
        // The lock must be free for others as soon as what was begun has ended.
        foreign.execute("begin immediate").await.expect("nobody keeps the lock");
        foreign.execute("commit").await.expect("the lock was ours");
        if round % 10 == 0 {
            store.insert(jobs(1)).await.expect("later operations work");
        }
    }
    let ids: i64 =
        sqlx::query_scalar("select count(*) from jobq_jobs where payload <> '{\"n\":0}'")
            .fetch_one(&mut foreign)
            .await
            .expect("readable");
    let finished: i64 =
        sqlx::query_scalar("select count(*) from jobq_finished where payload <> '{\"n\":0}'")
            .fetch_one(&mut foreign)
            .await
            .expect("readable");
    assert_eq!((ids + finished) % 49, 0, "each insert is written whole or not at all");
}

#[test]
fn f4_a_blocked_runtime_does_not_keep_the_file_locked() {
    let dir = TempDir::new().expect("a directory");
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build();
    let theirs = runtime().expect("a runtime");
    let ours = runtime().expect("a runtime");
    let store = Arc::new(ours.block_on(migrated(&dir)));
    ours.block_on(async {
        for _ in 0..50 {
            let insert = tokio::spawn({
                let store = Arc::clone(&store);
                async move { store.insert(jobs(20)).await }
            });
            // The insert is let in at some point, and then nothing of this runtime runs.
            for _ in 0..rand::random_range(1..4) {
                tokio::task::yield_now().await;
            }
            let dir = &dir;
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    theirs.block_on(async {
                        let patient = options(dir).busy_timeout(Duration::from_secs(10));
                        let mut foreign =
                            SqliteConnection::connect_with(&patient).await.expect("a file");
                        foreign.execute("begin immediate").await.expect("nobody keeps the lock");
                    });
                });
            });
            insert.await.expect("no panic").expect("written");
        }
    });
}

#[tokio::test]
async fn ids_follow_the_order_of_the_jobs_and_are_never_used_again() {
    let dir = TempDir::new().expect("a directory");
    let store = migrated(&dir).await;
    let enqueued = store.insert(jobs(3_000)).await.expect("written");
    let ids: Vec<JobId> = enqueued.into_iter().map(Enqueued::id).collect();
    assert!(ids.is_sorted());
    for n in [0, 1, 1_499, 2_999] {
        let Lookup::Found(info) = store.job(ids[n]).await.expect("readable") else {
            panic!("job {n} is missing");
        };
        assert_eq!(info.payload, format!("{{\"n\":{n}}}"));
    }
    let last = ids[2_999];
    connection(&dir).await.execute("delete from jobq_jobs").await.expect("writable");
    let next = store.insert(jobs(1)).await.expect("written")[0].id();
    assert!(next > last);
    assert_eq!(store.job(last).await.expect("readable"), Lookup::Gone);
    assert_eq!(store.job(JobId(next.0 + 1)).await.expect("readable"), Lookup::NotFound);
    assert_eq!(store.job(JobId(0)).await.expect("readable"), Lookup::NotFound);
    assert_eq!(store.job(JobId(-1)).await.expect("readable"), Lookup::NotFound);
}

#[tokio::test]
async fn e1_every_target_writes_all_or_none() {
    let dir = TempDir::new().expect("a directory");
    let store = migrated(&dir).await;
    let pool = SqlitePoolOptions::new().connect_lazy_with(options(&dir));
    let schema = Schema::default();
    (&pool).write(jobs(2), schema.clone()).await.expect("a pool");
    let mut pooled = pool.acquire().await.expect("a connection");
    (&mut pooled).write(jobs(2), schema.clone()).await.expect("a pool's connection");
    (&mut *pooled).write(jobs(2), schema.clone()).await.expect("a connection");
    drop(pooled);
    let mut rolled_back = pool.begin().await.expect("a transaction");
    (&mut rolled_back).write(jobs(2), schema.clone()).await.expect("a transaction");
    rolled_back.rollback().await.expect("rolled back");
    let mut committed = pool.begin_with("begin immediate").await.expect("a transaction");
    (&mut committed).write(jobs(2), schema.clone()).await.expect("a transaction");
    committed.commit().await.expect("committed");
    let refused = CheckedJob { priority: 9, ..job(1) };
    let mut bare = pool.acquire().await.expect("a connection");
    (&mut bare).write(vec![job(0), refused], schema).await.expect_err("no such priority");
    let counts = store.counts().await.expect("readable");
    assert_eq!(counts.iter().map(|count| count.count).collect::<Vec<_>>(), [8]);
}

#[tokio::test]
async fn e1_a_transaction_that_read_before_others_wrote_must_be_run_again() {
    let dir = TempDir::new().expect("a directory");
    let store = migrated(&dir).await;
    let pool = SqlitePoolOptions::new().connect_lazy_with(options(&dir));
    let mut deferred = pool.begin().await.expect("a transaction");
    deferred.fetch_all("select * from jobq_jobs").await.expect("readable");
    store.insert(jobs(1)).await.expect("written");
    let error = (&mut deferred).write(jobs(1), Schema::default()).await.expect_err("too late");
    assert!(matches!(error, Error::Serialization(_)), "{error}");
}

#[tokio::test]
async fn f7_completion_is_part_of_the_handlers_transaction() {
    let dir = TempDir::new().expect("a directory");
    let store = migrated(&dir).await;
    let pool = SqlitePoolOptions::new().connect_lazy_with(options(&dir));
    store.insert(jobs(2)).await.expect("written");
    let session = session(&store, 1, LEASE).await;
    let held = store.claim(&claim(session, 2)).await.expect("claimed").jobs;
    let schema = Schema::default();
    for (job, retention) in held.iter().zip([Duration::from_secs(60), Duration::ZERO]) {
        let completion = Completion { lease: job.lease, retention };
        let mut rolled_back = pool.begin_with("begin immediate").await.expect("a transaction");
        assert!((&mut rolled_back).complete(completion, schema.clone()).await.expect("no error"));
        rolled_back.rollback().await.expect("rolled back");
        let mut committed = pool.begin_with("begin immediate").await.expect("a transaction");
        assert!((&mut committed).complete(completion, schema.clone()).await.expect("no error"));
        assert!(!(&mut committed).complete(completion, schema.clone()).await.expect("no error"));
        committed.commit().await.expect("committed");
    }
    let Lookup::Found(kept) = store.job(held[0].lease.job).await.expect("readable") else {
        panic!("it is kept for a minute");
    };
    assert_eq!(kept.state, JobState::Completed);
    assert_eq!(store.job(held[1].lease.job).await.expect("readable"), Lookup::Gone);
    let stale = Lease { token: Token(0), ..held[0].lease };
    let completion = Completion { lease: stale, retention: Duration::ZERO };
    assert!(!(&mut connection(&dir).await).complete(completion, schema).await.expect("no error"));
}

#[tokio::test]
async fn e7_odd_values_written_by_hand_stop_nobody() {
    let dir = TempDir::new().expect("a directory");
    let store = migrated(&dir).await;
    let mut hand = connection(&dir).await;
    hand.execute(
        "insert into jobq_jobs (queue, kind, payload, tags, metadata, run_after, max_attempts)
         values ('images', 'resize', '', '?', '1', 12.0, -7),
                ('images', 'resize', 7, '{', '[]', -9223372036854775807, 1e15);
         insert into jobq_jobs (queue, kind, payload) values ('?', '', '')",
    )
    .await
    .expect("they are numbers and text");
    store.insert(jobs(1)).await.expect("written");
    let session = session(&store, 1, LEASE).await;
    let held = store.claim(&claim(session, 10)).await.expect("claimed").jobs;
    assert_eq!(held.len(), 3);
    assert_eq!(held[0].payload, "7");
    assert_eq!(held[1].payload, "", "which is no payload");
    store.held(session).await.expect("readable");
    let (from, to) = (Floor::START, Floor { run_after: Timestamp::INFINITY, id: i64::MAX });
    store.unleased("images", 0, from, to, 10).await.expect("readable");
    let settlements: Vec<_> = held.iter().map(|job| completed(job.lease)).collect();
    let settled = store.settle(&settlements).await.expect("no error");
    assert_eq!(settled, [Settled::Written; 3]);
}

#[tokio::test]
async fn an_endless_delay_is_a_time_that_can_be_stored() {
    let dir = TempDir::new().expect("a directory");
    let store = migrated(&dir).await;
    store.insert(jobs(1)).await.expect("written");
    let session = session(&store, 1, LEASE).await;
    let held = store.claim(&claim(session, 1)).await.expect("claimed").jobs;
    let settlement = Settlement {
        lease: held[0].lease,
        transition: Transition::Requeue {
            when: When::After(Duration::MAX),
            counters: Counters::default(),
            record: None,
        },
        retention: Duration::MAX,
        doubtful: false,
        key: None,
    };
    assert_eq!(store.settle(&[settlement]).await.expect("no error"), [Settled::Written]);
    let Lookup::Found(info) = store.job(held[0].lease.job).await.expect("readable") else {
        panic!("it is pending");
    };
    assert_eq!(info.state, JobState::Pending);
}

/// Counts what SQLite does for the store, in steps of its virtual machine: unlike time, they do not
/// depend on what else the machine does.
async fn counted(store: &SqliteStore) -> Arc<AtomicU64> {
    let steps = Arc::new(AtomicU64::new(0));
    let mut readers = Vec::new();
    for _ in 0..4 {
        let mut reader = store.reader().await.expect("a connection");
        count(&mut reader, &steps).await;
        readers.push(reader);
    }
    let counter = Arc::clone(&steps);
    let counting = store.write(async move |locked| {
        count(locked, &counter).await;
        Ok(())
    });
    counting.await.expect("a connection");
    steps
}

async fn count(connection: &mut SqliteConnection, steps: &Arc<AtomicU64>) {
    let steps = Arc::clone(steps);
    let mut handle = connection.lock_handle().await.expect("it is open");
    handle.set_progress_handler(1, move || {
        steps.fetch_add(1, Ordering::Relaxed);
        true
    });
}

#[tokio::test]
async fn plans_do_not_depend_on_statistics() {
    const ROWS: usize = 20_000;
    // Reading a table takes several steps for each row.
    const FEW: u64 = ROWS as u64 / 2;
    for analyzed in [0, 1, 4, 40] {
        let dir = TempDir::new().expect("a directory");
        drop(migrated(&dir).await);
        let mut hand = connection(&dir).await;
        fill(&mut hand, analyzed).await;
        hand.execute("analyze; delete from jobq_jobs").await.expect("writable");
        fill(&mut hand, ROWS).await;
        drop(hand);

        let store = store(&dir);
        let session = session(&store, 7, LEASE).await;
        let steps = counted(&store).await;
        let mut theirs = connection(&dir).await;
        count(&mut theirs, &steps).await;
        let taken = async |what: &str| {
            let steps = steps.swap(0, Ordering::Relaxed);
            assert!(steps < FEW, "analyzed with {analyzed} rows: {what} takes {steps} steps");
        };

        for scope in PauseScope::ALL {
            assert!(store.pause(scope, "other", None).await.expect("no error"));
        }
        taken("pausing").await;
        // Behind the leased jobs of one time, at the leased job that was claimed last.
        let floor = Floor { run_after: Timestamp(1), id: ROWS as i64 / 2 };
        let mut claimed =
            store.claim(&claim_from(session, 40, floor)).await.expect("no error").jobs;
        assert_eq!(claimed.len(), 40);
        taken("a claim").await;
        let held: Vec<_> = claimed.iter().map(|job| (job.lease.job, job.lease.token)).collect();
        let beat = Beat { session: session.0, held, floors: Vec::new() };
        claim::beat(&mut theirs, &store.schema, &beat).await.expect("no error");
        taken("a heartbeat").await;
        for retention in [Duration::ZERO, LEASE] {
            let lease = Lease { session: SessionId(9), token: Token(0), job: JobId(1) };
            let completion = Completion { lease, retention };
            let schema = store.schema.clone();
            (&mut theirs).complete(completion, schema).await.expect("no error");
            taken("completing in a transaction").await;
        }

        let record = AttemptRecord { reason: AttemptReason::Failed, error: "no".to_owned() };
        let (counters, when) = (Counters::default(), When::Next);
        for transition in [
            Transition::Complete { result: None },
            Transition::Cancel { reason: None },
            Transition::Requeue { when, counters, record: Some(record.clone()) },
            Transition::Bury { reason: DeathReason::Exhausted, counters, record },
        ] {
            let settlements: Vec<_> = claimed
                .drain(..10)
                .map(|job| Settlement {
                    lease: job.lease,
                    transition: transition.clone(),
                    retention: Duration::ZERO,
                    doubtful: true,
                    key: None,
                })
                .collect();
            let settled = store.settle(&settlements).await.expect("no error");
            assert_eq!(settled, [Settled::Written; 10]);
            taken("settling").await;
            store.settle(&settlements).await.expect("no error");
            taken("a second look").await;
        }
        let queues = ["images".to_owned()];
        let kinds = ["resize".to_owned()];
        store.next_due(&queues, &kinds).await.expect("no error");
        taken("looking ahead").await;
        assert!(store.pause(PauseScope::Queue, "images", None).await.expect("no error"));
        let from_the_beginning = claim_from(session, 40, Floor::START);
        let claimed = store.claim(&from_the_beginning).await.expect("no error");
        assert_eq!((claimed.jobs.len(), &claimed.paused.queues), (0, &queues.to_vec()));
        assert_eq!(store.next_due(&queues, &kinds).await.expect("no error"), None);
        assert!(store.resume(PauseScope::Queue, "images").await.expect("no error"));
        taken("what is paused").await;
        store.limit_queue("images", &QueueLimit::running(3)).await.expect("no error");
        taken("limiting").await;
        let claimed = store.claim(&claim_from(session, 40, floor)).await.expect("no error");
        assert_eq!(claimed.jobs.len(), 3);
        taken("claiming up to a limit").await;
        let claimed = store.claim(&claim_from(session, 40, floor)).await.expect("no error");
        assert_eq!(claimed.jobs.len(), 0);
        assert!(store.unlimit_queue("images").await.expect("no error"));
        taken("nothing is free").await;
        let to = Floor { run_after: Timestamp::INFINITY, id: 0 };
        let late = store.unleased("images", 0, floor, to, 10).await.expect("no error");
        assert_eq!(late.len(), 10);
        taken("looking for late jobs").await;
        assert_eq!(store.shift(&late, Shift::Park).await.expect("no error"), 10);
        taken("parking").await;
        assert_eq!(store.unpark(&queues, &kinds, 5).await.expect("no error"), 5);
        taken("unparking").await;
        assert_eq!(store.prune(10).await.expect("no error"), 10);
        taken("pruning").await;
        let id = late[0].id;
        assert!(matches!(store.job(id).await, Ok(Lookup::Found(_))));
        taken("looking a job up").await;
        assert_eq!(store.cancel(id).await.expect("no error"), (CancelReply::Cancelled, None));
        taken("cancelling").await;
        assert_eq!(
            store.redrive(&DeadFilter::id(id), JobId(0), 1).await.expect("no error").jobs,
            [id]
        );
        taken("redriving").await;
        assert_eq!(
            store.redrive(&DeadFilter::all(), JobId(0), 10).await.expect("no error").jobs.len(),
            10
        );
        taken("redriving").await;

        let unique = |n| {
            let key = UniqueKey::given("resize", &format!("{n}"));
            let (scope, on_conflict) = (UniqueScope::UntilFinished, OnConflict::Skip);
            CheckedJob { unique: Some(CheckedUnique { key, scope, on_conflict }), ..job(n) }
        };
        let twins = || (0..10).map(unique).collect::<Vec<_>>();
        let first = store.insert(twins()).await.expect("no error");
        assert!(first.iter().all(|it| it.is_new()));
        taken("enqueueing unique jobs").await;
        let second = store.insert(twins()).await.expect("no error");
        assert!(second.iter().zip(&first).all(|(twin, it)| !twin.is_new() && twin.id() == it.id()));
        taken("enqueueing twins").await;
        (&mut theirs).write(twins(), store.schema.clone()).await.expect("no error");
        taken("enqueueing twins in a transaction").await;
        hand_over(&mut theirs, first[0].id()).await;
        steps.store(0, Ordering::Relaxed);
        let redriven = store.redrive(&DeadFilter::id(first[0].id()), JobId(0), 1).await;
        assert_eq!(redriven.expect("no error").duplicates, [first[0].id()]);
        taken("redriving a job that has a twin").await;
        store.prune_keys(None, 10).await.expect("no error");
        taken("pruning keys").await;

        let keyed = |n| CheckedJob {
            key: Some(JobKey { text: format!("key-{}", n % 3), on_block: OnBlock::Block }),
            priority: 4,
            ..job(n)
        };
        store.insert((0..9).map(keyed).collect()).await.expect("no error");
        taken("enqueueing jobs with keys").await;
        let asking = claim_from(session, 40, floor);
        let mut jobs = store.claim(&asking).await.expect("no error").jobs;
        jobs.retain(|job| job.key.is_some());
        let (run, wait): (Vec<ClaimedJob>, Vec<ClaimedJob>) =
            jobs.into_iter().partition(|job| job.turn == Turn::Runs);
        assert_eq!((run.len(), wait.len()), (3, 6));
        taken("claiming jobs with keys").await;
        let ended: Vec<Settlement> = run
            .into_iter()
            .map(|job| Settlement { key: job.key, ..completed(job.lease) })
            .collect();
        store.settle(&ended).await.expect("no error");
        taken("settling jobs with keys").await;
        store.pass_on(&["other-1".to_owned(), "key-1".to_owned()]).await.expect("no error");
        taken("passing keys on").await;
        let stale = store.stale_grants(Some("other-1"), 10).await.expect("no error");
        assert!(stale.next.is_some(), "{stale:?}");
        taken("looking for stale grants").await;
    }
}

/// Buries a unique job and gives its key to the next one.
async fn hand_over(connection: &mut SqliteConnection, id: JobId) {
    let bury = format!(
        "insert into jobq_dead (
             id, token, reason, created_at, attempt, max_attempts, interruptions, crashes, max_crashes,
             priority, queue, kind, error, payload, unique_key, unique_scope
         )
         select id, token, 'exhausted', created_at, attempt, max_attempts, interruptions, crashes,
                max_crashes, priority, queue, kind, '', payload, unique_key, unique_scope
         from jobq_jobs
         where id = {id};
         update jobq_uniques set job_id = job_id + 1 where job_id = {id};
         delete from jobq_jobs where id = {id};"
    );
    connection.execute(AssertSqlSafe(bury)).await.expect("writable");
}

/// As many jobs, the first half of them leased, and finished and dead ones and attempts.
async fn fill(connection: &mut SqliteConnection, rows: usize) {
    let text = format!(
        "insert into jobq_jobs (queue, kind, run_after, leased_by)
         with recursive row (n) as (select 1 union all select n + 1 from row where n < {rows})
         select 'images', 'resize', 1, case when n <= {rows} / 2 then 9 else 0 end
         from row where {rows} > 0;
         insert or replace into jobq_finished (
             id, token, state, created_at, finished_at, expires_at, attempt, max_attempts,
             interruptions, crashes, max_crashes, priority, queue, kind, reason, result, tags,
             metadata, payload
         )
         select id + 100000, token, 'completed', 1, 1, 1, 1, 1, 0, 0, 1, 0, queue, kind, null, null,
                null, null, payload
         from jobq_jobs;
         insert or replace into jobq_dead (
             id, token, reason, created_at, died_at, attempt, max_attempts, interruptions, crashes,
             max_crashes, priority, queue, kind, error, tags, metadata, payload
         )
         select id + 200000, token, 'exhausted', 1, 1, 1, 1, 0, 0, 1, 0, queue, kind, '', null, null,
                payload
         from jobq_jobs;
         insert into jobq_uniques (unique_key, job_id, scope)
         select randomblob(32), 1000000 + id, 'until_finished' from jobq_jobs;
         insert or ignore into jobq_key_grants (job_key, job_id)
         select 'other-' || id, id from jobq_jobs;
         insert or replace into jobq_attempts select id + 100000, 1, 1, 'failed', '', null, 1
         from jobq_jobs;"
    );
    connection.execute(AssertSqlSafe(text)).await.expect("writable");
}
