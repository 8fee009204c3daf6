//! What flow control costs: jobs a second with a feature against without it, in the same run.
//!
//! `cargo bench --bench flow` measures SQLite; `cargo bench --bench flow -- URL…` each database named.
//! Each feature is measured right after the same without it; medians are printed. Trust the ratio, not the
//! figures, for machines are noisy: that of `plain` to itself says how much.

use std::time::{Duration, Instant};

use jobq::{Client, ClientOptions, NewJob, QueueLimit, Rate, Runtime, Unique, job};
use sqlx::{AssertSqlSafe, Connection, Executor};

const JOBS: u64 = 20_000;
const ROUNDS: usize = 3;
const CHUNK: u64 = 1_000;
const SLOTS: usize = 100;

#[job(retention = "0s")]
async fn nothing(n: u64, text: String) {
    let _ = (n, text);
}

/// How a feature makes the job with a number, and the limit of the queue.
type Feature = (&'static str, fn(u64) -> NewJob, Option<QueueLimit>);

/// A rate that holds nothing up.
const FAST: Rate = Rate::new(1_000_000, Duration::from_secs(1));

/// The first is what all are compared with.
const FEATURES: [Feature; 8] = [
    ("plain", plain, None),
    ("unique", |n| plain(n).unique(Unique::DEFAULT), None),
    ("a key for each job", |n| plain(n).key(format!("key-{n}")), None),
    ("500 keys", |n| plain(n).key(format!("key-{}", n % 500)), None),
    ("500 keys, each in one go", |n| plain(n).key(format!("key-{}", n / (JOBS / 500))), None),
    ("a limit of 100", plain, Some(QueueLimit::running(100))),
    ("a limit of 1,000", plain, Some(QueueLimit::running(1_000))),
    ("a rate", plain, Some(QueueLimit::rate(FAST))),
];

/// About 170 bytes, as the research on other queues used.
fn plain(n: u64) -> NewJob {
    nothing::new(n, "x".repeat(140))
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
    let database = url.split(':').next().unwrap_or_default();
    println!("{database} ({JOBS} jobs a round, {SLOTS} slots, medians of {ROUNDS} rounds)");
    println!(
        "{:28} {:>16} {:>8} {:>12} {:>8}",
        "", "enqueue, jobs/s", "of plain", "drain", "of plain"
    );
    let mut figures = vec![(Vec::new(), Vec::new()); FEATURES.len()];
    let mut ratios = figures.clone();
    for _ in 0..ROUNDS {
        for (n, feature) in FEATURES.iter().enumerate() {
            // What was before, and what the machine does besides, is to meet both alike.
            let plain = round(&client, &FEATURES[0]).await?;
            let with_it = round(&client, feature).await?;
            figures[n].0.push(with_it.0);
            figures[n].1.push(with_it.1);
            ratios[n].0.push(100.0 * with_it.0 / plain.0);
            ratios[n].1.push(100.0 * with_it.1 / plain.1);
        }
    }
    for ((name, ..), (figures, ratios)) in FEATURES.iter().zip(figures.into_iter().zip(ratios)) {
        println!(
            "{name:28} {:>16.0} {:>7.0}% {:>12.0} {:>7.0}%",
            median(figures.0),
            median(ratios.0),
            median(figures.1),
            median(ratios.1)
        );
    }
    if url.starts_with("postgres") {
        let mut connection = sqlx::PgConnection::connect(url).await?;
        connection.execute(AssertSqlSafe(format!("drop schema {schema} cascade"))).await?;
    }
    println!();
    Ok(())
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

fn rate(took: Duration) -> f64 {
    JOBS as f64 / took.as_secs_f64()
}

/// Jobs a second of enqueueing, and of draining.
async fn round(client: &Client, (_, new, limit): &Feature) -> jobq::Result<(f64, f64)> {
    match limit {
        Some(limit) => client.limit_queue("default", *limit).await?,
        None => drop(client.unlimit_queue("default").await?),
    }
    Ok((enqueue(client, *new).await?, drain(client).await?))
}

async fn enqueue(client: &Client, new: fn(u64) -> NewJob) -> jobq::Result<f64> {
    let started = Instant::now();
    for first in (0..JOBS).step_by(CHUNK as usize) {
        jobq::enqueue_many(client, (first..first + CHUNK).map(new)).await?;
    }
    Ok(rate(started.elapsed()))
}

async fn drain(client: &Client) -> jobq::Result<f64> {
    let started = Instant::now();
    let ended = Runtime::new(client.clone()).queue("default", SLOTS).run_until_idle().await?;
    let took = started.elapsed();
    assert_eq!(ended.completed, JOBS, "{ended:?}");
    Ok(rate(took))
}
