//! Shows how the work goes on: a bar on a terminal, a few lines elsewhere.

use std::cell::Cell;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use jobq::{Client, JobState};

use crate::QUEUE;

/// Where there is no terminal, how often a line says how far it is.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// How many jobs of the queue are in which state.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Counts {
    pub(crate) pending: u64,
    pub(crate) running: u64,
    pub(crate) completed: u64,
    pub(crate) dead: u64,
}

impl Counts {
    pub(crate) async fn read(client: &Client) -> jobq::Result<Self> {
        let mut counts = Self::default();
        for line in client.counts().await? {
            if line.queue != QUEUE {
                continue;
            }
            match line.state {
                JobState::Waiting | JobState::Pending => counts.pending += line.count,
                JobState::Running => counts.running += line.count,
                JobState::Completed | JobState::Cancelled => counts.completed += line.count,
                JobState::Dead => counts.dead += line.count,
            }
        }
        Ok(counts)
    }

    pub(crate) fn unfinished(&self) -> u64 {
        self.pending + self.running
    }
}

/// A progress bar, or what stands for it.
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    /// When a line was last written.
    line_at: Cell<Instant>,
    /// The latest counts, and since when they have been the same.
    latest: Cell<(Counts, Instant)>,
}

impl Progress {
    pub(crate) fn new() -> Self {
        let bar = std::io::stdout().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{bar:20.green} {pos}/{len} {wide_msg}");
            ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stdout())
                .with_style(style.expect("the template is valid"))
        });
        Self {
            bar,
            line_at: Cell::new(Instant::now()),
            latest: Cell::new((Counts::default(), Instant::now())),
        }
    }

    /// Writes a line.
    pub(crate) fn say(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| println!("{line}")),
            None => println!("{line}"),
        }
    }

    /// Shows how many jobs have been done since `before`, and what the others wait for.
    ///
    /// `here` is how many run in this process, `patience` the longest wait for a job whose process
    /// was killed.
    pub(crate) fn show(&self, counts: Counts, before: Counts, here: u64, patience: Duration) {
        let (latest, mut since) = self.latest.get();
        if counts != latest {
            since = Instant::now();
            self.latest.set((counts, since));
        }
        let completed = counts.completed.saturating_sub(before.completed);
        let dead = counts.dead.saturating_sub(before.dead);
        let done = completed + dead;
        let mut message = format!("{} running, {dead} dead", counts.running);
        // For a moment a job is still running for the database that has just ended here.
        let waited = since.elapsed();
        if counts.running > 0 && here == 0 && waited > Duration::from_secs(1) {
            let left = patience.saturating_sub(waited).as_secs();
            message = match left {
                0 => format!("{} held by another process", counts.running),
                _ => format!(
                    "{} held by another process; if killed, ours in {left} s",
                    counts.running
                ),
            };
        } else if counts.running == 0 && counts.pending > 0 && waited > Duration::from_secs(1) {
            message = format!("{} failed, to be tried again", counts.pending);
        }
        let Some(bar) = &self.bar else {
            if self.line_at.get().elapsed() >= LINE_EVERY {
                self.line_at.set(Instant::now());
                println!("{done} of {} done: {message}", done + counts.unfinished());
            }
            return;
        };
        bar.set_length(done + counts.unfinished());
        bar.set_position(done);
        bar.set_message(message);
        bar.tick();
    }

    /// Takes the bar away.
    pub(crate) fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
