//! Workers that are killed, and workers that come back too late.

use crate::bed::{Bed, Db, SIGCONT, SIGKILL, on_every_database, on_mariadb118, on_pool};
use crate::jobs::{effect, held_open, late_effect, link, poison, quick};

on_every_database! {
    a_killed_worker_loses_and_doubles_nothing
    a_worker_that_wakes_after_its_lease_writes_nothing
    a_paused_worker_gives_back_what_nobody_else_took
    a_poison_job_dies_alone
    a_rescued_job_runs_before_the_backlog
    an_open_transaction_of_a_killed_worker_is_rolled_back_and_the_job_rescued
    chains_of_jobs_survive_a_killed_worker_at_every_isolation_level
}

on_mariadb118! {
    chains_of_jobs_survive_a_killed_worker_at_every_isolation_level
}

async fn a_killed_worker_loses_and_doubles_nothing(bed: Bed) {
    const JOBS: i64 = 2_000;
    let jobs = (0..JOBS).map(|n| effect::new(u64::try_from(n % 7).expect("small")));
    jobq::enqueue_many(&bed.client, jobs).await.expect("jobs can be enqueued");
    let workers: Vec<_> =
        ["one", "two", "three"].iter().map(|name| bed.worker(name, &[])).collect();
    bed.until("select count(*) from effects", |effects| effects >= 300).await;
    bed.until(
        "select count(*) from jobq.job_states where state = 'running' and worker = 'two'",
        |held| held > 0,
    )
    .await;
    workers[1].signal(SIGKILL);
    let held = "select count(*) from jobq.job_states where state = 'running' and worker = 'two'";
    let left = bed.db.number(held).await;
    let done = bed.db.number("select count(*) from effects").await;
    println!("killed with {done} of {JOBS} done; it held {left}");

    bed.until("select count(*) from jobq.jobs", |jobs| jobs == 0).await;
    assert_eq!(bed.db.number("select count(*) from effects").await, JOBS);
    assert_eq!(bed.db.number("select count(distinct job_id) from effects").await, JOBS);
    let completed = "select count(*) from jobq.finished where state = 'completed'";
    assert_eq!(bed.db.number(completed).await, JOBS);
    assert_eq!(bed.db.number("select count(*) from jobq.dead").await, 0);
    // Only what the killed worker held ran twice.
    let twice = "select count(*) from (
        select job_id from log where what = 'start' group by job_id having count(*) > 1
    ) as again";
    let twice = bed.db.number(twice).await;
    println!("{twice} jobs were run again");
    assert!(twice <= 20, "{twice} jobs ran again, the worker had 20 slots");
    let strangers = "select count(*) from log as first
        join log as second on second.job_id = first.job_id and second.token > first.token
        where first.worker <> 'two'";
    assert_eq!(bed.db.number(strangers).await, 0, "only its own jobs ran again");
}

async fn a_worker_that_wakes_after_its_lease_writes_nothing(bed: Bed) {
    let id = late_effect::enqueue(&bed.client, "gate".to_owned()).await.expect("enqueued").id();
    let late = bed.worker("late", &[]);
    bed.until("select count(*) from log where what = 'start'", |started| started == 1).await;
    bed.pause(&late).await;
    let stopped = std::time::Instant::now();
    let now = bed.db.now();
    let left = match &bed.db {
        Db::Postgres(_) => format!("(extract(epoch from leased_until - {now}) * 1000)::int8"),
        Db::Mysql(_) => format!("(leased_until - {now}) div 1000"),
        Db::Sqlite(_) => format!("(leased_until - {now}) / 1000"),
    };
    let its_session = "jobq.sessions where id = (select leased_by from jobq.jobs)";
    let left = bed.db.number(&format!("select {left} from {its_session}")).await;
    let second = bed.worker("second", &[]);
    bed.until("select count(*) from log where what = 'start' and worker = 'second'", |n| n == 1)
        .await;
    let taken_over = stopped.elapsed().as_millis();
    println!("taken over {taken_over} ms after the stop; the lease had {left} ms to go");
    // The lease, the 6 s that a worker that has just started waits, and a sweep of 3 s; the rest is
    // room for a busy machine.
    assert!(taken_over < u128::from(left.unsigned_abs()) + 9_000 + 20_000);
    late.signal(SIGCONT);
    bed.open_gate("gate").await;
    bed.until("select count(*) from log where what = 'refused' and worker = 'late'", |n| n == 1)
        .await;
    bed.until("select count(*) from log where what = 'written' and worker = 'second'", |n| n == 1)
        .await;
    bed.until("select count(*) from jobq.finished", |finished| finished == 1).await;
    let effects = format!("select count(*) from effects where job_id = {id} and worker = 'second'");
    assert_eq!(bed.db.number(&effects).await, 1);
    assert_eq!(bed.db.number("select count(*) from effects").await, 1);
    assert_eq!(bed.db.number("select token from jobq.finished").await, 2);
    drop((late, second));
}

/// Its process lost the lease, and knows it: that is no crash.
async fn a_paused_worker_gives_back_what_nobody_else_took(bed: Bed) {
    let id = effect::enqueue(&bed.client, 600_000).await.expect("enqueued").id();
    let worker = bed.worker("paused", &[]);
    bed.until("select count(*) from log where what = 'start'", |started| started == 1).await;
    let now = bed.db.now();
    let given_back = "select count(*) from jobq.jobs where interruptions > 0";
    let or_lease = |is: &str| {
        let session = format!("id = job.leased_by and leased_until {is} {now}");
        format!(
            "select count(*) from jobq.jobs as job
             where interruptions > 0 or exists (select 1 from jobq.sessions where {session})"
        )
    };
    while bed.db.number(given_back).await == 0 {
        bed.pause(&worker).await;
        bed.until(&or_lease("<"), |expired| expired == 1).await;
        worker.signal(SIGCONT);
        // Its heartbeat may be faster than its watchdog, and find that nobody has closed the session.
        bed.until(&or_lease(">"), |decided| decided == 1).await;
    }
    bed.until("select count(*) from log where what = 'start'", |started| started >= 2).await;
    // Once, or once more: a claim may have been under way under the session that was just given up.
    let interrupted = format!(
        "select count(*) from jobq.jobs
         where id = {id} and crashes = 0 and attempt = 1 and interruptions > 0"
    );
    bed.until(&interrupted, |interrupted| interrupted == 1).await;
    drop(worker);
}

async fn a_poison_job_dies_alone(bed: Bed) {
    let poison = poison::enqueue(&bed.client).await.expect("enqueued").id();
    let innocents = (0..30).map(|_| effect::new(300)).collect::<Vec<_>>();
    jobq::enqueue_many(&bed.client, innocents).await.expect("enqueued");
    // It has waited long enough after its start to rescue at once.
    let _sweeper = bed.worker("sweeper", &[("JOBQ_WORKER_QUEUE", "elsewhere")]);
    // A process manager that starts the worker again each time it dies.
    let mut worker = bed.worker("w0", &[]);
    let mut starts = 1;
    while bed.db.number("select count(*) from jobq.jobs").await > 0 {
        if !worker.is_running() {
            worker = bed.worker(&format!("w{starts}"), &[]);
            starts += 1;
        }
        assert!(starts < 20, "it never ends");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    assert_eq!(bed.db.number("select count(*) from effects").await, 30, "no neighbour was lost");
    let dead = format!("select count(*) from jobq.dead where id = {poison} and reason = 'poison'");
    assert_eq!(bed.db.number(&dead).await, 1);
    assert_eq!(bed.db.number("select count(*) from jobq.dead").await, 1);
    assert_eq!(starts, 4, "three crashes, and the start that found peace");
}

async fn a_rescued_job_runs_before_the_backlog(bed: Bed) {
    const BACKLOG: i64 = 20_000;
    late_effect::enqueue(&bed.client, "never".to_owned()).await.expect("enqueued");
    // It has no slot left for the backlog: what a worker has passed by goes first, too.
    let first = bed.worker("first", &[("JOBQ_WORKER_SLOTS", "1")]);
    bed.until("select count(*) from log where what = 'start'", |n| n == 1).await;
    for _ in 0..BACKLOG / 2_000 {
        let jobs = (0..2_000).map(quick::new);
        jobq::enqueue_many(&bed.client, jobs).await.expect("enqueued");
    }
    first.signal(SIGKILL);
    bed.open_gate("never").await;
    let second = bed.worker("second", &[("JOBQ_WORKER_SLOTS", "2")]);
    bed.until("select count(*) from effects", |effects| effects == 1).await;
    let before = bed.db.number("select count(*) from jobq.jobs where kind = 'quick'").await;
    println!("the rescued job was done with {before} of {BACKLOG} still waiting");
    assert!(before > BACKLOG / 2, "it ran before most of the backlog");
    drop(second);
}

async fn an_open_transaction_of_a_killed_worker_is_rolled_back_and_the_job_rescued(bed: Bed) {
    let gate = bed.file("gate").display().to_string();
    held_open::enqueue(&bed.client, gate.clone(), "read committed".to_owned())
        .await
        .expect("enqueued");
    let first = bed.worker("first", &[]);
    bed.until("select count(*) from log where what = 'start'", |n| n == 1).await;
    bed.until_there_is(&format!("{gate}.open")).await;
    first.signal(SIGKILL);
    let second = bed.worker("second", &[]);
    bed.until("select count(*) from log where what = 'start' and worker = 'second'", |n| n == 1)
        .await;
    std::fs::write(&gate, "").expect("a gate can be opened");
    bed.open_gate(&gate).await;
    bed.until("select count(*) from jobq.finished", |finished| finished == 1).await;
    assert_eq!(bed.db.number("select count(*) from effects").await, 1);
    assert_eq!(bed.db.number("select token from jobq.finished").await, 2);
    drop(second);
}

/// Each job enqueues the next in the transaction that completes it; so does whoever begins a chain.
async fn chains_of_jobs_survive_a_killed_worker_at_every_isolation_level(bed: Bed) {
    const LINKS: u32 = 25;
    let mut chains = 0;
    for isolation in bed.db.isolations() {
        on_pool!(&bed.db, pool => for _ in 0..6 {
            let begin = bed.db.begin_at(isolation);
            let mut tx = pool.begin_with(begin).await.expect("begins");
            link::enqueue(&mut tx, LINKS, (*isolation).to_owned()).await.expect("enqueued");
            tx.commit().await.expect("commits");
            chains += 1;
        });
    }
    let jobs = chains * i64::from(LINKS);
    let workers = [bed.worker("one", &[]), bed.worker("two", &[])];
    bed.until("select count(*) from effects where worker = 'link'", |n| n >= jobs / 5).await;
    workers[0].signal(SIGKILL);
    bed.until("select count(*) from jobq.jobs", |jobs| jobs == 0).await;
    // One effect of each job: the table would refuse a second.
    assert_eq!(bed.db.number("select count(*) from effects").await, jobs);
    let completed = "select count(*) from jobq.finished where state = 'completed'";
    assert_eq!(bed.db.number(completed).await, jobs);
    let failed = "select count(*) from jobq.attempts where reason = 'failed'";
    println!("{} of {jobs} had to be tried again", bed.db.number(failed).await);
    assert_eq!(bed.db.number("select count(*) from jobq.dead").await, 0);
}
