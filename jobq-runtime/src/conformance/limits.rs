//! Limits of queues: how many jobs run at once, and how fast they start.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use jobq_core::job::JobId;
use jobq_core::key::OnBlock;
use jobq_core::lifecycle::{self, Transition};
use jobq_core::limit::Rate;
use jobq_core::queue::bands_with_fronts;
use jobq_core::time::Timestamp;

use super::bed::{Bed, LEASE, on_pool};
use super::settle::{buried, cancelled, completed, failed, snoozed};
use super::wait::{join_all, until};
use super::worker::{Worker, job, settlement};
use crate::client::ClientOptions;
use crate::error::Error;
use crate::floors::Floors;
use crate::job::CheckedJob;
use crate::key::{self, JobKey};
use crate::limit::QueueLimit;
use crate::store::{CancelReply, Claimed, ClaimedJob, Floor, Settled, Settlement, Turn};
use crate::sweep::{proven_floors, rescue};

const HOUR: Duration = Duration::from_secs(3_600);

async fn limit(bed: &Bed, running: u32) {
    bed.client.limit_queue("default", QueueLimit::running(running)).await.expect("limits");
}

async fn enqueue(bed: &Bed, jobs: usize) -> Vec<JobId> {
    bed.enqueue((0..jobs).map(|_| job("k")).collect()).await
}

async fn running(bed: &Bed) -> i64 {
    bed.number("select count(*) from jobq.jobs where leased_by <> 0").await
}

/// What no statement of the store says: each running job of the limited queue has one place, and no
/// place is said to be taken by a job that does not run.
async fn assert_places_are_right(bed: &Bed) {
    let placeless = "select count(*) from jobq.jobs as job
         where job.queue = 'default' and job.leased_by <> 0
           and (
                   select count(*) from jobq.queue_slots as place
                   where place.queue = job.queue and place.job_id = job.id and place.token = job.token
               ) <> 1";
    assert_eq!(bed.number(placeless).await, 0, "a job runs without a place, or has two");
    let taken = "select count(*) from jobq.queue_slots as place
         join jobq.jobs as job on job.id = place.job_id and job.token = place.token
         where job.leased_by <> 0";
    assert_eq!(bed.number(taken).await, running(bed).await);
}

pub(super) async fn o3_no_more_run_than_the_limit_lets_on_whatever_machine(bed: Bed) {
    let elsewhere = bed.client_with(ClientOptions::new().schema(&bed.schema)).store();
    let worker = bed.session(LEASE, &["k"]).await;
    limit(&bed, 3).await;
    let ids = enqueue(&bed, 8).await;
    let mut jobs = worker.claim(2).await;
    assert_eq!(jobs.len(), 2);
    let ask = worker.asking("default", 10, Floor::START);
    let there = elsewhere.claim(&ask).await.expect("claims");
    assert_eq!((there.jobs.len(), there.limited[0].jobs), (1, 1));
    assert_eq!(there.limited[0].next, None, "no time helps");
    jobs.extend(there.jobs);
    assert!(worker.claim(10).await.is_empty());
    assert_places_are_right(&bed).await;
    let mut done = Vec::new();
    while let Some(job) = jobs.pop() {
        assert_eq!(bed.settle(job.lease, completed()).await, Settled::Written);
        done.push(job.lease.job);
        jobs.extend(worker.claim(10).await);
        assert!(running(&bed).await <= 3);
        assert_places_are_right(&bed).await;
    }
    done.sort_unstable();
    assert_eq!(done, ids, "each ran once");
}

/// However a lease ends, nothing has to free its place.
pub(super) async fn o3_a_place_is_free_once_its_job_ends_whatever_the_end(bed: Bed) {
    limit(&bed, 1).await;
    let ends: [(&str, fn(&ClaimedJob) -> Transition); 6] = [
        ("completed", |_| completed()),
        ("failed", |job| failed(job.counters, HOUR)),
        ("snoozed", |job| snoozed(job.counters)),
        ("buried", |job| buried(job.counters)),
        ("cancelled", |_| cancelled()),
        ("released", |job| lifecycle::release(job.counters)),
    ];
    for (what, end) in ends {
        bed.execute("delete from jobq.jobs").await;
        enqueue(&bed, 2).await;
        let worker = bed.session(LEASE, &["k"]).await;
        let job = worker.claim_one().await;
        assert!(worker.claim(1).await.is_empty(), "{what}: the place is taken");
        if what == "cancelled" {
            let asked = bed.client.cancel(job.lease.job).await.expect("asks");
            assert_eq!(asked, CancelReply::Requested);
        }
        assert_eq!(bed.settle(job.lease, end(&job)).await, Settled::Written, "{what}");
        worker.claim_one().await;
        assert_places_are_right(&bed).await;
    }
    // In a transaction of the job's own: free when that commits.
    bed.execute("delete from jobq.jobs").await;
    enqueue(&bed, 2).await;
    let worker = bed.session(LEASE, &["k"]).await;
    let job = worker.claim_one().await;
    on_pool!(bed, pool => {
        let mut tx = pool.begin_with(bed.begin()).await.expect("begins");
        bed.context(job.lease, Duration::ZERO).complete_in(&mut tx).await.expect("completes");
        tx.commit().await.expect("commits");
    });
    // A dead worker's.
    let lost = worker.claim_one().await;
    bed.expire(worker.id).await;
    let other = bed.session(LEASE, &["k"]).await;
    assert!(other.claim(1).await.is_empty(), "until it is rescued");
    until("the job is rescued", async || {
        rescue(&*bed.store, false).await.expect("rescues");
        running(&bed).await == 0
    })
    .await;
    let again = other.claim_one().await;
    assert_eq!(again.lease.job, lost.lease.job);
    assert_eq!(bed.settle(lost.lease, completed()).await, Settled::LeaseLost);
    assert!(other.claim(1).await.is_empty(), "the late one has freed nothing");
    assert_places_are_right(&bed).await;
    // And one whose row is gone, by hand.
    enqueue(&bed, 1).await;
    bed.execute("delete from jobq.jobs where leased_by <> 0").await;
    other.claim_one().await;
}

pub(super) async fn o3_a_limit_can_be_changed_while_jobs_run(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    limit(&bed, 2).await;
    enqueue(&bed, 20).await;
    let mut jobs = worker.claim(10).await;
    assert_eq!(jobs.len(), 2);
    limit(&bed, 5).await;
    jobs.extend(worker.claim(10).await);
    assert_eq!(jobs.len(), 5, "more from the next claim on");
    limit(&bed, 3).await;
    for left in (0..5).rev() {
        // The oldest places become free first, and then the last ones.
        let job = if left % 2 == 0 { jobs.remove(0) } else { jobs.pop().expect("one is left") };
        assert_eq!(bed.settle(job.lease, completed()).await, Settled::Written);
        let more = worker.claim(10).await;
        assert_eq!(more.len(), usize::from(left < 3), "what ran goes on, and counts: {left}");
        jobs.extend(more);
        assert_places_are_right(&bed).await;
    }
    assert_eq!(running(&bed).await, 3);
    assert!(bed.client.unlimit_queue("default").await.expect("ends it"));
    assert!(!bed.client.unlimit_queue("default").await.expect("there is none"));
    assert_eq!(worker.claim(20).await.len(), 12);
    limit(&bed, 1).await;
    assert!(worker.claim(1).await.is_empty(), "what had a place is counted");
}

/// And so do the places: no more of them are ever looked at than the limit has.
pub(super) async fn o3_a_limit_changed_by_hand_holds_too(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    enqueue(&bed, 20).await;
    worker.claim_one().await;
    bed.execute("insert into jobq.queue_limits (queue, max_running) values ('default', 1)").await;
    assert!(worker.claim(5).await.is_empty(), "it has no places yet");
    limit(&bed, 9).await;
    assert_eq!(worker.claim(20).await.len(), 9);
    bed.execute("update jobq.queue_limits set max_running = 2").await;
    assert!(worker.claim(20).await.is_empty());
    bed.execute("delete from jobq.queue_limits").await;
    assert_eq!(worker.claim(7).await.len(), 7);
    bed.execute("delete from jobq.jobs where leased_by <> 0").await;
    limit(&bed, 2).await;
    assert_eq!(bed.count("queue_slots").await, 2);
    assert_eq!(worker.claim(20).await.len(), 2);
}

/// Its claim waits for the limit, finds that it is not what it has seen, and looks again.
#[cfg(feature = "postgres")]
pub(super) async fn o3_a_claim_that_another_was_quicker_than_takes_what_is_left(bed: Bed) {
    use sqlx::Executor;
    limit(&bed, 2).await;
    enqueue(&bed, 5).await;
    let worker = bed.session(LEASE, &["k"]).await;
    let mut tx = bed.postgres_pool().begin().await.expect("begins");
    for statement in [
        "update jobq.queue_limits set turn = turn + 1",
        "update jobq.jobs set leased_by = 1, token = 1 where id = (select min(id) from jobq.jobs)",
        "update jobq.queue_slots set job_id = (select min(id) from jobq.jobs), token = 1
         where slot = 1",
    ] {
        tx.execute(bed.statement(statement)).await.expect("updates");
    }
    let claim = worker.asking("default", 5, Floor::START);
    let store = bed.store.clone();
    let claimed = tokio::spawn(async move { store.claim(&claim).await });
    bed.until_one_waits_for_a_lock().await;
    tx.commit().await.expect("commits");
    let claimed = claimed.await.expect("ends").expect("claims");
    assert_eq!((claimed.jobs.len(), claimed.limited[0].jobs), (1, 1));
    assert_places_are_right(&bed).await;
}

/// At no time, whatever is claimed, ended and changed side by side.
pub(super) async fn o3_a_limit_holds_among_claims_at_the_same_time(bed: Bed) {
    const JOBS: usize = 240;
    limit(&bed, 3).await;
    enqueue(&bed, JOBS).await;
    let done = Arc::new(AtomicUsize::new(0));
    let mut workers = Vec::new();
    for n in 0..6 {
        let worker = bed.session(LEASE, &["k"]).await;
        let claim = worker.asking("default", 1 + n % 4, Floor::START);
        let client = bed.client_with(ClientOptions::new().schema(&bed.schema));
        let done = Arc::clone(&done);
        workers.push(tokio::spawn(async move {
            let store = client.store();
            while done.load(Ordering::SeqCst) < JOBS {
                let jobs = store.claim(&claim).await.expect("claims").jobs;
                if jobs.is_empty() {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                for job in jobs {
                    let settled = store.settle(&[settlement(job.lease, completed())]).await;
                    match settled.expect("settles")[0] {
                        Settled::Written | Settled::Found => {}
                        Settled::Busy => {
                            until("the row is not locked", async || {
                                let mut again = settlement(job.lease, completed());
                                again.doubtful = true;
                                store.settle(&[again]).await.expect("settles")[0] != Settled::Busy
                            })
                            .await;
                        }
                        other => panic!("{other:?}"),
                    }
                    done.fetch_add(1, Ordering::SeqCst);
                }
            }
        }));
    }
    let mut most = 0;
    while !workers.iter().all(tokio::task::JoinHandle::is_finished) {
        most = most.max(running(&bed).await);
        assert!(most <= 3, "{most} run at once");
    }
    for ended in join_all(workers).await {
        ended.expect("no worker failed");
    }
    assert!(most > 1, "they did run side by side");
    assert_eq!(bed.count("finished").await, i64::try_from(JOBS).expect("few"));
}

/// A worker with the cursor of the real loop, of a limited queue and one that is not.
struct Cursor<'b> {
    worker: Worker<'b>,
    floors: Floors,
}

impl<'b> Cursor<'b> {
    async fn new(bed: &'b Bed) -> Self {
        let floors = Floors::new(proven_floors(&*bed.store).await.expect("reads"), Instant::now());
        Self { worker: bed.session(LEASE, &["k"]).await, floors }
    }

    async fn claim(&mut self, limit: u32) -> Claimed {
        let now = Instant::now();
        let mut claim = self.worker.asking("default", limit, Floor::START);
        claim.queues = ["default", "other"]
            .into_iter()
            .map(|queue| self.floors.claim(queue, limit, false, now))
            .collect();
        let claimed = self.worker.claim_as(&claim).await;
        self.floors.advance(&claim.queues, &claimed, now);
        claimed
    }
}

pub(super) async fn o3_other_queues_go_on_and_nothing_is_passed_by(bed: Bed) {
    limit(&bed, 2).await;
    let with_priority = |priority| CheckedJob { priority, ..job("k") };
    let ids = bed.enqueue([0, 0, 0, 0, 0, 3].map(with_priority).into()).await;
    let other = |_| CheckedJob { queue: "other".into(), ..job("k") };
    bed.enqueue((0..6).map(other).collect()).await;
    let past = bed.seconds_away(-60);
    bed.execute(&format!("update jobq.jobs set run_after = {past}")).await;
    let mut cursor = Cursor::new(&bed).await;
    let mut order = Vec::new();
    let mut others = 0;
    for _ in 0..6 {
        let claimed = cursor.claim(4).await;
        let (mine, rest): (Vec<ClaimedJob>, Vec<ClaimedJob>) =
            claimed.jobs.into_iter().partition(|job| job.queue == "default");
        others += rest.len();
        order.extend(mine.iter().map(|job| job.lease.job));
        assert!(cursor.claim(4).await.jobs.iter().all(|job| {
            others += 1;
            job.queue == "other"
        }));
        assert!(mine.len() <= 2);
        for job in mine {
            assert_eq!(bed.settle(job.lease, completed()).await, Settled::Written);
        }
    }
    assert_eq!(order, [ids[5], ids[0], ids[1], ids[2], ids[3], ids[4]]);
    assert_eq!(others, 6);
}

pub(super) async fn o3_a_limited_queue_can_be_paused(bed: Bed) {
    limit(&bed, 2).await;
    let ids = enqueue(&bed, 4).await;
    let past = bed.seconds_away(-60);
    bed.execute(&format!("update jobq.jobs set run_after = {past}")).await;
    let mut cursor = Cursor::new(&bed).await;
    bed.client.pause_queue("default", None).await.expect("pauses");
    assert!(cursor.claim(4).await.jobs.is_empty());
    bed.client.resume_queue("default").await.expect("resumes");
    let jobs = cursor.claim(4).await.jobs;
    assert_eq!(jobs.iter().map(|job| job.lease.job).collect::<Vec<_>>(), ids[..2]);
}

/// What waits for its key takes no place for longer than its claim.
pub(super) async fn o3_jobs_with_keys_are_limited_too(bed: Bed) {
    limit(&bed, 2).await;
    let keyed = |text: &str| CheckedJob {
        key: Some(JobKey { text: text.to_owned(), on_block: OnBlock::Block }),
        ..job("k")
    };
    let jobs = ["a", "a", "a", "b", "b", "c"].map(keyed);
    bed.enqueue(jobs.into()).await;
    let worker = bed.session(LEASE, &["k"]).await;
    let mut ask = worker.asking("default", 10, Floor::START);
    ask.queues[0].floors = bands_with_fronts().map(|band| (band, Floor::START)).collect();
    let mut done = 0;
    let mut run: Vec<ClaimedJob> = Vec::new();
    for _ in 0..40 {
        let jobs = worker.claim_as(&ask).await.jobs;
        run.extend(jobs.into_iter().filter(|job| job.turn == Turn::Runs));
        assert!(running(&bed).await <= 2);
        assert_places_are_right(&bed).await;
        if let Some(job) = run.pop() {
            let settlement =
                Settlement { key: job.key.clone(), ..settlement(job.lease, completed()) };
            let settled = key::settle(&*bed.store, &[settlement]).await.expect("settles");
            assert_eq!(settled, [Settled::Written]);
            done += 1;
        }
    }
    assert_eq!(done, 6);
}

pub(super) async fn o3_a_limit_is_kept_and_shown_until_it_is_ended(bed: Bed) {
    let rate = Rate::new(50, Duration::from_secs(2)).burst(7);
    let client = &bed.client;
    assert_eq!(client.limits().await.expect("lists"), []);
    client.limit_queue("b", QueueLimit::rate(rate)).await.expect("limits");
    client.limit_queue("a", QueueLimit::running(3)).await.expect("limits");
    let elsewhere = bed.client_with(ClientOptions::new().schema(&bed.schema));
    let limits = elsewhere.limits().await.expect("lists");
    let limits: Vec<_> = limits.into_iter().map(|it| (it.queue, it.limit)).collect();
    let expected = [("a", QueueLimit::running(3)), ("b", QueueLimit::rate(rate))];
    assert_eq!(limits, expected.map(|(queue, limit)| (queue.to_owned(), limit)));
    let both = QueueLimit::running(10_000).and_rate(rate);
    client.limit_queue("a", both).await.expect("limits");
    assert_eq!(client.limits().await.expect("lists")[0].limit, both);
    assert!(client.unlimit_queue("a").await.expect("ends it"));
    assert_eq!(client.limits().await.expect("lists").len(), 1);
    for (queue, limit) in [("", both), ("a", QueueLimit::running(0))] {
        let error = client.limit_queue(queue, limit).await.expect_err("it cannot be");
        assert!(matches!(error, Error::BadName(_) | Error::BadOption { .. }), "{error:?}");
    }
}

pub(super) async fn o4_a_rate_gives_its_burst_and_then_what_comes(bed: Bed) {
    let hour = Rate::new(2, HOUR).burst(3);
    bed.client.limit_queue("default", QueueLimit::rate(hour)).await.expect("limits");
    enqueue(&bed, 10).await;
    let worker = bed.session(LEASE, &["k"]).await;
    let ask = worker.asking("default", 10, Floor::START);
    assert_eq!(worker.claim(1).await.len(), 1);
    let claimed = worker.claim_as(&ask).await;
    assert_eq!((claimed.jobs.len(), claimed.limited[0].jobs), (2, 2), "the burst");
    let claimed = worker.claim_as(&ask).await;
    assert_eq!((claimed.jobs.len(), claimed.limited[0].jobs), (0, 0));
    let next = claimed.limited[0].next.expect("it says when");
    assert!(next <= HOUR / 2 && next > HOUR / 2 - LEASE, "{next:?}");
    let later = |time: &str| {
        if bed.is_postgres() {
            format!("update jobq.queue_limits set full_at = full_at - interval '{time} minutes'")
        } else {
            format!("update jobq.queue_limits set full_at = full_at - {time} * 60000000")
        }
    };
    // As if half an hour had gone by.
    bed.execute(&later("30")).await;
    assert_eq!(worker.claim(10).await.len(), 1);
    assert!(worker.claim(10).await.is_empty());
    // An end frees nothing, and a failure is a start as well.
    bed.execute("update jobq.jobs set leased_by = 0").await;
    assert!(worker.claim(10).await.is_empty());
    // Nor does a limit that is set again.
    bed.client.limit_queue("default", QueueLimit::rate(hour)).await.expect("limits");
    assert!(worker.claim(10).await.is_empty());
    bed.execute(&later("600")).await;
    assert_eq!(worker.claim(10).await.len(), 3, "no more than the burst");
}

/// On the database's clock, however many claim.
pub(super) async fn o4_no_more_start_than_the_rate_lets(bed: Bed) {
    let rate = Rate::new(100, Duration::from_secs(1)).burst(5);
    bed.client.limit_queue("default", QueueLimit::rate(rate)).await.expect("limits");
    enqueue(&bed, 1_000).await;
    let started = Arc::new(AtomicUsize::new(0));
    let begin = bed.now().await;
    let mut workers = Vec::new();
    for _ in 0..4 {
        let worker = bed.session(LEASE, &["k"]).await;
        let claim = worker.asking("default", 10, Floor::START);
        let (store, started) = (bed.store.clone(), Arc::clone(&started));
        workers.push(tokio::spawn(async move {
            while started.load(Ordering::SeqCst) < 60 {
                let jobs = store.claim(&claim).await.expect("claims").jobs.len();
                started.fetch_add(jobs, Ordering::SeqCst);
            }
        }));
    }
    for ended in join_all(workers).await {
        ended.expect("no worker failed");
    }
    let took = Timestamp(bed.now().await).0 - begin;
    let most = 5 + took * 100 / 1_000_000;
    let started = i64::try_from(started.load(Ordering::SeqCst)).expect("few");
    assert!(started <= most, "{started} have started in {took} µs, which lets {most}");
    assert_eq!(started, running(&bed).await);
}

/// Stopped as a process is that is paused, or cut off, with whatever it has locked. Each time with a
/// queue of its own; they are waited for all together.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) async fn o3_a_process_that_stops_anywhere_does_not_keep_a_limited_queue(bed: Bed) {
    use super::wait::stopped_after;
    let gone = bed.session(LEASE, &["k"]).await;
    let both = QueueLimit::running(2).and_rate(Rate::new(1_000, Duration::from_secs(1)));
    let mut queues = Vec::new();
    for steps in 1.. {
        let queue: &'static str = format!("queue-{steps}").leak();
        queues.push(queue);
        bed.client.limit_queue(queue, both).await.expect("limits");
        let in_queue = |_| CheckedJob { queue: queue.into(), ..job("k") };
        bed.enqueue((0..3).map(in_queue).collect()).await;
        let store = bed.another_client(&bed.schema).store();
        // So that it has a connection.
        store.live_sessions().await.expect("reads");
        let claim = gone.asking(queue, 2, Floor::START);
        let stopped = stopped_after(steps, store.claim(&claim)).await;
        std::mem::forget(store);
        if !stopped {
            break;
        }
    }
    assert!(queues.len() > 3, "a claim has several steps");
    bed.expire(gone.id).await;
    let worker = bed.session(LEASE * 60, &["k"]).await;
    until("another has done them all", async || {
        // What is locked may be an error once, as to any claimer.
        let _ = rescue(&*bed.store, false).await;
        for queue in &queues {
            let claim = worker.asking(queue, 5, Floor::START);
            let Ok(claimed) = bed.store.claim(&claim).await else { continue };
            assert!(claimed.jobs.len() <= 2);
            for job in claimed.jobs {
                assert_eq!(bed.settle(job.lease, completed()).await, Settled::Written);
            }
        }
        bed.count("jobs").await == 0
    })
    .await;
}
