//! c. Five workers.
//!
//! Each takes one row after the other; a job waits 2 ms for something else, as most jobs do. First
//! the claim commits and the job runs outside of a transaction, with three ways to ask for the row.
//! Then the job runs inside the claiming transaction. Last, jobq itself. What it means to keep a
//! transaction open for longer is the second part, in `long_jobs`.
//!
//! What the jobs have done is noted by the jobs: no id may appear twice.

use std::time::{Duration, Instant};

use jobq::{Client, JobContext, Runtime, State, job};
use tokio::time::sleep;

use crate::Result;
use crate::effects::Effects;
use crate::long_jobs::long_jobs;
use crate::observer::{Observer, Waits};
use crate::queue::{Locked, Queue};
use crate::report::{Report, mean, ms};
use crate::server::{Product, Server};
use crate::session::{Refused, Session, Why, pause};

pub(crate) const WORKERS: usize = 5;

/// How long a job takes.
const JOB: Duration = Duration::from_millis(2);

/// No more than this can be run in a second, however fast the database is.
const JOBS_A_SECOND: u64 = WORKERS as u64 * 1000 / JOB.as_millis() as u64;

/// The longest wait of a worker that was refused, before it asks again.
const JITTER: Duration = Duration::from_millis(2);

/// A row of the table.
struct Measured {
    way: String,
    /// What the workers did; `None` under jobq.
    work: Option<Work>,
    effects: Effects,
    tally: Tally,
    waits: Waits,
}

/// What the workers have measured themselves.
#[derive(Default)]
struct Tally {
    claims: Vec<Duration>,
    /// From each transaction's begin to its commit.
    transactions: Vec<Duration>,
    refused: u64,
}

pub(crate) async fn run(server: &Server, time: Duration, report: &Report) -> Result<()> {
    let rows = (time.as_secs_f64() * JOBS_A_SECOND as f64) as u64 + 100;
    let sqlite = server.product == Product::Sqlite;
    if sqlite {
        report.say(
            "SQLite locks no rows, so there is no third way: whoever is refused can wait or ask \
             again. Its lock waits are neither counted nor to be seen from outside.",
        );
    }

    let mut all = Vec::new();
    for locked in Locked::ALL {
        let (way, table) = match (locked, sqlite) {
            (Locked::Wait, false) => ("for update", "rows_wait"),
            (Locked::Fail, false) => ("for update nowait, ask again", "rows_fail"),
            (Locked::Skip, false) => ("for update skip locked", "rows_skip"),
            (Locked::Wait, true) => ("begin immediate", "rows_wait"),
            (Locked::Fail, true) => ("begin immediate without waiting, ask again", "rows_fail"),
            (Locked::Skip, true) => continue,
        };
        let work = Work { queue: Queue { table }, locked, inside: false };
        all.push(measure(server, way, work, rows, time).await?);
    }
    let way = "job inside the claiming transaction";
    let work = Work { queue: Queue { table: "rows_inside" }, locked: Locked::Skip, inside: true };
    all.push(measure(server, way, work, rows, time).await?);
    for slots in [1, WORKERS] {
        all.push(measure_jobq(server, slots, rows, time).await?);
    }

    let show =
        |number: Option<f64>| number.map_or("—".to_owned(), |number| format!("{number:.2}"));
    let table: Vec<_> = all
        .iter()
        .map(|Measured { way, effects, tally, waits, .. }| {
            let own = !tally.claims.is_empty();
            let of_ours = |text: String| if own { text } else { "—".to_owned() };
            [
                way.clone(),
                format!("{:.0}", effects.rate()),
                of_ours(ms(mean(&tally.claims))),
                waits.counted.map_or("—".to_owned(), |counted| counted.to_string()),
                show(waits.waiting),
                show(waits.open),
                of_ours(ms(tally.transactions.iter().max().copied().unwrap_or_default())),
                of_ours(tally.refused.to_string()),
                effects.twice().to_string(),
            ]
        })
        .collect();
    let headings = [
        "5 workers",
        "jobs/s",
        "a claim",
        "lock waits",
        "waiting",
        "in a transaction",
        "longest",
        "refused",
        "twice",
    ];
    report.table(headings, &table);
    report.say(
        "Lock waits are counted by the server. Waiting and in a transaction: how many sessions, on \
         average, as the server shows them. A claim, longest (transaction) and refused (locked, or a \
         deadlock): as the workers measured it; jobq's are its own. Twice: ids that were handled again.",
    );

    for Measured { way, effects, .. } in &all {
        let (jobs, twice) = (effects.ids().len(), effects.twice());
        let what = format!("{way}: something is done, and nothing twice");
        report.expect(&what, format!("{jobs} jobs, {twice} twice"), jobs > 0 && twice == 0);
    }
    let of = |locked, inside| {
        let does = |work: Work| work.locked == locked && work.inside == inside;
        all.iter().find(|measured| measured.work.is_some_and(does))
    };
    if let Some(Measured { tally, .. }) = of(Locked::Skip, true) {
        let shortest = tally.transactions.iter().min().copied().unwrap_or_default();
        let what = "inside, each transaction lasts as long as its job";
        report.expect(what, format!("{} at least", ms(shortest)), shortest >= JOB);
    }
    if let Some(Measured { tally, .. }) = of(Locked::Fail, false) {
        let measured = format!("{} refusals for {} claims", tally.refused, tally.claims.len());
        report.expect("asking again costs refusals", measured, tally.refused > 0);
    }
    if let (Some(wait), Some(skip)) = (of(Locked::Wait, false), of(Locked::Skip, false)) {
        let what = "for update waits for row locks, skip locked does so seldom or never";
        if let (Some(wait), Some(skip)) = (wait.waits.counted, skip.waits.counted) {
            let measured = format!("{wait} waits, {skip} with skip locked");
            report.expect(what, measured, wait > 10 * skip && wait > 0);
        } else if let (Some(wait), Some(skip)) = (wait.waits.waiting, skip.waits.waiting) {
            let measured = format!("{wait:.2} sessions waiting, {skip:.2} with skip locked");
            report.expect(what, measured, wait > 3.0 * skip);
        }
    }
    long_jobs(server, report).await
}

/// What the workers do.
#[derive(Clone, Copy)]
struct Work {
    queue: Queue,
    locked: Locked,
    /// Whether the job runs inside the claiming transaction.
    inside: bool,
}

/// Lets five workers run for a while on a queue with nothing but a lock.
async fn measure(
    server: &Server,
    way: &str,
    work: Work,
    rows: u64,
    time: Duration,
) -> Result<Measured> {
    let mut setup = server.session("setup").await?;
    work.queue.create(&mut setup, rows).await?;
    let effects = Effects::default();
    let mut sessions = Vec::new();
    for _ in 0..WORKERS {
        let mut session = server.session("worker").await?;
        // At MySQL's own level a claim would also lock gaps; that is experiment e.
        session.isolate("read committed").await?;
        if server.product == Product::Sqlite {
            session.wait_at_most(if work.locked == Locked::Fail { 0 } else { 20 }).await?;
        }
        sessions.push(session);
    }
    let observer = Observer::start(server).await?;
    let until = Instant::now() + time;
    let workers: Vec<_> = sessions
        .into_iter()
        .map(|session| tokio::spawn(worker(session, work, effects.clone(), until)))
        .collect();
    let mut tally = Tally::default();
    for worker in workers {
        let of_one = worker.await??;
        tally.claims.extend(of_one.claims);
        tally.transactions.extend(of_one.transactions);
        tally.refused += of_one.refused;
    }
    let waits = observer.stop().await?;
    Ok(Measured { way: way.to_owned(), work: Some(work), effects, tally, waits })
}

/// Claims a row, does its job, completes it, and so on.
async fn worker(
    mut session: Session,
    work: Work,
    effects: Effects,
    until: Instant,
) -> Result<Tally> {
    let mut tally = Tally::default();
    while Instant::now() < until {
        let began = Instant::now();
        let done = if work.inside {
            inside(&mut session, work, &effects, &mut tally).await
        } else {
            outside(&mut session, work, &effects, &mut tally).await
        };
        match done {
            Ok(Some(transaction)) => tally.transactions.push(transaction),
            Ok(None) => break,
            Err(Refused { why: Why::Locked | Why::Deadlock, .. }) => {
                tally.refused += 1;
                tally.transactions.push(began.elapsed());
                pause(JITTER).await;
            }
            Err(refused) => return Err(refused.into()),
        }
    }
    Ok(tally)
}

/// The claim commits, and then the job runs; returns how long the claim's transaction was open.
async fn outside(
    session: &mut Session,
    work: Work,
    effects: &Effects,
    tally: &mut Tally,
) -> Result<Option<Duration>, Refused> {
    let began = Instant::now();
    let ids = work.queue.claim(session, work.locked, 1).await?;
    let claimed = began.elapsed();
    let Some(id) = ids.first() else { return Ok(None) };
    tally.claims.push(claimed);
    sleep(JOB).await;
    effects.note(*id);
    // What is done must not be done again: a refused completion is tried until it succeeds.
    while let Err(refused) = work.queue.set(session, *id, "completed").await {
        tally.refused += 1;
        if !matches!(refused.why, Why::Locked | Why::Deadlock) {
            return Err(refused);
        }
        pause(JITTER).await;
    }
    Ok(Some(claimed))
}

/// The job runs in the transaction that holds the lock; returns how long it was open.
async fn inside(
    session: &mut Session,
    work: Work,
    effects: &Effects,
    tally: &mut Tally,
) -> Result<Option<Duration>, Refused> {
    let began = Instant::now();
    session.begin().await?;
    let done = async {
        let ids = work.queue.lock(session, work.locked, 1).await?;
        let Some(id) = ids.first() else {
            session.rollback().await?;
            return Ok(None);
        };
        tally.claims.push(began.elapsed());
        sleep(JOB).await;
        work.queue.set(session, *id, "completed").await?;
        session.commit().await?;
        effects.note(*id);
        Ok(Some(began.elapsed()))
    }
    .await;
    if done.is_err() {
        drop(session.rollback().await);
    }
    done
}

/// The same job under jobq.
#[job(queue = "throughput")]
async fn brief(State(effects): State<Effects>, ctx: &JobContext) {
    sleep(JOB).await;
    effects.note(ctx.id().0);
}

/// Lets jobq run for a while: as five runtimes of one slot, or as one runtime of five.
async fn measure_jobq(
    server: &Server,
    slots: usize,
    rows: u64,
    time: Duration,
) -> Result<Measured> {
    let client = server.jobq(&format!("lab_c{slots}")).await?;
    let ids: Vec<u64> = (0..rows).collect();
    for ids in ids.chunks(5_000) {
        jobq::enqueue_many(&client, ids.iter().map(|_| brief::new())).await?;
    }
    let effects = Effects::default();
    let observer = Observer::start(server).await?;
    let runtimes: Vec<_> = (0..WORKERS / slots)
        .map(|_| tokio::spawn(runtime(&client, slots, &effects).run_until(sleep(time))))
        .collect();
    for runtime in runtimes {
        runtime.await??;
    }
    let waits = observer.stop().await?;
    let runtimes = WORKERS / slots;
    let plural = |n| if n == 1 { "" } else { "s" };
    let way =
        format!("jobq: {runtimes} runtime{} of {slots} slot{}", plural(runtimes), plural(slots));
    Ok(Measured { way, work: None, effects, tally: Tally::default(), waits })
}

fn runtime(client: &Client, slots: usize, effects: &Effects) -> Runtime {
    Runtime::new(client.clone())
        .jobs(jobq::jobs![brief])
        .only_listed_jobs()
        .queue("throughput", slots)
        .state(effects.clone())
}
