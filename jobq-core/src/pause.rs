//! What can be paused.

use std::fmt;
use std::str::FromStr;

use crate::job::UnknownWord;

/// What a pause is of.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum PauseScope {
    /// A queue, whatever the kinds of its jobs.
    Queue,
    /// A kind, whatever the queues of its jobs.
    Kind,
}

impl PauseScope {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Queue, Self::Kind];

    /// Its word in the database.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Kind => "kind",
        }
    }
}

impl fmt::Display for PauseScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for PauseScope {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        Self::ALL
            .into_iter()
            .find(|scope| scope.as_str() == word)
            .ok_or_else(|| UnknownWord { what: "scope of a pause", word: word.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scope_reads_back_from_its_word() {
        for scope in PauseScope::ALL {
            assert_eq!(scope.as_str().parse(), Ok(scope));
        }
        let error = "server".parse::<PauseScope>().expect_err("no scope of ours");
        assert!(error.to_string().contains("server"), "{error}");
    }
}
