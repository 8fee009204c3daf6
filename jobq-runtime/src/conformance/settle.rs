//! Settling: what each transition writes, and what is kept.

use std::time::Duration;

use jobq_core::lifecycle::{self, Counters, Transition, When};
use jobq_core::outcome::{AttemptReason, AttemptRecord, DeathReason};
use jobq_core::queue::EXPRESS;
use jobq_core::unique::{OnConflict, UniqueScope};

use super::bed::{Bed, LEASE, RETENTION};
use super::worker::{job, settlement};
use crate::job::{CheckedJob, CheckedUnique};
use crate::store::{ClaimedJob, DeadFilter, Lookup, Settled, Settlement};
use crate::unique::UniqueKey;

/// Counters unlike those of a job that was just claimed.
const OTHERS: Counters = Counters { attempt: 5, crashes: 2, interruptions: 4 };

pub(super) fn record(reason: AttemptReason) -> AttemptRecord {
    AttemptRecord { reason, error: format!("it {reason}: \u{fffd} é") }
}

/// A failed attempt that is retried after a delay.
pub(super) fn failed(counters: Counters, delay: Duration) -> Transition {
    Transition::Requeue {
        when: When::After(delay),
        counters,
        record: Some(record(AttemptReason::Failed)),
    }
}

/// A snooze, due again at once.
pub(super) fn snoozed(counters: Counters) -> Transition {
    Transition::Requeue {
        when: When::After(Duration::ZERO),
        counters: Counters { attempt: counters.attempt - 1, ..counters },
        record: None,
    }
}

pub(super) fn completed() -> Transition {
    Transition::Complete { result: Some(r#"{"ok":true}"#.to_owned()) }
}

pub(super) fn cancelled() -> Transition {
    Transition::Cancel { reason: Some("no longer wanted".to_owned()) }
}

pub(super) fn buried(counters: Counters) -> Transition {
    Transition::Bury {
        reason: DeathReason::Exhausted,
        counters,
        record: record(AttemptReason::TimedOut),
    }
}

/// A job with something in every column.
fn full_job() -> CheckedJob {
    CheckedJob {
        priority: 2,
        tags: vec!["tag".to_owned()],
        metadata: Some(r#"{"m":1}"#.to_owned()),
        payload: r#"{"n":1}"#.to_owned(),
        unique: Some(CheckedUnique {
            key: UniqueKey::given("k", "full"),
            scope: UniqueScope::UntilFinished,
            on_conflict: OnConflict::Skip,
        }),
        ..job("k")
    }
}

async fn claim_full_job(bed: &Bed) -> ClaimedJob {
    bed.enqueue(vec![full_job()]).await;
    bed.session(LEASE, &["k"]).await.claim_one().await
}

/// The worker's name of a session.
fn worker_of(job: &ClaimedJob) -> String {
    format!("worker-{}", job.lease.session)
}

pub(super) async fn l2_completing_moves_the_job_to_the_history(bed: Bed) {
    let job = claim_full_job(&bed).await;
    let running = bed.job_row(job.lease.job).await;
    let before = bed.now().await;
    assert_eq!(bed.settle(job.lease, completed()).await, Settled::Written);
    let after = bed.now().await;
    assert_eq!(bed.count("jobs").await + bed.count("dead").await + bed.count("attempts").await, 0);
    let finished = bed.row("finished", job.lease.job).await.expect("it is in the history");
    running.agrees(&finished, &[]);
    assert_eq!(finished.text("state"), "completed");
    assert_eq!(finished.text("result"), r#"{"ok":true}"#);
    assert!(finished.is_null("reason"));
    assert!((before..=after).contains(&finished.number("finished_at")));
    let kept = RETENTION.as_micros() as i64;
    assert!((before + kept..=after + kept).contains(&finished.number("expires_at")));
}

pub(super) async fn l2_cancelling_moves_the_job_to_the_history(bed: Bed) {
    let job = claim_full_job(&bed).await;
    let running = bed.job_row(job.lease.job).await;
    assert_eq!(bed.settle(job.lease, cancelled()).await, Settled::Written);
    assert_eq!(bed.count("jobs").await + bed.count("dead").await + bed.count("attempts").await, 0);
    let finished = bed.row("finished", job.lease.job).await.expect("it is in the history");
    running.agrees(&finished, &[]);
    assert_eq!(finished.text("state"), "cancelled");
    assert_eq!(finished.text("reason"), "no longer wanted");
    assert!(finished.is_null("result"));
}

pub(super) async fn l2_requeueing_frees_the_job_for_a_later_time(bed: Bed) {
    let job = claim_full_job(&bed).await;
    assert!(bed.store.isolate(job.lease).await.expect("writes"));
    let running = bed.job_row(job.lease.job).await;
    let before = bed.now().await;
    let delay = Duration::from_secs(90);
    assert_eq!(bed.settle(job.lease, failed(OTHERS, delay)).await, Settled::Written);
    let after = bed.now().await;
    let pending = bed.job_row(job.lease.job).await;
    let written = ["attempt", "crashes", "interruptions", "isolated", "leased_by", "run_after"];
    assert_eq!(running.changed(&pending), written);
    assert_eq!(pending.number("leased_by"), 0);
    assert_eq!(pending.number("isolated"), 0);
    assert_eq!(pending.number("attempt"), 5);
    assert_eq!(pending.number("crashes"), 2);
    assert_eq!(pending.number("interruptions"), 4);
    assert!((before + 90_000_000..=after + 90_000_000).contains(&pending.number("run_after")));
    assert_eq!(bed.count("finished").await + bed.count("dead").await, 0);
}

pub(super) async fn l2_what_goes_next_is_in_the_express_band_until_its_next_delay(bed: Bed) {
    let job = claim_full_job(&bed).await;
    let before = bed.now().await;
    let next = Transition::Requeue { when: When::Next, counters: OTHERS, record: None };
    assert_eq!(bed.settle(job.lease, next).await, Settled::Written);
    let pending = bed.job_row(job.lease.job).await;
    assert_eq!(pending.number("band"), i64::from(EXPRESS));
    assert_eq!(pending.number("priority"), 2);
    assert!((before..=bed.now().await).contains(&pending.number("run_after")));
    let again = bed.session(LEASE, &["k"]).await.claim_one().await;
    assert_eq!(again.band, EXPRESS);
    assert_eq!(bed.settle(again.lease, snoozed(again.counters)).await, Settled::Written);
    assert_eq!(bed.job_row(job.lease.job).await.number("band"), 2);
}

pub(super) async fn l2_burying_moves_the_job_to_the_dead_letters(bed: Bed) {
    let job = claim_full_job(&bed).await;
    let running = bed.job_row(job.lease.job).await;
    let before = bed.now().await;
    assert_eq!(bed.settle(job.lease, buried(OTHERS)).await, Settled::Written);
    assert_eq!(bed.count("jobs").await + bed.count("finished").await, 0);
    let dead = bed.row("dead", job.lease.job).await.expect("it is a dead letter");
    running.agrees(&dead, &["attempt", "crashes", "interruptions"]);
    assert_eq!(dead.number("attempt"), 5);
    assert_eq!(dead.number("crashes"), 2);
    assert_eq!(dead.number("interruptions"), 4);
    assert_eq!(dead.text("reason"), "exhausted");
    assert_eq!(dead.text("error"), "it timed_out: \u{fffd} é");
    assert!((before..=bed.now().await).contains(&dead.number("died_at")));
    assert_eq!(bed.attempts(job.lease.job).await.len(), 1, "the last attempt is kept too");
}

pub(super) async fn l2_isolating_changes_nothing_else(bed: Bed) {
    let job = claim_full_job(&bed).await;
    let before = bed.job_row(job.lease.job).await;
    assert!(bed.store.isolate(job.lease).await.expect("writes"));
    assert_eq!(before.changed(&bed.job_row(job.lease.job).await), ["isolated"]);
}

pub(super) async fn l2_a_claim_changes_token_attempt_and_holder_only(bed: Bed) {
    let id = bed.enqueue(vec![full_job()]).await[0];
    let before = bed.job_row(id).await;
    let worker = bed.session(LEASE, &["k"]).await;
    let job = worker.claim_one().await;
    let after = bed.job_row(id).await;
    assert_eq!(before.changed(&after), ["attempt", "leased_by", "token"]);
    assert_eq!(after.number("leased_by"), worker.id.0);
    assert_eq!((after.number("token"), after.number("attempt")), (job.lease.token.0, 1));
}

pub(super) async fn l3_every_attempt_that_did_not_complete_is_kept(bed: Bed) {
    let reasons = [
        AttemptReason::Failed,
        AttemptReason::TimedOut,
        AttemptReason::Panicked,
        AttemptReason::Interrupted,
        AttemptReason::Crashed,
    ];
    let id = bed.one().await;
    let mut workers = Vec::new();
    for reason in reasons {
        let job = bed.session(LEASE, &["k"]).await.claim_one().await;
        workers.push(worker_of(&job));
        let requeue = Transition::Requeue {
            when: When::Next,
            counters: job.counters,
            record: Some(record(reason)),
        };
        assert_eq!(bed.settle(job.lease, requeue).await, Settled::Written);
    }
    let worker = bed.session(LEASE, &["k"]).await;
    for _ in 0..3 {
        let job = worker.claim_one().await;
        assert_eq!(bed.settle(job.lease, snoozed(job.counters)).await, Settled::Written);
    }
    let last = worker.claim_one().await;
    let discarded = Transition::Bury {
        reason: DeathReason::Discarded,
        counters: last.counters,
        record: record(AttemptReason::Discarded),
    };
    assert_eq!(bed.settle(last.lease, discarded).await, Settled::Written);
    workers.push(worker_of(&last));

    let attempts = bed.attempts(id).await;
    assert_eq!(attempts.len(), 6, "a snooze leaves nothing");
    let expected = reasons.into_iter().chain([AttemptReason::Discarded]);
    for ((n, reason), row) in expected.enumerate().zip(&attempts) {
        assert_eq!(row.text("reason"), reason.as_str());
        assert_eq!(row.text("error"), record(reason).error);
        assert_eq!(row.text("worker"), workers[n]);
        assert_eq!(row.number("attempt"), n as i64 + 1);
    }
    let tokens: Vec<i64> = attempts.iter().map(|row| row.number("token")).collect();
    assert_eq!(tokens, [1, 2, 3, 4, 5, 9]);
}

/// The attempt that an interruption gives back is kept under the number it ran with.
pub(super) async fn l3_an_interrupted_attempt_is_kept_under_its_number(bed: Bed) {
    let id = bed.one().await;
    let worker = bed.session(LEASE, &["k"]).await;
    for _ in 0..2 {
        let job = worker.claim_one().await;
        assert_eq!(job.counters.attempt, 1);
        bed.settle(job.lease, lifecycle::release(job.counters)).await;
    }
    let attempts = bed.attempts(id).await;
    assert_eq!(attempts.len(), 2);
    assert!(attempts.iter().all(|row| row.number("attempt") == 1));
    assert_eq!(bed.job_row(id).await.number("interruptions"), 2);
}

/// R3: writing an error can never fail because of the error.
pub(super) async fn r3_any_error_text_that_was_made_storable_is_kept_whole(bed: Bed) {
    let texts = ["a\0b", &"é".repeat(100_000), "'; drop table jobs; --", "\u{1f980}\u{202e}\\"];
    let worker = bed.session(LEASE, &["k"]).await;
    for text in texts {
        let id = bed.one().await;
        let error = jobq_core::text::storable(text);
        let bury = Transition::Bury {
            reason: DeathReason::Exhausted,
            counters: OTHERS,
            record: AttemptRecord { reason: AttemptReason::Panicked, error: error.clone() },
        };
        let job = worker.claim_one().await;
        assert_eq!(bed.settle(job.lease, bury).await, Settled::Written);
        assert_eq!(bed.row("dead", id).await.expect("dead").text("error"), error);
        assert_eq!(bed.attempts(id).await[0].text("error"), error);
    }
}

pub(super) async fn r2_a_large_result_is_kept_byte_for_byte(bed: Bed) {
    let result = format!(r#"{{ "text" : "{}" }}"#, "é\\u0000".repeat(100_000));
    let job = claim_full_job(&bed).await;
    bed.settle(job.lease, Transition::Complete { result: Some(result.clone()) }).await;
    let row = bed.row("finished", job.lease.job).await.expect("finished");
    assert!(row.text("result") == result);
}

/// Settles a job's only running attempt and keeps nothing of it.
async fn finish_without_history(bed: &Bed, job: &ClaimedJob, transition: Transition) {
    let settlement = Settlement { retention: Duration::ZERO, ..settlement(job.lease, transition) };
    assert_eq!(bed.settle_all(&[settlement]).await, [Settled::Written]);
}

async fn assert_nothing_is_left(bed: &Bed) {
    for table in ["jobs", "finished", "dead", "attempts"] {
        assert_eq!(bed.count(table).await, 0, "{table}");
    }
}

pub(super) async fn l3_a_retention_of_zero_leaves_nothing(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    for end in [completed(), cancelled()] {
        let id = bed.one().await;
        let plain = worker.claim_one().await;
        finish_without_history(&bed, &plain, end.clone()).await;
        assert_nothing_is_left(&bed).await;
        assert_eq!(bed.client.job(id).await.expect("looks"), Lookup::Gone);

        bed.one().await;
        let first = worker.claim_one().await;
        bed.settle(first.lease, failed(first.counters, Duration::ZERO)).await;
        let second = worker.claim_one().await;
        bed.settle(second.lease, lifecycle::release(second.counters)).await;
        assert_eq!(bed.count("attempts").await, 2);
        finish_without_history(&bed, &worker.claim_one().await, end).await;
        assert_nothing_is_left(&bed).await;
    }
}

/// A redrive counts attempts anew but keeps those of before; they go with the job all the same.
pub(super) async fn l3_a_retention_of_zero_leaves_nothing_of_a_redriven_job(bed: Bed) {
    let id = bed.one().await;
    let worker = bed.session(LEASE, &["k"]).await;
    let job = worker.claim_one().await;
    bed.settle(job.lease, buried(job.counters)).await;
    assert_eq!(bed.client.redrive(&DeadFilter::id(id)).await.expect("redrives"), [id]);
    finish_without_history(&bed, &worker.claim_one().await, completed()).await;
    assert_nothing_is_left(&bed).await;
}

/// The longest retention that can be asked for is a date that can be stored.
pub(super) async fn l3_a_retention_for_ever_is_kept(bed: Bed) {
    let job = claim_full_job(&bed).await;
    let for_ever = Settlement { retention: Duration::MAX, ..settlement(job.lease, completed()) };
    assert_eq!(bed.settle_all(&[for_ever]).await, [Settled::Written]);
    let row = bed.row("finished", job.lease.job).await.expect("finished");
    assert!(row.number("expires_at") > bed.now().await + 99 * 365 * 86_400 * 1_000_000);
    assert_eq!(bed.store.prune(10).await.expect("prunes"), 0);
}

/// The longest wait that can be asked for is a date that can be stored.
pub(super) async fn r2_a_delay_for_ever_is_kept(bed: Bed) {
    let job = claim_full_job(&bed).await;
    let settled = bed.settle(job.lease, failed(job.counters, Duration::MAX)).await;
    assert_eq!(settled, Settled::Written);
    let row = bed.job_row(job.lease.job).await;
    assert!(row.number("run_after") > bed.now().await + 99 * 365 * 86_400 * 1_000_000);
    assert!(row.number("run_after") < i64::MAX, "that would mean waiting");
}
