//! Jobs that workers have passed by, and kinds that no worker knows.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use jobq_core::job::JobId;
use jobq_core::queue::{EXPRESS, bands};
use jobq_core::time::Timestamp;

use super::bed::{Bed, LEASE};
use super::worker::{Worker, job};
use crate::floors::Floors;
use crate::store::{Beat, Floor, NewSession, QueueFloor, Shift, UnleasedJob};
use crate::sweep::{Notes, find_late};

/// One pass of the sweep's search.
pub(super) async fn pass(bed: &Bed, notes: &mut Notes) -> HashSet<String> {
    let horizon = bed.store.horizon().await.expect("reads");
    find_late(&*bed.store, notes, horizon).await.expect("searches").unknown
}

/// A place in the order: so many seconds from now.
pub(super) async fn at(bed: &Bed, seconds: i64) -> Floor {
    Floor { run_after: Timestamp(bed.now().await + seconds * 1_000_000), id: 0 }
}

/// Says that a worker has claimed everything up to a floor, in every band.
pub(super) async fn publish(bed: &Bed, worker: &Worker<'_>, floor: Floor) {
    let floors =
        bands().map(|band| QueueFloor { queue: "default".to_owned(), band, floor }).collect();
    let beat = Beat { session: worker.id.0, held: Vec::new(), floors };
    bed.store.pulse().await.expect("connects").beat(&beat).await.expect("beats");
}

/// Makes jobs look as if their transaction had taken that long to commit.
async fn commit_late(bed: &Bed, jobs: &[JobId], seconds: i64) {
    let past = bed.seconds_away(-seconds);
    for id in jobs {
        bed.execute(&format!("update jobq.jobs set run_after = {past} where id = {id}")).await;
    }
}

pub(super) async fn e1_a_job_that_committed_late_is_found_and_goes_next(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    let floor = at(&bed, -5).await;
    publish(&bed, &worker, floor).await;
    let ids = bed.enqueue(vec![job("k"), job("k")]).await;
    commit_late(&bed, &ids[..1], 60).await;
    let mut notes = Notes::default();
    assert!(pass(&bed, &mut notes).await.is_empty());
    let row = bed.job_row(ids[0]).await;
    assert_eq!(row.number("band"), i64::from(EXPRESS));
    assert!(row.number("run_after") > floor.run_after.0, "it is ahead of every floor");
    assert_eq!(bed.job_row(ids[1]).await.number("band"), 0, "somebody will come to this one");
    let claimed = worker.claim_from(1, floor).await.jobs;
    assert_eq!(claimed[0].lease.job, ids[0]);
}

pub(super) async fn e1_a_late_job_of_the_express_band_is_found_too(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    let id = bed.one().await;
    bed.execute(&format!("update jobq.jobs set band = {EXPRESS}")).await;
    commit_late(&bed, &[id], 60).await;
    let floor = at(&bed, -5).await;
    publish(&bed, &worker, floor).await;
    pass(&bed, &mut Notes::default()).await;
    assert_eq!(worker.claim_from(1, floor).await.jobs[0].lease.job, id);
}

/// Claims with a real cursor until nothing comes.
async fn drain(worker: &Worker<'_>, floors: &mut Floors) -> usize {
    let mut drained = 0;
    loop {
        let now = Instant::now();
        let mut claim = worker.asking("default", 7, Floor::START);
        claim.queues = vec![floors.claim("default", 7, false, now)];
        let claimed = worker.claim_as(&claim).await;
        floors.advance(&claim.queues, &claimed, now);
        if claimed.jobs.is_empty() {
            return drained;
        }
        drained += claimed.jobs.len();
    }
}

/// A worker whose floors are years ahead, by whatever mistake, loses nobody's jobs.
pub(super) async fn e1_no_floor_however_wrong_loses_a_job(bed: Bed) {
    let hostile = bed.session(LEASE, &["k"]).await;
    publish(&bed, &hostile, at(&bed, 3 * 365 * 86_400).await).await;
    let honest = bed.session(LEASE, &["k"]).await;
    let mut floors = Floors::new(Vec::new(), Instant::now());
    assert_eq!(drain(&honest, &mut floors).await, 0);
    publish(&bed, &honest, at(&bed, 0).await).await;
    let mut notes = Notes::default();
    let mut claimed = 0;
    for round in 0..4 {
        // Late ones behind every floor, and some that are scheduled.
        let jobs = (0..50).map(|n| {
            let mut job = job("k");
            job.priority = [-4, -1, 0, 2, 4][n % 5];
            job
        });
        let ids = bed.enqueue(jobs.collect()).await;
        commit_late(&bed, &ids[..40], 30).await;
        let later = bed.seconds_away(3600);
        for id in &ids[45..] {
            bed.execute(&format!("update jobq.jobs set run_after = {later} where id = {id}")).await;
        }
        // The late transactions were open until now: nothing could be proved.
        notes.mark = None;
        pass(&bed, &mut notes).await;
        claimed += drain(&honest, &mut floors).await;
        assert_eq!(claimed, 45 + round * 50, "round {round}");
        for id in &ids[45..] {
            let row = bed.job_row(id).await;
            assert!(row.number("run_after") > bed.now().await, "it is not its time yet");
            commit_late(&bed, &[*id], 30).await;
        }
        notes.mark = None;
        pass(&bed, &mut notes).await;
        claimed += drain(&honest, &mut floors).await;
        assert_eq!(claimed, 50 + round * 50, "round {round}");
    }
}

pub(super) async fn r5_a_kind_that_no_worker_knows_is_parked_until_one_does(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    let mut stranger = job("stranger");
    stranger.priority = 2;
    let ids = bed.enqueue(vec![stranger.clone(), stranger, job("k")]).await;
    let later = bed.seconds_away(3600);
    bed.execute(&format!("update jobq.jobs set run_after = {later} where id = {}", ids[1])).await;
    publish(&bed, &worker, at(&bed, 1).await).await;
    let mut notes = Notes::default();
    assert_eq!(pass(&bed, &mut notes).await, HashSet::from(["stranger".to_owned()]));
    let parked = bed.job_row(ids[0]).await;
    assert_eq!(parked.number("run_after"), i64::MAX);
    assert_eq!(parked.text("wait_reason"), "kind");
    assert_eq!((parked.number("attempt"), parked.number("token")), (0, 0), "no attempt burned");
    let state = format!("select state from jobq.job_states where id = {}", ids[0]);
    assert_eq!(bed.texts(&state).await, ["waiting"]);
    assert!(bed.job_row(ids[1]).await.number("run_after") < i64::MAX, "it is not its time yet");
    assert!(pass(&bed, &mut notes).await.is_empty(), "what is parked is not read again");

    let knows = bed.session(LEASE, &["stranger"]).await;
    let before = bed.now().await;
    pass(&bed, &mut notes).await;
    let unparked = bed.job_row(ids[0]).await;
    assert_eq!(unparked.number("band"), 2);
    assert!((before..=bed.now().await).contains(&unparked.number("run_after")));
    assert!(unparked.is_null("wait_reason"));
    assert_eq!(knows.claim_one().await.lease.job, ids[0]);
}

/// Knowing a kind is not enough: somebody must serve the queue.
pub(super) async fn r5_a_kind_that_only_another_queues_worker_knows_is_parked(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    let elsewhere = NewSession {
        id: jobq_core::job::SessionId(worker.id.0 + 1_000_000),
        worker: "elsewhere".to_owned(),
        lease: LEASE,
        kinds: vec!["stranger".to_owned()],
        queues: vec!["elsewhere".to_owned()],
    };
    bed.store.open_session(&elsewhere).await.expect("opens");
    let id = bed.enqueue(vec![job("stranger")]).await[0];
    publish(&bed, &worker, at(&bed, 1).await).await;
    let mut notes = Notes::default();
    for _ in 0..2 {
        pass(&bed, &mut notes).await;
        assert_eq!(bed.job_row(id).await.text("wait_reason"), "kind");
    }
}

/// A worker that knows the kind will come to it in its own time and order.
pub(super) async fn r5_a_kind_whose_workers_have_not_come_there_yet_is_left_alone(bed: Bed) {
    let ahead = bed.session(LEASE, &["k"]).await;
    let behind = bed.session(LEASE, &["slow"]).await;
    let ids = bed.enqueue(vec![job("slow"), job("slow")]).await;
    commit_late(&bed, &ids, 60).await;
    publish(&bed, &ahead, at(&bed, 1).await).await;
    publish(&bed, &behind, at(&bed, -120).await).await;
    let before = bed.job_row(ids[0]).await;
    let mut notes = Notes::default();
    assert!(pass(&bed, &mut notes).await.is_empty());
    assert_eq!(before, bed.job_row(ids[0]).await);
    let place = Floor { run_after: Timestamp(before.number("run_after")), id: ids[0].0 };
    let proven = notes.floors.iter().find(|floor| floor.band == 0).expect("it was looked at");
    assert!(proven.floor < place);
    // Now that worker has passed it by as well.
    publish(&bed, &behind, at(&bed, -30).await).await;
    pass(&bed, &mut notes).await;
    assert_eq!(bed.job_row(ids[0]).await.number("band"), i64::from(EXPRESS));
}

/// Two steps of 1,000 and more are read in one pass, and what does not fit in the next.
pub(super) async fn e1_tens_of_thousands_of_late_jobs_are_found_in_two_passes(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    bed.enqueue((0..21_500).map(|_| job("k")).collect()).await;
    let past = bed.seconds_away(-60);
    bed.execute(&format!("update jobq.jobs set run_after = {past}")).await;
    publish(&bed, &worker, at(&bed, -5).await).await;
    let mut notes = Notes::default();
    let left = format!("select count(*) from jobq.jobs where band <> {EXPRESS}");
    pass(&bed, &mut notes).await;
    assert_eq!(bed.number(&left).await, 1_500);
    pass(&bed, &mut notes).await;
    assert_eq!(bed.number(&left).await, 0);
}

pub(super) async fn e1_a_late_job_that_was_claimed_meanwhile_is_left_alone(bed: Bed) {
    let ids = bed.enqueue((0..4).map(|_| job("k")).collect()).await;
    let to = at(&bed, 1).await;
    let found: Vec<UnleasedJob> =
        bed.store.unleased("default", 0, Floor::START, to, 10).await.expect("looks");
    assert_eq!(found.iter().map(|job| job.id).collect::<Vec<_>>(), ids);
    let worker = bed.session(LEASE, &["k"]).await;
    let jobs = worker.claim(2).await;
    bed.settle(jobs[1].lease, super::settle::snoozed(jobs[1].counters)).await;
    let later = bed.seconds_away(60);
    bed.execute(&format!("update jobq.jobs set run_after = {later} where id = {}", ids[2])).await;
    let mut before = Vec::new();
    for id in &ids[..3] {
        before.push(bed.job_row(id).await);
    }
    for shift in [Shift::Park, Shift::Hurry] {
        let moved = bed.store.shift(&found[..3], shift).await.expect("moves");
        assert_eq!(moved, 0, "one is claimed, one was, and one has another time");
    }
    for (id, before) in ids.iter().zip(&before) {
        assert_eq!(*before, bed.job_row(id).await);
    }
    assert_eq!(bed.store.shift(&found, Shift::Hurry).await.expect("moves"), 1);
}

pub(super) async fn e1_what_is_looked_through_has_two_ends(bed: Bed) {
    let ids = bed.enqueue((0..6).map(|_| job("k")).collect()).await;
    let same = bed.seconds_away(-10);
    bed.execute(&format!("update jobq.jobs set run_after = {same}")).await;
    // One statement may stamp its rows one by one.
    let time = bed.job_row(ids[0]).await.number("run_after");
    let stamp = if bed.is_postgres() {
        format!("'epoch'::timestamptz + {time} * interval '1 microsecond'")
    } else {
        format!("{time}")
    };
    bed.execute(&format!("update jobq.jobs set run_after = {stamp}")).await;
    let place = |n: usize| Floor { run_after: Timestamp(time), id: ids[n].0 };
    let look = |from, to, limit| bed.store.unleased("default", 0, from, to, limit);
    let found = look(place(1), place(4), 10).await.expect("looks");
    let found: Vec<_> = found.into_iter().map(|job| job.id).collect();
    assert_eq!(found, ids[2..=4], "after the one and up to the other");
    let found = look(Floor::START, place(5), 2).await.expect("looks");
    assert_eq!(found.len(), 2);
    assert!(look(place(5), place(5), 10).await.expect("looks").is_empty());
}

pub(super) async fn r5_unparking_is_bounded(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    bed.enqueue((0..10).map(|_| job("stranger")).collect()).await;
    publish(&bed, &worker, at(&bed, 1).await).await;
    pass(&bed, &mut Notes::default()).await;
    let unpark = || async {
        let (queues, kinds) = (["default".to_owned()], ["stranger".to_owned()]);
        bed.store.unpark(&queues, &kinds, 4).await.expect("unparks")
    };
    assert_eq!((unpark().await, unpark().await, unpark().await, unpark().await), (4, 4, 2, 0));
}

/// A worker's own claim, with the cursor of the real loop.
pub(super) async fn e1_a_cursor_meets_what_commits_a_moment_late(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    let mut floors = Floors::new(Vec::new(), Instant::now());
    drain(&worker, &mut floors).await;
    let id = bed.one().await;
    bed.execute(&format!(
        "update jobq.jobs set run_after = {} where id = {id}",
        bed.seconds_away(-1)
    ))
    .await;
    let now = Instant::now();
    let far = floors.claim("default", 1, true, now + Duration::from_millis(1));
    let mut claim = worker.asking("default", 1, Floor::START);
    claim.queues = vec![far];
    assert_eq!(worker.claim_as(&claim).await.jobs.len(), 1, "a far look goes back two seconds");
}
