//! Sessions: how they are kept alive, and what they may do once they are not.

use jobq_core::job::{JobId, SessionId, Token};
use jobq_core::time::Timestamp;

use super::bed::{Bed, LEASE, RETENTION, on_pool};
use super::settle::{completed, snoozed};
use super::wait::join_all;
use super::worker::job;
use crate::store::{Beat, BeatReply, Floor, NewSession, QueueFloor, Settled};

/// One heartbeat of a session that believes it holds these jobs.
async fn beat(bed: &Bed, session: SessionId, held: &[(JobId, Token)]) -> BeatReply {
    let mut pulse = bed.store.pulse().await.expect("connects");
    let beat = Beat { session: session.0, held: held.to_vec(), floors: Vec::new() };
    pulse.beat(&beat).await.expect("beats")
}

fn extended() -> BeatReply {
    BeatReply::Extended { lost: Vec::new(), cancel_requested: Vec::new() }
}

pub(super) async fn f4_a_heartbeat_extends_the_session_by_its_lease(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    let until = bed.seconds_away(1);
    bed.execute(&format!("update jobq.sessions set leased_until = {until}")).await;
    let before = bed.now().await;
    assert_eq!(beat(&bed, worker.id, &[]).await, extended());
    let after = bed.now().await;
    let lease = LEASE.as_micros() as i64;
    let leased_until = bed.row("sessions", worker.id).await.expect("open").number("leased_until");
    assert!((before + lease..=after + lease).contains(&leased_until));
}

/// Nobody has taken its jobs yet, so nothing is lost.
pub(super) async fn f4_an_expired_session_that_nobody_closed_is_extended(bed: Bed) {
    bed.one().await;
    let worker = bed.session(LEASE, &["k"]).await;
    let job = worker.claim_one().await;
    bed.expire(worker.id).await;
    assert_eq!(beat(&bed, worker.id, &[(job.lease.job, job.lease.token)]).await, extended());
    assert_eq!(crate::sweep::rescue(&*bed.store, false).await.expect("rescues"), 0);
    assert_eq!(bed.settle(job.lease, completed()).await, Settled::Written);
}

pub(super) async fn f4_a_closed_session_is_told_so_and_stays_closed(bed: Bed) {
    let ended = bed.session(LEASE, &["k"]).await;
    bed.store.close_session(ended.id).await.expect("closes");
    let expired = bed.session(LEASE, &["k"]).await;
    bed.expire(expired.id).await;
    let closed = bed.store.close_expired_sessions().await.expect("closes");
    assert!(closed.contains(&ended.id) && closed.contains(&expired.id));
    for session in [ended.id, expired.id, SessionId(1)] {
        assert_eq!(beat(&bed, session, &[]).await, BeatReply::Closed);
        assert!(bed.row("sessions", session).await.is_none());
    }
}

pub(super) async fn f4_a_heartbeat_brings_news_of_its_jobs_by_token(bed: Bed) {
    bed.enqueue((0..6).map(|_| job("k")).collect()).await;
    let worker = bed.session(LEASE, &["k"]).await;
    let jobs = worker.claim(5).await;
    let [fine, to_cancel, done, requeued, reclaimed] = &jobs[..] else { panic!("five jobs") };
    let strangers = bed.session(LEASE, &["k"]).await.claim_one().await;
    bed.client.cancel(to_cancel.lease.job).await.expect("asks");
    bed.client.cancel(strangers.lease.job).await.expect("asks");
    bed.settle(done.lease, completed()).await;
    bed.settle(reclaimed.lease, snoozed(reclaimed.counters)).await;
    assert_eq!(worker.claim_one().await.lease.job, reclaimed.lease.job);
    bed.settle(requeued.lease, snoozed(requeued.counters)).await;
    let mut held: Vec<_> = jobs.iter().map(|job| (job.lease.job, job.lease.token)).collect();
    held.push((strangers.lease.job, strangers.lease.token));
    held.push((JobId(i64::MAX), Token(1)));
    let BeatReply::Extended { mut lost, cancel_requested } = beat(&bed, worker.id, &held).await
    else {
        panic!("the session is open")
    };
    assert_eq!(cancel_requested, [to_cancel.lease.job]);
    lost.sort_unstable();
    let mut expected = vec![
        done.lease.job,
        requeued.lease.job,
        reclaimed.lease.job,
        strangers.lease.job,
        JobId(i64::MAX),
    ];
    expected.sort_unstable();
    assert_eq!(lost, expected);
    assert!(!lost.contains(&fine.lease.job));
}

pub(super) async fn f4_a_heartbeat_publishes_how_far_the_worker_has_claimed(bed: Bed) {
    let worker = bed.session(LEASE, &["k", "other"]).await;
    let floor = Floor { run_after: Timestamp(1_700_000_000_123_456), id: 77 };
    let floors = vec![
        QueueFloor { queue: "default".to_owned(), band: 32_767, floor },
        QueueFloor { queue: "default".to_owned(), band: -4, floor: Floor::START },
    ];
    let mut pulse = bed.store.pulse().await.expect("connects");
    let beat = Beat { session: worker.id.0, held: Vec::new(), floors: floors.clone() };
    pulse.beat(&beat).await.expect("beats");
    let live = bed.store.live_sessions().await.expect("lists");
    assert_eq!(live.len(), 1);
    assert_eq!(live[0].floors, floors);
    assert_eq!(live[0].kinds, ["k", "other"]);
    assert_eq!(live[0].queues, ["default"]);
}

/// A handler's open transaction holds up no heartbeat.
pub(super) async fn f4_a_heartbeat_does_not_wait_for_an_open_complete_in(bed: Bed) {
    bed.one().await;
    let worker = bed.session(LEASE, &["k"]).await;
    let job = worker.claim_one().await;
    let held = [(job.lease.job, job.lease.token)];
    // Opened before: connecting may want the file too.
    let mut pulse = bed.store.pulse().await.expect("connects");
    on_pool!(bed, pool => {
        let mut tx = pool.begin_with(bed.begin()).await.expect("begins");
        bed.context(job.lease, RETENTION).complete_in(&mut tx).await.expect("completes");
        let beat = Beat { session: worker.id.0, held: held.to_vec(), floors: Vec::new() };
        let reply = pulse.beat(&beat).await.expect("beats");
        // On SQLite nobody can claim or close a session either while the file is locked.
        let expected = if bed.is_sqlite() { BeatReply::Blocked } else { extended() };
        assert_eq!(reply, expected);
        tx.commit().await.expect("commits");
    });
}

pub(super) async fn f1_without_a_live_session_nothing_is_claimed(bed: Bed) {
    bed.one().await;
    let expired = bed.session(LEASE, &["k"]).await;
    bed.expire(expired.id).await;
    let ended = bed.session(LEASE, &["k"]).await;
    bed.store.close_session(ended.id).await.expect("closes");
    for worker in [&expired, &ended] {
        let claimed = worker.claim_from(5, Floor::START).await;
        assert!(!claimed.sessions_live && claimed.jobs.is_empty());
    }
    let live = bed.session(LEASE, &["k"]).await;
    let claimed = live.claim_from(5, Floor::START).await;
    assert!(claimed.sessions_live);
    assert_eq!(claimed.jobs.len(), 1);
}

/// A process has a session for each lease length: one that is over stops its claims.
pub(super) async fn f1_one_expired_session_of_two_stops_the_claim(bed: Bed) {
    bed.enqueue(vec![job("k"), job("slow")]).await;
    let short = bed.session(LEASE, &["k"]).await;
    let long = bed.session(LEASE * 10, &["slow"]).await;
    let mut claim = short.asking("default", 5, Floor::START);
    claim.kinds.push(("slow".to_owned(), long.id));
    bed.expire(short.id).await;
    let claimed = bed.store.claim(&claim).await.expect("claims");
    assert!(!claimed.sessions_live && claimed.jobs.is_empty());
    beat(&bed, short.id, &[]).await;
    let claimed = bed.store.claim(&claim).await.expect("claims");
    assert!(claimed.sessions_live);
    let session_of = |kind: &str| {
        claimed.jobs.iter().find(|job| job.kind == kind).expect("claimed").lease.session
    };
    assert_eq!(session_of("k"), short.id);
    assert_eq!(session_of("slow"), long.id, "each job has the session of its kind's lease");
}

pub(super) async fn f1_a_session_id_can_be_registered_once(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    let again = NewSession {
        id: worker.id,
        worker: "another".to_owned(),
        lease: LEASE,
        kinds: Vec::new(),
        queues: Vec::new(),
    };
    bed.store.open_session(&again).await.expect_err("it is taken");
    let row = bed.row("sessions", worker.id).await.expect("open");
    assert_eq!(row.text("worker"), format!("worker-{}", worker.id));
}

/// How long an idle worker may wait for what is scheduled; what is due or parked does not count.
pub(super) async fn e6_the_next_due_job_is_the_earliest_scheduled_one(bed: Bed) {
    use std::time::Duration;

    let queues = ["default".to_owned()];
    let kinds = ["k".to_owned()];
    let next = || async { bed.store.next_due(&queues, &kinds).await.expect("looks") };
    assert_eq!(next().await, None);
    let scheduled = |kind, priority, seconds| {
        let mut job = job(kind);
        job.priority = priority;
        job.due = crate::job::CheckedDue::After(Duration::from_secs(seconds));
        job
    };
    let parked = bed.one().await;
    let for_ever = bed.for_ever();
    bed.execute(&format!("update jobq.jobs set run_after = {for_ever} where id = {parked}")).await;
    bed.enqueue(vec![scheduled("stranger", 0, 10), job("k")]).await;
    assert_eq!(next().await, None);
    bed.enqueue(vec![scheduled("k", 0, 900), scheduled("k", -4, 300), scheduled("k", 4, 600)])
        .await;
    let wait = next().await.expect("something is scheduled");
    assert!((Duration::from_secs(280)..=Duration::from_secs(300)).contains(&wait), "{wait:?}");
}

/// Many heartbeats and claims of one session beside each other.
pub(super) async fn f4_heartbeats_and_claims_do_not_hold_each_other_up(bed: Bed) {
    bed.enqueue((0..200).map(|_| job("k")).collect()).await;
    let worker = bed.session(LEASE, &["k"]).await;
    let mut tasks: Vec<crate::handler::BoxFuture<'_, usize>> = Vec::new();
    for _ in 0..4 {
        tasks.push(Box::pin(async {
            let mut claimed = 0;
            for _ in 0..10 {
                claimed += worker.claim(5).await.len();
            }
            claimed
        }));
        tasks.push(Box::pin(async {
            let mut pulse = bed.store.pulse().await.expect("connects");
            let beat = Beat { session: worker.id.0, ..Beat::default() };
            for _ in 0..20 {
                let reply = pulse.beat(&beat).await.expect("beats");
                assert_ne!(reply, BeatReply::Closed);
            }
            0
        }));
    }
    assert_eq!(join_all(tasks).await.into_iter().sum::<usize>(), 200);
}

/// A process whose claim gets no further (its handlers block every thread, the network stalls) keeps its
/// sessions alive all the same.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) async fn f4_a_claim_that_stops_anywhere_holds_up_no_heartbeat(bed: Bed) {
    bed.enqueue((0..100).map(|_| job("k")).collect()).await;
    let worker = bed.session(LEASE, &["k"]).await;
    let mut stopped = 0;
    // How many steps it takes, and to where, depends on when the server's answers come.
    for steps in (1..=8).cycle().take(24) {
        let store = bed.another_client(&bed.schema).store();
        store.live_sessions().await.expect("reads, and so has a connection");
        let claim = worker.asking("default", 2, Floor::START);
        stopped += u32::from(super::wait::stopped_after(steps, store.claim(&claim)).await);
        assert_eq!(beat(&bed, worker.id, &[]).await, extended(), "after {steps} steps");
        std::mem::forget(store);
    }
    assert!(stopped > 2, "it was stopped somewhere");
}

/// A sweep closes the session while the claim is on its way.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) async fn f6_a_claim_whose_session_is_closed_meanwhile_leases_nothing(bed: Bed) {
    bed.enqueue((0..5).map(|_| job("k")).collect()).await;
    let worker = bed.session(LEASE, &["k"]).await;
    let (session, claim) = (worker.id, worker.asking("default", 3, Floor::START));
    on_pool!(bed, pool => {
        let mut sweep = pool.begin().await.expect("begins");
        let close = bed.statement(&format!("delete from jobq.sessions where id = {session}"));
        sqlx::query(close).execute(&mut *sweep).await.expect("closes");
        let store = bed.store.clone();
        let claim = tokio::spawn(async move { store.claim(&claim).await.expect("answers") });
        bed.until_one_waits_for_a_lock().await;
        sweep.commit().await.expect("commits");
        let claimed = claim.await.expect("no panic");
        assert!(!claimed.sessions_live && claimed.jobs.is_empty());
    });
    assert_eq!(bed.number("select count(*) from jobq.jobs where token <> 0").await, 0);
}

/// A claim that has begun is seen by the sweep that closes its session, however late it commits.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) async fn f6_a_session_is_not_closed_under_a_claim_in_flight(bed: Bed) {
    bed.enqueue((0..5).map(|_| job("k")).collect()).await;
    let worker = bed.session(LEASE, &["k"]).await;
    let (session, pin) =
        (worker.id, if bed.is_mysql() { "lock in share mode" } else { "for key share" });
    bed.expire(session).await;
    on_pool!(bed, pool => {
        // What a claim does, with a pause before its commit.
        let mut in_flight = pool.begin().await.expect("begins");
        let pins = format!("select id from jobq.sessions where id = {session} {pin}");
        let pinned = sqlx::query(bed.statement(&pins)).fetch_all(&mut *in_flight).await;
        assert_eq!(pinned.expect("pins").len(), 1);
        let take = format!("update jobq.jobs set token = 1, attempt = 1, leased_by = {session}");
        sqlx::query(bed.statement(&take)).execute(&mut *in_flight).await.expect("claims");
        assert_eq!(crate::sweep::rescue(&*bed.store, false).await.expect("sweeps"), 0);
        assert_eq!(bed.count("sessions").await, 1);
        in_flight.commit().await.expect("commits");
        assert_eq!(crate::sweep::rescue(&*bed.store, false).await.expect("rescues"), 5);
    });
    assert_eq!(bed.number("select count(*) from jobq.jobs where leased_by <> 0").await, 0);
}
