//! Claims: who is given which job.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use jobq_core::lifecycle::{self, Counters};

use super::bed::{Bed, LEASE};
use super::wait::join_all;
use super::worker::{job, settlement};
use crate::store::{Claimed, Floor, Settled};

pub(super) async fn f1_each_claim_raises_the_token_and_the_attempt(bed: Bed) {
    let id = bed.one().await;
    let worker = bed.session(LEASE, &["k"]).await;
    for n in 1..=3 {
        let claimed = worker.claim_one().await;
        assert_eq!(claimed.lease.job, id);
        assert_eq!(claimed.lease.token.0, n);
        assert_eq!(claimed.counters.attempt, 1, "a release gives the attempt back");
        let released = lifecycle::release(claimed.counters);
        assert_eq!(bed.settle(claimed.lease, released).await, Settled::Written);
    }
    assert!(worker.claim(1).await[0].lease.token.0 == 4, "a token never goes down");
}

/// All at once, from queues that this process has not seen yet.
pub(super) async fn f1_the_first_claims_of_a_process_all_bring_jobs(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    for queue in ["first", "second", "third", "fourth", "fifth"] {
        let mut wanted = job("k");
        wanted.queue = queue.into();
        bed.enqueue(vec![wanted; 40]).await;
        let claim = worker.asking(queue, 5, Floor::START);
        let claims = join_all((0..8).map(|_| worker.claim_as(&claim)).collect::<Vec<_>>()).await;
        let brought: Vec<usize> = claims.iter().map(|claimed| claimed.jobs.len()).collect();
        assert_eq!(brought, [5; 8], "there are as many as they all ask for");
    }
}

/// Claims and releases from many sessions at once, and checks an independent log: each claim of
/// a job must have a token no other claim of it had, and start only after the one before ended.
pub(super) async fn f1_many_claimers_never_share_a_job(bed: Bed) {
    const CLAIMERS: usize = 8;
    const JOBS: usize = 200;
    // From the start of the queue, past what others hold, which takes MySQL longest.
    let usual = if bed.is_mysql() { 6_000 } else { 20_000 };
    let claims: u64 = std::env::var("JOBQ_TEST_CLAIMS")
        .map_or(usual, |claims| claims.parse().expect("JOBQ_TEST_CLAIMS is a number"));
    bed.enqueue((0..JOBS).map(|_| job("k")).collect()).await;
    let held: Mutex<HashMap<i64, i64>> = Mutex::new(HashMap::new());
    let last: Mutex<HashMap<i64, i64>> = Mutex::new(HashMap::new());
    let done = AtomicU64::new(0);
    let worker_loop = || async {
        // Nobody extends it, and millions of claims take a while.
        let worker = bed.session(LEASE * 1_000, &["k"]).await;
        let mut turn = worker.id.0;
        while done.load(Ordering::Relaxed) < claims {
            let Claimed { sessions_live, jobs, .. } = worker.claim_from(20, Floor::START).await;
            assert!(sessions_live);
            {
                let mut held = held.lock().expect("no test thread panicked");
                let mut last = last.lock().expect("no test thread panicked");
                for job in &jobs {
                    let (id, token) = (job.lease.job.0, job.lease.token.0);
                    assert_eq!(held.insert(id, token), None, "job {id} was claimed twice");
                    let before = last.insert(id, token).unwrap_or(0);
                    assert_eq!(token, before + 1, "job {id} skipped or repeated a token");
                }
            }
            done.fetch_add(jobs.len() as u64, Ordering::Relaxed);
            let mut settlements = Vec::new();
            for job in jobs {
                held.lock().expect("no test thread panicked").remove(&job.lease.job.0);
                turn = turn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let transition = if turn & 0x1_0000_0000 == 0 {
                    lifecycle::release(job.counters)
                } else {
                    lifecycle::settle(
                        jobq_core::outcome::Outcome::Snoozed { delay: Duration::ZERO },
                        Counters { interruptions: 0, ..job.counters },
                        job.limits,
                        &jobq_core::retry::Backoff::DEFAULT,
                        0.0,
                    )
                };
                settlements.push(settlement(job.lease, transition));
            }
            // A claim that read the row before it was taken may have it locked for a moment.
            while !settlements.is_empty() {
                let settled = bed.store.settle(&settlements).await.expect("settles");
                let mut settled = settled.into_iter();
                settlements.retain(|_| {
                    let settled = settled.next().expect("one answer for each");
                    assert!(matches!(settled, Settled::Written | Settled::Busy), "{settled:?}");
                    settled == Settled::Busy
                });
            }
        }
    };
    let loops: Vec<_> = (0..CLAIMERS).map(|_| worker_loop()).collect();
    join_all(loops).await;
    assert!(done.load(Ordering::Relaxed) >= claims);
}

pub(super) async fn o1_higher_priority_first_then_time_then_id(bed: Bed) {
    let mut jobs = Vec::new();
    for priority in [0, -4, 4, 0, 1] {
        let mut job = job("k");
        job.priority = priority;
        jobs.push(job);
    }
    let ids = bed.enqueue(jobs).await;
    let worker = bed.session(LEASE, &["k"]).await;
    let claimed: Vec<_> = worker.claim(10).await.iter().map(|job| job.lease.job).collect();
    assert_eq!(claimed, [ids[2], ids[4], ids[0], ids[3], ids[1]]);
}

pub(super) async fn r5_a_kind_nobody_asked_for_is_never_claimed(bed: Bed) {
    bed.enqueue(vec![job("stranger"), job("k"), job("stranger")]).await;
    let worker = bed.session(LEASE, &["k"]).await;
    let claimed = worker.claim_from(10, Floor::START).await;
    assert_eq!(claimed.jobs.len(), 1);
    assert_eq!(claimed.jobs[0].kind, "k");
    assert_eq!(
        bed.number(
            "select count(*) from jobq.jobs where kind = 'stranger' and attempt + token > 0"
        )
        .await,
        0
    );
}

/// On SQLite. PostgreSQL's floors may pass it; there the sweep finds it.
#[cfg(feature = "sqlite")]
pub(super) async fn e1_no_claim_has_seen_past_what_an_open_transaction_wrote(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    worker.claim(1).await;
    let pool = bed.sqlite_pool();
    let mut tx = pool.begin_with(bed.begin()).await.expect("begins");
    let id =
        super::sample::plain().enqueue(bed.client.within(&mut tx)).await.expect("enqueues").id();
    let run_after = "select run_after from jobq.jobs";
    let run_after: i64 = sqlx::query_scalar(bed.statement(run_after))
        .fetch_one(&mut *tx)
        .await
        .expect("it is there");
    while bed.now().await < run_after + 50_000 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for _ in 0..3 {
        let claimed = worker.claim_from(1, Floor::START).await;
        assert!(claimed.jobs.is_empty());
        assert!(claimed.seen_to.0 <= run_after, "{:?} is past {run_after}", claimed.seen_to);
    }
    tx.commit().await.expect("commits");
    let claimed = worker.claim_from(1, Floor::START).await;
    assert_eq!(claimed.jobs[0].lease.job, id);
    assert!(claimed.seen_to.0 >= run_after);
}
