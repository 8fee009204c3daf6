//! What identifies a job, who holds it, and which state it is in.

use std::fmt;
use std::str::FromStr;

/// The id of a job: given by the database, never used twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobId(pub i64);

/// A fencing token: raised by one with each claim of a job, and never lowered.
///
/// Every write for a running job carries the token of its claim; a write with an older token
/// changes nothing. Handlers can pass it to external systems, so that these refuse an older
/// writer (the idea is Martin Kleppmann's). For outsiders a token orders claims only as long as
/// the database loses no commit (an asynchronous failover may rewind it).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub i64);

/// The id of a session: one per process and lease length, random, never zero.
///
/// A running job names the session that holds it; the session's row says until when.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub i64);

/// The right to write for a running job: which job, under which claim, held by which session.
///
/// This triple is the guard of every write for a running job.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Lease {
    /// The claimed job.
    pub job: JobId,
    /// The token this claim was given.
    pub token: Token,
    /// The session that holds the job.
    pub session: SessionId,
}

macro_rules! number {
    ($name:ident) => {
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.0)
            }
        }
    };
}
number!(JobId);
number!(Token);
number!(SessionId);

/// Where a job is in its life.
///
/// ```text
///              enqueue                claim                     settle
///   (nothing) ─────────▶ pending ───────────────▶ running ──┬─ ok ───────▶ completed
///                          ▲  ▲                    │  │     ├─ fail, attempts left ─▶ pending
///                          │  └── snooze/release ──┘  │     ├─ fail, none left ──▶ dead
///               redrive    │                          │     ├─ discard ──────▶ dead
///    dead, cancelled ──────┘      lease expired ◀─────┘     └─ cancelled ────▶ cancelled
///    waiting ──▶ pending
/// ```
///
/// "Scheduled" is `pending` with a `run_after` in the future; "retrying" is `pending` with an
/// attempt above 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum JobState {
    /// Held back until something else happens (for instance until a worker knows its kind).
    Waiting,
    /// May be claimed once `run_after` has come.
    Pending,
    /// Claimed and leased by a session.
    Running,
    /// Ended well.
    Completed,
    /// Failed for good and kept for inspection; can be redriven.
    Dead,
    /// Stopped by an operator or by itself.
    Cancelled,
}

impl JobState {
    /// Every state, in the order of a job's life.
    pub const ALL: [Self; 6] =
        [Self::Waiting, Self::Pending, Self::Running, Self::Completed, Self::Dead, Self::Cancelled];

    /// The word for this state in the database, logs and output.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Pending => "pending",
            Self::Running => "running",
            Self::Completed => "completed",
            Self::Dead => "dead",
            Self::Cancelled => "cancelled",
        }
    }

    /// Whether a job in this state will never run again by itself.
    pub const fn is_final(self) -> bool {
        matches!(self, Self::Completed | Self::Dead | Self::Cancelled)
    }
}

impl fmt::Display for JobState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for JobState {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        Self::ALL
            .into_iter()
            .find(|state| state.as_str() == word)
            .ok_or_else(|| UnknownWord { what: "job state", word: word.to_owned() })
    }
}

/// A word in the database that this version of jobq does not know.
///
/// It is an error and never a panic: a newer version may have written it.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("unknown {what} {word:?}; was it written by a newer version of jobq?")]
pub struct UnknownWord {
    /// What the word should have named.
    pub what: &'static str,
    /// The word itself.
    pub word: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_reads_back_from_its_word() {
        for state in JobState::ALL {
            assert_eq!(state.as_str().parse(), Ok(state));
        }
    }

    #[test]
    fn an_unknown_state_is_an_error_not_a_panic() {
        let error = "retryable".parse::<JobState>().expect_err("not a state of ours");
        assert!(error.to_string().contains("retryable"), "{error}");
    }
}
