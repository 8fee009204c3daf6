//! A point in time, as the database's clock gave it.

use std::time::{Duration, SystemTime};

/// Microseconds since 1970-01-01 00:00:00 UTC.
///
/// jobq reads time from the database only; an application's clock decides nothing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Timestamp(pub i64);

/// A time that no supported database can hold.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the time is out of range: jobq takes times from 0001-01-01 to 9999-12-31 UTC")]
pub struct TimeOutOfRange;

impl Timestamp {
    /// 0001-01-01 00:00:00 UTC, the earliest time taken from a caller.
    pub const MIN: Self = Self(-62_135_596_800_000_000);
    /// 9999-12-31 23:59:59.999999 UTC, the latest time taken from a caller.
    pub const MAX: Self = Self(253_402_300_799_999_999);
    /// Before every time.
    pub const NEG_INFINITY: Self = Self(i64::MIN);
    /// After every time: a job whose `run_after` is this one is waiting.
    pub const INFINITY: Self = Self(i64::MAX);

    /// Reads a [`SystemTime`], and whatever converts into one.
    ///
    /// # Errors
    ///
    /// [`TimeOutOfRange`] outside [`Timestamp::MIN`]..=[`Timestamp::MAX`].
    pub fn from_system(time: SystemTime) -> Result<Self, TimeOutOfRange> {
        let micros = match time.duration_since(SystemTime::UNIX_EPOCH) {
            Ok(after) => i64::try_from(after.as_micros()).map_err(|_| TimeOutOfRange)?,
            Err(before) => {
                -i64::try_from(before.duration().as_micros()).map_err(|_| TimeOutOfRange)?
            }
        };
        let time = Self(micros);
        if (Self::MIN..=Self::MAX).contains(&time) { Ok(time) } else { Err(TimeOutOfRange) }
    }

    /// This time as a [`SystemTime`]; `None` for the infinities.
    pub fn to_system(self) -> Option<SystemTime> {
        if self == Self::INFINITY || self == Self::NEG_INFINITY {
            return None;
        }
        let distance = Duration::from_micros(self.0.unsigned_abs());
        if self.0 < 0 {
            SystemTime::UNIX_EPOCH.checked_sub(distance)
        } else {
            SystemTime::UNIX_EPOCH.checked_add(distance)
        }
    }

    /// This time moved by `distance` towards the past, stopping at the earliest value.
    #[must_use]
    pub const fn minus(self, distance: Duration) -> Self {
        Self(self.0.saturating_sub(micros(distance)))
    }

    /// This time moved by `distance` towards the future, stopping at the latest value.
    #[must_use]
    pub const fn plus(self, distance: Duration) -> Self {
        Self(self.0.saturating_add(micros(distance)))
    }

    /// How long after `earlier` this time is; zero if it is not later.
    pub const fn since(self, earlier: Self) -> Duration {
        let distance = self.0.saturating_sub(earlier.0);
        Duration::from_micros(if distance < 0 { 0 } else { distance as u64 })
    }
}

/// `duration` in microseconds, stopping at the largest value.
pub const fn micros(duration: Duration) -> i64 {
    let micros = duration.as_micros();
    if micros > i64::MAX as u128 { i64::MAX } else { micros as i64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_outside_the_calendar_are_refused() {
        let far = SystemTime::UNIX_EPOCH + Duration::from_secs(300_000_000_000);
        assert_eq!(Timestamp::from_system(far), Err(TimeOutOfRange));
        let edge = Timestamp::MAX.to_system().expect("finite");
        assert_eq!(Timestamp::from_system(edge), Ok(Timestamp::MAX));
    }

    #[test]
    fn times_before_1970_read_back() {
        let time = SystemTime::UNIX_EPOCH - Duration::from_micros(1_500_000);
        assert_eq!(Timestamp::from_system(time).expect("in range").to_system(), Some(time));
    }
}
