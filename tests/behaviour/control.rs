//! What a job function returns, and what becomes of its job.

use std::time::Duration;

use jobq::{AttemptReason, Control, DeadFilter, DeathReason, JobContext, JobState, job, jobs};

use crate::bed::{Bed, on_every_database};

on_every_database! {
    r1_an_error_is_retried_with_its_backoff_until_the_attempts_are_used
    r1_a_retry_waits_for_its_backoff
    r2_a_handler_may_choose_when_it_is_retried
    r2_a_snooze_costs_no_attempt
    r2_a_discarded_job_is_dead_at_once
    r2_a_job_may_cancel_itself
    r2_a_returned_value_is_kept_as_the_result
    r3_a_panic_is_a_failure_with_its_message
    r3_an_error_that_cannot_be_stored_as_it_is_is_stored_all_the_same
    r4_a_dead_job_is_redriven_with_its_attempts_counted_anew
    r5_a_payload_that_does_not_fit_is_dead_at_once_with_its_place
    f8_a_run_past_its_timeout_is_a_failure
    s4_a_plain_function_runs_under_the_same_rules
    s4_a_plain_function_that_panics_is_a_failure
    s4_a_plain_function_that_completes_after_its_timeout_has_completed
    r3_a_panic_with_a_value_that_panics_is_a_failure
    l3_retention_zero_leaves_nothing
    l3_a_job_cancelled_before_it_ran_is_kept_whatever_its_retention
}

#[job(max_attempts = 3, backoff(base = "1ms", cap = "2ms"))]
async fn failing() -> Result<(), String> {
    Err("no luck".to_owned())
}

async fn r1_an_error_is_retried_with_its_backoff_until_the_attempts_are_used(bed: Bed) {
    let id = failing::enqueue(&bed.client).await.expect("enqueued").id();
    let info = bed.run_until_final(jobs![failing], id).await;
    assert_eq!(info.state, JobState::Dead);
    assert_eq!(info.death_reason, Some(DeathReason::Exhausted));
    let attempts: Vec<_> =
        info.attempts.iter().map(|a| (a.attempt, a.reason, a.error.as_str())).collect();
    let failed = AttemptReason::Failed;
    assert_eq!(attempts, [(1, failed, "no luck"), (2, failed, "no luck"), (3, failed, "no luck")]);
}

#[job(backoff(base = "1h", cap = "1h"))]
async fn waiting_for_its_retry() -> Result<(), String> {
    Err("later".to_owned())
}

async fn r1_a_retry_waits_for_its_backoff(bed: Bed) {
    // Full jitter may draw a short wait; of thirty jobs most have to wait.
    let new = (0..30).map(|_| waiting_for_its_retry::new());
    jobq::enqueue_many(&bed.client, new).await.expect("enqueued");
    let ended = bed.run(jobs![waiting_for_its_retry]).await;
    assert_eq!(ended.failed, 30, "each ran once: {ended:?}");
    let ended = bed.run(jobs![waiting_for_its_retry]).await;
    assert!(ended.failed < 5, "a new process respects the waits: {ended:?}");
}

#[job]
async fn choosing(ctx: &JobContext) -> Result<(), Control> {
    if ctx.attempt() == 1 { Err(jobq::retry_after(Duration::ZERO, "again")) } else { Ok(()) }
}

async fn r2_a_handler_may_choose_when_it_is_retried(bed: Bed) {
    let id = choosing::enqueue(&bed.client).await.expect("enqueued").id();
    let info = bed.run_until_final(jobs![choosing], id).await;
    assert_eq!((info.state, info.attempt), (JobState::Completed, 2));
    assert_eq!(info.attempts[0].error, "again");
}

#[job(max_attempts = 1)]
async fn snoozing(ctx: &JobContext) -> Result<(), Control> {
    if ctx.token().0 < 4 { Err(jobq::snooze(Duration::ZERO)) } else { Ok(()) }
}

async fn r2_a_snooze_costs_no_attempt(bed: Bed) {
    let id = snoozing::enqueue(&bed.client).await.expect("enqueued").id();
    let info = bed.run_until_final(jobs![snoozing], id).await;
    assert_eq!((info.state, info.attempt, info.token.0), (JobState::Completed, 1, 4));
    assert!(info.attempts.is_empty());
}

#[job]
async fn discarding() -> Result<(), Control> {
    Err(jobq::discard("no such customer"))
}

async fn r2_a_discarded_job_is_dead_at_once(bed: Bed) {
    let id = discarding::enqueue(&bed.client).await.expect("enqueued").id();
    bed.run(jobs![discarding]).await;
    let dead = bed.client.dead(&DeadFilter::all().reason(DeathReason::Discarded), 10).await;
    let dead = dead.expect("the database can be asked");
    assert_eq!(dead.len(), 1);
    assert_eq!((dead[0].id, dead[0].error.as_str()), (id, "no such customer"));
}

#[job]
async fn cancelling_itself() -> Result<(), Control> {
    Err(jobq::cancel("not needed any more"))
}

async fn r2_a_job_may_cancel_itself(bed: Bed) {
    let id = cancelling_itself::enqueue(&bed.client).await.expect("enqueued").id();
    bed.run(jobs![cancelling_itself]).await;
    assert_eq!(bed.job(id).await.state, JobState::Cancelled);
}

#[job]
async fn adding(a: i64, b: i64) -> Result<i64, String> {
    a.checked_add(b).ok_or_else(|| "too much".to_owned())
}

async fn r2_a_returned_value_is_kept_as_the_result(bed: Bed) {
    let id = adding::enqueue(&bed.client, 40, 2).await.expect("enqueued").id();
    bed.run(jobs![adding]).await;
    let info = bed.job(id).await;
    assert_eq!(info.result.as_deref(), Some("42"));
    assert_eq!(info.payload, r#"{"a":40,"b":2}"#);
    assert_eq!(adding(40, 2).await, Ok(42), "the function stays a function");
}

#[job(max_attempts = 1)]
async fn panicking(n: i64) {
    assert!(n > 100, "{n} is not enough");
}

async fn r3_a_panic_is_a_failure_with_its_message(bed: Bed) {
    let id = panicking::enqueue(&bed.client, 7).await.expect("enqueued").id();
    let fine = panicking::enqueue(&bed.client, 101).await.expect("enqueued").id();
    bed.run(jobs![panicking]).await;
    let info = bed.job(id).await;
    assert_eq!(info.state, JobState::Dead);
    assert_eq!(info.attempts[0].reason, AttemptReason::Panicked);
    assert_eq!(info.attempts[0].error, "panicked: 7 is not enough");
    assert_eq!(bed.job(fine).await.state, JobState::Completed, "the worker goes on");
}

#[job(max_attempts = 1)]
async fn failing_strangely() -> Result<(), String> {
    Err(format!("nul \0 and {}", "long ".repeat(20_000)))
}

async fn r3_an_error_that_cannot_be_stored_as_it_is_is_stored_all_the_same(bed: Bed) {
    let id = failing_strangely::enqueue(&bed.client).await.expect("enqueued").id();
    bed.run(jobs![failing_strangely]).await;
    let info = bed.job(id).await;
    assert_eq!(info.state, JobState::Dead);
    assert!(info.attempts[0].error.starts_with("nul \u{fffd} and long"));
    assert!(info.attempts[0].error.ends_with("(cut)"));
}

async fn r4_a_dead_job_is_redriven_with_its_attempts_counted_anew(bed: Bed) {
    let id = failing::enqueue(&bed.client).await.expect("enqueued").id();
    bed.run_until_final(jobs![failing], id).await;
    let redriven = bed.client.redrive(&DeadFilter::id(id)).await.expect("it can be redriven");
    assert_eq!(redriven, [id]);
    let again = bed.client.redrive(&DeadFilter::id(id)).await.expect("asking again is fine");
    assert!(again.is_empty(), "redriving twice makes one job");
    assert_eq!((bed.job(id).await.state, bed.job(id).await.attempt), (JobState::Pending, 0));
    let info = bed.run_until_final(jobs![failing], id).await;
    assert_eq!(info.attempts.len(), 6, "the first life's errors are kept");
    assert_eq!(info.token.0, 6, "the token went on rising");
}

mod older {
    use jobq::job;

    /// What an older program enqueued under the same name.
    #[job(name = "renamed_parameter", register = false)]
    pub(super) async fn old(count: String) {
        let _ = count;
    }
}

#[job(name = "renamed_parameter")]
async fn renamed_parameter(count: u32) {
    let _ = count;
}

async fn r5_a_payload_that_does_not_fit_is_dead_at_once_with_its_place(bed: Bed) {
    let id = older::old::enqueue(&bed.client, "seven".to_owned()).await.expect("enqueued").id();
    bed.run(jobs![renamed_parameter]).await;
    let info = bed.job(id).await;
    assert_eq!(info.death_reason, Some(DeathReason::Undecodable));
    let error = &info.attempts[0].error;
    assert!(error.contains("count") && error.contains("seven"), "{error}");
    assert_eq!(info.payload, r#"{"count":"seven"}"#, "the payload is kept");
}

#[job(max_attempts = 1, timeout = "50ms")]
async fn dawdling() {
    std::future::pending::<()>().await;
}

async fn f8_a_run_past_its_timeout_is_a_failure(bed: Bed) {
    let id = dawdling::enqueue(&bed.client).await.expect("enqueued").id();
    bed.run(jobs![dawdling]).await;
    let info = bed.job(id).await;
    assert_eq!(info.attempts[0].reason, AttemptReason::TimedOut);
    assert_eq!(info.attempts[0].error, "timed out after 50ms");
}

#[job]
fn plain(n: u32, ctx: &JobContext) -> Result<u32, String> {
    // It may block: it has a thread of its own.
    std::thread::sleep(Duration::from_millis(5));
    if ctx.attempt() == 1 { Err("once more".to_owned()) } else { Ok(n * 2) }
}

async fn s4_a_plain_function_runs_under_the_same_rules(bed: Bed) {
    let id = plain::enqueue(&bed.client, 21).await.expect("enqueued").id();
    let definition = jobs![plain];
    bed.run(definition).await;
    assert_eq!(bed.job(id).await.attempts[0].error, "once more");
    assert_eq!(plain(4, &JobContext::detached()), Err("once more".to_owned()));
}

#[job(max_attempts = 1)]
fn plain_panicking() {
    panic!("no thread of yours");
}

async fn s4_a_plain_function_that_panics_is_a_failure(bed: Bed) {
    let id = plain_panicking::enqueue(&bed.client).await.expect("enqueued").id();
    bed.run(jobs![plain_panicking]).await;
    assert_eq!(bed.job(id).await.attempts[0].error, "panicked: no thread of yours");
}

#[job(retention = "0s")]
async fn forgotten(ctx: &JobContext) -> Result<(), Control> {
    if ctx.attempt() == 1 { Err(jobq::retry_after(Duration::ZERO, "x")) } else { Ok(()) }
}

async fn l3_retention_zero_leaves_nothing(bed: Bed) {
    let id = forgotten::enqueue(&bed.client).await.expect("enqueued").id();
    while bed.client.job(id).await.expect("asked") != jobq::Lookup::Gone {
        bed.run(jobs![forgotten]).await;
    }
    let unknown = jobq::JobId(id.0 + 1_000);
    assert_eq!(bed.client.job(unknown).await.expect("asked"), jobq::Lookup::NotFound);
}

#[job(timeout = "20ms", max_attempts = 1)]
fn late_but_done(ctx: &JobContext) -> Result<i64, String> {
    while !ctx.is_cancelled() {
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(7)
}

async fn s4_a_plain_function_that_completes_after_its_timeout_has_completed(bed: Bed) {
    let id = late_but_done::enqueue(&bed.client).await.expect("enqueued").id();
    bed.run(jobs![late_but_done]).await;
    let info = bed.job(id).await;
    assert_eq!((info.state, info.result.as_deref()), (JobState::Completed, Some("7")));
}

struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("and again");
    }
}

#[job(max_attempts = 1)]
async fn throwing_a_bomb() {
    std::panic::panic_any(Bomb);
}

async fn r3_a_panic_with_a_value_that_panics_is_a_failure(bed: Bed) {
    let id = throwing_a_bomb::enqueue(&bed.client).await.expect("enqueued").id();
    let ended = bed.run(jobs![throwing_a_bomb]).await;
    assert_eq!((ended.dead, ended.leases_lost, ended.abandoned), (1, 0, 0), "{ended:?}");
    assert_eq!(bed.job(id).await.death_reason, Some(DeathReason::Exhausted));
}

async fn l3_a_job_cancelled_before_it_ran_is_kept_whatever_its_retention(bed: Bed) {
    let id = forgotten::enqueue(&bed.client).await.expect("enqueued").id();
    bed.client.cancel(id).await.expect("asked");
    bed.run(jobs![forgotten]).await;
    assert_eq!(bed.job(id).await.state, JobState::Cancelled);
}
