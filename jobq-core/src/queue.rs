//! Queue and kind names, priorities, bands.

use std::ops::RangeInclusive;

/// The queue of a job that names none.
pub const DEFAULT_QUEUE: &str = "default";

/// The priorities a job may have; higher runs first, 0 is the default.
///
/// The range is small and fixed so that every claim can look at all of it: a job with a new
/// priority never has to be discovered.
pub const PRIORITIES: RangeInclusive<i16> = -4..=4;

/// The band of a job that runs next: rescued, released or found late.
///
/// A band orders jobs within a queue. It is the job's priority, its [`front`], or this number, which
/// every claim looks at first.
pub const EXPRESS: i16 = i16::MAX;

/// Every band that every claim looks at, in the order in which it does.
pub fn bands() -> impl Iterator<Item = i16> {
    std::iter::once(EXPRESS).chain(PRIORITIES.rev())
}

/// The band of jobs that have waited for their key and now have its grant: before all others of their
/// priority, for they had been due before them.
pub const fn front(priority: i16) -> i16 {
    priority + 100
}

/// Whether a band is the [`front`] of a priority.
pub fn is_front(band: i16) -> bool {
    (front(*PRIORITIES.start())..=front(*PRIORITIES.end())).contains(&band)
}

/// The band of jobs that wait for their key, at which no claim looks.
pub const ASIDE: i16 = i16::MIN;

/// Every band that a claim may look at, in order: [`bands`] and before each priority its [`front`].
pub fn bands_with_fronts() -> impl Iterator<Item = i16> {
    let priorities = PRIORITIES.rev().flat_map(|priority| [front(priority), priority]);
    std::iter::once(EXPRESS).chain(priorities)
}

/// Why a name or a priority was refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BadName {
    /// The name is empty, too long or has a character that is not allowed.
    #[error(
        "{what} name {name:?} {problem}; use 1 to 100 letters, digits, '_', '-', '.', ':' or '/'"
    )]
    Name {
        /// What the name is for: `queue` or `job`.
        what: &'static str,
        /// The name.
        name: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The priority is outside [`PRIORITIES`].
    #[error("priority {0} is out of range; use -4 (last) to 4 (first)")]
    Priority(i64),
}

/// Checks the name of a queue or job.
///
/// # Errors
///
/// [`BadName::Name`] when it is empty, longer than 100 bytes or has other characters than ASCII
/// letters, digits, `_`, `-`, `.`, `:` and `/`.
pub fn check_name(what: &'static str, name: &str) -> Result<(), BadName> {
    let problem = if name.is_empty() {
        "is empty"
    } else if name.len() > 100 {
        "is longer than 100 bytes"
    } else if !name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.:/".contains(&b)) {
        "has a character that is not allowed"
    } else {
        return Ok(());
    };
    Err(BadName::Name { what, name: name.chars().take(120).collect(), problem })
}

/// Checks a priority.
///
/// # Errors
///
/// [`BadName::Priority`] outside [`PRIORITIES`].
pub fn check_priority(priority: i64) -> Result<i16, BadName> {
    i16::try_from(priority)
        .ok()
        .filter(|priority| PRIORITIES.contains(priority))
        .ok_or(BadName::Priority(priority))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        assert_eq!(check_name("queue", "images/eu-1.fast:a_b"), Ok(()));
        for name in ["", "a b", "ü", "a\0", "drop;table", &"x".repeat(101)] {
            let error = check_name("queue", name).expect_err(name);
            assert!(error.to_string().contains("use 1 to 100"), "{error}");
        }
    }

    #[test]
    fn express_comes_before_every_priority_and_higher_before_lower() {
        let bands: Vec<i16> = bands().collect();
        assert_eq!(bands[..2], [EXPRESS, 4]);
        assert_eq!(bands.len(), 10);
        assert!(bands.is_sorted_by(|a, b| a > b));
        let all: Vec<i16> = bands_with_fronts().collect();
        assert_eq!(all[..5], [EXPRESS, 104, 4, 103, 3]);
        assert_eq!(all.len(), 19);
        assert!(all.iter().all(|band| is_front(*band) != bands.contains(band)));
        assert!(!is_front(ASIDE) && !bands.contains(&ASIDE));
    }
}
