//! Text that is safe to store: error messages, panic messages, cancel reasons.

use std::error::Error;

/// The longest error text kept, in bytes; longer text is cut at a character boundary and ends
/// in `… (cut)`.
pub const MAX_ERROR_BYTES: usize = 16 * 1024;

/// The whole chain of an error as one line per cause, fit to be stored.
pub fn error_chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    // A cause that repeats its parent's words (a transparent wrapper) adds nothing.
    let mut last = text.clone();
    while let Some(error) = cause {
        let words = error.to_string();
        if words != last && text.len() <= MAX_ERROR_BYTES {
            text.push_str("\ncaused by: ");
            text.push_str(&words);
        }
        last = words;
        cause = error.source();
    }
    storable(&text)
}

/// `text` without NUL characters (PostgreSQL cannot store them) and cut to
/// [`MAX_ERROR_BYTES`], so that writing an error down can never fail because of the error.
pub fn storable(text: &str) -> String {
    const CUT: &str = "… (cut)";
    let clean = text.replace('\0', "\u{fffd}");
    if clean.len() <= MAX_ERROR_BYTES {
        return clean;
    }
    let mut end = MAX_ERROR_BYTES - CUT.len();
    while !clean.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}{CUT}", &clean[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("could not resize")]
    struct Outer(#[source] std::io::Error);

    #[test]
    fn the_whole_chain_is_kept() {
        let error = Outer(std::io::Error::other("disk is full"));
        assert_eq!(error_chain(&error), "could not resize\ncaused by: disk is full");
    }

    #[test]
    fn nul_and_length_cannot_make_an_error_unwritable() {
        let long = format!("a\0b{}", "é".repeat(MAX_ERROR_BYTES));
        let text = storable(&long);
        assert!(text.len() <= MAX_ERROR_BYTES);
        assert!(!text.contains('\0'));
        assert!(text.ends_with("(cut)"));
    }
}
