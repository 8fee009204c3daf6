//! Jobs that have to be started in a time.

use std::time::Duration;

use jobq_core::job::JobId;
use jobq_core::key::OnBlock;
use jobq_core::lifecycle::{self, Transition};
use jobq_core::outcome::{AttemptReason, DeathReason};
use jobq_core::queue::bands_with_fronts;
use jobq_core::time::micros;
use jobq_core::unique::{OnConflict, UniqueScope};

use super::bed::{Bed, LEASE};
use super::sample::plain;
use super::settle::{completed, failed, snoozed};
use super::worker::{job, settlement};
use crate::enqueue::Enqueued;
use crate::error::Error;
use crate::job::{CheckedDue, CheckedJob, CheckedUnique};
use crate::key::{self, JobKey};
use crate::limit::QueueLimit;
use crate::store::{
    CancelReply, ClaimedJob, DeadFilter, Floor, Settled, Settlement, Shift, Turn, UnleasedJob,
};
use crate::sweep::{bury_expired, burying, rescue};
use crate::unique::UniqueKey;

const MINUTES: Duration = Duration::from_secs(600);

fn expiring() -> CheckedJob {
    CheckedJob { expires: Some(MINUTES), ..job("k") }
}

/// As if the time had gone by, of all jobs that expire.
async fn let_all_expire(bed: &Bed) {
    let past = bed.seconds_away(-1);
    bed.execute(&format!("update jobq.jobs set start_by = {past} where start_by is not null"))
        .await;
    if bed.is_mysql() {
        bed.execute(
            "insert ignore into jobq.expiring (start_by, job_id)
             select start_by, id from jobq.jobs where start_by is not null",
        )
        .await;
    }
}

/// What a worker does with a job that it has claimed, if it does not run it.
fn refused(job: &ClaimedJob) -> Option<Transition> {
    lifecycle::admit(job.counters, job.limits, job.expired)
}

async fn bury(bed: &Bed, job: &ClaimedJob) {
    let transition = refused(job).expect("it must not run");
    assert_eq!(bed.settle(job.lease, transition).await, Settled::Written);
}

async fn expiring_jobs(bed: &Bed) -> i64 {
    bed.number("select count(*) from jobq.jobs where start_by is not null").await
}

async fn sweep(bed: &Bed) -> u64 {
    let session = bed.session(LEASE, &["k"]).await.id;
    let mut left = Vec::new();
    let buried = bury_expired(&*bed.store, session, &mut left).await.expect("buries");
    assert!(left.is_empty(), "{left:?}");
    buried
}

pub(super) async fn e9_a_job_that_is_not_started_in_time_is_buried_and_does_not_run(bed: Bed) {
    let ids = bed.enqueue(vec![expiring(), job("k"), expiring()]).await;
    let worker = bed.session(LEASE, &["k"]).await;
    let in_time = worker.claim_one().await;
    assert_eq!((in_time.lease.job, in_time.expired), (ids[0], false));
    assert_eq!((in_time.counters.attempt, refused(&in_time)), (1, None));
    let_all_expire(&bed).await;
    let jobs = worker.claim(10).await;
    let expired: Vec<_> = jobs.iter().map(|job| (job.lease.job, job.expired)).collect();
    assert_eq!(expired, [(ids[1], false), (ids[2], true)]);
    bury(&bed, &jobs[1]).await;
    let dead = bed.client.dead(&DeadFilter::id(ids[2]), 1).await.expect("lists").remove(0);
    assert_eq!((dead.reason, dead.attempt), (DeathReason::Expired, 0));
    assert!(dead.error.contains("`expires`"), "{}", dead.error);
    let attempts = bed.attempts(ids[2]).await;
    assert_eq!(attempts.len(), 1);
    assert_eq!(attempts[0].text("reason"), AttemptReason::Expired.as_str());
    for done in [&in_time, &jobs[0]] {
        assert_eq!(bed.settle(done.lease, completed()).await, Settled::Written);
    }
    assert_eq!(bed.count("finished").await, 2, "what was started goes on past its time");
}

pub(super) async fn e9_the_time_counts_from_when_the_job_is_due(bed: Bed) {
    let later = CheckedDue::After(Duration::from_secs(3_600));
    let at = CheckedDue::At(jobq_core::time::Timestamp(bed.now().await + 7_000_000_000));
    let past = CheckedDue::At(jobq_core::time::Timestamp(bed.now().await - 7_000_000_000));
    let jobs = [CheckedDue::After(Duration::ZERO), later, at, past]
        .map(|due| CheckedJob { due, ..expiring() });
    let ids = bed.enqueue(jobs.into()).await;
    bed.enqueue(vec![job("k")]).await;
    for id in ids {
        let row = format!("from jobq.jobs where id = {id}");
        let (due, by) = (bed.micros("run_after"), bed.micros("start_by"));
        let span = bed.number(&format!("select {by} - {due} {row}")).await;
        let off = span - micros(MINUTES);
        // The clock is read for each of the two.
        assert!((0..1_000_000).contains(&off), "{off}");
    }
    assert_eq!(expiring_jobs(&bed).await, 4);
}

/// Whatever ends the attempt, the job was started.
pub(super) async fn e9_what_was_started_in_time_is_tried_again_as_ever(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    let ends: [(&str, fn(&ClaimedJob) -> Transition); 3] = [
        ("failed", |job| failed(job.counters, Duration::ZERO)),
        ("snoozed", |job| snoozed(job.counters)),
        ("released", |job| lifecycle::release(job.counters)),
    ];
    for (what, end) in ends {
        bed.enqueue(vec![expiring()]).await;
        let job = worker.claim_one().await;
        let_all_expire(&bed).await;
        assert_eq!(sweep(&bed).await, 0, "it runs");
        assert_eq!(bed.settle(job.lease, end(&job)).await, Settled::Written);
        assert_eq!(expiring_jobs(&bed).await, 0, "{what}");
        let mut ask = worker.asking("default", 10, Floor::START);
        ask.queues[0].floors = bands_with_fronts().map(|band| (band, Floor::START)).collect();
        let again = worker.claim_as(&ask).await.jobs.remove(0);
        assert_eq!((again.lease.job, refused(&again)), (job.lease.job, None), "{what}");
        assert_eq!(bed.settle(again.lease, completed()).await, Settled::Written);
    }
    bed.enqueue(vec![expiring()]).await;
    let other = bed.session(LEASE, &["k"]).await;
    let job = other.claim_one().await;
    let_all_expire(&bed).await;
    bed.expire(other.id).await;
    assert_eq!(rescue(&*bed.store, false).await.expect("rescues"), 1);
    assert_eq!(expiring_jobs(&bed).await, 0, "crashed");
    let again = worker.claim_one().await;
    assert_eq!((again.lease.job, refused(&again)), (job.lease.job, None));
}

pub(super) async fn e9_a_worker_that_dies_before_it_has_buried_a_job_starts_nothing(bed: Bed) {
    let ids = bed.enqueue(vec![expiring(), expiring()]).await;
    let_all_expire(&bed).await;
    // One is met by a claim, the other by a sweep.
    let gone = bed.session(LEASE, &["k"]).await;
    assert!(gone.claim_one().await.expired);
    let taken = bed.store.take_expired(gone.id, 10).await.expect("takes");
    assert_eq!(taken.len(), 1);
    assert_eq!((taken[0].lease.job, taken[0].counters.attempt), (ids[1], 0));
    bed.expire(gone.id).await;
    assert_eq!(rescue(&*bed.store, false).await.expect("rescues"), 2);
    let worker = bed.session(LEASE, &["k"]).await;
    for job in worker.claim(10).await {
        assert!(job.expired, "it was never started");
        bury(&bed, &job).await;
    }
    assert_eq!(bed.count("dead").await, 2);
}

/// Between the sweep's taking it and burying it.
pub(super) async fn e9_one_that_is_cancelled_meanwhile_is_cancelled(bed: Bed) {
    let ids = bed.enqueue(vec![expiring(); 2]).await;
    let_all_expire(&bed).await;
    let session = bed.session(LEASE, &["k"]).await.id;
    let taken = bed.store.take_expired(session, 10).await.expect("takes");
    let mut left: Vec<Settlement> = taken.iter().map(burying).collect();
    let asked = bed.client.cancel(ids[0]).await.expect("asks");
    assert_eq!(asked, CancelReply::Requested);
    let bury = async |left: &mut Vec<Settlement>| {
        bury_expired(&*bed.store, session, left).await.expect("buries")
    };
    assert_eq!((bury(&mut left).await, left.len()), (1, 1));
    assert_eq!((bury(&mut left).await, left.len()), (0, 0));
    assert!(bed.row("finished", ids[0]).await.is_some());
    assert!(bed.row("dead", ids[1]).await.is_some());
}

pub(super) async fn e9_only_a_live_session_takes_what_has_expired(bed: Bed) {
    bed.enqueue(vec![expiring(); 3]).await;
    let session = bed.session(LEASE, &["k"]).await.id;
    assert!(bed.store.take_expired(session, 10).await.expect("takes").is_empty(), "in time");
    let_all_expire(&bed).await;
    let gone = bed.session(LEASE, &["k"]).await.id;
    bed.expire(gone).await;
    assert!(bed.store.take_expired(gone, 10).await.expect("takes").is_empty());
    assert_eq!(bed.store.take_expired(session, 2).await.expect("takes").len(), 2);
    assert_eq!(bed.store.take_expired(session, 2).await.expect("takes").len(), 1);
    assert!(bed.store.take_expired(session, 2).await.expect("takes").is_empty());
}

/// Stopped as a process is that is paused, or cut off, with whatever it has locked.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) async fn e9_a_sweep_that_stops_anywhere_keeps_no_expired_job(bed: Bed) {
    use super::wait::{stopped_after, until};
    let gone = bed.session(LEASE, &["k"]).await.id;
    let mut sweeps = 0;
    for steps in 1.. {
        bed.enqueue(vec![expiring(); 2]).await;
        let_all_expire(&bed).await;
        let store = bed.another_client(&bed.schema).store();
        // So that it has a connection.
        store.live_sessions().await.expect("reads");
        let stopped = stopped_after(steps, store.take_expired(gone, 10)).await;
        std::mem::forget(store);
        sweeps = steps;
        if !stopped {
            break;
        }
    }
    assert!(sweeps > 1, "it has several steps");
    bed.expire(gone).await;
    let session = bed.session(LEASE * 60, &["k"]).await.id;
    let left = tokio::sync::Mutex::new(Vec::new());
    until("another has buried them all", async || {
        // What is locked may be an error once, as to any sweep.
        let _ = rescue(&*bed.store, false).await;
        let _ = bury_expired(&*bed.store, session, &mut *left.lock().await).await;
        bed.count("jobs").await == 0
    })
    .await;
    let started = bed.number("select count(*) from jobq.dead where reason <> 'expired'").await;
    assert_eq!((started, bed.count("finished").await), (0, 0));
}

pub(super) async fn e9_what_claims_do_not_meet_is_buried_by_the_sweep(bed: Bed) {
    let in_queue = |queue: &'static str| CheckedJob { queue: queue.into(), ..expiring() };
    let keyed = || CheckedJob {
        key: Some(JobKey { text: "key".to_owned(), on_block: OnBlock::Block }),
        ..expiring()
    };
    let names = ["paused", "limited", "nobody's", "default"];
    bed.enqueue(names.map(in_queue).into()).await;
    bed.enqueue(vec![CheckedJob { expires: None, ..keyed() }, keyed(), job("k")]).await;
    let parked = bed.enqueue(vec![CheckedJob { kind: "unknown".into(), ..expiring() }]).await[0];
    bed.client.pause_queue("paused", None).await.expect("pauses");
    bed.client.limit_queue("limited", QueueLimit::running(1)).await.expect("limits");
    let token = jobq_core::job::Token(0);
    let row = bed.job_row(parked).await;
    let run_after = jobq_core::time::Timestamp(row.number("run_after"));
    let parked = UnleasedJob { id: parked, token, kind: "unknown".to_owned(), run_after };
    assert_eq!(bed.store.shift(&[parked], Shift::Park).await.expect("parks"), 1);
    // The first of the key runs, so that the second one waits.
    let worker = bed.session(LEASE, &["k"]).await;
    let claimed = worker.claim(10).await;
    assert_eq!(claimed.iter().filter(|job| job.turn == Turn::Runs).count(), 3);
    bed.enqueue(vec![expiring()]).await;
    let_all_expire(&bed).await;
    let expired = expiring_jobs(&bed).await;
    let running = "select count(*) from jobq.jobs where start_by is not null and leased_by <> 0";
    let running = bed.number(running).await;
    assert_eq!((expired, running), (7, 1));
    assert_eq!(sweep(&bed).await, 6);
    assert_eq!(sweep(&bed).await, 0);
    let reasons = bed.texts("select distinct reason from jobq.dead").await;
    assert_eq!(reasons, ["expired"]);
    assert_eq!((bed.count("dead").await, bed.count("jobs").await), (6, 3), "three run");
}

pub(super) async fn e9_an_expired_job_lets_go_of_its_key(bed: Bed) {
    for (on_block, by_claim) in [
        (OnBlock::Skip, true),
        (OnBlock::Skip, false),
        (OnBlock::Block, true),
        (OnBlock::Block, false),
    ] {
        let text = format!("{} {by_claim}", on_block.as_str());
        let keyed = |expires| CheckedJob {
            key: Some(JobKey { text: text.clone(), on_block }),
            expires,
            ..job("k")
        };
        let ids = bed.enqueue(vec![keyed(Some(MINUTES)), keyed(None)]).await;
        let_all_expire(&bed).await;
        let worker = bed.session(LEASE, &["k"]).await;
        if by_claim {
            let first = worker.claim_one().await;
            let transition = refused(&first).expect("it must not run");
            let settlement =
                Settlement { key: first.key.clone(), ..settlement(first.lease, transition) };
            let settled = key::settle(&*bed.store, &[settlement]).await.expect("settles");
            assert_eq!(settled, [Settled::Written]);
        } else {
            assert_eq!(sweep(&bed).await, 1);
        }
        let mut ask = worker.asking("default", 10, Floor::START);
        ask.queues[0].floors = bands_with_fronts().map(|band| (band, Floor::START)).collect();
        let run = async || {
            let jobs = worker.claim_as(&ask).await.jobs;
            let run = jobs.into_iter().filter(|job| job.turn == Turn::Runs);
            run.map(|job| job.lease.job).collect::<Vec<JobId>>()
        };
        // Nobody has to mend anything, for nothing is broken: it was not wanted any more.
        assert_eq!(run().await, [ids[1]], "{text}");
        assert_eq!(bed.client.blocked_keys(None, 10).await.expect("lists"), []);
    }
}

fn unique(scope: UniqueScope, on_conflict: OnConflict) -> CheckedJob {
    let key = UniqueKey::given("k", scope.as_str());
    CheckedJob { unique: Some(CheckedUnique { key, scope, on_conflict }), ..expiring() }
}

pub(super) async fn e9_a_twin_of_an_expired_job_is_a_new_job(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    for scope in [UniqueScope::UntilStarted, UniqueScope::UntilFinished] {
        for on_conflict in [OnConflict::Skip, OnConflict::Replace, OnConflict::Error] {
            let enqueue = async || {
                let twin = vec![unique(scope, on_conflict)];
                bed.store.insert(twin).await.map(|enqueued| enqueued[0])
            };
            let first = enqueue().await.expect("enqueues");
            assert!(matches!(first, Enqueued::Inserted(_)));
            let second = enqueue().await;
            assert!(!matches!(second, Ok(Enqueued::Inserted(_))), "in time: {second:?}");
            let_all_expire(&bed).await;
            let second = enqueue().await.expect("enqueues");
            assert!(matches!(second, Enqueued::Inserted(_)), "{scope:?} {on_conflict:?}");
            assert_eq!(sweep(&bed).await, 1);
            let claimed = worker.claim_one().await;
            assert_eq!((claimed.lease.job, claimed.expired), (second.id(), false));
            // It runs past its time: a twin of one that is unique until it is finished is kept out.
            let_all_expire(&bed).await;
            let third = enqueue().await;
            let is_new = matches!(third, Ok(Enqueued::Inserted(_)));
            assert_eq!(is_new, scope == UniqueScope::UntilStarted, "{on_conflict:?}");
            bed.execute("delete from jobq.jobs").await;
            bed.execute("delete from jobq.uniques").await;
        }
    }
}

pub(super) async fn e9_a_replacing_twin_brings_its_own_time(bed: Bed) {
    let twin =
        |expires| CheckedJob { expires, ..unique(UniqueScope::UntilFinished, OnConflict::Replace) };
    let id = bed.enqueue(vec![twin(None)]).await[0];
    let left = async || {
        let by = bed.micros("start_by");
        let now = bed.now().await;
        let select = format!("select coalesce({by}, 0) from jobq.jobs where id = {id}");
        let by = bed.number(&select).await;
        (by > 0).then_some((by - now) / 1_000_000)
    };
    assert_eq!(left().await, None);
    for expires in [Some(MINUTES), Some(MINUTES * 6), None] {
        // Once in a call of its own, and once of two in one call.
        for jobs in [vec![twin(expires)], vec![twin(Some(MINUTES / 2)), twin(expires)]] {
            bed.store.insert(jobs).await.expect("replaces");
            let seconds = expires.map(|expires| expires.as_secs().cast_signed());
            let left = left().await;
            assert_eq!(left.is_some(), seconds.is_some());
            let off = seconds.unwrap_or(0) - left.unwrap_or(0);
            assert!((0..60).contains(&off), "{off}");
        }
    }
    assert_eq!(bed.count("jobs").await, 1);
    // However often it was replaced, it is taken once.
    bed.store.insert(vec![twin(Some(MINUTES))]).await.expect("replaces");
    let_all_expire(&bed).await;
    let session = bed.session(LEASE, &["k"]).await.id;
    assert_eq!(bed.store.take_expired(session, 10).await.expect("takes").len(), 1);
    assert_eq!(bed.number("select token from jobq.jobs").await, 1);
}

pub(super) async fn e9_a_redriven_job_does_not_expire_again(bed: Bed) {
    let id = bed.enqueue(vec![expiring()]).await[0];
    let_all_expire(&bed).await;
    assert_eq!(sweep(&bed).await, 1);
    bed.client.redrive(&DeadFilter::id(id)).await.expect("redrives");
    let job = bed.session(LEASE, &["k"]).await.claim_one().await;
    assert_eq!((job.lease.job, refused(&job)), (id, None));
    assert_eq!(expiring_jobs(&bed).await, 0);
}

/// Of many that were started in time the look for expired ones gets rid, whatever became of them.
pub(super) async fn e9_many_that_were_started_in_time_do_not_hide_one_that_was_not(bed: Bed) {
    const EACH: usize = 700;
    let worker = bed.session(LEASE, &["k"]).await;
    bed.enqueue(vec![expiring(); EACH * 3]).await;
    let mut jobs = Vec::new();
    while jobs.len() < EACH * 3 {
        jobs.extend(worker.claim(500).await);
    }
    let settlements: Vec<Settlement> = jobs[..EACH]
        .iter()
        .map(|job| settlement(job.lease, completed()))
        .chain(
            jobs[EACH..EACH * 2]
                .iter()
                .map(|job| settlement(job.lease, failed(job.counters, Duration::from_secs(3_600)))),
        )
        .collect();
    assert!(bed.settle_all(&settlements).await.iter().all(|it| *it == Settled::Written));
    let late = bed.enqueue(vec![expiring()]).await[0];
    let_all_expire(&bed).await;
    if bed.is_mysql() {
        let past = bed.seconds_away(-2);
        bed.execute(&format!("update ignore jobq.expiring set start_by = {past}")).await;
    }
    assert_eq!(sweep(&bed).await, 1);
    assert!(bed.row("dead", late).await.is_some());
    if bed.is_mysql() {
        assert_eq!(sweep(&bed).await, 0);
        let now = bed.seconds_away(0);
        let left = format!("select count(*) from jobq.expiring where start_by <= {now}");
        assert_eq!(bed.number(&left).await, 0, "none of them can expire any more");
    }
}

pub(super) async fn e9_a_bad_expiry_is_a_typed_error(bed: Bed) {
    for expires in [Duration::ZERO, Duration::MAX] {
        let error = plain().expires(expires).enqueue(&bed.client).await.expect_err("it cannot be");
        assert!(matches!(error, Error::BadOption { option: "expires", .. }), "{error:?}");
    }
    assert_eq!(bed.count("jobs").await, 0);
}
