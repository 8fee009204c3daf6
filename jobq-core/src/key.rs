//! Keys: jobs with one key run one at a time, in the order in which they were enqueued.
//!
//! At any time one job at most has the grant of a key. Who is to have it follows from the jobs that
//! are there: the first of the key, by id, that does not step aside. A job of the key that is claimed
//! without the grant waits, and is passed by until the grant is its own.

/// What becomes of the jobs behind one that has their key and cannot run now: it is retried or
/// snoozed, is scheduled for later, waits for its kind (that nobody knows, or that is paused), or is
/// dead. One that is due in a paused queue keeps its place: those behind it wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OnBlock {
    /// They wait: nothing ever runs before what was enqueued before it. A dead job holds up its key
    /// until it is redriven, or let go.
    #[default]
    Block,
    /// They go on without it; it has its turn once it can run, before those behind it. They still run
    /// one at a time.
    Skip,
}

impl OnBlock {
    /// As it is stored and written in `#[job]`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Block => "block",
            Self::Skip => "skip",
        }
    }
}

/// The longest key, in bytes.
pub const MAX_KEY: usize = 200;

/// Why a text cannot be a key, and what to do.
pub fn problem_of(key: &str) -> Option<&'static str> {
    if key.is_empty() {
        Some("it is empty; leave it out for a job without a key")
    } else if key.len() > MAX_KEY {
        Some("it is longer than 200 bytes; use an id, or a hash of it")
    } else if key.contains('\0') {
        Some("it has a NUL character")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_checked() {
        assert_eq!(problem_of("customer-42"), None);
        assert_eq!(problem_of(&"é".repeat(100)), None);
        for (key, words) in [("", "empty"), ("a\0", "NUL"), (&"é".repeat(101), "longer than 200")]
        {
            assert!(problem_of(key).expect(key).contains(words), "{key:?}");
        }
    }
}
