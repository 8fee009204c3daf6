//! Looking at jobs, cancelling and redriving them.

use std::time::Duration;

use jobq_core::job::{JobId, JobState, Lease};
use jobq_core::lifecycle::Counters;
use jobq_core::outcome::{AttemptReason, DeathReason};

use super::bed::{Bed, LEASE, RETENTION};
use super::settle::{buried, cancelled, completed, failed, record, snoozed};
use super::wait::join_all;
use super::worker::{job, settlement};
use crate::error::Error;
use crate::job::CheckedJob;
use crate::store::{CancelReply, ClaimedJob, DeadFilter, JobInfo, Lookup, QueueCount, Settlement};

async fn look(bed: &Bed, id: JobId) -> JobInfo {
    match bed.client.job(id).await.expect("looks") {
        Lookup::Found(info) => *info,
        other => panic!("{other:?}"),
    }
}

async fn claim(bed: &Bed) -> ClaimedJob {
    bed.session(LEASE, &["k"]).await.claim_one().await
}

pub(super) async fn m3_a_job_can_be_looked_up_in_every_state(bed: Bed) {
    let new = CheckedJob { payload: r#"{"n":1}"#.to_owned(), ..job("k") };
    let id = bed.enqueue(vec![new]).await[0];
    let pending = look(&bed, id).await;
    assert_eq!((pending.id, pending.state), (id, JobState::Pending));
    assert_eq!(
        (&*pending.kind, &*pending.queue, &*pending.payload),
        ("k", "default", r#"{"n":1}"#)
    );
    assert_eq!((pending.attempt, pending.max_attempts, pending.token.0), (0, 3, 0));
    assert!(pending.run_after.is_some() && pending.finished_at.is_none());
    assert_eq!((pending.leased_by, pending.result, pending.death_reason), (None, None, None));

    let first = claim(&bed).await;
    let running = look(&bed, id).await;
    assert_eq!((running.state, running.attempt, running.token.0), (JobState::Running, 1, 1));
    let (worker, until) = running.leased_by.expect("somebody runs it");
    assert_eq!(worker, format!("worker-{}", first.lease.session));
    let session = bed.row("sessions", first.lease.session).await.expect("open");
    assert_eq!(until.0, session.number("leased_until"));

    bed.settle(first.lease, failed(first.counters, RETENTION)).await;
    let retrying = look(&bed, id).await;
    assert_eq!((retrying.state, retrying.attempt), (JobState::Pending, 1));
    assert_eq!(retrying.attempts.len(), 1);
    assert_eq!(retrying.attempts[0].reason, AttemptReason::Failed);
    assert_eq!(retrying.attempts[0].error, record(AttemptReason::Failed).error);
    assert_eq!(retrying.attempts[0].worker.as_deref(), Some(&*worker));
    assert_eq!((retrying.attempts[0].attempt, retrying.attempts[0].token.0), (1, 1));

    let for_ever = bed.for_ever();
    bed.execute(&format!("update jobq.jobs set run_after = {for_ever}")).await;
    let waiting = look(&bed, id).await;
    assert_eq!((waiting.state, waiting.run_after), (JobState::Waiting, None));
    bed.make_due(id).await;

    let second = claim(&bed).await;
    bed.settle(second.lease, completed()).await;
    let done = look(&bed, id).await;
    assert_eq!((done.state, done.attempt, done.token.0), (JobState::Completed, 2, 2));
    assert_eq!(done.result.as_deref(), Some(r#"{"ok":true}"#));
    assert_eq!((done.created_at, done.run_after), (pending.created_at, None));
    assert!(done.finished_at.is_some() && done.leased_by.is_none());
    assert_eq!(done.attempts, retrying.attempts, "the errors on the way are kept");
    assert_eq!(done.payload, pending.payload);
}

pub(super) async fn m3_dead_and_cancelled_jobs_say_why(bed: Bed) {
    let id = bed.one().await;
    let last = claim(&bed).await;
    bed.settle(last.lease, buried(last.counters)).await;
    let dead = look(&bed, id).await;
    assert_eq!((dead.state, dead.death_reason), (JobState::Dead, Some(DeathReason::Exhausted)));
    assert!(dead.finished_at.is_some());
    assert_eq!(dead.attempts[0].reason, AttemptReason::TimedOut);
    let id = bed.one().await;
    bed.client.cancel(id).await.expect("cancels");
    let cancelled = look(&bed, id).await;
    assert_eq!((cancelled.state, cancelled.token.0), (JobState::Cancelled, 0));
}

pub(super) async fn l3_gone_is_told_apart_from_never_there(bed: Bed) {
    let id = bed.one().await;
    for unknown in [JobId(id.0 + 1), JobId(0), JobId(-1), JobId(i64::MAX), JobId(i64::MIN)] {
        assert_eq!(bed.client.job(unknown).await.expect("looks"), Lookup::NotFound, "{unknown}");
    }
    let job = claim(&bed).await;
    let end = Settlement { retention: Duration::ZERO, ..settlement(job.lease, completed()) };
    bed.settle_all(&[end]).await;
    assert_eq!(bed.client.job(id).await.expect("looks"), Lookup::Gone);
}

pub(super) async fn l3_nothing_was_ever_there_before_the_first_job(bed: Bed) {
    assert_eq!(bed.client.job(JobId(1)).await.expect("looks"), Lookup::NotFound);
}

pub(super) async fn m1_jobs_are_counted_by_queue_and_state(bed: Bed) {
    assert_eq!(bed.client.counts().await.expect("counts"), []);
    bed.enqueue((0..6).map(|_| job("k")).collect()).await;
    let mut other = job("k");
    other.queue = "other".into();
    bed.enqueue(vec![other.clone(), other]).await;
    let jobs = bed.session(LEASE, &["k"]).await.claim(5).await;
    bed.settle(jobs[0].lease, completed()).await;
    bed.settle(jobs[1].lease, completed()).await;
    bed.settle(jobs[2].lease, buried(jobs[2].counters)).await;
    bed.settle(jobs[3].lease, cancelled()).await;
    let count = |queue: &str, state, count| QueueCount { queue: queue.to_owned(), state, count };
    let mut counts = bed.client.counts().await.expect("counts");
    counts.sort_by_key(|count| (count.queue.clone(), count.state.as_str()));
    assert_eq!(
        counts,
        [
            count("default", JobState::Cancelled, 1),
            count("default", JobState::Completed, 2),
            count("default", JobState::Dead, 1),
            count("default", JobState::Pending, 1),
            count("default", JobState::Running, 1),
            count("other", JobState::Pending, 2),
        ]
    );
}

/// Buries one job of each kind, queue and reason given.
async fn bury_all(bed: &Bed, jobs: &[(&'static str, &'static str, DeathReason)]) -> Vec<JobId> {
    let mut ids = Vec::new();
    for (kind, queue, reason) in jobs {
        let mut new = job(kind);
        new.queue = (*queue).into();
        let id = bed.enqueue(vec![new]).await[0];
        let worker = bed.session(LEASE, &[kind]).await;
        let claim = worker.asking(queue, 1, crate::store::Floor::START);
        let job = worker.claim_as(&claim).await.jobs.remove(0);
        let bury = jobq_core::lifecycle::Transition::Bury {
            reason: *reason,
            counters: job.counters,
            record: record(AttemptReason::Failed),
        };
        bed.settle(job.lease, bury).await;
        ids.push(id);
    }
    ids
}

const SEVERAL: [(&str, &str, DeathReason); 4] = [
    ("k", "a", DeathReason::Exhausted),
    ("k", "b", DeathReason::Poison),
    ("l", "a", DeathReason::Poison),
    ("l", "b", DeathReason::Discarded),
];

pub(super) async fn r4_dead_letters_are_found_by_queue_kind_and_reason(bed: Bed) {
    let ids = bury_all(&bed, &SEVERAL).await;
    let dead = |filter: DeadFilter| {
        let (bed, ids) = (&bed, &ids);
        async move {
            let found = bed.client.dead(&filter, 10).await.expect("lists");
            let place = |id| ids.iter().position(|known| *known == id).expect("one of them");
            found.into_iter().map(|job| place(job.id)).collect::<Vec<_>>()
        }
    };
    assert_eq!(dead(DeadFilter::all()).await, [3, 2, 1, 0], "newest first");
    assert_eq!(dead(DeadFilter::all().queue("a")).await, [2, 0]);
    assert_eq!(dead(DeadFilter::all().kind("k")).await, [1, 0]);
    assert_eq!(dead(DeadFilter::all().reason(DeathReason::Poison)).await, [2, 1]);
    assert_eq!(dead(DeadFilter::all().kind("l").queue("b")).await, [3]);
    assert_eq!(dead(DeadFilter::id(ids[1])).await, [1]);
    assert_eq!(dead(DeadFilter::id(ids[1]).kind("l")).await, [0; 0]);
    assert_eq!(dead(DeadFilter::all().kind("' or true --")).await, [0; 0]);
    assert_eq!(bed.client.dead(&DeadFilter::all(), 3).await.expect("lists").len(), 3);
    let letter = bed.client.dead(&DeadFilter::id(ids[2]), 1).await.expect("lists").remove(0);
    assert_eq!((&*letter.kind, &*letter.queue, letter.reason), ("l", "a", DeathReason::Poison));
    assert_eq!((letter.attempt, &*letter.payload), (1, "{}"));
    assert_eq!(letter.error, record(AttemptReason::Failed).error);
}

pub(super) async fn r4_redrive_takes_one_some_or_all(bed: Bed) {
    let ids = bury_all(&bed, &SEVERAL).await;
    let redrive = |filter: DeadFilter| {
        let bed = &bed;
        async move {
            let mut ids = bed.client.redrive(&filter).await.expect("redrives");
            ids.sort_unstable();
            ids
        }
    };
    assert_eq!(redrive(DeadFilter::id(ids[0])).await, [ids[0]]);
    assert_eq!(redrive(DeadFilter::id(ids[0])).await, [], "redriving twice makes one job");
    assert_eq!(redrive(DeadFilter::all().kind("l").queue("a")).await, [ids[2]]);
    assert_eq!(redrive(DeadFilter::all()).await, [ids[1], ids[3]]);
    assert_eq!(redrive(DeadFilter::all()).await, []);
    assert_eq!((bed.count("dead").await, bed.count("jobs").await), (0, 4));
    assert_eq!(redrive(DeadFilter::id(JobId(i64::MAX))).await, []);
}

pub(super) async fn r4_a_redriven_job_starts_anew_under_its_old_id_and_token(bed: Bed) {
    let mut new = job("k");
    (new.priority, new.tags) = (3, vec!["tag".to_owned()]);
    new.metadata = Some(r#"{"m":1}"#.to_owned());
    let id = bed.enqueue(vec![new]).await[0];
    for _ in 0..2 {
        let job = claim(&bed).await;
        bed.settle(job.lease, failed(job.counters, Duration::ZERO)).await;
    }
    let last = claim(&bed).await;
    let counters = Counters { crashes: 2, interruptions: 1, ..last.counters };
    bed.settle(last.lease, buried(counters)).await;
    let dead = bed.row("dead", id).await.expect("dead");
    let before = bed.now().await;
    assert_eq!(bed.client.redrive(&DeadFilter::id(id)).await.expect("redrives"), [id]);
    let row = bed.job_row(id).await;
    dead.agrees(&row, &["attempt", "crashes", "interruptions"]);
    assert_eq!(row.number("token"), 3);
    let counters = (row.number("attempt"), row.number("crashes"), row.number("interruptions"));
    assert_eq!(counters, (0, 0, 0));
    assert_eq!((row.number("band"), row.number("leased_by")), (3, 0));
    assert_eq!((row.number("isolated"), row.number("cancel_requested")), (0, 0));
    assert!((before..=bed.now().await).contains(&row.number("run_after")));
    let again = claim(&bed).await;
    assert_eq!((again.lease.token.0, again.counters.attempt), (4, 1));
    let attempts = look(&bed, id).await.attempts;
    assert_eq!(attempts.len(), 3, "the errors of its earlier life are kept");
    // It may die again; its attempts do not collide with those of before.
    bed.settle(again.lease, buried(again.counters)).await;
    assert_eq!(look(&bed, id).await.attempts.len(), 4);
}

pub(super) async fn r4_a_cancelled_job_can_be_redriven_by_its_id(bed: Bed) {
    let id = bed.one().await;
    let first = claim(&bed).await;
    bed.settle(first.lease, snoozed(first.counters)).await;
    assert_eq!(bed.client.cancel(id).await.expect("cancels"), CancelReply::Cancelled);
    assert_eq!(bed.client.redrive(&DeadFilter::all()).await.expect("redrives"), []);
    assert_eq!(bed.client.redrive(&DeadFilter::id(id)).await.expect("redrives"), [id]);
    assert_eq!(claim(&bed).await.lease.token.0, 2, "the token went through the history and back");
    assert_eq!(bed.count("finished").await, 0);
}

pub(super) async fn r4_a_cancelled_job_is_redriven_only_if_all_of_the_filter_matches(bed: Bed) {
    let id = bed.one().await;
    assert_eq!(bed.client.cancel(id).await.expect("cancels"), CancelReply::Cancelled);
    let redrive = |filter: DeadFilter| {
        let bed = &bed;
        async move { bed.client.redrive(&filter).await.expect("redrives") }
    };
    for filter in [
        DeadFilter::id(id).kind("l"),
        DeadFilter::id(id).queue("other"),
        DeadFilter::id(id).kind("k").queue("other"),
        DeadFilter::id(id).kind("l").queue("default"),
        DeadFilter::id(id).reason(DeathReason::Exhausted),
        DeadFilter::id(id).kind("k").queue("default").reason(DeathReason::Discarded),
    ] {
        assert_eq!(redrive(filter.clone()).await, [], "{filter:?}");
    }
    assert_eq!(bed.row("finished", id).await.expect("untouched").text("state"), "cancelled");
    assert_eq!(redrive(DeadFilter::id(id).kind("k").queue("default")).await, [id]);
    assert_eq!((bed.count("jobs").await, bed.count("finished").await), (1, 0));
}

pub(super) async fn r4_a_completed_job_cannot_be_redriven(bed: Bed) {
    let id = bed.one().await;
    let job = claim(&bed).await;
    bed.settle(job.lease, completed()).await;
    assert_eq!(bed.client.redrive(&DeadFilter::id(id)).await.expect("redrives"), []);
    assert!(bed.row("finished", id).await.is_some());
}

pub(super) async fn r4_four_who_redrive_at_once_make_each_job_once(bed: Bed) {
    bed.enqueue((0..2_300).map(|_| job("k")).collect()).await;
    let jobs = bed.session(LEASE, &["k"]).await.claim(2_300).await;
    let batch: Vec<Settlement> =
        jobs.iter().map(|job| settlement(job.lease, buried(job.counters))).collect();
    bed.settle_all(&batch).await;
    let redrives: Vec<_> = (0..4)
        .map(|_| {
            let client = bed.client.clone();
            tokio::spawn(async move { client.redrive(&DeadFilter::all()).await })
        })
        .collect();
    let mut ids = Vec::new();
    for redriven in join_all(redrives).await {
        ids.extend(redriven.expect("no panic").expect("redrives"));
    }
    ids.extend(bed.client.redrive(&DeadFilter::all()).await.expect("redrives"));
    ids.sort_unstable();
    let mut expected: Vec<JobId> = jobs.iter().map(|job| job.lease.job).collect();
    expected.sort_unstable();
    assert!(ids == expected, "{} of {} redriven", ids.len(), expected.len());
    assert_eq!((bed.count("jobs").await, bed.count("dead").await), (2_300, 0));
}

pub(super) async fn s3_each_job_is_cancelled_as_its_state_allows(bed: Bed) {
    let cancel = |id| bed.client.cancel(id);
    let pending = bed.one().await;
    assert_eq!(cancel(pending).await.expect("cancels"), CancelReply::Cancelled);
    let row = bed.row("finished", pending).await.expect("in the history");
    assert_eq!((row.text("state"), row.text("reason")), ("cancelled", "cancelled before it ran"));
    assert!(row.number("expires_at") > bed.now().await + 80_000_000_000, "kept for a day");
    let again = cancel(pending).await.expect("answers");
    assert_eq!(again, CancelReply::AlreadyFinal(JobState::Cancelled));

    let scheduled = bed.one().await;
    let later = bed.seconds_away(3600);
    bed.execute(&format!("update jobq.jobs set run_after = {later}")).await;
    assert_eq!(cancel(scheduled).await.expect("cancels"), CancelReply::Cancelled);

    bed.one().await;
    let running = claim(&bed).await;
    let before = bed.job_row(running.lease.job).await;
    for _ in 0..2 {
        let asked = cancel(running.lease.job).await.expect("asks");
        assert_eq!(asked, CancelReply::Requested);
    }
    let after = bed.job_row(running.lease.job).await;
    assert_eq!(before.changed(&after), ["cancel_requested"]);
    bed.settle(running.lease, completed()).await;
    let done = cancel(running.lease.job).await.expect("answers");
    assert_eq!(done, CancelReply::AlreadyFinal(JobState::Completed));

    bed.one().await;
    let last = claim(&bed).await;
    bed.settle(last.lease, buried(last.counters)).await;
    let dead = cancel(last.lease.job).await.expect("answers");
    assert_eq!(dead, CancelReply::AlreadyFinal(JobState::Dead));
    assert_eq!(cancel(JobId(i64::MAX)).await.expect("answers"), CancelReply::NotFound);
    assert!(bed.session(LEASE, &["k"]).await.claim(5).await.is_empty());
}

/// L1: a newer version may have written words that this one does not know.
pub(super) async fn l1_an_unknown_word_is_an_error_and_no_panic(bed: Bed) {
    let unknown = |error: Error| {
        assert!(error.to_string().contains("written by a newer version"), "{error}");
    };
    let dead = bury_all(&bed, &SEVERAL[..1]).await[0];
    bed.execute("update jobq.dead set reason = 'bored'").await;
    unknown(bed.client.job(dead).await.expect_err("no such reason"));
    unknown(bed.client.dead(&DeadFilter::all(), 10).await.expect_err("no such reason"));
    bed.execute("update jobq.dead set reason = 'exhausted'").await;
    bed.execute("update jobq.attempts set reason = 'bored'").await;
    unknown(bed.client.job(dead).await.expect_err("no such reason"));

    bed.one().await;
    let done = claim(&bed).await.lease.job;
    bed.settle(lease_of(&bed, done).await, completed()).await;
    bed.without_checks("update jobq.finished set state = 'archived'").await;
    unknown(bed.client.job(done).await.expect_err("no such state"));
    unknown(bed.client.counts().await.expect_err("no such state"));
    let error = bed.client.cancel(done).await.expect_err("no such state");
    let chain = jobq_core::text::error_chain(&error);
    assert!(chain.contains("written by a newer version"), "{chain}");
}

async fn lease_of(bed: &Bed, id: JobId) -> Lease {
    let row = bed.job_row(id).await;
    Lease {
        job: id,
        token: jobq_core::job::Token(row.number("token")),
        session: jobq_core::job::SessionId(row.number("leased_by")),
    }
}

/// Somebody looks at a dead letter with `for update`: the others are redriven.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) async fn r4_a_locked_dead_letter_holds_up_nobody_else(bed: Bed) {
    let ids = bury_all(&bed, &SEVERAL).await;
    super::bed::on_pool!(bed, pool => {
        let mut operator = pool.begin().await.expect("begins");
        let lock = format!("select id from jobq.dead where id = {} for update", ids[1]);
        sqlx::query(bed.statement(&lock)).execute(&mut *operator).await.expect("locks");
        let redriven = bed.client.redrive(&DeadFilter::all()).await.expect("redrives");
        assert_eq!(redriven.len(), 3);
        assert_eq!(bed.client.redrive(&DeadFilter::id(ids[1])).await.expect("redrives"), []);
        operator.rollback().await.expect("rolls back");
    });
    assert_eq!(bed.client.redrive(&DeadFilter::all()).await.expect("redrives"), [ids[1]]);
    assert_eq!(bed.count("jobs").await, 4);
}
