//! What is written: a timeline of who did what, tables of what was measured, and whether it is what
//! was expected.

use std::fmt::Display;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// The report of one experiment, written as it goes.
pub(crate) struct Report {
    letter: char,
    markdown: bool,
    so_far: Mutex<SoFar>,
}

struct SoFar {
    /// When the timeline began.
    began: Instant,
    last: Last,
    met: usize,
    failed: Vec<String>,
}

/// What was written last, as blocks are set apart.
#[derive(PartialEq, Eq, Clone, Copy)]
enum Last {
    Text,
    Timeline,
    Expectation,
}

impl Report {
    pub(crate) fn new(letter: char, title: &str, markdown: bool) -> Self {
        let rule = "─".repeat(96_usize.saturating_sub(title.chars().count()));
        if markdown {
            println!("### {letter}. {title}\n");
        } else {
            println!("── {letter}. {title} {rule}\n");
        }
        let so_far = SoFar { began: Instant::now(), last: Last::Text, met: 0, failed: Vec::new() };
        Self { letter, markdown, so_far: Mutex::new(so_far) }
    }

    /// Explains what comes next, or what came.
    pub(crate) fn say(&self, text: impl Display) {
        let _so_far = self.now(Last::Text);
        println!("{text}\n");
    }

    /// A line of the timeline: what a connection did, and what came of it.
    pub(crate) fn did(&self, who: &str, what: impl Display) {
        let so_far = self.now(Last::Timeline);
        let at = so_far.began.elapsed().as_secs_f64();
        // A, B, C: each further to the right.
        let column = who.bytes().next().map_or(0, |letter| letter.saturating_sub(b'A'));
        let indent = 4 * usize::from(column.min(3));
        let line = format!("{at:>7.3} s  {:indent$}{who}  {what}", "");
        println!("{}", line.trim_end());
    }

    /// A table of what was measured.
    pub(crate) fn table<const N: usize>(&self, headings: [&str; N], rows: &[[String; N]]) {
        let _so_far = self.now(Last::Text);
        let headings = headings.map(str::to_owned);
        let cells = |n: usize| rows.iter().map(move |row| &row[n]);
        let widths: [usize; N] = std::array::from_fn(|n| {
            cells(n).chain([&headings[n]]).map(|cell| cell.chars().count()).max().unwrap_or(0)
        });
        // Numbers stand to the right.
        let right: [bool; N] = std::array::from_fn(|n| cells(n).all(|cell| is_number(cell)));
        let line = |row: &[String; N]| {
            let cells = (0..N).map(|n| {
                let width = widths[n];
                if right[n] { format!("{:>width$}", row[n]) } else { format!("{:width$}", row[n]) }
            });
            cells.collect::<Vec<_>>()
        };
        let rule: [String; N] = std::array::from_fn(|n| match (self.markdown, right[n]) {
            (true, true) => format!("{:->width$}", ":", width = widths[n]),
            (true, false) => "-".repeat(widths[n]),
            (false, _) => "─".repeat(widths[n]),
        });
        for row in [&headings, &rule].into_iter().chain(rows) {
            if self.markdown {
                println!("| {} |", line(row).join(" | "));
            } else {
                println!("  {}", line(row).join("  ").trim_end());
            }
        }
        println!();
    }

    /// Compares what was expected with what was measured.
    pub(crate) fn expect(&self, what: &str, measured: impl Display, holds: bool) {
        let mut so_far = self.now(Last::Expectation);
        let (list, mark) = (if self.markdown { "- " } else { "  " }, if holds { "✓" } else { "✗" });
        println!("{list}{mark} {what}: {measured}");
        if holds {
            so_far.met += 1;
        } else {
            so_far.failed.push(format!("{}: {what}; measured: {measured}", self.letter));
        }
    }

    /// Writes the verdict; returns the expectations that were not met.
    pub(crate) fn close(self) -> Vec<String> {
        drop(self.now(Last::Text));
        let SoFar { met, failed, .. } = self.so_far.into_inner().expect(NOBODY_PANICS);
        let all = met + failed.len();
        let verdict = if failed.is_empty() && met > 0 { "as expected" } else { "NOT as expected" };
        let bold = if self.markdown { "**" } else { "" };
        println!("{bold}verdict {}: {verdict} ({met} of {all}){bold}\n", self.letter);
        failed
    }

    /// Sets the next block apart from the one before.
    fn now(&self, next: Last) -> MutexGuard<'_, SoFar> {
        let mut so_far = self.so_far.lock().expect(NOBODY_PANICS);
        let fence = self.markdown && so_far.last != next;
        if fence && so_far.last == Last::Timeline {
            println!("```");
        }
        if so_far.last != next && so_far.last != Last::Text {
            println!();
        }
        if fence && next == Last::Timeline {
            println!("```text");
        }
        if next == Last::Timeline && so_far.last != next {
            so_far.began = Instant::now();
        }
        so_far.last = next;
        so_far
    }
}

const NOBODY_PANICS: &str = "nobody panics while holding the lock";

/// Milliseconds, as precise as one reads them.
pub(crate) fn ms(time: Duration) -> String {
    let ms = time.as_secs_f64() * 1000.0;
    match ms {
        100.0.. => format!("{ms:.0} ms"),
        10.0.. => format!("{ms:.1} ms"),
        _ => format!("{ms:.2} ms"),
    }
}

/// Several ids, or that there is none.
pub(crate) fn ids(ids: &[i64]) -> String {
    match ids {
        [] => "nothing".to_owned(),
        ids => ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    }
}

/// The mean of some times.
pub(crate) fn mean(times: &[Duration]) -> Duration {
    times.iter().sum::<Duration>() / u32::try_from(times.len().max(1)).unwrap_or(u32::MAX)
}

/// Whether it is a number, with its unit perhaps, or stands for one that there is not.
fn is_number(cell: &str) -> bool {
    let number = cell.strip_suffix(" ms").or(cell.strip_suffix(" %")).unwrap_or(cell);
    number == "—" || number.parse::<f64>().is_ok()
}
