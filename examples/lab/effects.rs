//! What jobs have done, noted by themselves and apart from the database: it is not asked whether it
//! has kept its word.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Ids in the order in which they were noted, and when.
#[derive(Clone, Default)]
pub(crate) struct Effects(Arc<Mutex<Vec<(i64, Instant)>>>);

impl Effects {
    pub(crate) fn note(&self, id: i64) {
        self.lock().push((id, Instant::now()));
    }

    pub(crate) fn ids(&self) -> Vec<i64> {
        self.lock().iter().map(|(id, _)| *id).collect()
    }

    /// How many ids were noted again.
    pub(crate) fn twice(&self) -> usize {
        let ids = self.ids();
        ids.len() - ids.iter().collect::<HashSet<_>>().len()
    }

    /// How many a second.
    pub(crate) fn rate(&self) -> f64 {
        let noted = self.lock();
        match noted.as_slice() {
            [(_, first), between @ .., (_, last)] => {
                (between.len() + 1) as f64 / (*last - *first).as_secs_f64()
            }
            _ => 0.0,
        }
    }

    /// The median of the times that `count` of them took, in the first tenth and in the last.
    ///
    /// The median: a machine that was busy for a moment does not show.
    pub(crate) fn first_and_last(&self, count: usize) -> [Duration; 2] {
        let times: Vec<Instant> = self.lock().iter().map(|(_, at)| *at).collect();
        let tenth = times.len() / 10;
        let median = |times: &[Instant]| {
            let marks: Vec<Instant> = times.iter().step_by(count).copied().collect();
            let mut took: Vec<Duration> = marks.windows(2).map(|pair| pair[1] - pair[0]).collect();
            took.sort_unstable();
            took.get(took.len() / 2).copied().unwrap_or_default()
        };
        [median(&times[..tenth]), median(&times[times.len() - tenth..])]
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(i64, Instant)>> {
        self.0.lock().expect("nobody panics while holding the lock")
    }
}
