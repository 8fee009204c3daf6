//! Many claimers and many producers at once, on a server as it is out of the box.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use jobq::{Client, Error, JobId, enqueue_many};
use sqlx::mysql::MySqlDatabaseError;
use sqlx::{AssertSqlSafe, Connection, MySqlConnection, MySqlPool, Row};

use crate::bed::{Bed, Db};
use crate::jobs::counted;
use crate::server::Server;

const CLAIMERS: usize = 8;
const PRODUCERS: usize = 4;

/// How long it goes on; set `JOBQ_TEST_CONTENTION_SECONDS` for more.
const SECONDS: u64 = 8;

/// The server ended a transaction for the sake of another one.
const DEADLOCK: u16 = 1213;
/// A lock was not to be had in time.
const LOCK_WAIT: u16 = 1205;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mysql() {
    nobody_waits_and_nothing_is_lost_or_done_twice(Server::mysql().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mariadb() {
    nobody_waits_and_nothing_is_lost_or_done_twice(Server::mariadb().await).await;
}

async fn nobody_waits_and_nothing_is_lost_or_done_twice(server: Server) {
    let bed = Bed::at(&server.url()).await;
    let Db::Mysql(pool) = &bed.db else { unreachable!("MySQL and MariaDB only") };
    bed.db.execute("create table orders (id bigint primary key)").await.expect("a table");
    let seconds = std::env::var("JOBQ_TEST_CONTENTION_SECONDS");
    let seconds = seconds.map_or(SECONDS, |text| text.parse().expect("a number of seconds"));
    let timeouts = counter(pool, "lock_timeouts").await;
    wait_for_a_lock_in_vain(pool).await;
    assert_eq!(counter(pool, "lock_timeouts").await, timeouts + 1, "the server counts them");
    let deadlocks = counter(pool, "lock_deadlocks").await;
    let timeouts = counter(pool, "lock_timeouts").await;

    let settings = [("JOBQ_WORKER_THREADS", "1"), ("JOBQ_WORKER_POOL", "4")];
    let mut workers: Vec<_> =
        (0..CLAIMERS).map(|n| bed.worker(&format!("claimer{n}"), &settings)).collect();
    let end = Instant::now() + Duration::from_secs(seconds);
    let producers: Vec<_> = (0..PRODUCERS)
        .map(|n| tokio::spawn(produce(bed.url.clone(), bed.client.clone(), n, end)))
        .collect();
    let mut all = Produced::default();
    for producer in producers {
        let one = producer.await.expect("a producer meets no error that it does not expect");
        all.promised.extend(one.promised);
        all.withdrawn.extend(one.withdrawn);
        all.deadlocks += one.deadlocks;
        all.lock_waits += one.lock_waits;
        all.longest = all.longest.max(one.longest);
    }
    bed.until("select count(*) from jobq.jobs", |jobs| jobs == 0).await;
    for worker in &mut workers {
        assert!(worker.is_running(), "{} exited: {:?}", worker.name, bed.logs());
    }

    let mut runs: HashMap<JobId, i64> = HashMap::new();
    for row in sqlx::query("select job_id, count(*) from log group by job_id")
        .fetch_all(pool)
        .await
        .expect("the log can be read")
    {
        runs.insert(JobId(row.get(0)), row.get(1));
    }
    let lost = all.promised.iter().filter(|id| !runs.contains_key(id)).count();
    let twice = runs.values().filter(|runs| **runs > 1).count();
    let unasked = all.withdrawn.iter().filter(|id| runs.contains_key(id)).count();
    let deadlocks = counter(pool, "lock_deadlocks").await - deadlocks;
    let timeouts = counter(pool, "lock_timeouts").await - timeouts;
    let version: String =
        sqlx::query_scalar("select version()").fetch_one(pool).await.expect("a version");
    println!(
        "{version}: {CLAIMERS} claimers, {PRODUCERS} producers, {seconds} s: {} jobs, {lost} lost, \
         {twice} twice; deadlocks: {deadlocks} by the server's count, {} of them met by producers; \
         lock waits that timed out: {timeouts} by the server's count, {} of producers; \
         the longest enqueue took {:?}",
        all.promised.len(),
        all.deadlocks,
        all.lock_waits,
        all.longest,
    );
    let attempts =
        "select concat_ws(' ', job_id, token, attempt, reason, error) from jobq_attempts";
    let attempts: Vec<String> =
        sqlx::query_scalar(attempts).fetch_all(pool).await.expect("they can be read");
    assert_eq!(attempts, [""; 0], "each job ran once, to its end");
    assert!(all.promised.len() > 500, "something went on");
    assert_eq!((lost, twice, unasked), (0, 0, 0));
    assert_eq!((timeouts, all.lock_waits), (0, 0));
    assert_eq!(runs.len(), all.promised.len(), "the same jobs");
    for (table, rows) in [("jobq.finished", runs.len() as i64), ("jobq.dead", 0)] {
        assert_eq!(bed.db.number(&format!("select count(*) from {table}")).await, rows, "{table}");
    }
}

async fn wait_for_a_lock_in_vain(pool: &MySqlPool) {
    let lock = "select id from orders where id = -1 for update";
    sqlx::query("insert into orders values (-1)").execute(pool).await.expect("writes");
    let mut first = pool.begin().await.expect("begins");
    sqlx::query(lock).fetch_all(&mut *first).await.expect("locks");
    let mut second =
        pool.begin_with("set innodb_lock_wait_timeout = 1; begin").await.expect("begins");
    let error = sqlx::query(lock).fetch_all(&mut *second).await.expect_err("it is locked");
    assert_eq!(server_error(&error), Some(LOCK_WAIT), "{error}");
}

/// What a producer has done.
#[derive(Default)]
struct Produced {
    /// Jobs of transactions that were committed.
    promised: HashSet<JobId>,
    /// Jobs of transactions that were rolled back.
    withdrawn: HashSet<JobId>,
    deadlocks: u64,
    lock_waits: u64,
    longest: Duration,
}

/// Enqueues in transactions of an application, at every isolation level, and now and then without.
async fn produce(url: String, client: Client, producer: usize, end: Instant) -> Produced {
    let mut produced = Produced::default();
    let mut connection = MySqlConnection::connect(&url).await.expect("the server can be reached");
    // Who waits for longer is found out.
    sqlx::query("set session innodb_lock_wait_timeout = 1")
        .execute(&mut connection)
        .await
        .expect("a setting");
    for turn in 0.. {
        if Instant::now() >= end {
            break;
        }
        let began = Instant::now();
        let ids = if turn % 5 == 4 {
            counted::enqueue(&client).await.map(|enqueued| vec![enqueued.id()])
        } else {
            transaction(&mut connection, producer, turn).await
        };
        produced.longest = produced.longest.max(began.elapsed());
        match ids {
            Ok(ids) if is_withdrawn(turn) => produced.withdrawn.extend(ids),
            Ok(ids) => produced.promised.extend(ids),
            Err(error) => match number(&error) {
                Some(DEADLOCK) => produced.deadlocks += 1,
                Some(LOCK_WAIT) => produced.lock_waits += 1,
                _ => panic!("{error:?}"),
            },
        }
    }
    produced
}

fn is_withdrawn(turn: i64) -> bool {
    turn % 11 == 7 && turn % 5 != 4
}

async fn transaction(
    connection: &mut MySqlConnection,
    producer: usize,
    turn: i64,
) -> Result<Vec<JobId>, Error> {
    let levels = ["repeatable read", "read committed", "serializable", "read uncommitted"];
    let level = levels[turn as usize % levels.len()];
    let begin = format!("set transaction isolation level {level}; begin");
    let mut tx = connection.begin_with(AssertSqlSafe(begin)).await.expect("begins");
    sqlx::query("insert into orders values (?)")
        .bind(turn * PRODUCERS as i64 + producer as i64)
        .execute(&mut *tx)
        .await
        .expect("nobody else writes orders");
    let jobs = (0..turn % 13).map(|n| counted::new().priority((n % 9) - 4));
    let many = enqueue_many(&mut tx, jobs).await?;
    let one = counted::enqueue(&mut tx).await?;
    let ids = many.into_iter().chain([one]).map(|enqueued| enqueued.id()).collect();
    if is_withdrawn(turn) {
        tx.rollback().await.expect("rolls back");
    } else {
        tx.commit().await.expect("commits");
    }
    Ok(ids)
}

fn number(error: &Error) -> Option<u16> {
    match error {
        Error::Database { source, .. } | Error::Serialization(source) => server_error(source),
        _ => None,
    }
}

fn server_error(error: &sqlx::Error) -> Option<u16> {
    Some(error.as_database_error()?.try_downcast_ref::<MySqlDatabaseError>()?.number())
}

/// What the server itself has counted since it was started.
async fn counter(pool: &MySqlPool, name: &str) -> i64 {
    let counted =
        "select cast(count as signed) from information_schema.innodb_metrics where name = ?";
    sqlx::query_scalar(counted).bind(name).fetch_one(pool).await.expect("it is counted")
}
