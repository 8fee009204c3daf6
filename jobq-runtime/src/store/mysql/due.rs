//! Reading the due index.
//!
//! Rows that are gone, but that somebody's old read view could still see, stay in an index as dead
//! entries: a forgotten transaction leaves every job of the day there. Claims begin behind them, at
//! their floors. But InnoDB skips dead entries before it looks whether they are in the range that it
//! was asked for: a read of an empty band goes on through all dead entries of the next band, or the
//! next queue, until it meets a living one. With locks it even fetches the row of each.
//!
//! So the index is read in pages, without locks; what is to be locked is then locked by its id. MySQL
//! knows where such a read ends, provided that conditions are not pushed down to the index. And bands in
//! which no job was ever met are asked only whether they have any, by an equality, which both databases
//! know to end: on MariaDB only a band in use leads into the dead entries of the next one.

use jobq_core::time::Timestamp;
use sqlx::mysql::MySqlRow;

use super::{Floor, get, is_set, list, literal};

/// jobq's jobs by their ids, each looked up by itself and in this order, as a table `job` to select
/// from. Of a list of ids the servers may make a scan of a small table, which locks every row for a
/// moment; and a row that is locked for a moment is skipped.
pub(crate) fn jobs_by_id(ids: impl IntoIterator<Item = i64>) -> String {
    let ids = list(ids);
    format!(
        "json_table('[{ids}]', '$[*]' columns (id bigint path '$')) as wanted
         straight_join jobq_jobs as job force index (primary) on job.id = wanted.id"
    )
}

/// A part of the due index.
#[derive(Clone)]
pub(crate) struct Range {
    pub(crate) queue: String,
    pub(crate) band: i16,
    /// It begins behind this place.
    pub(crate) from: Floor,
    /// What else its keys must be, as SQL.
    pub(crate) and: String,
}

/// What locks jobs that were looked up by id. (MySQL wants to know which of the tables; MariaDB cannot
/// be told.)
pub(crate) const LOCK_JOBS: &str = "for update /*!80001 of job */ skip locked";

/// The jobs that are due.
pub(crate) const DUE: &str = "run_after <= now_us()";

/// A key of the due index.
pub(crate) struct Key {
    pub(crate) run_after: Timestamp,
    pub(crate) id: i64,
    /// Whether the job is what was looked for.
    pub(crate) fits: bool,
}

impl Key {
    pub(crate) fn read(row: &MySqlRow) -> sqlx::Result<Self> {
        Ok(Self {
            run_after: Timestamp(get(row, "run_after")?),
            id: get(row, "id")?,
            fits: is_set(row, "fits")?,
        })
    }

    /// The place just behind it.
    pub(crate) fn floor(&self) -> Floor {
        Floor { run_after: self.run_after, id: self.id }
    }
}

impl Range {
    /// Reads the first keys of the range in order, each with whether its job fits, as rows
    /// `columns, run_after, id, fits`.
    ///
    /// Both databases make two ranges of the floor, of which the first begins at its id: one insert
    /// gives thousands of jobs the same time. Of a comparison of `(run_after, id)` they would make
    /// none, and of `run_after >= … and (run_after > … or id > …)` one that begins at the time.
    pub(crate) fn page(&self, columns: &str, fits: &str, limit: u32) -> String {
        let (queue, band, and) = (literal(&self.queue), self.band, &self.and);
        // The smallest number has no literal.
        let (from, id) = (self.from.run_after.0.max(-i64::MAX), self.from.id);
        format!(
            "select {columns} run_after, id, {fits} as fits
             from jobq_jobs force index (jobq_jobs_due)
             where queue = {queue}
               and band = {band}
               and ((run_after = {from} and id > {id}) or run_after > {from})
               and {and}
             order by run_after, id
             limit {limit}"
        )
    }
}

/// Whether a band has any jobs, of whatever time and kind.
pub(crate) fn band_has_any(queue: &str, band: i16) -> String {
    let queue = literal(queue);
    format!(
        "exists (
             select 1
             from jobq_jobs force index (jobq_jobs_due)
             where queue = {queue} and band = {band}
         )"
    )
}
