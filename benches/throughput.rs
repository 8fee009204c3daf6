//! How many jobs a second: enqueued in bulk and drained, beside a raw-SQL floor in the same run.
//!
//! `cargo bench --bench throughput` measures SQLite; `cargo bench --bench throughput -- URL…` each
//! database named. Rounds alternate between jobq and the floor, medians are compared: trust the
//! ratio, not the figures, for machines are noisy.
//!
//! The floor does the least that claims and completes a row for good: one statement marks a batch
//! as taken and reads it, one deletes it, each committed by itself. It has no leases, retries,
//! history or handlers.

use std::time::{Duration, Instant};

use jobq::{Client, ClientOptions, Runtime, job};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection, SqliteConnection};

const JOBS: u64 = 20_000;
const ROUNDS: usize = 3;

#[job(retention = "0s")]
async fn nothing(n: u64, text: String) {
    let _ = (n, text);
}

/// About 170 bytes, as the research on other queues used.
fn text() -> String {
    "x".repeat(140)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let urls: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let folder = tempfile::tempdir()?;
    if urls.is_empty() {
        return measure(&format!("sqlite:{}", folder.path().join("bench.db").display())).await;
    }
    for url in &urls {
        measure(url).await?;
    }
    Ok(())
}

async fn measure(url: &str) -> Result<(), Box<dyn std::error::Error>> {
    let schema = format!("bench{}", std::process::id());
    let client = ClientOptions::new().schema(&schema).connect(url).await?;
    client.migrate().await?;
    let mut floor = Floor::connect(url).await?;
    println!("{} ({JOBS} jobs a round, medians of {ROUNDS} rounds)", floor.name().await?);
    println!("{:28} {:>12} {:>12} {:>8}", "", "jobq jobs/s", "floor", "ratio");

    for chunk in [100, 1_000, 5_000] {
        let (mut ours, mut least) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            ours.push(enqueue(&client, chunk).await?);
            drain(&client, 200).await?;
            least.push(floor.enqueue(chunk).await?);
            floor.empty().await?;
        }
        row(&format!("enqueue, {chunk} at once"), ours, least);
    }
    for batch in [10, 32, 100] {
        let (mut ours, mut least) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            enqueue(&client, 5_000).await?;
            ours.push(drain(&client, batch).await?);
            floor.enqueue(5_000).await?;
            least.push(floor.drain(batch).await?);
        }
        row(&format!("drain, {batch} slots"), ours, least);
    }
    floor.clean(&schema).await?;
    println!();
    Ok(())
}

fn row(what: &str, ours: Vec<f64>, floor: Vec<f64>) {
    let (ours, floor) = (median(ours), median(floor));
    println!("{what:28} {ours:>12.0} {floor:>12.0} {:>7.0}%", 100.0 * ours / floor);
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

fn rate(took: Duration) -> f64 {
    JOBS as f64 / took.as_secs_f64()
}

async fn enqueue(client: &Client, chunk: u64) -> jobq::Result<f64> {
    let started = Instant::now();
    for first in (0..JOBS).step_by(chunk as usize) {
        let jobs = (first..(first + chunk).min(JOBS)).map(|n| nothing::new(n, text()));
        jobq::enqueue_many(client, jobs).await?;
    }
    Ok(rate(started.elapsed()))
}

async fn drain(client: &Client, slots: usize) -> jobq::Result<f64> {
    let started = Instant::now();
    let ended = Runtime::new(client.clone()).queue("default", slots).run_until_idle().await?;
    let took = started.elapsed();
    assert_eq!(ended.completed, JOBS, "{ended:?}");
    Ok(rate(took))
}

/// Raw SQL on one connection.
enum Floor {
    Postgres(PgConnection),
    Sqlite(SqliteConnection),
}

impl Floor {
    async fn connect(url: &str) -> Result<Self, sqlx::Error> {
        let table = "create table if not exists floor_jobs (
            id integer primary key, taken integer not null default 0, payload text not null
        )";
        if url.starts_with("postgres") {
            let mut connection = PgConnection::connect(url).await?;
            connection.execute("set plan_cache_mode = force_generic_plan").await?;
            connection.execute("set enable_seqscan = off").await?;
            connection.execute("drop table if exists floor_jobs").await?;
            connection
                .execute(
                    "create table floor_jobs (
                         id bigint generated always as identity primary key,
                         taken integer not null default 0,
                         payload text not null
                     ) with (fillfactor = 50)",
                )
                .await?;
            Ok(Self::Postgres(connection))
        } else {
            let options: SqliteConnectOptions = url.parse()?;
            let options = options.journal_mode(SqliteJournalMode::Wal);
            let mut connection =
                SqliteConnection::connect_with(&options.busy_timeout(Duration::from_secs(10)))
                    .await?;
            connection.execute(table).await?;
            Ok(Self::Sqlite(connection))
        }
    }

    async fn name(&mut self) -> Result<String, sqlx::Error> {
        match self {
            Self::Postgres(connection) => {
                sqlx::query_scalar("select 'PostgreSQL ' || current_setting('server_version')")
                    .fetch_one(connection)
                    .await
            }
            Self::Sqlite(connection) => {
                sqlx::query_scalar("select 'SQLite ' || sqlite_version()")
                    .fetch_one(connection)
                    .await
            }
        }
    }

    async fn enqueue(&mut self, chunk: u64) -> Result<f64, sqlx::Error> {
        let payload = format!("{{\"n\":1,\"text\":\"{}\"}}", text());
        let started = Instant::now();
        for first in (0..JOBS).step_by(chunk as usize) {
            let payloads = vec![payload.clone(); chunk.min(JOBS - first) as usize];
            match self {
                Self::Postgres(connection) => {
                    sqlx::query("insert into floor_jobs (payload) select unnest($1::text[])")
                        .bind(payloads)
                        .execute(connection)
                        .await?;
                }
                Self::Sqlite(connection) => {
                    let mut tx = connection.begin_with("begin immediate").await?;
                    for payload in payloads {
                        sqlx::query("insert into floor_jobs (payload) values (?)")
                            .bind(payload)
                            .execute(&mut *tx)
                            .await?;
                    }
                    tx.commit().await?;
                }
            }
        }
        Ok(rate(started.elapsed()))
    }

    async fn drain(&mut self, batch: usize) -> Result<f64, sqlx::Error> {
        let started = Instant::now();
        let (mut done, mut last) = (0, 0);
        while done < JOBS {
            let ids: Vec<(i64, String)> = match self {
                Self::Postgres(connection) => {
                    sqlx::query_as(
                        "update floor_jobs set taken = 1
                         from (select ctid as tid from floor_jobs where id > $2 order by id limit $1
                               for update skip locked) as due
                         where floor_jobs.ctid = due.tid
                         returning id, payload",
                    )
                    .bind(batch as i64)
                    .bind(last)
                    .fetch_all(connection)
                    .await?
                }
                Self::Sqlite(connection) => {
                    sqlx::query_as(
                        "update floor_jobs set taken = 1
                         where id in (select id from floor_jobs where id > ? order by id limit ?)
                         returning id, payload",
                    )
                    .bind(last)
                    .bind(batch as i64)
                    .fetch_all(connection)
                    .await?
                }
            };
            done += ids.len() as u64;
            let ids: Vec<i64> = ids.into_iter().map(|(id, _)| id).collect();
            last = ids.iter().copied().max().unwrap_or(last);
            match self {
                Self::Postgres(connection) => {
                    sqlx::query("delete from floor_jobs where id = any($1)")
                        .bind(ids)
                        .execute(connection)
                        .await?;
                }
                Self::Sqlite(connection) => {
                    let mut tx = connection.begin_with("begin immediate").await?;
                    for id in ids {
                        sqlx::query("delete from floor_jobs where id = ?")
                            .bind(id)
                            .execute(&mut *tx)
                            .await?;
                    }
                    tx.commit().await?;
                }
            }
        }
        Ok(rate(started.elapsed()))
    }

    async fn empty(&mut self) -> Result<(), sqlx::Error> {
        match self {
            Self::Postgres(connection) => {
                connection.execute("delete from floor_jobs").await.map(drop)
            }
            Self::Sqlite(connection) => {
                connection.execute("delete from floor_jobs").await.map(drop)
            }
        }
    }

    /// Leaves nothing behind in a database that may be somebody's.
    async fn clean(&mut self, schema: &str) -> Result<(), sqlx::Error> {
        if let Self::Postgres(connection) = self {
            let drop_schema = format!("drop schema {schema} cascade");
            connection.execute(AssertSqlSafe(drop_schema)).await?;
            connection.execute("drop table floor_jobs").await?;
        }
        Ok(())
    }
}
