//! What a `#[job]` function is to jobq: its options, its definition, and a new job of its kind.

use std::borrow::Cow;
use std::time::{Duration, SystemTime};

use jobq_core::key::{self, OnBlock};
use jobq_core::payload::{self, PayloadError};
use jobq_core::queue::{DEFAULT_QUEUE, check_name, check_priority};
use jobq_core::retry::Backoff;
use jobq_core::time::{TimeOutOfRange, Timestamp};
use jobq_core::unique::{OnConflict, Unique, UniqueScope};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::enqueue::{EnqueueTarget, Enqueued};
use crate::error::{Error, Result};
use crate::handler::{Handler, Need};
use crate::key::{JobKey, of_payload};
use crate::store::tags_json;
use crate::unique::{self, UniqueKey};

/// A job function's twin type, made by `#[job]`.
///
/// `#[job] async fn resize(..)` makes a type `resize` with `new`, `enqueue` and this trait.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a job",
    label = "not annotated with `#[job]`",
    note = "annotate the function with `#[jobq::job]`, then name it here without parentheses"
)]
pub trait Job: 'static {
    /// The function's parameters as stored: a JSON object keyed by parameter name.
    type Payload: Serialize + DeserializeOwned + Send + 'static;

    /// The kind: the function's name, unless `name = "…"` says otherwise.
    const NAME: &'static str;

    /// The whole definition.
    const DEF: &'static JobDef;
}

/// The options of `#[job(...)]`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct JobOptions {
    /// The queue that new jobs go to. Default: `default`.
    pub queue: &'static str,
    /// How long a worker that falls silent keeps the job. Default: 30 s; at least 1 s.
    pub lease: Duration,
    /// The longest an attempt may take before it is cancelled and counted as a failure.
    /// Default: none.
    pub timeout: Option<Duration>,
    /// How many attempts a job gets in all. Default: 20.
    pub max_attempts: u32,
    /// How often a job may crash its process, the last times while alone in it. Default: 3.
    pub max_crashes: u32,
    /// Which jobs of a queue run first, from 4 down to −4. Default: 0.
    pub priority: i16,
    /// The wait before each retry.
    pub backoff: Backoff,
    /// How long a job is kept once its worker has completed or cancelled it; `Some(0)` deletes it at
    /// once. Default: what the queue says.
    pub retention: Option<Duration>,
    /// In which time from when it is due a job has to be started; one that was not becomes a dead letter
    /// with the reason `expired`, and does not run. Default: none.
    pub expires: Option<Duration>,
    /// Which of its jobs are twins, of which only one is to be. Default: none.
    pub unique: Option<Unique>,
    /// The parameters of which a job's key is made: jobs with one key run one at a time, in the order
    /// in which they were enqueued. Default: none.
    pub key: Option<&'static [&'static str]>,
    /// What becomes of the jobs behind one with their key that cannot run now. Default: they wait.
    pub on_block: OnBlock,
}

impl JobOptions {
    /// The options of a plain `#[job]`.
    pub const DEFAULT: Self = Self {
        queue: DEFAULT_QUEUE,
        lease: Duration::from_secs(30),
        timeout: None,
        max_attempts: 20,
        max_crashes: 3,
        priority: 0,
        backoff: Backoff::DEFAULT,
        retention: None,
        expires: None,
        unique: None,
        key: None,
        on_block: OnBlock::Block,
    };

    /// The shortest lease that can be renewed in time: 1 s.
    pub const MIN_LEASE: Duration = Duration::from_secs(1);

    /// Refuses options that cannot work; `#[job]` calls it at compile time.
    ///
    /// # Panics
    ///
    /// Panics with the reason, which makes it a compile error in a `const`.
    #[must_use]
    #[track_caller]
    pub const fn checked(self) -> Self {
        assert!(
            self.lease.as_millis() >= Self::MIN_LEASE.as_millis(),
            "`lease` must be at least 1s: it is renewed every third of it"
        );
        assert!(
            self.lease.as_secs() <= 30 * 86_400,
            "`lease` must be at most 30d: it is how long a dead worker keeps its jobs; \
             use `timeout` to bound a run"
        );
        if let Some(timeout) = self.timeout {
            assert!(!timeout.is_zero(), "`timeout` must be longer than 0s; leave it out for none");
            assert!(
                timeout.as_secs() <= jobq_core::duration::MAX.as_secs(),
                "`timeout` must be at most 100 years; leave it out for none"
            );
        }
        if let Some(expires) = self.expires {
            assert!(!expires.is_zero(), "`expires` must be longer than 0s; leave it out for none");
            assert!(
                expires.as_secs() <= jobq_core::duration::MAX.as_secs(),
                "`expires` must be at most 100 years; leave it out for none"
            );
        }
        assert!(
            self.max_attempts >= 1,
            "`max_attempts` must be at least 1: it counts the first run"
        );
        assert!(self.max_attempts <= i32::MAX as u32, "`max_attempts` must be at most 2147483647");
        assert!(self.max_crashes >= 1, "`max_crashes` must be at least 1");
        assert!(self.max_crashes <= i16::MAX as u32, "`max_crashes` must be at most 32767");
        assert!(
            self.priority >= -4 && self.priority <= 4,
            "`priority` must be from -4 (last) to 4 (first)"
        );
        assert!(self.backoff.factor >= 1.0, "`backoff` needs a `factor` of at least 1");
        assert!(
            self.backoff.base.as_nanos() <= self.backoff.cap.as_nanos(),
            "`backoff` needs a `base` that is not longer than its `cap`"
        );
        if let Some(unique) = self.unique
            && let Some(problem) = unique.problem()
        {
            panic!("{}", problem);
        }
        self
    }
}

impl Default for JobOptions {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// A job function, as the runtime knows it. Made by `#[job]` only.
#[derive(Debug)]
pub struct JobDef {
    /// The kind.
    pub kind: &'static str,
    /// Former kinds whose stored jobs this function also runs.
    pub aliases: &'static [&'static str],
    /// The options.
    pub options: JobOptions,
    /// The source file of the function.
    pub file: &'static str,
    /// The line of the function.
    pub line: u32,
    /// The module of the function.
    pub module: &'static str,
    /// The state the function needs from the runtime.
    pub needs: fn() -> Vec<Need>,
    /// How to run it.
    pub handler: Handler,
}

/// A job that is not enqueued yet.
///
/// Made by a job function's `new`; options chain, and [`enqueue`](Self::enqueue) writes it.
/// Wrong values are kept and reported by `enqueue`, as typed errors.
#[derive(Debug)]
#[must_use = "a new job does nothing until it is enqueued"]
pub struct NewJob {
    pub(crate) kind: Cow<'static, str>,
    pub(crate) queue: Cow<'static, str>,
    pub(crate) payload: Result<String, PayloadError>,
    pub(crate) due: Due,
    pub(crate) priority: i64,
    pub(crate) max_attempts: u32,
    pub(crate) max_crashes: u32,
    pub(crate) expires: Option<Duration>,
    pub(crate) tags: Vec<String>,
    pub(crate) metadata: serde_json::Map<String, serde_json::Value>,
    pub(crate) unique: Option<Unique>,
    /// Whether `unique` is the function's own, whose parameters there are.
    pub(crate) unique_is_own: bool,
    /// What makes it unique instead of its payload.
    pub(crate) unique_key: Option<Cow<'static, str>>,
    pub(crate) key: NewKey,
    pub(crate) on_block: OnBlock,
}

/// The key of a new job.
#[derive(Debug)]
pub(crate) enum NewKey {
    None,
    /// Made of these parameters.
    By(&'static [&'static str]),
    Given(Cow<'static, str>),
}

/// When a new job is wanted.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Due {
    After(Duration),
    At(Result<Timestamp, TimeOutOfRange>),
}

impl NewJob {
    /// A job of kind `J` with this payload.
    pub fn of<J: Job>(payload: &J::Payload) -> Self {
        let options = &J::DEF.options;
        Self {
            kind: Cow::Borrowed(J::NAME),
            queue: Cow::Borrowed(options.queue),
            payload: payload::encode(payload),
            due: Due::After(Duration::ZERO),
            priority: i64::from(options.priority),
            max_attempts: options.max_attempts,
            max_crashes: options.max_crashes,
            expires: options.expires,
            tags: Vec::new(),
            metadata: serde_json::Map::new(),
            unique: options.unique,
            unique_is_own: true,
            unique_key: None,
            key: options.key.map_or(NewKey::None, NewKey::By),
            on_block: options.on_block,
        }
    }

    /// Runs the job no earlier than `delay` after it is written, on the database's clock.
    pub fn delay(mut self, delay: Duration) -> Self {
        self.due = Due::After(delay);
        self
    }

    /// Runs the job no earlier than `time`; a time in the past means now.
    ///
    /// Takes a [`SystemTime`] and whatever converts into one (the time types of `jiff`, `chrono`
    /// and `time` do). Times outside the years 1 to 9999 fail at enqueue.
    pub fn run_at(mut self, time: impl Into<SystemTime>) -> Self {
        self.due = Due::At(Timestamp::from_system(time.into()));
        self
    }

    /// Runs the job before those of lower priority in its queue: from 4 down to −4.
    pub fn priority(mut self, priority: i64) -> Self {
        self.priority = priority;
        self
    }

    /// Puts the job in another queue than its function's.
    pub fn queue(mut self, queue: impl Into<Cow<'static, str>>) -> Self {
        self.queue = queue.into();
        self
    }

    /// Gives the job another number of attempts than its function's.
    pub fn max_attempts(mut self, max_attempts: u32) -> Self {
        self.max_attempts = max_attempts;
        self
    }

    /// Gives the job so long from when it is due to be started, whatever its function says. A job that
    /// was not becomes a dead letter with the reason `expired`, and does not run.
    ///
    /// What was started in time is not touched by this: it is retried as ever.
    pub fn expires(mut self, expires: Duration) -> Self {
        self.expires = Some(expires);
        self
    }

    /// Lets the job be started at any time, whatever its function says.
    pub fn without_expiry(mut self) -> Self {
        self.expires = None;
        self
    }

    /// Adds a tag, a word for people: it is kept with the job in every table, and given to its
    /// function.
    pub fn tag(mut self, tag: impl Into<String>) -> Self {
        self.tags.push(tag.into());
        self
    }

    /// Adds a value that travels with the job but is no parameter of its function.
    pub fn metadata(
        mut self,
        name: impl Into<String>,
        value: impl Into<serde_json::Value>,
    ) -> Self {
        self.metadata.insert(name.into(), value.into());
        self
    }

    /// Makes the job unique, or unique in another way than its function says.
    ///
    /// Parameters are named as the payload has them: as the function's, or as `#[serde(rename)]` says.
    /// One that this job's payload does not have is an error at enqueue.
    pub fn unique(mut self, unique: Unique) -> Self {
        self.unique = Some(unique);
        self.unique_is_own = false;
        self
    }

    /// Makes the job unique by a text instead of its parameters, such as an idempotency key: of jobs
    /// of one kind those with the same text are twins.
    pub fn unique_key(mut self, key: impl Into<Cow<'static, str>>) -> Self {
        self.unique.get_or_insert(Unique::DEFAULT);
        self.unique_key = Some(key.into());
        self
    }

    /// Enqueues the job whether or not it has a twin, and keeps no twin out.
    pub fn not_unique(mut self) -> Self {
        self.unique = None;
        self.unique_key = None;
        self
    }

    /// Gives the job a key, instead of its function's: jobs with the same key, of whatever kind and in
    /// whatever queue, run one at a time, in the order in which they were enqueued.
    ///
    /// A key is a text of 1 to 200 bytes.
    pub fn key(mut self, key: impl Into<Cow<'static, str>>) -> Self {
        self.key = NewKey::Given(key.into());
        self
    }

    /// Enqueues the job without a key, whatever its function says.
    pub fn without_key(mut self) -> Self {
        self.key = NewKey::None;
        self
    }

    /// Says what becomes of the jobs behind this one with the same key while this one cannot run: it
    /// is retried or snoozed, is scheduled for later, or is dead.
    pub fn on_block(mut self, on_block: OnBlock) -> Self {
        self.on_block = on_block;
        self
    }

    /// Writes the job.
    ///
    /// The target is a [`Client`](crate::Client), a pool, a connection or **your own open
    /// transaction**: then the job exists if and when that transaction commits.
    ///
    /// # Errors
    ///
    /// [`Error::Payload`], [`Error::BadName`], [`Error::TimeOutOfRange`] and [`Error::BadOption`]
    /// for what was wrong with the job, [`Error::Duplicate`] when it has a twin and that is to be an
    /// error (nothing was written in both cases), [`Error::CommitUnknown`] when the connection broke
    /// after the job was sent, and database errors.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped the job is either written whole or not at all. But in a transaction of
    /// yours, a unique job may be written without keeping its twins out: roll it back. On MySQL and
    /// MariaDB close the connection: its driver may wait for ever for the reply to a dropped query.
    pub async fn enqueue(self, target: impl EnqueueTarget) -> Result<Enqueued> {
        let enqueued = crate::enqueue::enqueue(target, vec![self]).await?;
        Ok(enqueued[0])
    }

    /// Checks everything that can be checked without a database.
    pub(crate) fn check(self, payload_limit: usize) -> Result<CheckedJob> {
        let kind = self.kind;
        let payload =
            self.payload.map_err(|source| Error::Payload { kind: kind.to_string(), source })?;
        check_name("job", &kind)?;
        check_name("queue", &self.queue)?;
        if self.max_attempts == 0 || self.max_attempts > i32::MAX as u32 {
            return Err(Error::BadOption {
                option: "max_attempts",
                problem: format!("{} is not between 1 and {}", self.max_attempts, i32::MAX),
            });
        }
        if let Some(tag) = self.tags.iter().find(|tag| tag.is_empty() || tag.contains('\0')) {
            return Err(Error::BadOption {
                option: "tag",
                problem: format!("{tag:?} is empty or has a NUL character"),
            });
        }
        let due = match self.due {
            Due::After(delay) if delay > jobq_core::duration::MAX => {
                return Err(Error::BadOption {
                    option: "delay",
                    problem: "it is longer than 100 years".to_owned(),
                });
            }
            Due::After(delay) => CheckedDue::After(delay),
            Due::At(time) => CheckedDue::At(time?),
        };
        let bad_expiry = match self.expires {
            Some(expires) if expires < Duration::from_micros(1) => {
                Some("it is 0: no job could be started")
            }
            Some(expires) if expires > jobq_core::duration::MAX => {
                Some("it is longer than 100 years")
            }
            _ => None,
        };
        if let Some(problem) = bad_expiry {
            return Err(Error::BadOption { option: "expires", problem: problem.to_owned() });
        }
        let metadata = if self.metadata.is_empty() {
            None
        } else {
            Some(payload::encode(&self.metadata).map_err(|error| Error::BadOption {
                option: "metadata",
                problem: error.to_string(),
            })?)
        };
        let unique = match self.unique {
            Some(unique) => {
                if self.unique_key.is_none() && !self.unique_is_own {
                    check_parameters(&unique, &payload)?;
                }
                Some(checked_unique(unique, &kind, &payload, self.unique_key)?)
            }
            None => None,
        };
        let key = match self.key {
            NewKey::None => None,
            NewKey::By(by) => of_payload(&payload, by),
            NewKey::Given(key) => Some(key.into_owned()),
        };
        if let Some(problem) = key.as_deref().and_then(key::problem_of) {
            return Err(Error::BadOption { option: "key", problem: problem.to_owned() });
        }
        let key = key.map(|text| JobKey { text, on_block: self.on_block });
        let job = CheckedJob {
            priority: check_priority(self.priority)?,
            kind,
            queue: self.queue,
            payload,
            due,
            max_attempts: self.max_attempts,
            max_crashes: self.max_crashes,
            expires: self.expires,
            tags: self.tags,
            metadata,
            unique,
            key,
        };
        let size = job.size();
        if size > payload_limit {
            let source = PayloadError::TooLarge { size, limit: payload_limit };
            return Err(Error::Payload { kind: job.kind.into_owned(), source });
        }
        Ok(job)
    }
}

/// Refuses names that the payload does not have: all jobs would be twins because of a typing error.
fn check_parameters(unique: &Unique, payload: &str) -> Result<()> {
    match unique.by.unwrap_or_default().iter().find(|name| !unique::has(payload, name)) {
        None => Ok(()),
        Some(name) => Err(Error::BadOption {
            option: "unique",
            problem: format!("the payload has no parameter {name:?}"),
        }),
    }
}

fn checked_unique(
    unique: Unique,
    kind: &str,
    payload: &str,
    given: Option<Cow<'static, str>>,
) -> Result<CheckedUnique> {
    let problem = match (&given, unique.problem()) {
        (_, Some(problem)) => Some(problem),
        (Some(given), None) if given.is_empty() => Some("the key is empty"),
        _ => None,
    };
    if let Some(problem) = problem {
        return Err(Error::BadOption { option: "unique", problem: problem.to_owned() });
    }
    Ok(CheckedUnique {
        key: match given {
            Some(given) => UniqueKey::given(kind, &given),
            None => UniqueKey::of_payload(kind, payload, unique.by),
        },
        scope: unique.scope,
        on_conflict: unique.on_conflict,
    })
}

/// A new job that is fit to be written.
#[derive(Clone, Debug)]
pub struct CheckedJob {
    pub(crate) kind: Cow<'static, str>,
    pub(crate) queue: Cow<'static, str>,
    pub(crate) payload: String,
    pub(crate) due: CheckedDue,
    pub(crate) priority: i16,
    pub(crate) max_attempts: u32,
    pub(crate) max_crashes: u32,
    /// How long after `due` it has to be started.
    pub(crate) expires: Option<Duration>,
    pub(crate) tags: Vec<String>,
    pub(crate) metadata: Option<String>,
    pub(crate) unique: Option<CheckedUnique>,
    pub(crate) key: Option<JobKey>,
}

/// How a checked job is unique.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CheckedUnique {
    pub(crate) key: UniqueKey,
    pub(crate) scope: UniqueScope,
    pub(crate) on_conflict: OnConflict,
}

impl CheckedJob {
    /// Bytes of everything in it that the caller can make as large as it likes, as it is stored.
    pub(crate) fn size(&self) -> usize {
        self.payload.len()
            + self.metadata.as_ref().map_or(0, String::len)
            + tags_json(&self.tags).map_or(0, |tags| tags.len())
    }
}

/// When a checked job is wanted.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CheckedDue {
    After(Duration),
    At(Timestamp),
}
