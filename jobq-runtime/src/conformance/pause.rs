//! Queues and kinds that are paused.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use jobq_core::job::JobId;
use jobq_core::key::OnBlock;
use jobq_core::pause::PauseScope;
use jobq_core::queue::{EXPRESS, bands_with_fronts};

use super::bed::{Bed, LEASE};
use super::late::{at, pass, publish};
use super::settle::{buried, completed, failed};
use super::wait::join_all;
use super::worker::{Worker, job, settlement};
use crate::client::ClientOptions;
use crate::error::Error;
use crate::floors::Floors;
use crate::job::{CheckedDue, CheckedJob};
use crate::key::{self, JobKey};
use crate::store::{
    Beat, BeatReply, CancelReply, ClaimedJob, DeadFilter, Floor, Settled, Settlement, Shift, Turn,
};
use crate::sweep::{Notes, pass_on_all_grants, proven_floors, rescue};

fn job_in(queue: &'static str, kind: &'static str) -> CheckedJob {
    CheckedJob { queue: queue.into(), ..job(kind) }
}

fn ids(jobs: &[ClaimedJob]) -> Vec<JobId> {
    jobs.iter().map(|job| job.lease.job).collect()
}

/// A worker with the cursor of the real loop.
struct Cursor<'b> {
    bed: &'b Bed,
    worker: Worker<'b>,
    floors: Floors,
}

impl<'b> Cursor<'b> {
    async fn new(bed: &'b Bed, kinds: &[&str]) -> Self {
        let floors = Floors::new(proven_floors(&*bed.store).await.expect("reads"), Instant::now());
        Self { bed, worker: bed.session(LEASE, kinds).await, floors }
    }

    /// One claim of the default queue; begins anew first if the last one said so, as the loop does.
    async fn claim(&mut self, limit: u32) -> (Vec<ClaimedJob>, bool) {
        let now = Instant::now();
        let mut claim = self.worker.asking("default", limit, Floor::START);
        claim.queues = vec![self.floors.claim("default", limit, false, now)];
        let claimed = self.worker.claim_as(&claim).await;
        let resumed = self.floors.advance(&claim.queues, &claimed, now);
        if resumed {
            self.floors.restart(proven_floors(&*self.bed.store).await.expect("reads"));
        }
        (claimed.jobs, resumed)
    }
}

pub(super) async fn o6_a_claim_after_a_pause_leases_nothing_of_it_on_any_worker(bed: Bed) {
    // Another process: it shares nothing with the first but the database.
    let elsewhere = bed.client_with(ClientOptions::new().schema(&bed.schema));
    let workers = [bed.session(LEASE, &["k"]).await, bed.session(LEASE, &["k"]).await];
    let claim = async |limit| {
        let mut claimed = Vec::new();
        for worker in &workers {
            claimed.extend(worker.claim(limit).await);
            let there = elsewhere.store();
            let ask = worker.asking("default", limit, Floor::START);
            claimed.extend(there.claim(&ask).await.expect("claims").jobs);
        }
        claimed.len()
    };
    for kind in [false, true] {
        bed.enqueue((0..8).map(|_| job("k")).collect()).await;
        assert_eq!(claim(1).await, 4, "nothing is paused");
        let paused = match kind {
            true => elsewhere.pause_kind("k", None).await,
            false => elsewhere.pause_queue("default", None).await,
        };
        assert!(paused.expect("pauses"));
        assert_eq!(claim(10).await, 0);
        let resumed = match kind {
            true => bed.client.resume_kind("k").await,
            false => bed.client.resume_queue("default").await,
        };
        assert!(resumed.expect("resumes"));
        assert_eq!(claim(10).await, 4);
    }
}

/// Whoever writes it: a person, or a worker of another version.
pub(super) async fn o6_a_pause_written_by_hand_holds_too(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    bed.enqueue((0..4).map(|_| job("k")).collect()).await;
    worker.claim_one().await;
    for (scope, name) in [("queue", "default"), ("kind", "k")] {
        let insert = format!("insert into jobq.pauses (scope, name) values ('{scope}', '{name}')");
        bed.execute(&insert).await;
        assert!(worker.claim(1).await.is_empty(), "{scope}");
        bed.execute("update jobq.pauses set name = 'other'").await;
        worker.claim_one().await;
        bed.execute(&format!("update jobq.pauses set name = '{name}'")).await;
        assert!(worker.claim(1).await.is_empty(), "{scope}");
        bed.execute("delete from jobq.pauses").await;
    }
    worker.claim_one().await;
}

/// Claims that begin once a pause has returned bring nothing, whatever other claims are in flight.
pub(super) async fn o6_no_pause_is_overlooked_by_claims_at_the_same_time(bed: Bed) {
    const JOBS: usize = 300;
    bed.enqueue((0..JOBS).map(|_| job("k")).collect()).await;
    // The number of the pause that is known to be there, or 0.
    let pause = Arc::new(AtomicUsize::new(0));
    let claimed = Arc::new(AtomicUsize::new(0));
    let mut workers = Vec::new();
    for _ in 0..4 {
        let worker = bed.session(LEASE, &["k"]).await;
        let claim = worker.asking("default", 2, Floor::START);
        let (store, pause, claimed) = (bed.store.clone(), Arc::clone(&pause), Arc::clone(&claimed));
        workers.push(tokio::spawn(async move {
            while claimed.load(Ordering::SeqCst) < JOBS {
                let before = pause.load(Ordering::SeqCst);
                let jobs = store.claim(&claim).await.expect("claims").jobs.len();
                let was_paused = before > 0 && pause.load(Ordering::SeqCst) == before;
                assert!(jobs == 0 || !was_paused, "it was paused all the time");
                claimed.fetch_add(jobs, Ordering::SeqCst);
            }
        }));
    }
    for round in 1.. {
        if workers.iter().all(tokio::task::JoinHandle::is_finished) {
            break;
        }
        let before = claimed.load(Ordering::SeqCst);
        let (scope, name) =
            if round % 2 == 0 { (PauseScope::Queue, "default") } else { (PauseScope::Kind, "k") };
        bed.store.pause(scope, name, None).await.expect("pauses");
        pause.store(round, Ordering::SeqCst);
        for _ in 0..3 {
            bed.store.pauses().await.expect("lists");
        }
        pause.store(0, Ordering::SeqCst);
        bed.store.resume(scope, name).await.expect("resumes");
        super::wait::until("somebody claims", || async {
            claimed.load(Ordering::SeqCst) > before
                || workers.iter().all(tokio::task::JoinHandle::is_finished)
        })
        .await;
    }
    for ended in join_all(workers).await {
        ended.expect("no claim brought what was paused");
    }
    assert_eq!(claimed.load(Ordering::SeqCst), JOBS);
}

pub(super) async fn o6_a_kind_is_paused_in_every_queue_and_a_queue_for_every_kind(bed: Bed) {
    let worker = bed.session(LEASE, &["a", "b"]).await;
    let pairs = [("default", "a"), ("default", "b"), ("mail", "a"), ("mail", "b")];
    let open = async || {
        let mut claim = worker.asking("default", 10, Floor::START);
        claim.queues.extend(worker.asking("mail", 10, Floor::START).queues);
        let jobs = worker.claim_as(&claim).await.jobs;
        let claimed = |pair: &(&str, &str)| {
            jobs.iter().any(|job| (job.queue.as_str(), job.kind.as_str()) == *pair)
        };
        let open: Vec<_> = pairs.into_iter().filter(claimed).collect();
        for job in &jobs {
            assert_eq!(bed.settle(job.lease, completed()).await, Settled::Written);
        }
        open
    };
    let client = &bed.client;
    client.pause_kind("a", None).await.expect("pauses");
    bed.enqueue(pairs.iter().map(|(queue, kind)| job_in(queue, kind)).collect()).await;
    assert_eq!(open().await, [("default", "b"), ("mail", "b")]);
    client.resume_kind("a").await.expect("resumes");
    client.pause_queue("mail", None).await.expect("pauses");
    bed.enqueue(pairs.iter().map(|(queue, kind)| job_in(queue, kind)).collect()).await;
    assert_eq!(open().await, [("default", "a"), ("default", "b")]);
    // A queue and a kind of one name are two.
    client.pause_kind("mail", None).await.expect("pauses");
    client.resume_queue("mail").await.expect("resumes");
    assert_eq!(open().await, [("mail", "a"), ("mail", "b")]);
}

pub(super) async fn o6_resuming_one_of_two_pauses_leaves_the_other(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    let client = &bed.client;
    for queue_first in [true, false] {
        let id = bed.one().await;
        client.pause_queue("default", None).await.expect("pauses");
        client.pause_kind("k", None).await.expect("pauses");
        publish(&bed, &worker, at(&bed, 1).await).await;
        pass(&bed, &mut Notes::default()).await;
        for last in [false, true] {
            assert!(worker.claim(1).await.is_empty());
            let resumed = if queue_first == last {
                client.resume_kind("k").await
            } else {
                client.resume_queue("default").await
            };
            assert!(resumed.expect("resumes"));
        }
        assert_eq!(worker.claim_one().await.lease.job, id);
    }
}

pub(super) async fn o6_everything_but_claims_goes_on_while_all_is_paused(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    let other = bed.session(LEASE, &["k"]).await;
    bed.enqueue((0..4).map(|_| job("k")).collect()).await;
    let running = worker.claim(3).await;
    let crashed = other.claim_one().await;
    bed.client.pause_queue("default", None).await.expect("pauses");
    bed.client.pause_kind("k", None).await.expect("pauses");
    // What runs goes on and ends.
    let held: Vec<_> = running.iter().map(|job| (job.lease.job, job.lease.token)).collect();
    let beat = Beat { session: worker.id.0, held, floors: Vec::new() };
    let reply = bed.store.pulse().await.expect("connects").beat(&beat).await.expect("beats");
    let nothing_lost = BeatReply::Extended { lost: Vec::new(), cancel_requested: Vec::new() };
    assert_eq!(reply, nothing_lost);
    assert_eq!(bed.settle(running[0].lease, completed()).await, Settled::Written);
    let retried = failed(running[1].counters, Duration::ZERO);
    assert_eq!(bed.settle(running[1].lease, retried).await, Settled::Written);
    assert_eq!(bed.settle(running[2].lease, buried(running[2].counters)).await, Settled::Written);
    // A dead worker's job is rescued.
    bed.expire(other.id).await;
    super::wait::until("the job is rescued", || async {
        rescue(&*bed.store, false).await.expect("rescues");
        bed.job_row(crashed.lease.job).await.number("leased_by") == 0
    })
    .await;
    // Others are enqueued, cancelled and redriven.
    let (new, gone) = (bed.one().await, bed.one().await);
    assert_eq!(bed.client.cancel(gone).await.expect("cancels"), CancelReply::Cancelled);
    let redriven = bed.client.redrive(&DeadFilter::all()).await.expect("redrives");
    assert_eq!(redriven, [running[2].lease.job]);

    publish(&bed, &worker, at(&bed, 1).await).await;
    pass(&bed, &mut Notes::default()).await;
    assert!(worker.claim(10).await.is_empty());
    bed.client.resume_queue("default").await.expect("resumes");
    bed.client.resume_kind("k").await.expect("resumes");
    let mut claimed = ids(&worker.claim(10).await);
    claimed.sort_unstable();
    let mut left = vec![running[1].lease.job, running[2].lease.job, crashed.lease.job, new];
    left.sort_unstable();
    assert_eq!(claimed, left);
}

/// Neither the floors of those that claimed meanwhile nor a new worker's nor the sweep has passed
/// anything by.
pub(super) async fn o6_a_paused_queue_is_claimed_in_order_once_it_is_resumed(bed: Bed) {
    let with_priority = |priority| CheckedJob { priority, ..job("k") };
    let first = bed.enqueue([0, 0, 2].map(with_priority).into()).await;
    let past = bed.seconds_away(-60);
    bed.execute(&format!("update jobq.jobs set run_after = {past}")).await;
    let mut old = Cursor::new(&bed, &["k"]).await;
    let (jobs, _) = old.claim(1).await;
    assert_eq!(ids(&jobs), [first[2]]);
    bed.client.pause_queue("default", None).await.expect("pauses");
    let mut notes = Notes::default();
    let mut later = Vec::new();
    for _ in 0..3 {
        assert!(old.claim(10).await.0.is_empty());
        let floors = old.floors.all();
        let beat = Beat { session: old.worker.id.0, held: Vec::new(), floors };
        bed.store.pulse().await.expect("connects").beat(&beat).await.expect("beats");
        pass(&bed, &mut notes).await;
        later.extend(bed.enqueue(vec![with_priority(0), with_priority(4)]).await);
    }
    let waiting = bed.number("select count(*) from jobq.jobs where leased_by = 0").await;
    assert_eq!(waiting, 8);
    let moved = format!("select count(*) from jobq.jobs where band = {EXPRESS}");
    assert_eq!(bed.number(&moved).await, 0, "the sweep has no reason to move anything");
    let mut new = Cursor::new(&bed, &["k"]).await;
    assert!(new.claim(10).await.0.is_empty());
    bed.client.resume_queue("default").await.expect("resumes");
    let high = [later[1], later[3], later[5]];
    let low = [first[0], first[1], later[0], later[2], later[4]];
    assert_eq!(ids(&old.claim(2).await.0), high[..2]);
    assert_eq!(ids(&new.claim(2).await.0), [high[2], low[0]]);
    assert_eq!(ids(&old.claim(2).await.0), low[1..3]);
    assert_eq!(ids(&new.claim(10).await.0), low[3..]);
}

/// Without the sweep, and without anything that resuming does to rows.
pub(super) async fn o6_a_worker_that_passed_by_a_paused_kind_comes_back_for_it(bed: Bed) {
    let ids_of_slow = bed.enqueue((0..5).map(|_| job("slow")).collect()).await;
    let others = bed.enqueue((0..5).map(|_| job("k")).collect()).await;
    let past = bed.seconds_away(-60);
    bed.execute(&format!("update jobq.jobs set run_after = {past}")).await;
    let mut cursor = Cursor::new(&bed, &["k", "slow"]).await;
    bed.store.pause(PauseScope::Kind, "slow", None).await.expect("pauses");
    assert_eq!(ids(&cursor.claim(3).await.0), others[..3]);
    assert_eq!(ids(&cursor.claim(3).await.0), others[3..]);
    assert!(cursor.claim(3).await.0.is_empty());
    bed.store.resume(PauseScope::Kind, "slow").await.expect("resumes");
    let (jobs, resumed) = cursor.claim(3).await;
    assert!(jobs.is_empty() && resumed, "they are behind its floors, and it knows");
    let (jobs, resumed) = cursor.claim(3).await;
    assert_eq!((ids(&jobs), resumed), (ids_of_slow[..3].to_vec(), false));
    assert_eq!(ids(&cursor.claim(3).await.0), ids_of_slow[3..]);
}

pub(super) async fn o6_jobs_of_a_paused_kind_are_set_aside_and_say_so(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    let ids = bed.enqueue(vec![CheckedJob { priority: 2, ..job("k") }, job("k"), job("k")]).await;
    // One was next in line, and one is scheduled.
    bed.execute(&format!("update jobq.jobs set band = {EXPRESS} where id = {}", ids[1])).await;
    let later = bed.seconds_away(3_600);
    bed.execute(&format!("update jobq.jobs set run_after = {later} where id = {}", ids[2])).await;
    bed.client.pause_kind("k", None).await.expect("pauses");
    publish(&bed, &worker, at(&bed, 1).await).await;
    let mut notes = Notes::default();
    assert!(pass(&bed, &mut notes).await.is_empty(), "nobody has to be told that it is missing");
    let states = "select state from jobq.job_states order by id";
    assert_eq!(bed.texts(states).await, ["waiting", "waiting", "pending"]);
    for (id, band) in [(ids[0], 2), (ids[1], 0)] {
        let row = bed.job_row(id).await;
        assert_eq!((row.number("run_after"), row.number("band")), (i64::MAX, band));
        assert_eq!(row.text("wait_reason"), "paused");
        assert_eq!((row.number("attempt"), row.number("token")), (0, 0));
    }
    let before = bed.rows("jobs", "order by id").await;
    pass(&bed, &mut notes).await;
    assert_eq!(bed.rows("jobs", "order by id").await, before, "it stays so");
    let now = bed.now().await;
    assert!(bed.client.resume_kind("k").await.expect("resumes"));
    for (id, band) in [(ids[0], 2), (ids[1], 0)] {
        let row = bed.job_row(id).await;
        assert!((now..=bed.now().await).contains(&row.number("run_after")), "as of now");
        assert_eq!(row.number("band"), band);
        assert!(row.is_null("wait_reason"));
    }
    assert_eq!(self::ids(&worker.claim(10).await), ids[..2]);
    assert!(bed.job_row(ids[2]).await.number("run_after") > bed.now().await);
}

/// A hundred thousand at the head of the queue are read past once by each worker, and by nobody once
/// the sweep has been there.
pub(super) async fn o6_many_jobs_of_a_paused_kind_cost_the_claims_of_others_nothing(bed: Bed) {
    let past = bed.seconds_away(-60);
    bed.enqueue((0..25).map(|_| job("slow")).collect()).await;
    bed.execute(&format!("update jobq.jobs set run_after = {past}")).await;
    for _ in 0..12 {
        bed.execute(
            "insert into jobq.jobs (kind, run_after)
             select kind, run_after from jobq.jobs where kind = 'slow'",
        )
        .await;
    }
    assert_eq!(bed.count("jobs").await, 102_400);
    let others = bed.enqueue((0..3).map(|_| job("k")).collect()).await;
    bed.client.pause_kind("slow", None).await.expect("pauses");
    let mut cursor = Cursor::new(&bed, &["k", "slow"]).await;
    assert_eq!(ids(&cursor.claim(1).await.0), others[..1], "whatever is before it");
    let last = bed.number("select max(id) from jobq.jobs where kind = 'slow'").await;
    let place = bed.job_row(last).await.number("run_after");
    let floors = cursor.floors.all();
    let floor = floors.iter().find(|floor| floor.band == 0).expect("every band");
    assert!(floor.floor.run_after.0 > place, "the next claim begins behind all of them");
    assert_eq!(ids(&cursor.claim(10).await.0), others[1..]);

    // Five passes of twenty thousand and one more.
    publish(&bed, &cursor.worker, at(&bed, 0).await).await;
    let mut notes = Notes::default();
    for _ in 0..6 {
        pass(&bed, &mut notes).await;
    }
    let due = format!(
        "select count(*) from jobq.jobs where leased_by = 0 and run_after < {}",
        bed.for_ever()
    );
    assert_eq!(bed.number(&due).await, 0, "a claim has nothing to read past");
    let aside = "select count(*) from jobq.jobs where wait_reason = 'paused'";
    assert_eq!(bed.number(aside).await, 102_400);
    let new = bed.one().await;
    let mut another = Cursor::new(&bed, &["k", "slow"]).await;
    assert_eq!(ids(&another.claim(10).await.0), [new]);

    assert!(bed.client.resume_kind("slow").await.expect("resumes"));
    assert_eq!(bed.number(aside).await, 92_400, "what resuming does is bounded");
    assert_eq!(another.claim(10).await.0.len(), 10);
    super::wait::until("the sweep does the rest", || async {
        pass(&bed, &mut Notes::default()).await;
        bed.number(aside).await == 0
    })
    .await;
}

/// An idle worker's timer, which must not go off for what it could not claim.
pub(super) async fn o6_what_is_paused_is_not_what_comes_next(bed: Bed) {
    let scheduled = |kind, seconds| CheckedJob {
        due: CheckedDue::After(Duration::from_secs(seconds)),
        ..job(kind)
    };
    let (queues, kinds) = (["default".to_owned()], ["k".to_owned(), "other".to_owned()]);
    let next = async || bed.store.next_due(&queues, &kinds).await.expect("looks");
    // More than one page of those that do not count.
    bed.enqueue((0..50).map(|_| scheduled("k", 60)).collect()).await;
    bed.enqueue(vec![scheduled("other", 600)]).await;
    let is_about = |wait: Option<Duration>, seconds| {
        wait.is_some_and(|wait| (seconds - 50..=seconds).contains(&(wait.as_secs() + 1)))
    };
    assert!(is_about(next().await, 60));
    bed.client.pause_kind("k", None).await.expect("pauses");
    assert!(is_about(next().await, 600), "{:?}", next().await);
    bed.client.pause_kind("other", None).await.expect("pauses");
    assert_eq!(next().await, None);
    bed.client.resume_kind("k").await.expect("resumes");
    bed.client.pause_queue("default", None).await.expect("pauses");
    assert_eq!(next().await, None);
    bed.client.resume_queue("default").await.expect("resumes");
    assert!(is_about(next().await, 60));
}

pub(super) async fn o6_a_pause_is_kept_and_shown_until_it_is_ended(bed: Bed) {
    let client = &bed.client;
    assert_eq!(client.paused().await.expect("lists"), []);
    assert!(!client.resume_queue("mail").await.expect("asks"), "it was not paused");
    let before = bed.now().await;
    // Any text will do.
    let reason = "the provider's down: 50% \"lost\"; \\ é 🦀\n";
    assert!(client.pause_queue("mail", Some(reason)).await.expect("pauses"));
    let after = bed.now().await;
    assert!(!client.pause_queue("mail", Some("another")).await.expect("asks"));
    assert!(client.pause_kind("welcome", None).await.expect("pauses"));
    assert!(client.pause_kind("mail", Some("")).await.expect("pauses"));

    // Another process, later.
    let elsewhere = bed.client_with(ClientOptions::new().schema(&bed.schema));
    let paused = elsewhere.paused().await.expect("lists");
    let shown: Vec<_> =
        paused.iter().map(|p| (p.scope, p.name.as_str(), p.reason.as_deref())).collect();
    let expected = [
        (PauseScope::Kind, "mail", Some("")),
        (PauseScope::Kind, "welcome", None),
        (PauseScope::Queue, "mail", Some(reason)),
    ];
    assert_eq!(shown, expected);
    assert!((before..=after).contains(&paused[2].since.0), "as of the first time");

    assert!(elsewhere.resume_queue("mail").await.expect("resumes"));
    assert!(!client.resume_queue("mail").await.expect("asks"));
    assert_eq!(client.paused().await.expect("lists").len(), 2);
    assert!(client.resume_kind("mail").await.expect("resumes"));
    assert!(client.resume_kind("welcome").await.expect("resumes"));
    assert_eq!(elsewhere.paused().await.expect("lists"), []);
    assert!(client.pause_queue("mail", None).await.expect("pauses"), "and again");
}

pub(super) async fn o6_a_name_or_reason_that_cannot_be_is_a_typed_error(bed: Bed) {
    let client = &bed.client;
    for name in ["", "a b", "ü", "a\0", "drop;table", &"x".repeat(101)] {
        for error in [
            client.pause_queue(name, None).await,
            client.resume_queue(name).await,
            client.pause_kind(name, None).await,
            client.resume_kind(name).await,
        ] {
            let error = error.expect_err(name);
            assert!(matches!(error, Error::BadName(_)), "{error:?}");
            assert!(error.to_string().contains("use 1 to 100"), "{error}");
        }
    }
    for reason in ["a\0", &"x".repeat(1_001)] {
        let error = client.pause_queue("q", Some(reason)).await.expect_err(reason);
        assert!(matches!(error, Error::BadOption { option: "reason", .. }), "{error:?}");
    }
    assert_eq!(client.paused().await.expect("lists"), []);
    let (name, reason) = ("x".repeat(100), "é".repeat(500));
    assert!(client.pause_kind(&name, Some(&reason)).await.expect("the longest will do"));
    assert_eq!(client.paused().await.expect("lists")[0].reason, Some(reason));
}

/// A job function with an alias runs both; they are paused each by itself.
pub(super) async fn o6_a_pause_is_of_the_name_that_is_stored(bed: Bed) {
    let worker = bed.session(LEASE, &["resize", "shrink"]).await;
    let ids = bed.enqueue(vec![job("shrink"), job("resize")]).await;
    bed.client.pause_kind("resize", None).await.expect("pauses");
    assert_eq!(self::ids(&worker.claim(10).await), ids[..1]);
    bed.client.resume_kind("resize").await.expect("resumes");
    assert_eq!(self::ids(&worker.claim(10).await), ids[1..]);
}

pub(super) async fn o6_a_kind_that_nobody_knows_is_not_woken_while_it_is_paused(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    let id = bed.enqueue(vec![job("stranger")]).await[0];
    publish(&bed, &worker, at(&bed, 1).await).await;
    let mut notes = Notes::default();
    pass(&bed, &mut notes).await;
    assert_eq!(bed.job_row(id).await.text("wait_reason"), "kind");
    bed.client.pause_kind("stranger", None).await.expect("pauses");
    let knows = bed.session(LEASE, &["stranger"]).await;
    let before = bed.job_row(id).await;
    pass(&bed, &mut notes).await;
    let (queues, kinds) = (["default".to_owned()], ["stranger".to_owned()]);
    assert_eq!(bed.store.unpark(&queues, &kinds, 10).await.expect("looks"), 0);
    assert_eq!(bed.job_row(id).await, before);
    bed.client.resume_kind("stranger").await.expect("resumes");
    assert_eq!(knows.claim_one().await.lease.job, id);
}

/// A sweep that had read of a pause sets jobs aside when the kind is resumed already, and when what
/// resuming does is done.
pub(super) async fn o6_what_was_set_aside_too_late_is_found(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    let id = bed.one().await;
    let to = at(&bed, 1).await;
    let found = bed.store.unleased("default", 0, Floor::START, to, 10).await.expect("looks");
    bed.client.pause_kind("k", None).await.expect("pauses");
    bed.client.resume_kind("k").await.expect("resumes");
    assert_eq!(bed.store.shift(&found, Shift::Pause).await.expect("moves"), 1);
    assert!(worker.claim(1).await.is_empty());
    // Resuming once more would do, too.
    pass(&bed, &mut Notes::default()).await;
    assert_eq!(worker.claim_one().await.lease.job, id);
}

/// The order of a key holds across a pause, and nobody waits for ever.
pub(super) async fn o6_a_paused_job_keeps_its_place_among_those_with_its_key(bed: Bed) {
    for (on_block, scope) in [
        (OnBlock::Block, PauseScope::Queue),
        (OnBlock::Block, PauseScope::Kind),
        (OnBlock::Skip, PauseScope::Queue),
        (OnBlock::Skip, PauseScope::Kind),
    ] {
        let worker = bed.session(LEASE, &["paused", "k"]).await;
        let keyed = |queue, kind| CheckedJob {
            key: Some(JobKey { text: "one".to_owned(), on_block }),
            ..job_in(queue, kind)
        };
        let take = async || {
            let mut claim = worker.asking("default", 10, Floor::START);
            claim.queues.extend(worker.asking("other", 10, Floor::START).queues);
            for queue in &mut claim.queues {
                queue.floors = bands_with_fronts().map(|band| (band, Floor::START)).collect();
            }
            let mut jobs = worker.claim_as(&claim).await.jobs;
            jobs.retain(|job| job.turn == Turn::Runs);
            jobs
        };
        let settle = async |job: &ClaimedJob| {
            let settlement =
                Settlement { key: job.key.clone(), ..settlement(job.lease, completed()) };
            let settled = key::settle(&*bed.store, &[settlement]).await.expect("settles");
            assert_eq!(settled, [Settled::Written]);
        };
        // The sweep looks after the queue of this worker.
        let (name, queue) = match scope {
            PauseScope::Queue => ("other", "other"),
            PauseScope::Kind => ("paused", "default"),
        };
        bed.store.pause(scope, name, None).await.expect("pauses");
        let line = vec![keyed(queue, "paused"), keyed("default", "k"), keyed("default", "k")];
        let line = bed.enqueue(line).await;
        assert_eq!(ids(&take().await), [], "{on_block:?} {scope:?}: the first one keeps its place");
        publish(&bed, &worker, at(&bed, 1).await).await;
        let mut notes = Notes::default();
        pass(&bed, &mut notes).await;
        pass_on_all_grants(&*bed.store).await.expect("passes on");
        let run = take().await;
        let passed_by = on_block == OnBlock::Skip && scope == PauseScope::Kind;
        let mut left = line.clone();
        if passed_by {
            assert_eq!(ids(&run), [line[1]], "it is set aside");
            settle(&run[0]).await;
            left.remove(1);
        } else {
            assert_eq!(ids(&run), [], "{on_block:?} {scope:?}: neither the sweep nor time lets go");
        }
        bed.store.resume(scope, name).await.expect("resumes");
        pass(&bed, &mut notes).await;
        // What was woken before the other one was resumed is its key's next.
        let next = if passed_by { vec![left[1], left[0]] } else { left };
        for id in next {
            let run = take().await;
            assert_eq!(ids(&run), [id], "{on_block:?} {scope:?}");
            settle(&run[0]).await;
        }
        assert_eq!(bed.number("select count(*) from jobq.key_grants").await, 0);
    }
}
