//! Limited queues on many worker processes, some of which are killed.

use std::time::{Duration, Instant};

use jobq::{QueueLimit, Rate};

use crate::bed::{Bed, Db, SIGKILL, on_every_database};
use crate::jobs::{brief, instant};

on_every_database! {
    three_at_once_run_and_no_more_whoever_is_killed
    no_more_start_than_the_rate_lets_and_hardly_fewer
}

/// How many jobs run, and how many of eight processes are killed; set `JOBQ_TEST_LIMIT=3000,20` for more.
const SIZE: [i64; 2] = [200, 4];

fn numbers<const N: usize>(name: &str, otherwise: [i64; N]) -> [i64; N] {
    std::env::var(name).map_or(otherwise, |text| {
        let numbers: Vec<i64> = text.split(',').map(|it| it.parse().expect("a number")).collect();
        numbers.try_into().expect("as many numbers")
    })
}

const SETTINGS: [(&str, &str); 2] = [("JOBQ_WORKER_THREADS", "1"), ("JOBQ_WORKER_POOL", "2")];

async fn three_at_once_run_and_no_more_whoever_is_killed(bed: Bed) {
    let [jobs, kills] = numbers("JOBQ_TEST_LIMIT", SIZE);
    bed.client.limit_queue("default", QueueLimit::running(3)).await.expect("limited");
    // Their names are numbers.
    let mut workers: Vec<_> = (1..=8).map(|n| bed.worker(&n.to_string(), &SETTINGS)).collect();
    bed.until("select count(*) from jobq.sessions", |open| open >= 8).await;
    jobq::enqueue_many(&bed.client, (0..jobs).map(brief::new)).await.expect("enqueued");
    let (mut killed, mut most, mut least_until) = (0, 0, Instant::now());
    let mut longest = Duration::ZERO;
    loop {
        // What a dead worker held is not valid any more once its lease is over.
        let valid = format!(
            "select count(*) from jobq.jobs as job
             where  exists (
                 select 1 from jobq.sessions as open
                 where open.id = job.leased_by and open.leased_until > {}
             )",
            bed.db.now()
        );
        let valid = bed.db.number(&valid).await;
        assert!(valid <= 3, "{valid} run at once");
        most = most.max(valid);
        let due = format!(
            "select count(*) from jobq.jobs
             where leased_by = 0 and run_after <= {}",
            bed.db.now()
        );
        if valid == 3 || bed.db.number(&due).await == 0 {
            least_until = Instant::now();
        }
        longest = longest.max(least_until.elapsed());
        assert!(longest < Duration::from_secs(30), "fewer than 3 run while jobs are due");
        let done = bed.db.number("select count(*) from jobq.finished").await;
        if done == jobs {
            break;
        }
        if killed < kills && done >= jobs * (killed + 1) / (kills + 1) {
            // One that has a job, if any has: else nothing is lost.
            let busy = bed.db.number(busy_worker(&bed.db)).await.to_string();
            let place = workers.iter().position(|worker| worker.name == busy).unwrap_or(0);
            let worker = workers.swap_remove(place);
            worker.signal(SIGKILL);
            drop(worker);
            killed += 1;
            workers.push(bed.worker(&(8 + killed).to_string(), &SETTINGS));
        }
    }
    drop(workers);
    assert_eq!((most, killed), (3, kills));
    assert_eq!(bed.db.number("select count(*) from jobq.dead").await, 0);
    let taken = "select count(*) from jobq.queue_slots as place
         join jobq.jobs as job on job.id = place.job_id and job.token = place.token";
    assert_eq!(bed.db.number(taken).await, 0, "no place outlives its job");
    let crashed = "select count(*) from jobq.attempts where reason = 'crashed'";
    println!(
        "{jobs} jobs on 8 processes, {kills} of them killed with {} jobs: never more than 3 at once, \
         fewer while jobs were due for {longest:.1?} at most",
        bed.db.number(crashed).await
    );
}

/// The name of a worker that has a job, or 0.
fn busy_worker(db: &Db) -> &'static str {
    match db {
        Db::Postgres(_) | Db::Sqlite(_) => {
            "select coalesce(max(cast(worker as bigint)), 0) from jobq.sessions
             where id in (select leased_by from jobq.jobs)"
        }
        Db::Mysql(_) => {
            "select coalesce(max(cast(worker as signed)), 0) from jobq.sessions
             where id in (select leased_by from jobq.jobs)"
        }
    }
}

async fn no_more_start_than_the_rate_lets_and_hardly_fewer(bed: Bed) {
    const RATE: i64 = 50;
    const BURST: i64 = 10;
    let [seconds] = numbers("JOBQ_TEST_RATE_SECONDS", [3]);
    let rate = Rate::new(RATE as u32, Duration::from_secs(1)).burst(BURST as u32);
    bed.client.limit_queue("default", QueueLimit::rate(rate)).await.expect("limited");
    let workers: Vec<_> = (0..4).map(|n| bed.worker(&format!("worker{n}"), &SETTINGS)).collect();
    bed.until("select count(*) from jobq.sessions", |open| open >= 4).await;
    let micros = async || match bed.db {
        Db::Postgres(_) => {
            let now = "select (extract(epoch from clock_timestamp()) * 1000000)::bigint";
            bed.db.number(now).await
        }
        Db::Mysql(_) | Db::Sqlite(_) => bed.db.number(&format!("select {}", bed.db.now())).await,
    };
    let transactions = async || match bed.db {
        Db::Postgres(_) => {
            let commits =
                "select xact_commit from pg_stat_database where datname = current_database()";
            Some(bed.db.number(commits).await)
        }
        Db::Mysql(_) | Db::Sqlite(_) => None,
    };
    let (begin, before) = (micros().await, transactions().await);
    let many = (0..RATE * (seconds + 5) + BURST).map(instant::new);
    jobq::enqueue_many(&bed.client, many).await.expect("enqueued");
    let mut now = begin;
    while now < begin + seconds * 1_000_000 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        now = micros().await;
    }
    let started = "select (select count(*) from jobq.finished)
         + (select count(*) from jobq.jobs where leased_by <> 0)";
    let started = bed.db.number(started).await;
    // Read after the jobs: more may have started since, not fewer.
    let took = micros().await - begin;
    let most = BURST + RATE * took / 1_000_000;
    assert!(started <= most, "{started} of {most}");
    assert!(started * 2 > most, "{started} of {most}");
    let statements = transactions().await.zip(before).map(|(after, before)| {
        format!(", {} transactions per second", (after - before) * 1_000_000 / took)
    });
    drop(workers);
    println!(
        "{RATE} jobs per second on 4 processes for {:.1} s: {started} of {most} started, {} %{}",
        took as f64 / 1e6,
        started * 100 / most,
        statements.unwrap_or_default()
    );
}
