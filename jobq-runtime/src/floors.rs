//! The cursor: where each claim begins to look.
//!
//! A queue's due index has dead entries at its beginning: of jobs that were claimed and are gone,
//! but that the database cannot clean up yet. A claim that begins at the beginning reads them all,
//! more with every job done. So a worker remembers, for each queue and band, the last place it
//! claimed, and begins there.
//!
//! Transactions commit later than the time in their rows, so a row may appear behind that place.
//! Near the present the worker therefore looks back a little: [`NEAR`] with every claim, which
//! meets ordinary transactions, and [`FAR`] every now and then. What appears even later is found
//! by the sweep: no mistake of a cursor can lose a job.
//!
//! What is paused is passed by too, knowingly: a worker remembers what was, and when it is resumed
//! begins where the sweep has proved that nothing is left behind.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use jobq_core::queue::{bands, bands_with_fronts, is_front};
use jobq_core::time::Timestamp;

use crate::store::{Claimed, Floor, Paused, QueueClaim, QueueFloor};

/// How far every claim looks back from now.
const NEAR: Duration = Duration::from_millis(20);

/// How far a claim looks back now and then.
const FAR: Duration = Duration::from_secs(2);

/// The shortest time between two far looks; a slow one waits 20 times what it took.
const FAR_EVERY: Duration = Duration::from_millis(50);

/// For how long after the last job from the front of a priority every claim looks there; else only those
/// that look far back do. Only keys have anything there.
const FRONTS_FOR: Duration = Duration::from_secs(2);

/// Where claims begin, for each queue and band of one process.
pub(crate) struct Floors {
    places: HashMap<(String, i16), Floor>,
    /// When a claim last brought a job from the front of a priority.
    fronts: HashMap<String, Instant>,
    /// Up to when the last claim has seen everything, and when that was here.
    seen: Option<(Timestamp, Instant)>,
    next_far: Instant,
    /// What was paused at the last claim, and so may be behind these places.
    paused: Paused,
}

impl Floors {
    /// Begins where the sweep has proved that nothing is left behind.
    pub(crate) fn new(proven: Vec<QueueFloor>, now: Instant) -> Self {
        let places =
            proven.into_iter().map(|floor| ((floor.queue, floor.band), floor.floor)).collect();
        let paused = Paused::default();
        Self { places, fronts: HashMap::new(), seen: None, next_far: now, paused }
    }

    /// Where the next claim begins in each band of a queue.
    ///
    /// `far` is whether it is to look far back; see [`far_is_due`](Self::far_is_due).
    pub(crate) fn claim(&self, queue: &str, limit: u32, far: bool, now: Instant) -> QueueClaim {
        let back = self.seen.filter(|_| far).map(|(seen, at)| {
            // Only to estimate where to look; nothing is decided by this process's clock.
            let estimate = seen.plus(now.saturating_duration_since(at)).minus(FAR);
            Floor { run_after: estimate, id: 0 }
        });
        let floor = |band| {
            let place = self.place(queue, band);
            (band, back.map_or(place, |back| back.min(place)))
        };
        let fronts = far || self.fronts.get(queue).is_some_and(|at| now - *at < FRONTS_FOR);
        let floors = if fronts {
            bands_with_fronts().map(floor).collect()
        } else {
            bands().map(floor).collect()
        };
        QueueClaim { queue: queue.to_owned(), limit, floors }
    }

    /// Notes that there may be jobs at the front of a queue's priorities.
    pub(crate) fn expect_front(&mut self, queue: &str, now: Instant) {
        self.fronts.insert(queue.to_owned(), now);
    }

    fn place(&self, queue: &str, band: i16) -> Floor {
        self.places.get(&(queue.to_owned(), band)).copied().unwrap_or(Floor::START)
    }

    /// Whether the next claim is to look far back.
    pub(crate) fn far_is_due(&self, now: Instant) -> bool {
        now >= self.next_far
    }

    /// Notes that a claim looked far back, and how long it took.
    pub(crate) fn looked_far(&mut self, took: Duration, now: Instant) {
        self.next_far = now + FAR_EVERY.max(took * 20);
    }

    /// Learns from what a claim brought. True if something was resumed since the claim before: what
    /// was passed by of it is met from the proven floors, so [`restart`](Self::restart) there.
    pub(crate) fn advance(
        &mut self,
        asked: &[QueueClaim],
        claimed: &Claimed,
        now: Instant,
    ) -> bool {
        self.seen = Some((claimed.seen_to, now));
        for job in claimed.jobs.iter().filter(|job| is_front(job.band)) {
            self.expect_front(&job.queue, now);
        }
        let near = Floor { run_after: claimed.seen_to.minus(NEAR), id: 0 };
        // A claim has not looked at a queue that is paused.
        for queue in asked.iter().filter(|asked| !claimed.paused.queues.contains(&asked.queue)) {
            let allowed = claimed.limited.iter().find(|allowed| allowed.queue == queue.queue);
            let limit = allowed.map_or(queue.limit, |allowed| allowed.jobs.min(queue.limit));
            if limit == 0 {
                // Nor at one whose limit allows nothing.
                continue;
            }
            let mut brought = 0;
            for (band, _) in &queue.floors {
                let last = claimed
                    .jobs
                    .iter()
                    .filter(|job| job.queue == queue.queue && job.band == *band)
                    .inspect(|_| brought += 1)
                    .map(|job| Floor { run_after: job.run_after, id: job.lease.job.0 })
                    .max();
                let full = brought >= limit;
                // A band that was looked through to its end holds nothing due before now; one that
                // filled the claim goes on after its last job.
                let place = match last {
                    Some(last) if full => last.min(near),
                    _ => near,
                };
                self.places.insert((queue.queue.clone(), *band), place);
                if full {
                    // The bands after this one were not looked at.
                    break;
                }
            }
        }
        self.is_resumed(asked, &claimed.paused)
    }

    /// Notes what is paused now; whether something is not any more. Of queues that were not asked for
    /// nothing is known.
    fn is_resumed(&mut self, asked: &[QueueClaim], paused: &Paused) -> bool {
        let before = std::mem::replace(&mut self.paused, paused.clone());
        let (gone, unknown): (Vec<String>, Vec<String>) = before
            .queues
            .into_iter()
            .filter(|queue| !paused.queues.contains(queue))
            .partition(|queue| asked.iter().any(|asked| asked.queue == *queue));
        self.paused.queues.extend(unknown);
        !gone.is_empty() || before.kinds.iter().any(|kind| !paused.kinds.contains(kind))
    }

    /// Goes back to a place where something became claimable.
    pub(crate) fn lower(&mut self, queue: &str, band: i16, run_after: Timestamp) {
        let before = Floor { run_after: Timestamp(run_after.0.saturating_sub(1)), id: 0 };
        if let Some(place) = self.places.get_mut(&(queue.to_owned(), band)) {
            *place = before.min(*place);
        }
    }

    /// Begins anew where the sweep has proved that nothing is left behind: the database was away,
    /// and may have come back with another clock or history.
    pub(crate) fn restart(&mut self, proven: Vec<QueueFloor>) {
        *self = Self::new(proven, self.next_far);
    }

    /// Every place, for the sweep.
    pub(crate) fn all(&self) -> Vec<QueueFloor> {
        self.places
            .iter()
            .map(|((queue, band), floor)| QueueFloor {
                queue: queue.clone(),
                band: *band,
                floor: *floor,
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use jobq_core::job::{JobId, Lease, SessionId, Token};
    use jobq_core::lifecycle::{Counters, Limits};
    use jobq_core::queue::EXPRESS;

    use super::*;
    use crate::store::{Allowed, ClaimedJob, Turn};

    const SECOND: i64 = 1_000_000;

    fn job(band: i16, run_after: i64, id: i64) -> ClaimedJob {
        ClaimedJob {
            lease: Lease { job: JobId(id), token: Token(1), session: SessionId(1) },
            kind: "k".to_owned(),
            queue: "q".to_owned(),
            band,
            run_after: Timestamp(run_after),
            counters: Counters::default(),
            limits: Limits { max_attempts: 1, max_crashes: 1 },
            expired: false,
            created_at: Timestamp(0),
            tags: Vec::new(),
            metadata: serde_json::Map::new(),
            payload: String::new(),
            key: None,
            turn: Turn::Runs,
        }
    }

    fn step(floors: &mut Floors, limit: u32, now: i64, jobs: Vec<ClaimedJob>) {
        let at = Instant::now();
        let asked = [floors.claim("q", limit, false, at)];
        floors.advance(&asked, &claimed(now, Paused::default(), jobs), at);
    }

    fn claimed(now: i64, paused: Paused, jobs: Vec<ClaimedJob>) -> Claimed {
        let limited = Vec::new();
        Claimed { seen_to: Timestamp(now), sessions_live: true, paused, limited, jobs }
    }

    #[test]
    fn in_a_backlog_the_floor_is_the_last_job_claimed() {
        let mut floors = Floors::new(Vec::new(), Instant::now());
        step(&mut floors, 2, 100 * SECOND, vec![job(0, SECOND, 7), job(0, SECOND, 8)]);
        assert_eq!(floors.place("q", 0), Floor { run_after: Timestamp(SECOND), id: 8 });
        assert_eq!(floors.place("q", -1), Floor::START, "lower bands were not looked at");
        let near = Timestamp(100 * SECOND).minus(NEAR);
        assert_eq!(floors.place("q", EXPRESS).run_after, near, "higher bands were looked through");
    }

    #[test]
    fn a_short_claim_moves_every_floor_to_the_near_window() {
        let mut floors = Floors::new(Vec::new(), Instant::now());
        step(&mut floors, 5, 100 * SECOND, vec![job(0, SECOND, 7)]);
        let near = Floor { run_after: Timestamp(100 * SECOND).minus(NEAR), id: 0 };
        for band in bands() {
            assert_eq!(floors.place("q", band), near);
        }
    }

    #[test]
    fn near_the_present_even_a_full_claim_looks_back() {
        let mut floors = Floors::new(Vec::new(), Instant::now());
        step(&mut floors, 1, 100 * SECOND, vec![job(0, 100 * SECOND - 5, 7)]);
        assert_eq!(floors.place("q", 0).run_after, Timestamp(100 * SECOND).minus(NEAR));
    }

    #[test]
    fn a_clock_that_steps_back_is_followed() {
        let mut floors = Floors::new(Vec::new(), Instant::now());
        step(&mut floors, 5, 100 * SECOND, Vec::new());
        step(&mut floors, 5, 40 * SECOND, Vec::new());
        assert_eq!(floors.place("q", 0).run_after, Timestamp(40 * SECOND).minus(NEAR));
    }

    #[test]
    fn a_wake_up_behind_the_floor_is_met_by_the_next_claim() {
        let mut floors = Floors::new(Vec::new(), Instant::now());
        step(&mut floors, 5, 100 * SECOND, Vec::new());
        floors.lower("q", 0, Timestamp(90 * SECOND));
        let claim = floors.claim("q", 5, false, Instant::now());
        let floor = claim.floors.iter().find(|(band, _)| *band == 0).expect("every band").1;
        assert!(floor < Floor { run_after: Timestamp(90 * SECOND), id: 0 });
    }

    #[test]
    fn a_claim_that_did_not_look_at_a_paused_queue_leaves_its_floors_alone() {
        let mut floors = Floors::new(Vec::new(), Instant::now());
        step(&mut floors, 2, 100 * SECOND, vec![job(0, SECOND, 7), job(0, SECOND, 8)]);
        let before = floors.place("q", 0);
        let at = Instant::now();
        let asked = [floors.claim("q", 2, false, at), floors.claim("other", 2, false, at)];
        let paused = Paused { queues: vec!["q".to_owned()], kinds: Vec::new() };
        assert!(!floors.advance(&asked, &claimed(200 * SECOND, paused, Vec::new()), at));
        assert_eq!(floors.place("q", 0), before);
        assert_eq!(floors.place("q", -1), Floor::START);
        let near = Timestamp(200 * SECOND).minus(NEAR);
        assert_eq!(floors.place("other", 0).run_after, near, "the other was looked through");
    }

    #[test]
    fn a_claim_goes_no_further_than_the_limit_of_a_queue_allows() {
        let mut floors = Floors::new(Vec::new(), Instant::now());
        let mut then = |jobs: u32, brought| {
            let at = Instant::now();
            let asked = [floors.claim("q", 10, false, at)];
            let allowed = Allowed { queue: "q".to_owned(), jobs, next: None };
            let mut claimed = claimed(100 * SECOND, Paused::default(), brought);
            claimed.limited = vec![allowed];
            floors.advance(&asked, &claimed, at);
            floors.place("q", 0)
        };
        assert_eq!(then(0, Vec::new()), Floor::START, "it has not looked");
        let last = Floor { run_after: Timestamp(SECOND), id: 8 };
        assert_eq!(then(2, vec![job(0, SECOND, 7), job(0, SECOND, 8)]), last);
        assert_eq!(then(0, Vec::new()), last);
        let near = Timestamp(100 * SECOND).minus(NEAR);
        assert_eq!(then(2, vec![job(0, SECOND, 9)]).run_after, near, "there is no more");
    }

    #[test]
    fn only_what_is_resumed_makes_a_worker_look_for_what_it_passed_by() {
        let mut floors = Floors::new(Vec::new(), Instant::now());
        let paused = |queues: &[&str], kinds: &[&str]| {
            let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
            Paused { queues: owned(queues), kinds: owned(kinds) }
        };
        let mut then = |paused| {
            let at = Instant::now();
            let asked = [floors.claim("q", 1, false, at)];
            floors.advance(&asked, &claimed(SECOND, paused, Vec::new()), at)
        };
        assert!(!then(paused(&[], &["k"])), "paused");
        assert!(!then(paused(&["q"], &["k"])), "another too");
        assert!(then(paused(&["q"], &[])), "one was resumed");
        assert!(then(paused(&[], &["k"])), "one was resumed and one paused");
        assert!(then(paused(&[], &[])));
        assert!(!then(paused(&[], &[])), "once is enough");
        assert!(!then(paused(&["q"], &[])));
        let at = Instant::now();
        let nothing = claimed(SECOND, Paused::default(), Vec::new());
        assert!(!floors.advance(&[], &nothing, at), "it was not asked for");
        assert!(floors.advance(&[floors.claim("q", 1, false, at)], &nothing, at), "now it was");
        floors.advance(&[], &claimed(SECOND, paused(&[], &["k"]), Vec::new()), at);
        floors.restart(Vec::new());
        assert!(!floors.advance(&[], &nothing, at), "from there nothing was passed by");
    }

    #[test]
    fn a_far_look_goes_back_two_seconds_but_never_forward() {
        let mut floors = Floors::new(Vec::new(), Instant::now());
        step(&mut floors, 1, 100 * SECOND, vec![job(0, SECOND, 7)]);
        let claim = floors.claim("q", 1, true, Instant::now());
        for (band, floor) in claim.floors {
            assert!(floor.run_after < Timestamp(99 * SECOND), "band {band}");
            assert!(floor <= floors.place("q", band));
        }
    }
}
