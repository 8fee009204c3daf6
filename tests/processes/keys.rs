//! Jobs with keys on many worker processes, some of which are killed.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use sqlx::AssertSqlSafe;

use crate::bed::{Bed, Db, SIGKILL, on_every_database, on_pool};
use crate::jobs::in_line;

on_every_database! {
    every_key_is_worked_off_in_order_by_one_at_a_time
}

/// How many worker processes, jobs and keys there are, and how many of the processes are killed; set
/// `JOBQ_TEST_KEYS=20,5000,500,40` for more.
const SIZE: [i64; 4] = [4, 600, 50, 4];

/// What an attempt wrote down.
#[derive(Debug)]
struct Event {
    line: i64,
    job: i64,
    token: i64,
    is_start: bool,
}

async fn every_key_is_worked_off_in_order_by_one_at_a_time(bed: Bed) {
    let size = std::env::var("JOBQ_TEST_KEYS").map_or(SIZE, |text| {
        let numbers: Vec<i64> = text.split(',').map(|it| it.parse().expect("a number")).collect();
        numbers.try_into().expect("four numbers")
    });
    let [processes, jobs, keys, kills] = size;
    bed.db.execute(log_table(&bed.db)).await.expect("a table");
    for from in (0..jobs).step_by(1_000) {
        let some = (from..jobs.min(from + 1_000)).map(|n| in_line::new(n % keys));
        jobq::enqueue_many(&bed.client, some).await.expect("enqueued");
    }
    let settings =
        [("JOBQ_WORKER_THREADS", "1"), ("JOBQ_WORKER_POOL", "2"), ("JOBQ_WORKER_SLOTS", "10")];
    let started = Instant::now();
    let mut workers: Vec<_> =
        (0..processes).map(|n| bed.worker(&format!("worker{n}"), &settings)).collect();
    for n in 0..kills {
        let due = jobs * (n + 1) / (kills + 1);
        let done = "select count(*) from jobq.finished";
        bed.until(done, |done| done >= due).await;
        // Not one that has just started: it may hold nothing.
        let oldest = workers.remove(0);
        oldest.signal(SIGKILL);
        drop(oldest);
        workers.push(bed.worker(&format!("another{n}"), &settings));
    }
    bed.until("select count(*) from jobq.jobs", |jobs| jobs == 0).await;
    bed.until("select count(*) from jobq.key_grants", |grants| grants == 0).await;
    drop(workers);
    assert_eq!(bed.db.number("select count(*) from jobq.dead").await, 0);
    let completed = "select count(*) from jobq.finished where state = 'completed'";
    assert_eq!(bed.db.number(completed).await, jobs);

    let events = events(&bed.db).await;
    let (mut cut_off, mut lines) = (0, HashMap::new());
    for event in &events {
        let line: &mut Line = lines.entry(event.line).or_default();
        cut_off += line.see(event);
    }
    assert_eq!(lines.len() as i64, keys);
    println!(
        "{jobs} jobs with {keys} keys on {processes} processes, {kills} of them killed: \
         {} attempts, {cut_off} cut off, in {:.1?}",
        events.iter().filter(|event| event.is_start).count(),
        started.elapsed()
    );
}

/// What has been seen of a key.
#[derive(Default)]
struct Line {
    /// The last job that was started.
    last: i64,
    /// Its attempts that have not ended.
    open: Vec<i64>,
}

impl Line {
    /// Looks at the next event; returns how many attempts will never end.
    fn see(&mut self, event: &Event) -> usize {
        if !event.is_start {
            // That of a worker that has lost its lease may come late, or twice.
            if event.job == self.last {
                self.open.retain(|token| *token != event.token);
            }
            return 0;
        }
        assert!(event.job >= self.last, "{event:?} after job {}", self.last);
        let mut cut_off = 0;
        if event.job > self.last {
            assert!(self.open.is_empty(), "{event:?} while job {} runs", self.last);
            self.last = event.job;
        } else {
            // Its worker was killed, or has lost its lease.
            assert!(self.open.iter().all(|token| *token < event.token), "{event:?} twice at once");
            cut_off = self.open.len();
            self.open.clear();
        }
        self.open.push(event.token);
        cut_off
    }
}

fn log_table(db: &Db) -> &'static str {
    match db {
        Db::Postgres(_) => {
            "create table line_log (n bigint generated always as identity primary key,
                 line bigint, job_id bigint, token bigint, is_start int)"
        }
        Db::Mysql(_) => {
            "create table line_log (n bigint auto_increment primary key,
                 line bigint, job_id bigint, token bigint, is_start int)"
        }
        Db::Sqlite(_) => {
            "create table line_log (n integer primary key autoincrement,
                 line bigint, job_id bigint, token bigint, is_start int)"
        }
    }
}

async fn events(db: &Db) -> Vec<Event> {
    let text = AssertSqlSafe("select line, job_id, token, is_start from line_log order by n");
    let rows: Vec<(i64, i64, i64, i32)> =
        on_pool!(db, pool => sqlx::query_as(text).fetch_all(pool).await.expect("readable"));
    rows.into_iter()
        .map(|(line, job, token, is_start)| Event { line, job, token, is_start: is_start != 0 })
        .collect()
}

/// Long enough for a worker that is kept from the machine by nineteen others.
pub(crate) const LEASE: Duration = Duration::from_secs(5);
