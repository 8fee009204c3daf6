//! What is the same on every database when unique jobs are enqueued: which jobs of a call are twins,
//! what is written for them, and what the caller is told.

use std::collections::BTreeMap;

use jobq_core::job::JobId;
use jobq_core::unique::{OnConflict, UniqueScope};

use crate::enqueue::Enqueued;
use crate::error::{Error, Result};
use crate::job::{CheckedDue, CheckedJob};
use crate::store::Redriven;
use crate::unique::UniqueKey;

/// A call that enqueues at least one unique job.
///
/// Of the jobs with one key the first is written, if any; those after it that replace give it their
/// payload, time and priority.
pub(crate) struct UniqueCall {
    /// What is written if every key is free: every plain job and the first of all twins.
    pub(crate) jobs: Vec<CheckedJob>,
    /// For each job of the call its place in `jobs`, and what its conflict does.
    places: Vec<(usize, Option<OnConflict>)>,
    /// The places of the unique ones in `jobs`, in the order of their keys: who locks several locks
    /// them in this order.
    keys: BTreeMap<UniqueKey, usize>,
    /// What is to be done for each of `jobs` where a twin is there.
    conflicts: Vec<Conflict>,
}

/// What several twins of one call ask for together.
#[derive(Clone, Copy, Default)]
struct Conflict {
    replaces: bool,
    is_error: bool,
}

/// Who has a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Holder {
    /// The job that is about to be written.
    New,
    /// Another one, which is there; it was given what the new one would have been, or not.
    Existing { id: JobId, replaced: bool },
}

/// What is known of a key that somebody has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Held {
    pub(crate) job: JobId,
    pub(crate) taken: i64,
    /// Whether it keeps others out.
    pub(crate) live: bool,
    /// Whether its job can be changed.
    pub(crate) idle: bool,
}

impl UniqueCall {
    /// The call, if any of its jobs is unique.
    pub(crate) fn of(jobs: &[CheckedJob]) -> Result<Option<Self>> {
        if jobs.iter().all(|job| job.unique.is_none()) {
            return Ok(None);
        }
        let mut call = Self {
            jobs: Vec::new(),
            places: Vec::new(),
            keys: BTreeMap::new(),
            conflicts: Vec::new(),
        };
        for job in jobs {
            let on_conflict = job.unique.map(|unique| unique.on_conflict);
            let first = job.unique.and_then(|unique| call.keys.get(&unique.key).copied());
            let place = first.unwrap_or(call.jobs.len());
            call.places.push((place, on_conflict));
            match (first, on_conflict) {
                (Some(_), Some(OnConflict::Error)) => {
                    return Err(Error::Duplicate { kind: job.kind.to_string(), existing: None });
                }
                (Some(first), Some(on_conflict)) if on_conflict.replaces() => {
                    let twin = &mut call.jobs[first];
                    twin.payload.clone_from(&job.payload);
                    twin.due = job.due;
                    twin.priority = job.priority;
                    twin.expires = job.expires;
                    twin.unique = twin.unique.zip(job.unique).map(|(mut twin, job)| {
                        twin.on_conflict = job.on_conflict;
                        twin
                    });
                }
                (Some(_), _) => {}
                (None, _) => {
                    if let Some(unique) = job.unique {
                        call.keys.insert(unique.key, place);
                    }
                    call.jobs.push(job.clone());
                    call.conflicts.push(Conflict::default());
                }
            }
            if let Some(on_conflict) = on_conflict {
                let conflict = &mut call.conflicts[place];
                conflict.replaces |= on_conflict.replaces();
                conflict.is_error |= on_conflict == OnConflict::Error;
            }
        }
        for job in &mut call.jobs {
            if let Some(OnConflict::Debounce { max_wait }) = job.unique.map(|it| it.on_conflict)
                && let CheckedDue::After(delay) = &mut job.due
            {
                *delay = max_wait.min(*delay);
            }
        }
        Ok(Some(call))
    }

    /// The unique jobs, in the order of their keys, each with its place in `jobs`.
    pub(crate) fn unique(&self) -> impl Iterator<Item = (UniqueKey, usize, &CheckedJob)> {
        self.keys.iter().map(|(key, place)| (*key, *place, &self.jobs[*place]))
    }

    /// Whether one of `jobs` may be due later than it may be put off: a time that was asked for can be
    /// compared with the clock in the database only. One that replaces itself is put right.
    pub(crate) fn is_put_off_too_far(&self, place: usize) -> bool {
        let job = &self.jobs[place];
        let on_conflict = job.unique.map(|unique| unique.on_conflict);
        matches!((on_conflict, job.due), (Some(OnConflict::Debounce { .. }), CheckedDue::At(_)))
    }

    /// The place in `jobs` of the one with a key.
    #[cfg(feature = "sqlite")]
    pub(crate) fn place(&self, key: &UniqueKey) -> Option<usize> {
        self.keys.get(key).copied()
    }

    /// Decides about a job whose key is held by another; `None` if that one does not keep it out.
    ///
    /// If it is to be replaced that is still to be done: `Some(false)`.
    pub(crate) fn judge(&self, place: usize, held: Held) -> Result<Option<Replace>> {
        if !held.live {
            return Ok(None);
        }
        let Conflict { replaces, is_error } = self.conflicts[place];
        if is_error {
            return Err(Error::Duplicate {
                kind: self.jobs[place].kind.to_string(),
                existing: Some(held.job),
            });
        }
        Ok(Some(if replaces && held.idle { Replace::Try } else { Replace::No }))
    }

    /// What the caller is told. `holders` has for each of `jobs` who has its key, `ids` the ids of
    /// those that were written, in order.
    pub(crate) fn told(&self, holders: &[Holder], ids: &[JobId]) -> Vec<Enqueued> {
        let mut ids = ids.iter().copied();
        let outcomes: Vec<(Holder, Option<JobId>)> = holders
            .iter()
            .map(|holder| match holder {
                Holder::New => (*holder, ids.next()),
                Holder::Existing { id, .. } => (*holder, Some(*id)),
            })
            .collect();
        let mut told: Vec<bool> = vec![false; self.jobs.len()];
        self.places
            .iter()
            .map(|(place, on_conflict)| {
                let (holder, id) = outcomes[*place];
                let id = id.unwrap_or(JobId(0));
                let is_first = !std::mem::replace(&mut told[*place], true);
                let replaces = on_conflict.is_some_and(OnConflict::replaces);
                match holder {
                    Holder::New if is_first => Enqueued::Inserted(id),
                    Holder::New => Enqueued::Existing { id, replaced: replaces },
                    Holder::Existing { replaced, .. } => {
                        Enqueued::Existing { id, replaced: replaced && replaces }
                    }
                }
            })
            .collect()
    }
}

/// Unique jobs that are to be made pending again.
///
/// A job that has started does not take a key that it held until then, and one that holds a key for a
/// time has had that time. But where another job has the key, it is a duplicate, and stays as it is.
#[derive(Default)]
pub(crate) struct Retake {
    /// For each key the jobs that may become pending, and the word of the scope of the one that is to
    /// hold it.
    keys: BTreeMap<UniqueKey, Vec<(JobId, Option<String>)>>,
    /// Jobs that stay as they are, and which one is in their way.
    pub(crate) duplicates: Vec<(JobId, JobId)>,
}

impl Retake {
    /// Adds a job with its token, key and scope, as they are stored.
    pub(crate) fn add(&mut self, job: JobId, token: i64, key: Option<Vec<u8>>, scope: &str) {
        let key = key.and_then(|key| key.try_into().ok()).map(UniqueKey);
        let (Some(key), false) = (key, scope == "until_started" && token > 0) else { return };
        let holds = ["until_started", "until_finished"].contains(&scope).then(|| scope.to_owned());
        let jobs = self.keys.entry(key).or_default();
        match jobs.iter().find(|(_, scope)| scope.is_some()) {
            Some((first, _)) if holds.is_some() => self.duplicates.push((job, *first)),
            _ => jobs.push((job, holds)),
        }
    }

    /// The keys that it is about, in order.
    pub(crate) fn keys(&self) -> impl Iterator<Item = UniqueKey> {
        self.keys.keys().copied()
    }

    /// Who is to hold which key, in order, with the word of its scope.
    pub(crate) fn holders(&self) -> impl Iterator<Item = (UniqueKey, JobId, &str)> {
        self.keys.iter().flat_map(|(key, jobs)| {
            jobs.iter().filter_map(|(job, scope)| Some((*key, *job, scope.as_deref()?)))
        })
    }

    /// Sets those aside whose key another job has.
    pub(crate) fn set_aside(&mut self, held: impl IntoIterator<Item = (UniqueKey, Held)>) {
        for (key, held) in held.into_iter().filter(|(_, held)| held.live) {
            let Some(jobs) = self.keys.get_mut(&key) else { continue };
            for (job, _) in jobs.extract_if(.., |(job, _)| *job != held.job) {
                // Whoever is behind it is behind the same.
                let behind = self.duplicates.iter_mut().filter(|(_, first)| *first == job);
                behind.for_each(|(_, first)| *first = held.job);
                self.duplicates.push((job, held.job));
            }
        }
    }

    /// Of these jobs those that become pending, and those that do not.
    pub(crate) fn split(&self, jobs: Vec<JobId>) -> Redriven {
        let is_duplicate =
            |job: &JobId| self.duplicates.iter().any(|(duplicate, _)| duplicate == job);
        let (duplicates, jobs) = jobs.into_iter().partition(is_duplicate);
        Redriven { jobs, duplicates }
    }
}

/// What to do with a job that keeps another one out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Replace {
    /// Leave it as it is.
    No,
    /// Change it, if it is still as it was seen.
    Try,
}

/// A value that marks a key as taken anew by a job that may have had it before.
pub(crate) fn taken_anew() -> i64 {
    rand::random()
}

/// How long a scope lasts, in microseconds, if that does not depend on the job.
pub(crate) fn lasting(scope: UniqueScope) -> Option<i64> {
    match scope {
        UniqueScope::For(time) => Some(jobq_core::time::micros(time)),
        UniqueScope::UntilStarted | UniqueScope::UntilFinished | UniqueScope::Forever => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::job::CheckedUnique;

    fn job(key: &str, payload: &str, on_conflict: OnConflict) -> CheckedJob {
        CheckedJob {
            unique: Some(CheckedUnique {
                key: UniqueKey::given("k", key),
                scope: UniqueScope::UntilFinished,
                on_conflict,
            }),
            ..plain(payload)
        }
    }

    fn plain(payload: &str) -> CheckedJob {
        CheckedJob {
            kind: "k".into(),
            queue: "default".into(),
            payload: payload.to_owned(),
            due: CheckedDue::After(Duration::from_secs(9)),
            priority: 0,
            max_attempts: 1,
            max_crashes: 1,
            expires: None,
            tags: Vec::new(),
            metadata: None,
            unique: None,
            key: None,
        }
    }

    fn call(jobs: &[CheckedJob]) -> UniqueCall {
        UniqueCall::of(jobs).expect("no conflict").expect("there are unique ones")
    }

    #[test]
    fn without_unique_jobs_there_is_nothing_to_do() {
        assert!(UniqueCall::of(&[plain("1"), plain("2")]).expect("no conflict").is_none());
    }

    #[test]
    fn the_first_of_twins_is_written_and_the_last_that_replaces_counts() {
        let (skip, replace) = (OnConflict::Skip, OnConflict::Replace);
        let call = call(&[
            job("a", "1", skip),
            plain("2"),
            job("b", "3", skip),
            job("a", "4", replace),
            job("a", "5", skip),
        ]);
        let payloads: Vec<&str> = call.jobs.iter().map(|job| job.payload.as_str()).collect();
        assert_eq!(payloads, ["4", "2", "3"]);
        let ids = [JobId(1), JobId(2)];
        let existing = Holder::Existing { id: JobId(9), replaced: true };
        assert_eq!(
            call.told(&[Holder::New, Holder::New, existing], &ids),
            [
                Enqueued::Inserted(JobId(1)),
                Enqueued::Inserted(JobId(2)),
                Enqueued::Existing { id: JobId(9), replaced: false },
                Enqueued::Existing { id: JobId(1), replaced: true },
                Enqueued::Existing { id: JobId(1), replaced: false },
            ]
        );
        let held = Held { job: JobId(9), taken: 0, live: true, idle: true };
        assert_eq!(call.judge(0, held).expect("none is to fail"), Some(Replace::Try));
        assert_eq!(call.judge(2, held).expect("none is to fail"), Some(Replace::No));
        let running = Held { idle: false, ..held };
        assert_eq!(call.judge(0, running).expect("none is to fail"), Some(Replace::No));
        let ended = Held { live: false, ..held };
        assert_eq!(call.judge(0, ended).expect("none is to fail"), None);
    }

    #[test]
    fn a_twin_that_is_to_be_an_error_is_one() {
        let (skip, error) = (OnConflict::Skip, OnConflict::Error);
        let twice = UniqueCall::of(&[job("a", "1", skip), job("a", "2", error)]);
        assert!(matches!(twice, Err(Error::Duplicate { existing: None, .. })));
        let call = call(&[job("a", "1", error)]);
        let held = Held { job: JobId(9), taken: 0, live: true, idle: true };
        assert!(matches!(
            call.judge(0, held),
            Err(Error::Duplicate { existing: Some(JobId(9)), .. })
        ));
        assert_eq!(call.judge(0, Held { live: false, ..held }).expect("it is free"), None);
    }

    #[test]
    fn a_debounced_job_waits_no_longer_than_it_may() {
        let debounce = |max_wait| OnConflict::Debounce { max_wait: Duration::from_secs(max_wait) };
        for (max_wait, delay) in [(5, 5), (30, 9)] {
            let call = call(&[job("a", "1", debounce(max_wait))]);
            let CheckedDue::After(after) = call.jobs[0].due else { panic!("it is a delay") };
            assert_eq!(after, Duration::from_secs(delay));
        }
    }

    #[test]
    fn keys_are_gone_through_in_order() {
        let jobs: Vec<CheckedJob> =
            (0..50).map(|n| job(&n.to_string(), "1", OnConflict::Skip)).collect();
        let call = call(&jobs);
        let keys: Vec<UniqueKey> = call.unique().map(|(key, ..)| key).collect();
        assert!(keys.is_sorted() && keys.len() == 50);
        assert!(call.unique().all(|(key, place, job)| {
            call.jobs[place].unique.map(|it| it.key) == Some(key) && job.unique.is_some()
        }));
    }
}
