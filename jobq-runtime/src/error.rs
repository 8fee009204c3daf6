//! Why an operation failed, in one type.

use std::fmt;

use jobq_core::job::{JobId, UnknownWord};
use jobq_core::payload::PayloadError;
use jobq_core::queue::BadName;
use jobq_core::time::TimeOutOfRange;

/// The result of jobq's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an operation failed.
///
/// `{:?}` gives the message and its causes: what a `main` that returns this prints.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The URL names no database that jobq can use.
    #[error("cannot use the database URL {url:?}: {problem}")]
    BadUrl {
        /// The URL, without its password.
        url: String,
        /// What is wrong, and what to write instead.
        problem: String,
    },
    /// The database cannot be reached, or refuses the login.
    #[error(
        "cannot connect to {url}; is the server running, and are host, port, user and password right?"
    )]
    Connect {
        /// The URL, without its password.
        url: String,
        /// What the driver said.
        #[source]
        source: sqlx::Error,
    },
    /// The server is too old, or set up in a way jobq cannot work with.
    #[error("this database cannot be used: {problem}")]
    Unsupported {
        /// What is wrong, and what to do.
        problem: String,
    },
    /// jobq's tables are missing or older than this version needs.
    #[error(
        "jobq's tables are at version {found}, this version of jobq needs {needed}; call \
         `client.migrate()` or apply the SQL of `jobq::migrations`"
    )]
    Schema {
        /// The version found; 0 when there are no tables.
        found: i64,
        /// The version needed.
        needed: i64,
    },
    /// The database refused or lost the operation.
    #[error("the database failed to {action}")]
    Database {
        /// What jobq was doing.
        action: &'static str,
        /// What the driver said.
        #[source]
        source: sqlx::Error,
    },
    /// The database did not answer in time.
    #[error("the database did not {action} within {}", jobq_core::duration::display(*.after))]
    Timeout {
        /// What jobq was doing.
        action: &'static str,
        /// How long it waited.
        after: std::time::Duration,
    },
    /// The connection broke after jobs were sent: they may have been written or not.
    ///
    /// The ids were reserved before. Look them up with [`Client::job`](crate::Client::job), once the
    /// server has had a moment to end what it was doing: jobs of one call are written all or none.
    ///
    /// - [`Found`](crate::Lookup::Found): they were written.
    /// - [`Gone`](crate::Lookup::Gone): they were not written, or they were, have ended since and
    ///   were not kept. Only if their retention is longer than it took to look does it mean that
    ///   they were not, and may be enqueued again.
    ///
    /// Enqueueing again without looking may write them twice.
    #[error(
        "the connection broke while jobs were written; they may exist: look up {ids:?} before enqueueing again"
    )]
    CommitUnknown {
        /// The ids the jobs have if they were written, in the order given.
        ids: Vec<JobId>,
        /// What the driver said.
        #[source]
        source: sqlx::Error,
    },
    /// The caller's own transaction is at an isolation level at which it must be retried whole.
    #[error(
        "your transaction cannot be serialised with another one; roll it back and run it again"
    )]
    Serialization(#[source] sqlx::Error),
    /// A unique job has a twin, and that was to be an error. Nothing was written.
    #[error("{kind} is a duplicate of {}", twin(*.existing))]
    Duplicate {
        /// The kind of job.
        kind: String,
        /// The twin; `None` if it is in the same call.
        existing: Option<JobId>,
    },
    /// A payload cannot be stored.
    #[error("cannot enqueue {kind}: {source}")]
    Payload {
        /// The kind of job.
        kind: String,
        /// What is wrong with it.
        source: PayloadError,
    },
    /// The name of a queue or job, or a priority, is not allowed.
    #[error(transparent)]
    BadName(#[from] BadName),
    /// A time is out of range.
    #[error(transparent)]
    TimeOutOfRange(#[from] TimeOutOfRange),
    /// An option has a value that cannot work.
    #[error("bad value for `{option}`: {problem}")]
    BadOption {
        /// The option.
        option: &'static str,
        /// What is wrong, and what is allowed.
        problem: String,
    },
    /// The lease was lost before the write: the job belongs to somebody else now.
    #[error("job {job} is no longer held by this attempt: its lease was lost")]
    LeaseLost {
        /// The job.
        job: JobId,
    },
    /// The database holds a word that this version does not know.
    #[error(transparent)]
    UnknownWord(#[from] UnknownWord),
    /// The runtime cannot start; every problem is listed.
    #[error("the runtime cannot start:{}", list(.0))]
    Start(Vec<StartProblem>),
}

/// One reason why the runtime cannot start.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartProblem {
    /// No job is registered.
    #[error(
        "no job is registered; if your jobs are in another crate, mention it in this one \
         (`use my_jobs as _;`) so that it is linked, or list them: `.jobs(jobq::jobs![resize])`"
    )]
    NoJobs,
    /// No queue is left to serve.
    #[error("no queue is served: `.only_queues(...)` was given none")]
    NoQueues,
    /// Two jobs have one name.
    #[error("two jobs are named {kind:?}: {first} and {second}; rename one with `name = \"…\"`")]
    DuplicateJob {
        /// The name or alias.
        kind: String,
        /// Where one is.
        first: String,
        /// Where the other is.
        second: String,
    },
    /// A job needs state that the runtime was not given.
    #[error(
        "job {kind} ({place}) takes `State<{state}>`; give it to the runtime with `.state(value)`"
    )]
    MissingState {
        /// The job.
        kind: &'static str,
        /// Where it is.
        place: String,
        /// The type of the state.
        state: &'static str,
    },
    /// A queue was named twice or its settings cannot work.
    #[error("queue {queue:?} {problem}")]
    BadQueue {
        /// The queue.
        queue: String,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// An expected job is not registered.
    #[error(
        "job {kind:?} was expected but is not registered; is its crate linked (`use my_jobs as _;`)?"
    )]
    NotRegistered {
        /// The job.
        kind: &'static str,
    },
}

fn twin(existing: Option<JobId>) -> String {
    match existing {
        Some(id) => format!("job {id}"),
        None => "another job of the same call".to_owned(),
    }
}

fn list(problems: &[StartProblem]) -> String {
    let mut text = String::new();
    for problem in problems {
        text.push_str("\n  - ");
        text.push_str(&problem.to_string());
    }
    text
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")?;
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            write!(f, "\n  caused by: {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

impl Error {
    /// Names what was being done when the driver failed.
    pub(crate) fn database(action: &'static str) -> impl FnOnce(sqlx::Error) -> Self {
        move |source| match missing(&source) {
            Some((dialect, found)) => {
                Self::Schema { found, needed: jobq_migrations::needed(dialect) }
            }
            None => Self::Database { action, source },
        }
    }

    /// What the driver said, if that is what failed.
    #[cfg(feature = "postgres")]
    pub(crate) fn into_driver_error(self) -> std::result::Result<sqlx::Error, Self> {
        match self {
            Self::Database { source, .. } | Self::Serialization(source) => Ok(source),
            other => Err(other),
        }
    }

    /// Whether the same operation may succeed if it is simply tried again.
    ///
    /// True for lost connections, timeouts, deadlocks, serialization failures, a busy or a
    /// read-only database.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Connect { source, .. } | Self::Database { source, .. } => is_transient(source),
            Self::Timeout { .. } | Self::Serialization(_) => true,
            _ => false,
        }
    }
}

/// The database whose statement failed because jobq's tables, or their schema, are not there, or are
/// from before a column was added; and the version that they have at most.
fn missing(error: &sqlx::Error) -> Option<(jobq_migrations::Dialect, i64)> {
    use jobq_migrations::Dialect::{Mysql, Postgres, Sqlite};

    let sqlx::Error::Database(error) = error else { return None };
    let says = |words| error.message().contains(words);
    let (dialect, is_column) = match &*error.code()? {
        "42P01" | "3F000" => (Postgres, false),
        "42703" => (Postgres, true),
        "42S02" => (Mysql, false),
        "42S22" => (Mysql, true),
        "1" if says("no such table") => (Sqlite, false),
        "1" if says("no such column") || says("has no column") => (Sqlite, true),
        _ => return None,
    };
    // At most the version before the step that makes what is missing.
    let found = match () {
        () if says("start_by") || says("expiring") => {
            if dialect == Postgres {
                6
            } else {
                5
            }
        }
        () if says("rules") || says(".turn") => 5,
        () if says("queue_limits") || says("queue_slots") => 4,
        () if says("pauses") => 3,
        () if ["key_grants", "job_key", "on_block"].into_iter().any(says) => 2,
        () if is_column || says("uniques") => 1,
        () => 0,
    };
    Some((dialect, found))
}

/// Whether a driver error says nothing about the statement itself.
pub(crate) fn is_transient(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(error) => {
            let code = error.code().unwrap_or_default();
            if let Some(number) = mysql_number(&**error) {
                return is_transient_on_mysql(number);
            }
            // PostgreSQL's codes have five characters, SQLite's are numbers of at most four digits.
            if code.len() == 5 {
                // Connection exceptions, serialization, deadlock, resources, shutdown, lock not
                // available, statement cancelled, read-only (a failover is under way).
                ["08", "40", "53", "57"].iter().any(|class| code.starts_with(class))
                    || code == "55P03"
                    || code == "25006"
            } else {
                // Busy (5), locked (6), disk I/O (10), disk full (13) and a lost race for the start
                // of a read (15), each with its extensions.
                code.parse::<u32>().is_ok_and(|code| matches!(code & 0xff, 5 | 6 | 10 | 13 | 15))
            }
        }
        other => is_connection_loss(other),
    }
}

/// The number of an error of MySQL or MariaDB.
#[cfg(feature = "mysql")]
fn mysql_number(error: &dyn sqlx::error::DatabaseError) -> Option<u16> {
    Some(error.try_downcast_ref::<sqlx::mysql::MySqlDatabaseError>()?.number())
}

#[cfg(not(feature = "mysql"))]
fn mysql_number(_: &dyn sqlx::error::DatabaseError) -> Option<u16> {
    None
}

/// Deadlock, lock wait, changed since the snapshot, statement interrupted or too slow; resources
/// and connections used up; shutdown, a connection cut, read-only (a failover is under way); what a
/// store's own check answers that found a write to have been killed.
fn is_transient_on_mysql(number: u16) -> bool {
    matches!(number, 1213 | 1205 | 1020 | 1317 | 1969 | 3024)
        || matches!(number, 1021 | 1037 | 1040 | 1041 | 1114 | 1203 | 1226)
        || number == 1242
        || matches!(number, 1053 | 1077 | 1290 | 1792 | 1836 | 1927 | 4031)
}

/// Whether a driver error means that the connection is gone and the fate of the last statement
/// unknown.
pub(crate) fn is_connection_loss(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::Protocol(_)
        | sqlx::Error::PoolTimedOut
        | sqlx::Error::PoolClosed
        | sqlx::Error::WorkerCrashed => true,
        sqlx::Error::Database(error) => {
            // Shutdown, killed, too long idle.
            if mysql_number(&**error).is_some_and(|number| [1053, 1927, 4031].contains(&number)) {
                return true;
            }
            let code = error.code().unwrap_or_default();
            code.starts_with("08") || ["57P01", "57P02", "57P03"].contains(&&*code)
        }
        _ => false,
    }
}
