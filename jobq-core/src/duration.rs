//! Durations as people write them: `"250ms"`, `"30s"`, `"1h30m"`, `"7d"`.

use std::time::Duration;

/// Why a duration could not be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{problem}; write a duration like \"250ms\", \"30s\", \"5m\", \"1h30m\" or \"7d\"")]
pub struct BadDuration {
    problem: String,
}

/// The longest duration taken: 100 years of 365 days.
pub const MAX: Duration = Duration::from_secs(100 * 365 * 86_400);

const UNITS: [(&str, u64); 6] = [
    ("ms", 1),
    ("s", 1_000),
    ("m", 60_000),
    ("h", 3_600_000),
    ("d", 86_400_000),
    ("w", 604_800_000),
];

/// Reads a duration: whole numbers with the units `ms`, `s`, `m`, `h`, `d`, `w`, largest first.
///
/// # Errors
///
/// [`BadDuration`] says what is wrong: no unit, an unknown unit, units out of order, not a whole
/// number, longer than [`MAX`].
///
/// # Examples
///
/// ```
/// use jobq_core::duration::parse;
/// use std::time::Duration;
///
/// assert_eq!(parse("1h30m")?, Duration::from_secs(5400));
/// assert!(parse("3o s").unwrap_err().to_string().contains("3o"));
/// # Ok::<(), jobq_core::duration::BadDuration>(())
/// ```
pub fn parse(text: &str) -> Result<Duration, BadDuration> {
    let bad = |problem: String| BadDuration { problem };
    if text.is_empty() {
        return Err(bad("the duration is empty".to_owned()));
    }
    let mut total: u64 = 0;
    let mut smallest = u64::MAX;
    let mut rest = text;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let (number, tail) = rest.split_at(digits);
        let letters = tail.find(|c: char| c.is_ascii_digit()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(letters);
        if number.is_empty() {
            return Err(bad(format!("{text:?} has no number before {unit:?}")));
        }
        if unit.is_empty() {
            return Err(bad(format!("{text:?} has no unit after {number}")));
        }
        let Some((_, millis)) = UNITS.iter().find(|(name, _)| *name == unit) else {
            return Err(bad(format!("{text:?} has the unknown unit {unit:?} after {number}")));
        };
        if smallest <= *millis {
            return Err(bad(format!("{text:?} must give each unit once, largest first")));
        }
        smallest = *millis;
        total = number
            .parse::<u64>()
            .ok()
            .and_then(|number| number.checked_mul(*millis))
            .and_then(|part| total.checked_add(part))
            .filter(|total| u128::from(*total) <= MAX.as_millis())
            .ok_or_else(|| bad(format!("{text:?} is longer than 100 years")))?;
        rest = tail;
    }
    Ok(Duration::from_millis(total))
}

/// Writes a duration the way [`parse`] reads it, to the millisecond.
pub fn display(duration: Duration) -> String {
    let mut rest = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    if rest == 0 {
        return "0s".to_owned();
    }
    let mut text = String::new();
    for (unit, millis) in UNITS.iter().rev() {
        if rest >= *millis && *unit != "w" {
            text.push_str(&(rest / millis).to_string());
            text.push_str(unit);
            rest %= millis;
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_people_write() {
        for (text, millis) in [
            ("0s", 0),
            ("250ms", 250),
            ("30s", 30_000),
            ("5m", 300_000),
            ("1h30m", 5_400_000),
            ("2w1d", 1_296_000_000),
            ("1s500ms", 1_500),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_millis(millis)), "{text}");
        }
    }

    #[test]
    fn refuses_what_is_not_a_duration() {
        for text in [
            "",
            "30",
            "s",
            "3o s",
            "30 s",
            "-1s",
            "1.5h",
            "1m1h",
            "1s1s",
            "1y",
            "30sec",
            "9999999999999999999s",
            "40000d",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn display_reads_back() {
        for millis in [0, 1, 999, 1_000, 61_000, 5_400_000, 90_061_001] {
            let duration = Duration::from_millis(millis);
            assert_eq!(parse(&display(duration)), Ok(duration));
        }
    }
}
