//! Everything at once: no job is lost, doubled or settled twice, and nothing waits for ever.

use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use jobq_core::job::{JobId, Lease};
use jobq_core::lifecycle::{self, Transition};

use super::bed::Bed;
use super::late::{at, publish};
use super::settle::{buried, cancelled, completed, failed, snoozed};
use super::wait::join_all;
use super::worker::{job, settlement};
use crate::handler::BoxFuture;
use crate::store::{CancelReply, ClaimedJob, DeadFilter, Settled, Settlement};
use crate::sweep::{Notes, find_late, rescue};

const JOBS: usize = 200;
const CLAIMS: u64 = 4_000;

/// What the tasks share: the jobs, and an account of what was claimed and settled.
struct Chaos<'b> {
    bed: &'b Bed,
    ids: Vec<JobId>,
    claims: AtomicU64,
    claimed: Mutex<HashSet<Lease>>,
    written: Mutex<HashSet<Lease>>,
}

/// Numbers that look random and are the same each time.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

impl Chaos<'_> {
    fn goes_on(&self) -> bool {
        self.claims.load(Ordering::Relaxed) < CLAIMS
    }

    /// Claims and settles under a session that somebody may let expire at any time.
    async fn work(&self, seed: u64) {
        let mut dice = Dice(seed);
        while self.goes_on() {
            let worker = self.bed.session(super::bed::LEASE * 60, &["k"]).await;
            for _ in 0..10 {
                let jobs = worker.claim(1 + dice.roll(20) as u32).await;
                self.claims.fetch_add(jobs.len().max(1) as u64, Ordering::Relaxed);
                for job in &jobs {
                    let new = self.claimed.lock().expect("no panic").insert(job.lease);
                    assert!(new, "{:?} was claimed twice", job.lease);
                }
                if dice.roll(8) == 0 {
                    // It hangs, and its lease runs out.
                    self.bed.expire(worker.id).await;
                    break;
                }
                let batch = jobs.iter().map(|job| outcome(job, &mut dice)).collect();
                self.settle(batch).await;
            }
        }
    }

    async fn settle(&self, mut batch: Vec<Settlement>) {
        while !batch.is_empty() {
            let settled = self.bed.settle_all(&batch).await;
            let mut rest = Vec::new();
            for (mut settlement, settled) in batch.into_iter().zip(settled) {
                match settled {
                    Settled::Written => {
                        let new = self.written.lock().expect("no panic").insert(settlement.lease);
                        assert!(new, "{:?} was settled twice", settlement.lease);
                    }
                    Settled::Found | Settled::LeaseLost => {}
                    Settled::Busy => rest.push(settlement),
                    Settled::CancelRequested => {
                        settlement.transition = cancelled();
                        rest.push(settlement);
                    }
                }
            }
            batch = rest;
        }
    }

    async fn cancel_and_redrive(&self) {
        let mut dice = Dice(7);
        while self.goes_on() {
            let id = self.ids[dice.roll(JOBS as u64) as usize];
            let reply = self.bed.client.cancel(id).await.expect("answers");
            assert_ne!(reply, CancelReply::NotFound, "{id} is nowhere");
            self.bed.client.redrive(&DeadFilter::id(id)).await.expect("redrives");
            self.bed.client.redrive(&DeadFilter::all()).await.expect("redrives");
        }
    }

    async fn rescue(&self) {
        while self.goes_on() {
            rescue(&*self.bed.store, false).await.expect("rescues");
            tokio::task::yield_now().await;
        }
    }

    /// Sweeps beside a worker whose floors are wrong, so that every job counts as passed by.
    async fn sweep(&self) {
        let wrong = self.bed.session(super::bed::LEASE * 60, &["k"]).await;
        let mut notes = Notes::default();
        while self.goes_on() {
            publish(self.bed, &wrong, at(self.bed, 3_600).await).await;
            let horizon = self.bed.store.horizon().await.expect("reads");
            find_late(&*self.bed.store, &mut notes, horizon).await.expect("sweeps");
        }
    }

    /// Every job is in one place, and has been claimed as often as its token says.
    async fn assert_all_are_there(&self) {
        let mut found = 0;
        for table in ["jobs", "finished", "dead"] {
            for row in self.bed.rows(table, "").await {
                found += 1;
                let id = row.number("id");
                let claims =
                    self.claimed.lock().expect("no panic").iter().filter(|l| l.job.0 == id).count();
                assert_eq!(row.number("token"), claims as i64, "{row:?}");
            }
        }
        assert_eq!(found, JOBS, "each job is in one table");
        let distinct = "select count(distinct id) from (
                 select id from jobq.jobs
                 union all select id from jobq.finished
                 union all select id from jobq.dead
             ) as every";
        assert_eq!(self.bed.number(distinct).await, JOBS as i64);
    }
}

/// Completed jobs are over, so few are; the others come back in one way or another.
fn outcome(job: &ClaimedJob, dice: &mut Dice) -> Settlement {
    let transition: Transition = match dice.roll(100) {
        0 => completed(),
        1..10 => cancelled(),
        10..30 => buried(job.counters),
        30..50 => failed(job.counters, Duration::ZERO),
        50..75 => snoozed(job.counters),
        _ => lifecycle::release(job.counters),
    };
    settlement(job.lease, transition)
}

pub(super) async fn f2_whatever_happens_at_once_no_job_is_lost_or_settled_twice(bed: Bed) {
    let mut new = job("k");
    (new.max_attempts, new.max_crashes) = (1_000_000, 30_000);
    let ids = bed.enqueue(vec![new; JOBS]).await;
    let chaos = Chaos {
        bed: &bed,
        ids,
        claims: AtomicU64::new(0),
        claimed: Mutex::default(),
        written: Mutex::default(),
    };
    let mut tasks: Vec<BoxFuture<'_, ()>> = Vec::new();
    for seed in 1..=4 {
        tasks.push(Box::pin(chaos.work(seed)));
    }
    tasks.push(Box::pin(chaos.cancel_and_redrive()));
    tasks.push(Box::pin(chaos.sweep()));
    for _ in 0..2 {
        tasks.push(Box::pin(chaos.rescue()));
    }
    join_all(tasks).await;
    chaos.assert_all_are_there().await;

    // What is left comes to an end like any other job.
    bed.execute(&format!("update jobq.sessions set leased_until = {}", bed.seconds_away(-1))).await;
    while rescue(&*bed.store, true).await.expect("rescues") > 0 {}
    bed.client.redrive(&DeadFilter::all()).await.expect("redrives");
    let worker = bed.session(super::bed::LEASE, &["k"]).await;
    loop {
        let jobs = worker.claim(50).await;
        if jobs.is_empty() {
            break;
        }
        chaos.claimed.lock().expect("no panic").extend(jobs.iter().map(|job| job.lease));
        chaos.settle(jobs.iter().map(|job| settlement(job.lease, completed())).collect()).await;
    }
    chaos.assert_all_are_there().await;
    assert_eq!((bed.count("jobs").await, bed.count("dead").await), (0, 0));
}
