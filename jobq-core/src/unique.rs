//! Unique jobs: when two jobs are twins, for how long one keeps the other out, and what happens to
//! the second one.
//!
//! A key is held by at most one job. Whether it still holds it follows from the job itself (is it
//! unfinished, has it started) and is not written down anywhere: nothing has to be freed, so
//! nothing can be forgotten.

use std::time::Duration;

/// Which jobs of a kind are twins, for how long, and what to do with the second one.
///
/// # Examples
///
/// ```
/// use jobq_core::unique::{OnConflict, Unique};
/// use std::time::Duration;
///
/// // One job at a time for each payload.
/// let unique = Unique::DEFAULT;
/// // One in an hour for each image, whatever became of it.
/// let unique = Unique::by(&["image_id"]).lasting(Duration::from_secs(3600));
/// // The last one counts, as long as none has started.
/// let unique = Unique::DEFAULT.until_started().on_conflict(OnConflict::Replace);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Unique {
    /// The parameters that make two jobs twins; `None` means all.
    pub by: Option<&'static [&'static str]>,
    /// For how long a job keeps its twins out.
    pub scope: UniqueScope,
    /// What to do with a twin.
    pub on_conflict: OnConflict,
}

/// For how long a job keeps its twins out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UniqueScope {
    /// Until it is claimed for the first time. Its retries do not count: they may be pending beside a
    /// twin.
    UntilStarted,
    /// Until it is completed, dead or cancelled; retries, snoozes and rescues included.
    UntilFinished,
    /// For this long from when it was enqueued, whatever becomes of it.
    For(Duration),
    /// For ever, whatever becomes of it.
    Forever,
}

/// What to do with a job whose twin is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OnConflict {
    /// Nothing is written; the twin's id is returned.
    Skip,
    /// The enqueue fails, and writes nothing.
    Error,
    /// The twin is given the new job's payload, time and priority, if it is not running; else nothing
    /// is written.
    Replace,
    /// As [`Replace`](Self::Replace), but the twin runs no later than `max_wait` after it was
    /// enqueued: enqueued with a delay again and again, it runs once it has been quiet for that delay,
    /// or `max_wait` is over.
    Debounce {
        /// The longest that the first job may be put off.
        max_wait: Duration,
    },
}

impl Unique {
    /// All parameters, [`UntilFinished`](UniqueScope::UntilFinished), [`Skip`](OnConflict::Skip).
    pub const DEFAULT: Self =
        Self { by: None, scope: UniqueScope::UntilFinished, on_conflict: OnConflict::Skip };

    /// Jobs are twins if these parameters are equal.
    #[must_use]
    pub const fn by(parameters: &'static [&'static str]) -> Self {
        Self { by: Some(parameters), ..Self::DEFAULT }
    }

    /// A job keeps its twins out until it is claimed for the first time.
    #[must_use]
    pub const fn until_started(self) -> Self {
        Self { scope: UniqueScope::UntilStarted, ..self }
    }

    /// A job keeps its twins out until it is completed, dead or cancelled.
    #[must_use]
    pub const fn until_finished(self) -> Self {
        Self { scope: UniqueScope::UntilFinished, ..self }
    }

    /// A job keeps its twins out for this long from when it was enqueued.
    #[must_use]
    pub const fn lasting(self, time: Duration) -> Self {
        Self { scope: UniqueScope::For(time), ..self }
    }

    /// A job keeps its twins out for ever.
    #[must_use]
    pub const fn forever(self) -> Self {
        Self { scope: UniqueScope::Forever, ..self }
    }

    /// What to do with a twin.
    #[must_use]
    pub const fn on_conflict(self, on_conflict: OnConflict) -> Self {
        Self { on_conflict, ..self }
    }

    /// What is wrong with it, if anything: it would keep nobody out, or it can never be met.
    pub const fn problem(&self) -> Option<&'static str> {
        if let Some(by) = self.by
            && by.is_empty()
        {
            return Some(
                "`unique` by no parameter would make all jobs of the kind twins; leave `by` out for \
                 all parameters, or give a key to each job: `.unique_key(\"…\")`",
            );
        }
        if let UniqueScope::For(time) = self.scope {
            if time.as_micros() == 0 {
                return Some("`unique` for 0s keeps no job out; give a longer time");
            }
            if time.as_secs() > crate::duration::MAX.as_secs() {
                return Some("`unique` takes at most 100 years; write \"forever\"");
            }
        }
        if let OnConflict::Debounce { max_wait } = self.on_conflict {
            if max_wait.as_micros() == 0 {
                return Some("a debounce needs a `max_wait` longer than 0s");
            }
            if max_wait.as_secs() > crate::duration::MAX.as_secs() {
                return Some("`max_wait` must be at most 100 years");
            }
        }
        None
    }
}

impl Default for Unique {
    fn default() -> Self {
        Self::DEFAULT
    }
}

impl UniqueScope {
    /// Its word in the database.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::UntilStarted => "until_started",
            Self::UntilFinished => "until_finished",
            Self::For(_) => "for",
            Self::Forever => "forever",
        }
    }
}

impl OnConflict {
    /// Whether it changes the twin.
    pub const fn replaces(self) -> bool {
        matches!(self, Self::Replace | Self::Debounce { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_keep_nobody_out_is_a_problem() {
        assert_eq!(Unique::DEFAULT.problem(), None);
        assert_eq!(Unique::DEFAULT.forever().problem(), None);
        assert_eq!(Unique::DEFAULT.lasting(Duration::from_micros(1)).problem(), None);
        for bad in [
            Unique::by(&[]),
            Unique::DEFAULT.lasting(Duration::ZERO),
            Unique::DEFAULT.lasting(Duration::from_nanos(999)),
            Unique::DEFAULT.lasting(Duration::MAX),
            Unique::DEFAULT.on_conflict(OnConflict::Debounce { max_wait: Duration::ZERO }),
            Unique::DEFAULT.on_conflict(OnConflict::Debounce { max_wait: Duration::MAX }),
        ] {
            assert!(bad.problem().is_some(), "{bad:?}");
        }
    }
}
