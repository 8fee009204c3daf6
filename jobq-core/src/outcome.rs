//! How an attempt ended, and the words kept about it.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::job::UnknownWord;

/// How an attempt ended.
#[derive(Clone, PartialEq, Debug)]
pub enum Outcome {
    /// The job function returned a value; `result` is its JSON, if it has one.
    Completed {
        /// The JSON of the returned value; `None` for `()`.
        result: Option<String>,
    },
    /// The job function returned an error, panicked or ran too long.
    Failed {
        /// Which of these it was.
        reason: AttemptReason,
        /// The error's text.
        error: String,
        /// The wait that the job function asked for instead of its backoff.
        retry_after: Option<Duration>,
    },
    /// The job function asked to be run again later; the attempt does not count.
    Snoozed {
        /// How much later.
        delay: Duration,
    },
    /// The job function gave up for good.
    Discarded {
        /// Why.
        error: String,
    },
    /// The job was cancelled by an operator or by its own function.
    Cancelled {
        /// Why, if anybody said so.
        reason: Option<String>,
    },
    /// The payload does not fit the job function's parameters.
    Undecodable {
        /// Where and why.
        error: String,
    },
    /// The worker had to stop before the job function was done, or never started it.
    Interrupted,
}

macro_rules! words {
    ($(#[$doc:meta])* $name:ident, $what:literal { $($(#[$vdoc:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum $name {
            $($(#[$vdoc])* $variant,)+
        }

        impl $name {
            /// The word for this in the database, logs and output.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word,)+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl FromStr for $name {
            type Err = UnknownWord;

            fn from_str(word: &str) -> Result<Self, UnknownWord> {
                match word {
                    $($word => Ok(Self::$variant),)+
                    _ => Err(UnknownWord { what: $what, word: word.to_owned() }),
                }
            }
        }
    };
}

words! {
    /// Why an attempt did not complete its job; kept with each attempt's error.
    AttemptReason, "attempt reason" {
        /// The job function returned an error.
        Failed = "failed",
        /// The job function panicked.
        Panicked = "panicked",
        /// The attempt ran longer than the job's `timeout`.
        TimedOut = "timed_out",
        /// The lease expired: the worker's process crashed, hung or lost the database.
        Crashed = "crashed",
        /// The worker was stopped, or the reply to its claim was lost.
        Interrupted = "interrupted",
        /// The job function gave up for good.
        Discarded = "discarded",
        /// The payload did not fit the job function's parameters.
        Undecodable = "undecodable",
        /// The job was cancelled while it ran.
        Cancelled = "cancelled",
        /// It was not begun: the time in which the job was to be started was over.
        Expired = "expired",
    }
}

words! {
    /// Why a job became a dead letter.
    DeathReason, "death reason" {
        /// The last allowed attempt failed.
        Exhausted = "exhausted",
        /// The job function gave up for good.
        Discarded = "discarded",
        /// The job crashed its worker's process too often while running alone in it.
        Poison = "poison",
        /// The payload does not fit the job function's parameters.
        Undecodable = "undecodable",
        /// The lease of the last allowed attempt expired.
        LeaseExpired = "lease_expired",
        /// The job was not started in time: within its `expires`.
        Expired = "expired",
    }
}

/// What is kept about an attempt that did not complete its job.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AttemptRecord {
    /// Why it ended.
    pub reason: AttemptReason,
    /// The error's text, storable as it is (see [`crate::text`]).
    pub error: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_reason_is_an_error_not_a_panic() {
        assert!("gone fishing".parse::<DeathReason>().is_err());
        assert_eq!("poison".parse(), Ok(DeathReason::Poison));
        assert_eq!("timed_out".parse(), Ok(AttemptReason::TimedOut));
    }
}
