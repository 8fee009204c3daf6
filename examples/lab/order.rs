//! d. Order: who is overtaken.
//!
//! Two workers, one of them slow, and rows that are due in the order of their ids. A row is overtaken
//! when one that is due after it is started, or ends, before it.

use std::time::Duration;

use jobq::{JobContext, NewJob, Runtime, State, job};
use tokio::time::sleep;

use crate::Result;
use crate::effects::Effects;
use crate::queue::{Locked, Queue};
use crate::report::{self, Report};
use crate::server::Server;
use crate::session::Session;

const ROWS: i64 = 10;

/// How many of them, the last ones, are urgent.
const URGENT: i64 = 3;

/// How long a job takes; the first one is slow.
const QUICK: Duration = Duration::from_millis(5);
const SLOW: Duration = Duration::from_millis(600);

fn takes(id: i64) -> Duration {
    if id == 1 { SLOW } else { QUICK }
}

/// What happened, in which order.
#[derive(Clone, Default)]
struct Log {
    started: Effects,
    ended: Effects,
}

impl Log {
    async fn job(&self, id: i64, takes: Duration) {
        self.started.note(id);
        sleep(takes).await;
        self.ended.note(id);
    }
}

pub(crate) async fn run(server: &Server, report: &Report) -> Result<()> {
    report.say("A queue with nothing but a lock, claims of one row; row 1 is slow:");
    let one = two_workers(server, "rows_one", 1, report).await?;
    report.say("The same, claims of five rows:");
    let five = two_workers(server, "rows_five", 5, report).await?;
    let jobs = (1..=ROWS).map(|id| step::new(takes(id)));
    let plain = with_jobq(server, "lab_d", 2, jobs).await?;
    let priority = |id| if id > ROWS - URGENT { 4 } else { 0 };
    let jobs = (1..=ROWS).map(|id| step::new(takes(id)).priority(priority(id)));
    let urgent = with_jobq(server, "lab_d_urgent", 1, jobs).await?;

    let mut rows = Vec::new();
    for (way, log) in [
        ("claims of one row".to_owned(), &one),
        ("claims of five rows".to_owned(), &five),
        ("jobq, 2 slots".to_owned(), &plain),
        (format!("jobq, 1 slot, the last {URGENT} with priority 4"), &urgent),
    ] {
        for (what, order) in [("started", log.started.ids()), ("ended", log.ended.ids())] {
            let overtaken = report::ids(&overtaken(&order));
            let by = most(&order).to_string();
            rows.push([way.clone(), what.to_owned(), report::ids(&order), overtaken, by]);
        }
    }
    report.table(["", "", "in this order", "overtaken", "by at most"], &rows);

    let by = overtaken_by(&one.ended.ids(), 1);
    let what = "the slow row is overtaken at its end by all that are due later";
    report.expect(what, by, by == ROWS as usize - 1);
    let by = most(&one.started.ids());
    let what = "claims of one row start rows in order, give or take a worker";
    report.expect(what, format!("overtaken by {by} at most"), by <= 1);
    let by = overtaken_by(&five.started.ids(), 2);
    let what = "of five rows claimed by a slow worker, four are not even started";
    report.expect(what, format!("row 2 is overtaken by {by}"), by == ROWS as usize - 5);
    let by = most(&plain.started.ids());
    let what =
        "jobq claims no more than it has free slots, and starts in order, give or take a slot";
    report.expect(what, format!("overtaken by {by} at most"), by <= 1);
    let mut first = urgent.started.ids();
    first.truncate(URGENT as usize);
    let what = "with priority the last ones come first";
    let expected: Vec<i64> = (1 + ROWS - URGENT..=ROWS).collect();
    report.expect(what, report::ids(&first), first == expected);
    report.say(
        "A priority decides who is next; it neither stops what runs nor keeps an order. While urgent \
         jobs keep coming, others wait. Where the order of some jobs matters, they have to run one at \
         a time: that is what keys are for, which jobq does not have yet.",
    );
    Ok(())
}

/// Two workers, on a queue with nothing but a lock, that claim up to `limit` rows at once.
async fn two_workers(
    server: &Server,
    table: &'static str,
    limit: u32,
    report: &Report,
) -> Result<Log> {
    let queue = Queue { table };
    let [mut a, mut b] = server.sessions(["A", "B"]).await?;
    queue.create(&mut a, ROWS as u64).await?;
    for session in [&mut a, &mut b] {
        // At MySQL's own level a claim would also lock gaps; that is experiment e.
        session.isolate("read committed").await?;
    }
    let log = Log::default();
    // B comes a moment later, so that it is A who meets the slow row.
    let later = async {
        sleep(QUICK * 4).await;
        work(queue, &mut b, limit, &log, report).await
    };
    let (of_a, of_b) = tokio::join!(work(queue, &mut a, limit, &log, report), later);
    of_a?;
    of_b?;
    Ok(log)
}

/// Claims rows and works on them, one after the other, until there are none.
async fn work(
    queue: Queue,
    session: &mut Session,
    limit: u32,
    log: &Log,
    report: &Report,
) -> Result<()> {
    loop {
        let ids = queue.claim(session, Locked::Skip, limit).await?;
        if ids.is_empty() {
            return Ok(());
        }
        report.did(session.name, format!("claims {}", report::ids(&ids)));
        for id in ids {
            log.job(id, takes(id)).await;
            queue.set(session, id, "completed").await?;
            if id == 1 {
                report.did(session.name, "has completed 1");
            }
        }
    }
}

/// The same job under jobq.
#[job(queue = "order")]
async fn step(takes: Duration, State(log): State<Log>, ctx: &JobContext) {
    log.job(ctx.id().0, takes).await;
}

/// Runs jobs to their end under jobq, with so many slots.
async fn with_jobq(
    server: &Server,
    schema: &str,
    slots: usize,
    jobs: impl Iterator<Item = NewJob>,
) -> Result<Log> {
    let client = server.jobq(schema).await?;
    jobq::enqueue_many(&client, jobs.collect::<Vec<_>>()).await?;
    let log = Log::default();
    Runtime::new(client)
        .jobs(jobq::jobs![step])
        .only_listed_jobs()
        .queue("order", slots)
        .state(log.clone())
        .run_until_idle()
        .await?;
    Ok(log)
}

/// How many rows that are due later stand before this one.
fn overtaken_by(order: &[i64], id: i64) -> usize {
    order.iter().take_while(|other| **other != id).filter(|other| **other > id).count()
}

/// By how many the row that fares worst is overtaken.
fn most(order: &[i64]) -> usize {
    order.iter().map(|id| overtaken_by(order, *id)).max().unwrap_or_default()
}

/// The rows that are overtaken.
fn overtaken(order: &[i64]) -> Vec<i64> {
    let mut rows = order.to_vec();
    rows.retain(|id| overtaken_by(order, *id) > 0);
    rows.sort_unstable();
    rows
}
