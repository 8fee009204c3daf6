//! Claiming, slots, order, time, and ending by itself.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use jobq::{Enqueued, JobContext, JobState, QueueOptions, State, job, jobs};

use crate::bed::{Bed, on_every_database};

on_every_database! {
    s6_no_more_jobs_run_than_there_are_slots
    s7_run_until_idle_leaves_scheduled_jobs_alone
    e3_priority_decides_among_due_jobs
    e3_a_delayed_job_runs_when_it_is_due
    e3_what_was_given_at_enqueue_reaches_the_handler
    e6_an_idle_worker_starts_a_job_that_commits_later
    r5_a_job_of_an_unknown_kind_waits_until_somebody_knows_it
    u4_a_job_under_a_former_name_is_run
    s3_a_pending_job_is_cancelled_at_once
    a_running_job_that_ignores_its_cancellation_is_dropped_after_a_grace
    l3_retention_is_the_jobs_then_the_queues
    e5_of_twins_one_is_run_and_then_the_next_may_come
    dropping_the_runtime_drops_its_jobs
}

#[derive(Clone, Default)]
struct Gauge(Arc<(AtomicUsize, AtomicUsize)>);

#[job(queue = "narrow")]
async fn crowding(State(Gauge(gauge)): State<Gauge>) {
    let now = gauge.0.fetch_add(1, Ordering::SeqCst) + 1;
    gauge.1.fetch_max(now, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_millis(3)).await;
    gauge.0.fetch_sub(1, Ordering::SeqCst);
}

async fn s6_no_more_jobs_run_than_there_are_slots(bed: Bed) {
    jobq::enqueue_many(&bed.client, (0..60).map(|_| crowding::new())).await.expect("enqueued");
    let gauge = Gauge::default();
    let runtime = bed.runtime(jobs![crowding]).queue("narrow", 3).state(gauge.clone());
    let ended = runtime.run_until_idle().await.expect("it runs");
    assert_eq!(ended.completed, 60);
    assert_eq!(gauge.0.1.load(Ordering::SeqCst), 3, "all slots were used, and no more");
}

type Log = Arc<Mutex<Vec<i64>>>;

#[job(queue = "ordered")]
async fn noting(n: i64, State(log): State<Log>) {
    log.lock().expect("no handler panics").push(n);
}

async fn s7_run_until_idle_leaves_scheduled_jobs_alone(bed: Bed) {
    let log = Log::default();
    noting::enqueue(&bed.client, 1).await.expect("enqueued");
    let later = noting::new(2).delay(Duration::from_secs(3_600));
    let later = later.enqueue(&bed.client).await.expect("enqueued").id();
    let runtime = bed.runtime(jobs![noting]).state(log.clone());
    assert_eq!(runtime.run_until_idle().await.expect("it runs").completed, 1);
    assert_eq!(bed.job(later).await.state, JobState::Pending);
}

async fn e3_priority_decides_among_due_jobs(bed: Bed) {
    let new = [0, -4, 4, 1].map(|priority| noting::new(priority).priority(priority));
    jobq::enqueue_many(&bed.client, new).await.expect("enqueued");
    let log = Log::default();
    let runtime = bed.runtime(jobs![noting]).queue("ordered", 1).state(log.clone());
    runtime.run_until_idle().await.expect("it runs");
    assert_eq!(*log.lock().expect("no handler panics"), [4, 1, 0, -4]);
}

async fn e3_a_delayed_job_runs_when_it_is_due(bed: Bed) {
    let log = Log::default();
    let id = noting::new(7).delay(Duration::from_millis(400)).enqueue(&bed.client).await;
    let id = id.expect("enqueued").id();
    let past = noting::new(8).run_at(SystemTime::UNIX_EPOCH).enqueue(&bed.client).await;
    let past = past.expect("a past time means now").id();
    let client = bed.client.clone();
    let done = async move {
        while !matches!(client.job(id).await, Ok(jobq::Lookup::Found(info)) if info.state.is_final())
        {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let runtime = bed.runtime(jobs![noting]).state(log.clone());
    runtime.run_until(done).await.expect("it runs");
    assert_eq!(*log.lock().expect("no handler panics"), [8, 7]);
    let info = bed.job(id).await;
    let waited = info.finished_at.expect("it is final").since(info.created_at);
    assert!(waited >= Duration::from_millis(399), "it waited only {waited:?}");
    let info = bed.job(past).await;
    assert!(info.finished_at.expect("it is final") >= info.created_at);
}

#[job(max_attempts = 9)]
async fn describing(ctx: JobContext) -> Result<(String, Vec<String>, u64, u32), String> {
    let customer = ctx.metadata()["customer"].as_u64().ok_or("no customer")?;
    Ok((ctx.queue().to_owned(), ctx.tags().to_vec(), customer, ctx.max_attempts()))
}

async fn e3_what_was_given_at_enqueue_reaches_the_handler(bed: Bed) {
    let id = describing::new()
        .queue("side")
        .tag("one")
        .tag("two")
        .metadata("customer", 42)
        .max_attempts(2)
        .enqueue(&bed.client)
        .await
        .expect("enqueued")
        .id();
    let runtime = bed.runtime(jobs![describing]).queue("side", 1);
    runtime.run_until_idle().await.expect("it runs");
    let result = bed.job(id).await.result;
    assert_eq!(result.as_deref(), Some(r#"["side",["one","two"],42,2]"#));
}

async fn e6_an_idle_worker_starts_a_job_that_commits_later(bed: Bed) {
    let log = Log::default();
    let stop = tokio_util::sync::CancellationToken::new();
    let stopped = stop.clone();
    let runtime = bed.runtime(jobs![noting]).state(log.clone());
    let run = tokio::spawn(runtime.run_until(async move { stopped.cancelled().await }));
    for n in 0..20 {
        noting::enqueue(&bed.client, n).await.expect("enqueued");
        while log.lock().expect("no handler panics").len() <= n as usize {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    stop.cancel();
    assert_eq!(run.await.expect("no panic").expect("no error").completed, 20);
}

#[job(register = false)]
async fn rare() {}

async fn r5_a_job_of_an_unknown_kind_waits_until_somebody_knows_it(bed: Bed) {
    let id = rare::enqueue(&bed.client).await.expect("enqueued").id();
    let client = bed.client.clone();
    let parked = async move {
        while !matches!(client.job(id).await, Ok(jobq::Lookup::Found(info)) if info.state == JobState::Waiting)
        {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    // A worker of the same queue that does not know it leaves it alone, and its sweep parks it.
    let runtime = bed.runtime(jobs![snug]);
    runtime.run_until(parked).await.expect("it runs");
    assert_eq!(bed.job(id).await.attempt, 0, "no attempt was burned");
    bed.run(jobs![rare]).await;
    assert_eq!(bed.job(id).await.state, JobState::Completed);
}

#[job]
async fn snug() {}

mod former {
    #[jobq::job(register = false)]
    pub(super) async fn old_name(n: u8) {
        let _ = n;
    }
}

#[job(aliases("old_name"))]
async fn new_name(n: u8) -> Result<u8, String> {
    Ok(n)
}

async fn u4_a_job_under_a_former_name_is_run(bed: Bed) {
    let id = former::old_name::enqueue(&bed.client, 3).await.expect("enqueued").id();
    bed.run(jobs![new_name]).await;
    assert_eq!(bed.job(id).await.result.as_deref(), Some("3"));
}

async fn s3_a_pending_job_is_cancelled_at_once(bed: Bed) {
    let id = snug::enqueue(&bed.client).await.expect("enqueued").id();
    assert_eq!(bed.client.cancel(id).await.expect("asked"), jobq::CancelReply::Cancelled);
    assert_eq!(bed.run(jobs![snug]).await.completed, 0);
    let again = bed.client.cancel(id).await.expect("asked");
    assert_eq!(again, jobq::CancelReply::AlreadyFinal(JobState::Cancelled));
    let none = bed.client.cancel(jobq::JobId(id.0 + 99)).await.expect("asked");
    assert_eq!(none, jobq::CancelReply::NotFound);
}

#[job(lease = "9s")]
async fn deaf(State(started): State<Arc<AtomicUsize>>) {
    started.fetch_add(1, Ordering::SeqCst);
    std::future::pending::<()>().await;
}

async fn a_running_job_that_ignores_its_cancellation_is_dropped_after_a_grace(bed: Bed) {
    let id = deaf::enqueue(&bed.client).await.expect("enqueued").id();
    let started = Arc::new(AtomicUsize::new(0));
    let (client, running) = (bed.client.clone(), started.clone());
    let cancelled = async move {
        while running.load(Ordering::SeqCst) == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        client.cancel(id).await.expect("asked");
        while !matches!(client.job(id).await, Ok(jobq::Lookup::Found(info)) if info.state.is_final())
        {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let runtime = bed.runtime(jobs![deaf]).state(started);
    let ended = runtime.run_until(cancelled).await.expect("it runs");
    assert_eq!(ended.cancelled, 1, "{ended:?}");
    assert_eq!(bed.job(id).await.state, JobState::Cancelled);
}

#[job(unique(by(n), on_conflict = "replace"))]
async fn once(n: i64, note: String, State(log): State<Log>) {
    log.lock().expect("no handler panics").push(n * 100 + note.len() as i64);
}

async fn e5_of_twins_one_is_run_and_then_the_next_may_come(bed: Bed) {
    let log = Log::default();
    let new = |n, note: &str| once::new(n, note.to_owned());
    let told = jobq::enqueue_many(&bed.client, [new(1, "a"), new(2, "a"), new(1, "ab")]).await;
    let told = told.expect("enqueued");
    assert!(told[0].is_new() && told[1].is_new());
    assert_eq!(told[2], Enqueued::Existing { id: told[0].id(), replaced: true });
    let again = once::enqueue(&bed.client, 2, "abc".to_owned()).await.expect("enqueued");
    assert_eq!(again, Enqueued::Existing { id: told[1].id(), replaced: true });
    let run = async || {
        let runtime = bed.runtime(jobs![once]).state(log.clone());
        runtime.run_until_idle().await.expect("it runs").completed
    };
    assert_eq!(run().await, 2);
    let mut ran = log.lock().expect("no handler panics").clone();
    ran.sort_unstable();
    assert_eq!(ran, [102, 203], "with what was enqueued last");
    let next = once::enqueue(&bed.client, 1, String::new()).await.expect("enqueued");
    assert!(next.is_new());
    assert_eq!(run().await, 1);
}

#[job(retention = "10d")]
async fn keeping() {}

async fn l3_retention_is_the_jobs_then_the_queues(bed: Bed) {
    let kept = keeping::enqueue(&bed.client).await.expect("enqueued").id();
    let dropped = snug::enqueue(&bed.client).await.expect("enqueued").id();
    let runtime = bed
        .runtime(jobs![keeping, snug])
        .queue("default", QueueOptions::new().retention(Duration::ZERO));
    runtime.run_until_idle().await.expect("it runs");
    assert_eq!(bed.job(kept).await.state, JobState::Completed);
    assert_eq!(bed.client.job(dropped).await.expect("asked"), jobq::Lookup::Gone);
}

#[job(lease = "2s")]
async fn brief(State(started): State<Arc<AtomicUsize>>) {
    started.fetch_add(1, Ordering::SeqCst);
    std::future::pending::<()>().await;
}

async fn dropping_the_runtime_drops_its_jobs(bed: Bed) {
    let id = brief::enqueue(&bed.client).await.expect("enqueued").id();
    let started = Arc::new(AtomicUsize::new(0));
    let runtime = bed.runtime(jobs![brief]).state(started.clone());
    let run = tokio::spawn(runtime.run_until(std::future::pending()));
    while started.load(Ordering::SeqCst) == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    run.abort();
    assert!(run.await.expect_err("it was dropped").is_cancelled());
    // It is given back if there is time, else its lease ends: another runtime takes the job over.
    let again = started.clone();
    let taken_over = async move {
        while again.load(Ordering::SeqCst) < 2 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let runtime = bed.runtime(jobs![brief]).state(started.clone());
    let runtime = runtime.shutdown_timeout(Duration::ZERO);
    runtime.run_until(taken_over).await.expect("it runs");
    let reason = bed.job(id).await.attempts[0].reason;
    let expected = [jobq::AttemptReason::Crashed, jobq::AttemptReason::Interrupted];
    assert!(expected.contains(&reason), "{reason}");
}
