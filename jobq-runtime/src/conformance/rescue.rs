//! Rescue: what becomes of the jobs of a session whose lease expired.

use jobq_core::lifecycle::Counters;
use jobq_core::queue::EXPRESS;

use super::bed::{Bed, LEASE};
use super::settle::{completed, snoozed};
use super::wait::join_all;
use super::worker::job;
use crate::store::{CancelReply, ClaimedJob, Settled};
use crate::sweep;

/// Lets every session that holds one of these jobs expire and rescues.
async fn crash(bed: &Bed, jobs: &[ClaimedJob]) -> u64 {
    let mut sessions: Vec<_> = jobs.iter().map(|job| job.lease.session).collect();
    sessions.sort_unstable();
    sessions.dedup();
    for session in sessions {
        bed.expire(session).await;
    }
    sweep::rescue(&*bed.store, false).await.expect("rescues")
}

/// A job claimed by a process of its own.
async fn claim_one(bed: &Bed) -> ClaimedJob {
    bed.session(LEASE, &["k"]).await.claim_one().await
}

pub(super) async fn f6_a_rescued_job_is_next_in_line_before_the_backlog(bed: Bed) {
    bed.one().await;
    let job = claim_one(&bed).await;
    let mut urgent = super::worker::job("k");
    urgent.priority = 4;
    bed.enqueue((0..50).map(|_| urgent.clone()).collect()).await;
    assert_eq!(crash(&bed, std::slice::from_ref(&job)).await, 1);
    let again = claim_one(&bed).await;
    assert_eq!(again.lease.job, job.lease.job);
    assert_eq!(again.band, EXPRESS);
    assert_eq!(again.lease.token.0, 2);
    assert_eq!(again.counters, Counters { attempt: 2, crashes: 1, interruptions: 0 });
    let attempt = &bed.attempts(job.lease.job).await[0];
    assert_eq!(attempt.text("reason"), "crashed");
    assert_eq!(attempt.text("worker"), format!("worker-{}", job.lease.session));
    assert!(attempt.text("error").contains("lease expired"));
}

pub(super) async fn f6_only_crashes_while_isolated_count_towards_poison(bed: Bed) {
    let mut poison = job("k");
    (poison.max_attempts, poison.max_crashes) = (100, 3);
    let id = bed.enqueue(vec![poison]).await[0];
    // Alone only from the fourth crash on: until then its neighbours may have been to blame.
    for (isolated, crashes) in [(false, 1), (false, 1), (false, 1), (true, 2)] {
        let job = claim_one(&bed).await;
        if isolated {
            assert!(bed.store.isolate(job.lease).await.expect("writes"));
        }
        assert_eq!(crash(&bed, &[job]).await, 1);
        assert_eq!(bed.job_row(id).await.number("crashes"), crashes);
        assert_eq!(bed.job_row(id).await.number("isolated"), 0, "that was that attempt");
    }
    let last = claim_one(&bed).await;
    assert!(bed.store.isolate(last.lease).await.expect("writes"));
    assert_eq!(crash(&bed, &[last]).await, 1);
    let dead = bed.row("dead", id).await.expect("it is poison");
    assert_eq!(dead.text("reason"), "poison");
    // What crashed before it was isolated had not started: it cost no attempt.
    assert_eq!((dead.number("crashes"), dead.number("attempt")), (3, 3));
    assert_eq!(bed.attempts(id).await.len(), 5);
}

pub(super) async fn f6_a_crash_of_the_last_attempt_is_the_end(bed: Bed) {
    let mut twice = job("k");
    twice.max_attempts = 2;
    let id = bed.enqueue(vec![twice]).await[0];
    let first = claim_one(&bed).await;
    crash(&bed, &[first]).await;
    let second = claim_one(&bed).await;
    assert!(bed.store.isolate(second.lease).await.expect("writes"));
    crash(&bed, &[second]).await;
    let dead = bed.row("dead", id).await.expect("it is dead");
    assert_eq!(dead.text("reason"), "lease_expired");
    assert_eq!((dead.number("attempt"), dead.number("crashes")), (2, 2));
}

pub(super) async fn f6_a_crashed_job_that_was_to_be_cancelled_is_cancelled(bed: Bed) {
    let id = bed.one().await;
    let job = claim_one(&bed).await;
    assert_eq!(bed.client.cancel(id).await.expect("asks"), CancelReply::Requested);
    assert_eq!(crash(&bed, &[job]).await, 1);
    assert_eq!(bed.row("finished", id).await.expect("finished").text("state"), "cancelled");
}

/// Crashes, failures and interruptions are counted apart.
pub(super) async fn f6_the_three_counters_do_not_mix(bed: Bed) {
    let id = bed.one().await;
    let crashed = claim_one(&bed).await;
    crash(&bed, &[crashed]).await;
    let interrupted = claim_one(&bed).await;
    bed.settle(interrupted.lease, jobq_core::lifecycle::release(interrupted.counters)).await;
    let snoozed_job = claim_one(&bed).await;
    bed.settle(snoozed_job.lease, snoozed(snoozed_job.counters)).await;
    let failed = claim_one(&bed).await;
    let failure = super::settle::failed(failed.counters, std::time::Duration::ZERO);
    bed.settle(failed.lease, failure).await;
    let row = bed.job_row(id).await;
    let counters = (row.number("attempt"), row.number("crashes"), row.number("interruptions"));
    assert_eq!(counters, (2, 1, 1), "a crash and a failure, a crash, an interruption");
    let reasons: Vec<String> =
        bed.attempts(id).await.iter().map(|row| row.text("reason").to_owned()).collect();
    assert_eq!(reasons, ["crashed", "interrupted", "failed"]);
}

pub(super) async fn f6_jobs_of_live_sessions_are_left_alone(bed: Bed) {
    bed.enqueue((0..3).map(|_| job("k")).collect()).await;
    let (first, second, live) =
        (claim_one(&bed).await, claim_one(&bed).await, claim_one(&bed).await);
    let before = bed.everything(live.lease.job).await;
    assert_eq!(crash(&bed, &[first, second]).await, 2);
    assert_eq!(before, bed.everything(live.lease.job).await);
    assert_eq!(bed.settle(live.lease, completed()).await, Settled::Written);
}

pub(super) async fn f6_a_session_without_jobs_is_forgotten(bed: Bed) {
    let idle = bed.session(LEASE, &["k"]).await;
    let ended = bed.session(LEASE, &["k"]).await;
    bed.store.close_session(ended.id).await.expect("closes");
    bed.expire(idle.id).await;
    assert_eq!(sweep::rescue(&*bed.store, false).await.expect("rescues"), 0);
    assert_eq!(bed.count("sessions").await + bed.count("closed_sessions").await, 0);
}

/// Something that somebody at work by hand left behind is in one job's way.
pub(super) async fn f6_one_rescue_that_is_refused_holds_up_nobody_else(bed: Bed) {
    bed.enqueue((0..3).map(|_| job("k")).collect()).await;
    let jobs = bed.session(LEASE, &["k"]).await.claim(3).await;
    let id = jobs[1].lease.job;
    // On SQLite a row that is in the way is replaced.
    let (put, remove) = if bed.is_sqlite() {
        (
            format!(
                "create trigger in_the_way before insert on jobq.attempts when new.job_id = {id}
                 begin select raise(abort, 'by hand'); end"
            ),
            "drop trigger in_the_way".to_owned(),
        )
    } else {
        (
            format!(
                "insert into jobq.attempts (job_id, token, attempt, reason, error)
                 values ({id}, 1, 1, 'failed', 'by hand')"
            ),
            format!("delete from jobq.attempts where job_id = {id}"),
        )
    };
    bed.execute(&put).await;
    bed.expire(jobs[0].lease.session).await;
    // PostgreSQL says that it refuses a write before it lets go of the rows: the next pass has them.
    let held = "select count(*) from jobq.jobs where leased_by <> 0";
    let sweep_until = async |left: i64| {
        super::wait::until("no more are left", || async {
            sweep::rescue(&*bed.store, false).await.expect("goes on with what else is due");
            bed.number(held).await == left
        })
        .await;
    };
    sweep_until(1).await;
    assert_ne!(bed.job_row(id).await.number("leased_by"), 0, "it is still to be rescued");
    bed.execute(&remove).await;
    sweep_until(0).await;
    assert_eq!(bed.count("attempts").await, 3, "each was rescued once");
    assert_eq!(bed.count("closed_sessions").await, 0);
}

/// More than one step of the sweep reads at once.
pub(super) async fn f6_thousands_of_jobs_are_rescued_in_one_go(bed: Bed) {
    bed.enqueue((0..2_500).map(|_| job("k")).collect()).await;
    let jobs = bed.session(LEASE, &["k"]).await.claim(2_500).await;
    assert_eq!(crash(&bed, &jobs).await, 2_500);
    assert_eq!(bed.number("select count(*) from jobq.jobs where leased_by <> 0").await, 0);
    assert_eq!(bed.count("closed_sessions").await, 0);
}

pub(super) async fn f6_four_rescuers_at_once_rescue_each_job_once(bed: Bed) {
    let ids = bed.enqueue((0..400).map(|_| job("k")).collect()).await;
    for _ in 0..4 {
        let worker = bed.session(LEASE, &["k"]).await;
        assert_eq!(worker.claim(100).await.len(), 100);
        bed.expire(worker.id).await;
    }
    let rescuers: Vec<_> = (0..4)
        .map(|_| {
            let store = bed.store.clone();
            tokio::spawn(async move { sweep::rescue(&*store, false).await.expect("rescues") })
        })
        .collect();
    let rescued = join_all(rescuers).await;
    let rescued: u64 = rescued.into_iter().map(|rescued| rescued.expect("no panic")).sum();
    // One that found its rows locked by another leaves the rest to the next pass.
    let rest = sweep::rescue(&*bed.store, false).await.expect("rescues");
    assert_eq!(rescued + rest, ids.len() as u64);
    assert_eq!(bed.count("attempts").await, 400, "each was rescued from its one claim");
    let once = "select count(*) from jobq.jobs where crashes = 1 and leased_by = 0 and token = 1";
    assert_eq!(bed.number(once).await, 400);
    sweep::rescue(&*bed.store, false).await.expect("rescues");
    assert_eq!(bed.count("closed_sessions").await, 0);
}

/// A lease of a session that no table knows: somebody deleted it by hand, or a restore lost it.
pub(super) async fn f6_a_job_of_a_session_that_does_not_exist_is_found(bed: Bed) {
    let orphan = bed.one().await;
    let job = claim_one(&bed).await;
    bed.execute("delete from jobq.sessions").await;
    let live = bed.session(LEASE, &["k"]).await;
    let held = bed.one().await;
    assert_eq!(live.claim_one().await.lease.job, held);
    assert_eq!(sweep::rescue(&*bed.store, false).await.expect("rescues"), 0);
    assert_eq!(sweep::rescue(&*bed.store, true).await.expect("rescues"), 1);
    assert_eq!(bed.job_row(orphan).await.number("leased_by"), 0);
    assert_eq!(bed.job_row(held).await.number("leased_by"), live.id.0);
    assert!(bed.attempts(job.lease.job).await[0].is_null("worker"), "nobody knows whose it was");
}

pub(super) async fn f6_a_sessions_jobs_can_be_listed(bed: Bed) {
    bed.enqueue((0..3).map(|_| job("k")).collect()).await;
    let worker = bed.session(LEASE, &["k"]).await;
    let jobs = worker.claim(2).await;
    claim_one(&bed).await;
    bed.store.isolate(jobs[1].lease).await.expect("writes");
    bed.client.cancel(jobs[1].lease.job).await.expect("asks");
    let mut held = bed.store.held(worker.id).await.expect("lists");
    held.sort_by_key(|job| job.lease.job);
    let leases: Vec<_> = held.iter().map(|job| job.lease).collect();
    assert_eq!(leases, [jobs[0].lease, jobs[1].lease]);
    assert_eq!((held[0].isolated, held[0].cancel_requested), (false, false));
    assert_eq!((held[1].isolated, held[1].cancel_requested), (true, true));
    assert_eq!((held[1].counters, held[1].limits), (jobs[1].counters, jobs[1].limits));
}

/// A handler's transaction that is still open holds up the rescue of its own job only.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) async fn f6_an_open_complete_in_does_not_hold_up_the_rescue_of_others(bed: Bed) {
    use jobq_core::job::JobId;

    use super::bed::{RETENTION, on_pool};

    for commit in [false, true] {
        bed.enqueue((0..20).map(|_| job("k")).collect()).await;
        let worker = bed.session(LEASE, &["k"]).await;
        let jobs = worker.claim(20).await;
        let busy = jobs[7].lease;
        on_pool!(bed, pool => {
            let mut tx = pool.begin().await.expect("begins");
            bed.context(busy, RETENTION).complete_in(&mut tx).await.expect("completes");
            assert_eq!(crash(&bed, &jobs).await, 19);
            let still: Vec<JobId> = bed
                .rows("jobs", "where leased_by <> 0")
                .await
                .iter()
                .map(|row| JobId(row.number("id")))
                .collect();
            assert_eq!(still, [busy.job]);
            assert!(bed.row("closed_sessions", worker.id).await.is_some(), "it is not forgotten");
            assert_eq!(sweep::rescue(&*bed.store, false).await.expect("rescues"), 0);
            if commit {
                tx.commit().await.expect("commits");
            } else {
                tx.rollback().await.expect("rolls back");
            }
        });
        let rescued = sweep::rescue(&*bed.store, false).await.expect("rescues");
        assert_eq!(rescued, u64::from(!commit));
        assert_eq!(bed.row("finished", busy.job).await.is_some(), commit);
        assert!(bed.row("closed_sessions", worker.id).await.is_none());
        bed.execute("delete from jobq.jobs").await;
    }
}

/// By hand, or a claim whose process got no further.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) async fn f6_sessions_that_somebody_has_locked_hold_up_no_other(bed: Bed) {
    const LOCKED: usize = 12;
    bed.enqueue((0..=LOCKED).map(|_| job("k")).collect()).await;
    let mut sessions = Vec::new();
    for _ in 0..=LOCKED {
        let session = claim_one(&bed).await.lease.session;
        bed.expire(session).await;
        sessions.push(session.0);
    }
    let other = sessions.pop().expect("the last one");
    super::bed::on_pool!(bed, pool => {
        let mut holder = pool.begin().await.expect("begins");
        // One by one: for a list MySQL may lock all there are.
        for session in sessions {
            let lock = format!("select 1 from jobq.sessions where id = {session} for update");
            sqlx::query(bed.statement(&lock)).execute(&mut *holder).await.expect("locks");
        }
        assert_eq!(sweep::rescue(&*bed.store, false).await.expect("rescues the other"), 1);
        holder.rollback().await.expect("ends");
    });
    let held = format!("select count(*) from jobq.jobs where leased_by = {other}");
    assert_eq!(bed.number(&held).await, 0);
    let rest = sweep::rescue(&*bed.store, false).await.expect("rescues");
    assert_eq!(rest, LOCKED as u64);
}

/// A process that is paused, or cut off, in the middle of whatever the runtime does: the server
/// keeps its connections, and hears no more of it.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) async fn f6_a_process_that_stops_anywhere_holds_nobody_up_for_long(bed: Bed) {
    use super::wait::{stopped_after, until};
    use super::worker::settlement;
    use crate::store::{Floor, Shift};

    const SPAN: std::time::Duration = std::time::Duration::from_secs(9);
    let duty = |steps: usize| -> &'static str { format!("duty {steps}").leak() };
    bed.enqueue((0..200).map(|_| job("k")).collect()).await;
    let worker = bed.session(LEASE, &["k"]).await;
    let mut duties = Vec::new();
    for operation in ["claim", "settle", "take a duty", "move", "prune", "cancel"] {
        for steps in 1.. {
            let store = bed.another_client(&bed.schema).store();
            // So that it has a connection.
            store.live_sessions().await.expect("reads");
            let stopped = match operation {
                "claim" => {
                    let claim = worker.asking("default", 2, Floor::START);
                    stopped_after(steps, store.claim(&claim)).await
                }
                "settle" => {
                    let jobs = worker.claim(2).await;
                    let batch = [(&jobs[0], snoozed(jobs[0].counters)), (&jobs[1], completed())]
                        .map(|(job, transition)| settlement(job.lease, transition));
                    stopped_after(steps, store.settle(&batch)).await
                }
                "take a duty" => {
                    duties.push(duty(steps));
                    stopped_after(steps, store.take_duty(duty(steps), worker.id, SPAN)).await
                }
                "move" => {
                    let horizon = store.horizon().await.expect("reads");
                    let last = Floor { run_after: horizon.now, id: i64::MAX };
                    let jobs = store.unleased("default", 0, Floor::START, last, 2).await;
                    let jobs = jobs.expect("reads");
                    stopped_after(steps, store.shift(&jobs, Shift::Hurry)).await
                }
                "prune" => {
                    bed.execute("update jobq.finished set expires_at = created_at").await;
                    stopped_after(steps, store.prune(1)).await
                }
                _ => {
                    let job = bed.one().await;
                    stopped_after(steps, store.cancel(job)).await
                }
            };
            std::mem::forget(store);
            if !stopped {
                break;
            }
        }
    }
    bed.expire(worker.id).await;
    until("its jobs are rescued", || async {
        let swept = sweep::rescue(&*bed.store, false).await;
        let sessions = bed.count("sessions").await + bed.count("closed_sessions").await;
        swept.is_ok() && sessions == 0
    })
    .await;
    let second = bed.session(LEASE, &["k"]).await;
    let left = bed.count("jobs").await as usize;
    let claimed = std::cell::Cell::new(0);
    until("every job can be claimed", || async {
        claimed.set(claimed.get() + second.claim(200).await.len());
        claimed.get() == left
    })
    .await;
    for duty in duties {
        until("every duty can be taken", || async {
            let taken = bed.store.take_duty(duty, second.id, SPAN).await;
            taken.is_ok_and(|notes| notes.is_some())
        })
        .await;
    }
}

pub(super) async fn f6_a_lease_of_a_clock_that_stepped_back_expires_too(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    let lease = i64::try_from(LEASE.as_secs()).expect("short");
    for (ahead, closed) in [(lease + 5, false), (lease + 60, true)] {
        let until = bed.seconds_away(ahead);
        bed.execute(&format!("update jobq.sessions set leased_until = {until}")).await;
        let found = bed.store.close_expired_sessions().await.expect("closes");
        assert_eq!(found == [worker.id], closed, "{ahead} s ahead");
    }
    // So does a duty that somebody holds until then.
    let store = &*bed.store;
    let span = std::time::Duration::from_secs(9);
    let other = jobq_core::job::SessionId(worker.id.0 + 1);
    assert!(store.take_duty("d", worker.id, span).await.expect("asks").is_some());
    assert!(store.take_duty("d", other, span).await.expect("asks").is_none());
    let until = bed.seconds_away(3_600);
    bed.execute(&format!("update jobq.duties set held_until = {until}")).await;
    assert!(store.take_duty("d", other, span).await.expect("asks").is_some());
}
