//! Limits of queues across the fleet: what a claim may take.
//!
//! How many jobs of a queue run is not counted, it is looked up: each running job has a place, and a
//! place is taken while its job runs under the very token that took it. So nothing frees a place; the
//! one write that ends a lease, whoever makes it, does. Claims of a limited queue come one after the
//! other: each locks the row of its limit, looks at the places, and takes those that are free.

use std::time::Duration;

use jobq_core::limit::{MAX_RUNNING, Rate};
use jobq_core::time::Timestamp;

use crate::error::{Error, Result};
use crate::store::Allowed;

/// What a queue may do across the fleet: how many of its jobs run at once, how fast they start, or
/// both.
///
/// # Examples
///
/// ```
/// # use jobq_runtime as jobq;
/// use std::time::Duration;
///
/// use jobq::{QueueLimit, Rate};
///
/// let few = QueueLimit::running(3);
/// let slow = QueueLimit::rate(Rate::new(50, Duration::from_secs(1)));
/// let both = QueueLimit::running(3).and_rate(Rate::new(50, Duration::from_secs(1)).burst(5));
/// # let _ = (few, slow, both);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueLimit {
    pub(crate) max_running: Option<u32>,
    pub(crate) rate: Option<Rate>,
}

impl QueueLimit {
    /// At most so many jobs run at once, from 1 to 10,000.
    pub const fn running(jobs: u32) -> Self {
        Self { max_running: Some(jobs), rate: None }
    }

    /// Jobs start no faster than this.
    pub const fn rate(rate: Rate) -> Self {
        Self { max_running: None, rate: Some(rate) }
    }

    /// And they start no faster than this.
    #[must_use]
    pub const fn and_rate(self, rate: Rate) -> Self {
        Self { rate: Some(rate), ..self }
    }

    /// How many jobs run at once, if that is limited.
    pub const fn max_running(&self) -> Option<u32> {
        self.max_running
    }

    /// How fast jobs start, if that is limited.
    pub const fn max_rate(&self) -> Option<Rate> {
        self.rate
    }

    /// Fails for what cannot be.
    pub(crate) fn check(&self) -> Result<()> {
        let bad =
            |option, problem: &str| Err(Error::BadOption { option, problem: problem.to_owned() });
        match self.max_running {
            Some(0) => return bad("running", "lets nothing run; pause the queue instead"),
            Some(jobs) if jobs > MAX_RUNNING => {
                return bad("running", "is more than 10,000; leave the queue without a limit");
            }
            _ => {}
        }
        match self.rate.as_ref().and_then(Rate::problem) {
            Some(problem) => bad("rate", problem),
            None => Ok(()),
        }
    }
}

/// A queue's limit as it was stored.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct LimitedQueue {
    /// The queue.
    pub queue: String,
    /// What it may do.
    pub limit: QueueLimit,
}

/// The limit of a queue, locked by a claim, and what is left of it.
#[derive(Clone, Debug)]
pub(crate) struct Gate {
    pub(crate) queue: String,
    pub(crate) limit: QueueLimit,
    pub(crate) full_at: Timestamp,
    /// The places that may be taken, as far as they are asked for; none if it is not limited how many
    /// run.
    pub(crate) free: Vec<i32>,
}

impl Gate {
    /// How many jobs a claim that asks for so many may take.
    pub(crate) fn allows(&self, asked: u32, now: Timestamp) -> Allowed {
        let free = u32::try_from(self.free.len()).unwrap_or(u32::MAX);
        let places = self.limit.max_running.map(|_| free);
        let tokens = self.limit.rate.map(|rate| rate.available(self.full_at, now));
        let jobs = asked.min(places.unwrap_or(asked)).min(tokens.unwrap_or(asked));
        // Only where it is the rate that holds it up does waiting help.
        let next = match (self.limit.rate, tokens) {
            (Some(rate), Some(tokens)) if tokens == jobs && jobs < asked => {
                rate.next(rate.spend(self.full_at, now, jobs), now)
            }
            _ => None,
        };
        Allowed { queue: self.queue.clone(), jobs, next }
    }

    /// When the bucket is full again once these have started; none if nothing changes.
    pub(crate) fn spent(&self, started: usize, now: Timestamp) -> Option<Timestamp> {
        let started = u32::try_from(started).unwrap_or(u32::MAX);
        let rate = self.limit.rate.filter(|_| started > 0)?;
        Some(rate.spend(self.full_at, now, started))
    }
}

/// A rate as it is stored: jobs, microseconds, and the burst.
pub(crate) fn stored_rate(jobs: Option<u32>, per: Option<i64>, burst: Option<u32>) -> Option<Rate> {
    let per = Duration::from_micros(per?.max(1).unsigned_abs());
    Some(Rate::new(jobs?.max(1), per).burst(burst?.max(1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp(1_000_000_000);

    fn gate(limit: QueueLimit, running: i32) -> Gate {
        let most = limit.max_running.map_or(0, u32::cast_signed);
        let (free, full_at) = ((running + 1..=most).collect(), Timestamp::NEG_INFINITY);
        Gate { queue: "q".to_owned(), limit, full_at, free }
    }

    #[test]
    fn the_smaller_of_both_limits_holds() {
        let second = Duration::from_secs(1);
        let both = QueueLimit::running(5).and_rate(Rate::new(10, second));
        assert_eq!(gate(both, 2).allows(100, NOW).jobs, 3);
        assert_eq!(gate(both, 5).allows(100, NOW).jobs, 0);
        assert_eq!(gate(both, 0).allows(1, NOW).jobs, 1, "no more than was asked for");
        assert_eq!(gate(both, 2).allows(100, NOW).next, None, "it has tokens");

        let mut slow = gate(QueueLimit::rate(Rate::new(10, second)), 0);
        let first = slow.allows(100, NOW);
        let tenth = Some(Duration::from_millis(100));
        assert_eq!((first.jobs, first.next), (10, tenth), "once these have started");
        slow.full_at = slow.spent(10, NOW).expect("it has a rate");
        let then = slow.allows(100, NOW);
        assert_eq!((then.jobs, then.next), (0, Some(Duration::from_millis(100))));
        assert_eq!(slow.spent(0, NOW), None);
        assert_eq!(gate(QueueLimit::running(5), 0).spent(3, NOW), None);
    }

    #[test]
    fn limits_that_cannot_be_are_refused_with_the_cure() {
        let second = Duration::from_secs(1);
        for (limit, cure) in [
            (QueueLimit::running(0), "pause the queue"),
            (QueueLimit::running(10_001), "without a limit"),
            (QueueLimit::rate(Rate::new(0, second)), "pause the queue"),
            (QueueLimit::running(1).and_rate(Rate::new(1, Duration::ZERO)), "less than"),
        ] {
            let error = limit.check().expect_err("it cannot be");
            assert!(error.to_string().contains(cure), "{error}");
        }
        QueueLimit::running(10_000).check().expect("it can be");
    }
}
