//! The life of a job: what an attempt's outcome does to its row.
//!
//! This module decides; a store writes the decision down, guarded by the job's lease. Nothing
//! here reads a clock or a database, so every rule can be checked by calling a function.
//!
//! Every operation that may change a job's state (the guard of all writes for a running job is
//! its lease: id, token and session):
//!
//! | operation | from → to | guard | decided by |
//! |---|---|---|---|
//! | insert | (nothing) → pending | – | the caller's transaction |
//! | claim | pending → running | due, unleased, live session, neither queue nor kind paused, and the queue's limit has room; token + 1, attempt + 1 unless it has expired | [`admit`] |
//! | sweep: take what has expired | waiting, pending → running | not started in time, unleased, live session; token + 1 | [`expire`] |
//! | settle: complete | running → completed | lease | [`settle`] |
//! | settle: requeue | running → pending | lease, no cancel requested | [`settle`], [`rescue`] |
//! | settle: bury | running → dead | lease, no cancel requested | [`settle`], [`rescue`], [`admit`], [`expire`] |
//! | settle: cancel | running → cancelled | lease | [`settle`], [`rescue`] |
//! | complete in transaction | running → completed | lease | the handler's transaction |
//! | cancel | waiting, pending → cancelled | unleased | an operator |
//! | redrive | dead, cancelled → pending | the row still there, no twin has its key; old id and token kept | an operator |
//! | replace | pending → pending, waiting → waiting | unleased; of a job unique until it starts: never claimed | a twin's enqueue |
//! | claim: put aside | pending, running → waiting | unleased, or lease and no cancel requested; another job has its key | – |
//! | settle, cancel, sweep: wake | waiting → pending, front | the first of its key that may run | – |
//! | sweep: hurry | pending → pending, express | unleased, token | a late find |
//! | sweep: park | pending → waiting | unleased, token, no live session knows the kind, or it is paused | – |
//! | sweep, resume: unpark | waiting → pending | unleased, token, a live session knows the kind, and it is not paused | – |
//!
//! Rescue is not a write of its own: it closes a session whose lease expired and then settles
//! that session's jobs with what [`rescue`] decides.

use std::time::Duration;

use crate::outcome::{AttemptReason, AttemptRecord, DeathReason, Outcome};
use crate::retry::Backoff;

/// What a job's row counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Attempts that were started and not given back; the running one included.
    pub attempt: u32,
    /// Attempts in a row that ended because their lease expired.
    pub crashes: u32,
    /// Claims given back unfinished: by a shutdown, after a lost claim reply, or by a process that
    /// could not extend its lease.
    pub interruptions: u32,
}

/// How often a job may be tried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// The attempt with this number is the last.
    pub max_attempts: u32,
    /// The job is poison when it crashes while running alone and has crashed this often.
    pub max_crashes: u32,
}

/// What to do with the row of a job that was claimed.
#[derive(Clone, PartialEq, Debug)]
pub enum Transition {
    /// Move it to the history as completed.
    Complete {
        /// The JSON of the job function's value.
        result: Option<String>,
    },
    /// Make it pending again.
    Requeue {
        /// When it may be claimed.
        when: When,
        /// The counters from now on.
        counters: Counters,
        /// What to keep about the attempt.
        record: Option<AttemptRecord>,
    },
    /// Move it to the dead letters.
    Bury {
        /// Why.
        reason: DeathReason,
        /// The counters from now on.
        counters: Counters,
        /// What to keep about the attempt.
        record: AttemptRecord,
    },
    /// Move it to the history as cancelled.
    Cancel {
        /// Why, if anybody said so.
        reason: Option<String>,
    },
}

/// When a requeued job may be claimed again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum When {
    /// At once and before all others: it was running already.
    Next,
    /// After this long, counted on the database's clock.
    After(Duration),
}

/// Refuses a claimed job that must not run at all.
///
/// `counters` are those after the claim, `expired` says that by then it was to have been started. A row
/// may be past its last attempt when somebody lowered `max_attempts` or changed the row by hand; it must
/// not run once more.
pub fn admit(counters: Counters, limits: Limits, expired: bool) -> Option<Transition> {
    if expired {
        return Some(expire(counters));
    }
    (counters.attempt > limits.max_attempts).then(|| Transition::Bury {
        reason: DeathReason::Exhausted,
        counters: Counters { attempt: counters.attempt - 1, ..counters },
        record: AttemptRecord {
            reason: AttemptReason::Failed,
            error: format!(
                "not run: {} of {} attempts were already used",
                counters.attempt - 1,
                limits.max_attempts
            ),
        },
    })
}

/// Decides what happens to a job that was not started in time, and was claimed for this only.
pub fn expire(counters: Counters) -> Transition {
    Transition::Bury {
        reason: DeathReason::Expired,
        counters,
        record: AttemptRecord {
            reason: AttemptReason::Expired,
            error: "not run: it was not started in time (`expires`)".to_owned(),
        },
    }
}

/// Decides what happens to a job whose attempt has ended.
///
/// `counters.attempt` is the number of that attempt, counted from 1; the attempt numbered
/// `limits.max_attempts` is the last. `unit` is a random number in `0.0..1.0` for the jitter.
///
/// Crashes are counted in a row: an attempt that returns, with whatever outcome, has not taken its
/// process along.
pub fn settle(
    outcome: Outcome,
    counters: Counters,
    limits: Limits,
    backoff: &Backoff,
    unit: f64,
) -> Transition {
    let bury = |reason, attempt_reason, error| Transition::Bury {
        reason,
        counters,
        record: AttemptRecord { reason: attempt_reason, error },
    };
    match outcome {
        Outcome::Completed { result } => Transition::Complete { result },
        Outcome::Failed { reason, error, .. } if limits.max_attempts <= counters.attempt => {
            bury(DeathReason::Exhausted, reason, error)
        }
        Outcome::Failed { reason, error, retry_after } => Transition::Requeue {
            when: When::After(retry_after.unwrap_or_else(|| backoff.delay(counters.attempt, unit))),
            counters: Counters { crashes: 0, ..counters },
            record: Some(AttemptRecord { reason, error }),
        },
        Outcome::Snoozed { delay } => Transition::Requeue {
            when: When::After(delay),
            counters: Counters {
                attempt: counters.attempt.saturating_sub(1),
                crashes: 0,
                ..counters
            },
            record: None,
        },
        Outcome::Discarded { error } => {
            bury(DeathReason::Discarded, AttemptReason::Discarded, error)
        }
        Outcome::Undecodable { error } => {
            bury(DeathReason::Undecodable, AttemptReason::Undecodable, error)
        }
        Outcome::Cancelled { reason } => Transition::Cancel { reason },
        Outcome::Interrupted => release(counters),
    }
}

/// Decides what happens to a job that its worker gives back without an outcome.
///
/// It costs neither an attempt nor a crash, and the job is next in line.
pub fn release(counters: Counters) -> Transition {
    Transition::Requeue {
        when: When::Next,
        counters: Counters {
            attempt: counters.attempt.saturating_sub(1),
            interruptions: counters.interruptions.saturating_add(1),
            ..counters
        },
        record: Some(AttemptRecord {
            reason: AttemptReason::Interrupted,
            error: "the worker stopped, or lost the database, before the job was done".to_owned(),
        }),
    }
}

/// Decides what happens to a job whose lease expired.
///
/// A process that dies takes all its jobs with it, the poison one and its neighbours. So the
/// first crash only marks the job: from then on it runs `isolated` (nothing else runs in that
/// process meanwhile), and only a crash while isolated counts on towards `max_crashes`. A marked
/// job that was not isolated yet had not started: it gets its attempt back.
pub fn rescue(
    counters: Counters,
    limits: Limits,
    isolated: bool,
    cancel_requested: bool,
) -> Transition {
    if cancel_requested {
        return Transition::Cancel { reason: None };
    }
    let started = isolated || counters.crashes == 0;
    let counters = if started {
        Counters { crashes: counters.crashes.saturating_add(1), ..counters }
    } else {
        Counters { attempt: counters.attempt.saturating_sub(1), ..counters }
    };
    let record = AttemptRecord {
        reason: AttemptReason::Crashed,
        error: "the lease expired: the worker's process crashed, hung or lost the database"
            .to_owned(),
    };
    if isolated && counters.crashes >= limits.max_crashes {
        Transition::Bury { reason: DeathReason::Poison, counters, record }
    } else if started && counters.attempt >= limits.max_attempts {
        Transition::Bury { reason: DeathReason::LeaseExpired, counters, record }
    } else {
        Transition::Requeue { when: When::Next, counters, record: Some(record) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { max_attempts: 3, max_crashes: 3 };

    fn at(attempt: u32) -> Counters {
        Counters { attempt, ..Counters::default() }
    }

    fn failed() -> Outcome {
        Outcome::Failed {
            reason: AttemptReason::Failed,
            error: "boom".to_owned(),
            retry_after: None,
        }
    }

    fn decide(outcome: Outcome, counters: Counters) -> Transition {
        settle(outcome, counters, LIMITS, &Backoff::DEFAULT, 0.5)
    }

    #[test]
    fn a_failed_attempt_waits_its_backoff() {
        let Transition::Requeue { when: When::After(wait), counters, record } =
            decide(failed(), at(2))
        else {
            panic!("attempts are left");
        };
        assert_eq!(wait, Backoff::DEFAULT.delay(2, 0.5));
        assert_eq!(counters, at(2), "a failure counts");
        assert_eq!(record.map(|r| r.error).as_deref(), Some("boom"));
    }

    #[test]
    fn the_last_failed_attempt_is_buried() {
        for attempt in [3, 4, u32::MAX] {
            assert!(matches!(
                decide(failed(), at(attempt)),
                Transition::Bury { reason: DeathReason::Exhausted, .. }
            ));
        }
    }

    #[test]
    fn a_wait_the_handler_asked_for_replaces_the_backoff() {
        let outcome = Outcome::Failed {
            reason: AttemptReason::Failed,
            error: "busy".to_owned(),
            retry_after: Some(Duration::from_secs(77)),
        };
        assert!(matches!(
            decide(outcome, at(1)),
            Transition::Requeue { when: When::After(wait), .. } if wait == Duration::from_secs(77)
        ));
    }

    #[test]
    fn a_snooze_costs_no_attempt_even_on_the_last_one() {
        let Transition::Requeue { counters, record, .. } =
            decide(Outcome::Snoozed { delay: Duration::from_secs(1) }, at(3))
        else {
            panic!("a snooze always requeues");
        };
        assert_eq!(counters, at(2));
        assert_eq!(record, None, "a job may snooze for ever: nothing piles up");
    }

    #[test]
    fn an_interruption_costs_neither_attempt_nor_crash_and_is_next_in_line() {
        let Transition::Requeue { when, counters, .. } = decide(Outcome::Interrupted, at(3)) else {
            panic!("an interruption always requeues");
        };
        assert_eq!(when, When::Next);
        assert_eq!(counters, Counters { attempt: 2, crashes: 0, interruptions: 1 });
    }

    #[test]
    fn discarded_and_undecodable_jobs_die_at_once() {
        for (outcome, expected) in [
            (Outcome::Discarded { error: "no".to_owned() }, DeathReason::Discarded),
            (Outcome::Undecodable { error: "no".to_owned() }, DeathReason::Undecodable),
        ] {
            assert!(matches!(
                decide(outcome, at(1)),
                Transition::Bury { reason, .. } if reason == expected
            ));
        }
    }

    #[test]
    fn a_job_that_was_not_started_in_time_is_buried_and_has_used_no_attempt() {
        let Some(Transition::Bury { reason, counters, record }) = admit(at(0), LIMITS, true) else {
            panic!("it must not run");
        };
        assert_eq!((reason, counters), (DeathReason::Expired, at(0)));
        assert_eq!(record.reason, AttemptReason::Expired);
    }

    #[test]
    fn a_row_past_its_last_attempt_is_not_run_again() {
        assert_eq!(admit(at(3), LIMITS, false), None);
        assert!(matches!(
            admit(at(4), LIMITS, false),
            Some(Transition::Bury { reason: DeathReason::Exhausted, counters, .. })
                if counters.attempt == 3
        ));
    }

    #[test]
    fn an_attempt_that_returns_ends_the_row_of_crashes() {
        let counters = Counters { attempt: 2, crashes: 2, interruptions: 1 };
        for outcome in [failed(), Outcome::Snoozed { delay: Duration::ZERO }] {
            let Transition::Requeue { counters, .. } = decide(outcome, counters) else {
                panic!("attempts are left");
            };
            assert_eq!(counters.crashes, 0);
        }
        let Transition::Requeue { counters, .. } = decide(Outcome::Interrupted, counters) else {
            panic!("an interruption always requeues");
        };
        assert_eq!(counters.crashes, 2, "one that was given back proves nothing");
    }

    #[test]
    fn a_poison_job_is_buried_by_its_crashes_while_isolated() {
        let limits = Limits { max_attempts: 100, max_crashes: 3 };
        let mut counters = at(1);
        let mut isolated = false;
        let mut crashes = 0;
        loop {
            crashes += 1;
            match rescue(counters, limits, isolated, false) {
                Transition::Requeue { when, counters: next, .. } => {
                    assert_eq!(when, When::Next);
                    counters = Counters { attempt: next.attempt + 1, ..next };
                    isolated = true;
                }
                Transition::Bury { reason, .. } => {
                    assert_eq!(reason, DeathReason::Poison);
                    break;
                }
                other => panic!("unexpected {other:?}"),
            }
        }
        assert_eq!(crashes, 3);
    }

    #[test]
    fn the_neighbours_of_a_poison_job_are_not_buried_with_it() {
        let limits = Limits { max_attempts: 2, max_crashes: 3 };
        let mut counters = at(1);
        for _ in 0..50 {
            // It is never the isolated one when its process dies.
            let Transition::Requeue { counters: next, .. } = rescue(counters, limits, false, false)
            else {
                panic!("an innocent job was buried");
            };
            assert_eq!((next.crashes, next.attempt), (1, 1), "what never started costs nothing");
            counters = Counters { attempt: next.attempt + 1, ..next };
        }
    }

    #[test]
    fn a_crash_on_the_last_attempt_is_buried_as_lease_expired() {
        assert!(matches!(
            rescue(at(3), LIMITS, false, false),
            Transition::Bury { reason: DeathReason::LeaseExpired, .. }
        ));
    }

    #[test]
    fn a_crashed_job_that_was_to_be_cancelled_is_cancelled() {
        assert_eq!(rescue(at(1), LIMITS, false, true), Transition::Cancel { reason: None });
    }
}
