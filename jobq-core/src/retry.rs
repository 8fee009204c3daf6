//! How long to wait before the next attempt.

use std::time::Duration;

/// Exponential backoff with full jitter: the n-th retry waits a random time between zero and
/// `min(cap, base · factor^(n−1))`.
///
/// Full jitter spreads the retries of many jobs that failed together over the whole interval
/// (Marc Brooker, "Exponential Backoff And Jitter", 2015).
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Backoff {
    /// The longest wait before the first retry.
    pub base: Duration,
    /// How much longer each further retry may wait; at least 1.
    pub factor: f64,
    /// The longest wait of all.
    pub cap: Duration,
}

impl Backoff {
    /// Base 5 s, factor 2, cap 1 h: a job with 20 attempts is retried for about 12 hours.
    pub const DEFAULT: Self =
        Self { base: Duration::from_secs(5), factor: 2.0, cap: Duration::from_secs(3600) };

    /// The longest wait after the failed attempt number `attempt` (1 is the first).
    pub fn ceiling(&self, attempt: u32) -> Duration {
        let exponent = f64::from(attempt.saturating_sub(1));
        let seconds = self.base.as_secs_f64() * self.factor.powf(exponent);
        // `powf` may overflow to infinity, and infinity times a base of zero is not a number.
        if seconds.is_finite() && seconds < self.cap.as_secs_f64() {
            Duration::from_secs_f64(seconds.max(0.0))
        } else if self.base.is_zero() {
            Duration::ZERO
        } else {
            self.cap
        }
    }

    /// The wait after the failed attempt number `attempt`, given a random `unit` in `0.0..1.0`.
    pub fn delay(&self, attempt: u32, unit: f64) -> Duration {
        let unit = if unit.is_finite() { unit.clamp(0.0, 1.0) } else { 1.0 };
        self.ceiling(attempt).mul_f64(unit)
    }
}

impl Default for Backoff {
    fn default() -> Self {
        Self::DEFAULT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_by_the_factor_up_to_the_cap() {
        let backoff =
            Backoff { base: Duration::from_secs(2), factor: 3.0, cap: Duration::from_secs(60) };
        let seconds: Vec<u64> = (1..=6).map(|n| backoff.ceiling(n).as_secs()).collect();
        assert_eq!(seconds, [2, 6, 18, 54, 60, 60]);
    }

    #[test]
    fn no_attempt_number_or_setting_overflows() {
        let bases = [Duration::ZERO, Duration::from_nanos(1), Duration::from_secs(31_536_000)];
        for base in bases {
            for factor in [1.0, 1.5, 2.0, 1e6, f64::MAX] {
                let backoff = Backoff { base, factor, cap: Duration::from_secs(3600) };
                let mut last = Duration::ZERO;
                for attempt in [0, 1, 2, 10, 63, 64, 1_000, u32::MAX] {
                    for unit in [0.0, 0.5, 0.999_999, f64::NAN, -1.0, 7.0] {
                        assert!(backoff.delay(attempt, unit) <= backoff.cap.max(base));
                    }
                    assert!(backoff.ceiling(attempt) >= last, "waits never shrink");
                    last = backoff.ceiling(attempt);
                }
            }
        }
    }
}
