//! What a queue may do across the fleet: how many of its jobs run at once, and how many start in a
//! time.

use std::time::Duration;

use crate::time::{Timestamp, micros};

/// The most jobs of a queue that a limit can let run at once.
pub const MAX_RUNNING: u32 = 10_000;

/// How fast jobs may start: so many in a time, and so many at once after a time without any.
///
/// A token bucket: it holds `burst` tokens, each job takes one when it is claimed, and they come back
/// one by one, evenly. In any time `t` at most `burst + jobs × t / per` jobs start.
///
/// Of the bucket only the time is kept at which it is full again (the theoretical arrival time of the
/// generic cell rate algorithm, ITU-T I.371): there is no count that could drift.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rate {
    jobs: u32,
    per: Duration,
    burst: u32,
}

impl Rate {
    /// So many jobs in a time, and as many at once.
    pub const fn new(jobs: u32, per: Duration) -> Self {
        Self { jobs, per, burst: jobs }
    }

    /// So many at once; 1 spaces them out evenly.
    ///
    /// Workers look every 50 ms for what may start, so a burst below what comes in that time slows
    /// the queue down.
    #[must_use]
    pub const fn burst(self, burst: u32) -> Self {
        Self { burst, ..self }
    }

    /// How many jobs in [`per`](Self::per).
    pub const fn jobs(&self) -> u32 {
        self.jobs
    }

    /// The time in which [`jobs`](Self::jobs) may start.
    pub const fn per(&self) -> Duration {
        self.per
    }

    /// How many may start at once.
    pub const fn most_at_once(&self) -> u32 {
        self.burst
    }

    /// Why this cannot be, and what to do.
    pub fn problem(&self) -> Option<&'static str> {
        const MOST: u32 = 1_000_000;
        const LONGEST: Duration = Duration::from_secs(86_400);

        if self.jobs == 0 || self.burst == 0 {
            Some("lets nothing start; pause the queue instead")
        } else if self.jobs > MOST || self.burst > MOST {
            Some("is of more than 1,000,000 jobs")
        } else if self.per < Duration::from_millis(1) || self.per > LONGEST {
            Some("is per less than a millisecond, or more than a day")
        } else {
            None
        }
    }

    /// How many jobs may start, if the bucket is full again at `full_at`.
    pub fn available(&self, full_at: Timestamp, now: Timestamp) -> u32 {
        let missing = (i128::from(full_at.0) - i128::from(now.0)).max(0);
        let left = (self.time_of(self.burst) - missing).max(0);
        let jobs = left * i128::from(self.jobs) / self.per_micros();
        u32::try_from(jobs).unwrap_or(u32::MAX).min(self.burst)
    }

    /// When the bucket is full again once so many jobs have started.
    pub fn spend(&self, full_at: Timestamp, now: Timestamp, jobs: u32) -> Timestamp {
        let time = i64::try_from(self.time_of(jobs)).unwrap_or(i64::MAX);
        Timestamp(full_at.0.max(now.0).saturating_add(time))
    }

    /// How long until one more may start than may now; none if the bucket is full.
    pub fn next(&self, full_at: Timestamp, now: Timestamp) -> Option<Duration> {
        let more =
            self.available(full_at, now).checked_add(1).filter(|more| *more <= self.burst)?;
        let missing = (i128::from(full_at.0) - i128::from(now.0)).max(0);
        let wait = self.time_of(more) - (self.time_of(self.burst) - missing);
        Some(Duration::from_micros(u64::try_from(wait).unwrap_or(0)))
    }

    /// How full a bucket of another rate may be at most, when it becomes this one's.
    pub fn emptied(&self, full_at: Timestamp, now: Timestamp) -> Timestamp {
        full_at.min(self.spend(now, now, self.burst))
    }

    /// In microseconds, rounded up: never faster than it says.
    fn time_of(&self, jobs: u32) -> i128 {
        let jobs_wanted = i128::from(jobs) * self.per_micros();
        (jobs_wanted + i128::from(self.jobs) - 1) / i128::from(self.jobs)
    }

    fn per_micros(&self) -> i128 {
        i128::from(micros(self.per))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn at(micros: i64) -> Timestamp {
        Timestamp(micros)
    }

    #[test]
    fn a_full_bucket_gives_its_burst_and_no_more() {
        let rate = Rate::new(50, SECOND).burst(10);
        let now = at(1_000_000);
        assert_eq!(rate.available(Timestamp::NEG_INFINITY, now), 10);
        assert_eq!(rate.next(Timestamp::NEG_INFINITY, now), None);
        let full_at = rate.spend(Timestamp::NEG_INFINITY, now, 10);
        assert_eq!(full_at, at(1_200_000));
        assert_eq!(rate.available(full_at, now), 0);
        assert_eq!(rate.next(full_at, now), Some(Duration::from_millis(20)));
        assert_eq!(rate.available(full_at, at(1_019_999)), 0);
        assert_eq!(rate.available(full_at, at(1_020_000)), 1);
        assert_eq!(rate.available(full_at, at(9_000_000)), 10);
    }

    /// Whatever is taken and when, in no time does more start than the burst and what has come since.
    #[test]
    fn nobody_gets_more_than_the_bound_or_much_less() {
        for (jobs, per, burst) in [
            (50, SECOND, 50),
            (3, SECOND, 1),
            (7, Duration::from_millis(13), 4),
            (1, Duration::from_secs(3_600), 2),
            (1_000_000, SECOND, 1_000_000),
        ] {
            let rate = Rate::new(jobs, per).burst(burst);
            assert_eq!(rate.problem(), None);
            let (mut full_at, mut now, mut started) = (Timestamp::NEG_INFINITY, 0_i64, 0_u64);
            let step = i64::try_from(per.as_micros()).expect("small") / i64::from(jobs) / 3 + 7;
            for n in 0..5_000_u32 {
                now += step * i64::from(n % 5);
                let available = rate.available(full_at, at(now));
                let take = if n % 3 == 0 { available } else { available.min(1) };
                full_at = rate.spend(full_at, at(now), take);
                started += u64::from(take);
                let come = now as f64 * f64::from(jobs) / per.as_micros() as f64;
                assert!(started as f64 <= f64::from(burst) + come, "{rate:?} at {now}");
            }
            let mut wait = rate.next(full_at, at(now));
            while let Some(some) = wait {
                let before = rate.available(full_at, at(now));
                now += i64::try_from(some.as_micros()).expect("small");
                assert_eq!(rate.available(full_at, at(now)), before + 1, "{rate:?}");
                wait = rate.next(full_at, at(now)).filter(|_| before < 20);
            }
        }
    }

    #[test]
    fn another_rate_finds_a_bucket_that_is_empty_at_worst() {
        let slow = Rate::new(1, Duration::from_secs(86_400));
        let now = at(5_000_000);
        let full_at = slow.spend(Timestamp::NEG_INFINITY, now, 1);
        let fast = Rate::new(50, SECOND);
        assert_eq!(fast.available(full_at, now), 0);
        let full_at = fast.emptied(full_at, now);
        assert_eq!(fast.available(full_at, now), 0);
        assert_eq!(fast.available(full_at, at(6_000_000)), 50);
    }

    #[test]
    fn what_lets_nothing_start_is_refused() {
        assert!(Rate::new(0, SECOND).problem().is_some());
        assert!(Rate::new(1, SECOND).burst(0).problem().is_some());
        assert!(Rate::new(1_000_001, SECOND).problem().is_some());
        assert!(Rate::new(1, Duration::ZERO).problem().is_some());
        assert!(Rate::new(1, Duration::from_secs(86_401)).problem().is_some());
    }
}
