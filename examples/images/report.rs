//! What is written at the end: what ran where, and the dead letters.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;

use jobq::{Client, DeadFilter, DeadJob, JobId, JobInfo, JobState, Lookup};

use crate::args::Args;
use crate::folder::Copy;
use crate::{Resized, resize};

/// Longer tables are for nobody.
const MAX_LINES: usize = 100;

/// An error with its causes, in a line.
pub(crate) fn with_causes(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let words = error.to_string();
        // Some errors say what their cause says.
        if !text.ends_with(&words) {
            text = format!("{text}: {words}");
        }
        cause = error.source();
    }
    text
}

/// Writes a table of those of these jobs that ended; returns how many were completed.
pub(crate) async fn jobs(client: &Client, ids: BTreeSet<JobId>) -> jobq::Result<usize> {
    let mut jobs = Vec::new();
    for id in ids {
        // A job that is gone was finished longer ago than its queue keeps jobs.
        if let Lookup::Found(job) = client.job(id).await?
            && job.state.is_final()
            && let Some(copy) = Copy::of(&job.payload)
        {
            jobs.push((copy, job));
        }
    }
    jobs.sort_by(|(one, _), (other, _)| one.cmp(other));
    let completed = jobs.iter().filter(|(_, job)| job.state == JobState::Completed).count();
    if jobs.is_empty() {
        return Ok(0);
    }

    let lines = jobs.iter().take(MAX_LINES).map(|(copy, job)| line(copy, job));
    let heading = ["photo", "width", "copy", "worker", "took", "attempts"].map(str::to_owned);
    let table: Vec<[String; 6]> = std::iter::once(heading).chain(lines).collect();
    let width = |column: usize| {
        table.iter().map(|line| line[column].chars().count()).max().unwrap_or_default()
    };
    let [photo, copy, worker] = [width(0), width(2), width(3)];
    println!();
    for [name, width, facts, by, took, attempts] in &table {
        println!(
            "{name:photo$}  {width:>5}  {facts:copy$}  {by:worker$}  {took:>7}  {attempts:>8}"
        );
    }
    if jobs.len() > MAX_LINES {
        println!("… and {} more", jobs.len() - MAX_LINES);
    }
    println!();
    Ok(completed)
}

fn line(copy: &Copy, job: &JobInfo) -> [String; 6] {
    let resized = job.result.as_deref().and_then(|json| serde_json::from_str::<Resized>(json).ok());
    let last = job.attempts.last();
    let (facts, worker, took) = if let Some(Resized { copy, worker, millis }) = resized {
        let kilobytes = copy.bytes as f64 / 1000.0;
        let facts = format!("{} × {}, {kilobytes:.1} kB", copy.width, copy.height);
        (facts, worker, format!("{millis} ms"))
    } else {
        let worker = last.and_then(|attempt| attempt.worker.clone()).unwrap_or_default();
        (job.state.to_string(), worker, String::new())
    };
    let attempts = job.attempt.to_string();
    [copy.name(), copy.width.to_string(), facts, worker, took, attempts]
}

/// Writes the dead letters of this folder, those of one photo with the same error in a line.
pub(crate) async fn dead_letters(client: &Client, args: &Args) -> jobq::Result<Vec<DeadJob>> {
    let mut dead = client.dead(&DeadFilter::all().kind(resize::NAME), u32::MAX).await?;
    let mut lines: BTreeMap<(String, String), BTreeSet<u32>> = BTreeMap::new();
    dead.retain(|letter| {
        let Some(copy) = Copy::of(&letter.payload) else { return false };
        // Of other folders, or made up for since.
        if copy.source.parent() != Some(&args.folder)
            || !copy.target.starts_with(&args.out)
            || copy.is_made()
        {
            return false;
        }
        let error = letter.error.replace("\ncaused by: ", ": ");
        let line = (copy.name(), format!("{error} ({})", letter.reason));
        lines.entry(line).or_default().insert(copy.width);
        true
    });
    if lines.is_empty() {
        return Ok(dead);
    }

    println!("dead letters:");
    let longest = lines.keys().map(|(name, _)| name.chars().count()).max().unwrap_or_default();
    for ((name, error), widths) in &lines {
        let widths: Vec<String> = widths.iter().map(ToString::to_string).collect();
        println!("  {name:longest$}  {:13}  {error}", widths.join(", "));
    }
    println!(
        "They stay in the database: run the command again to see them, with --retry to try them \
         again.\n"
    );
    Ok(dead)
}
