//! Background jobs you can trust, from one annotated function. The database you already have is
//! the queue: PostgreSQL, MySQL, MariaDB, or SQLite in a file when you have none.
//!
//! ```no_run
//! use jobq::{Client, Runtime, State, job};
//!
//! #[derive(Clone)]
//! struct Mailer;
//!
//! #[job(queue = "mail", lease = "30s", max_attempts = 5)]
//! async fn welcome(user_id: i64, name: String, State(mailer): State<Mailer>) -> Result<(), String> {
//!     let Mailer = mailer; // send it
//!     println!("welcome, {name} (user {user_id})");
//!     Ok(())
//! }
//!
//! # async fn example() -> jobq::Result<()> {
//! let client = Client::connect("sqlite:jobs.db").await?;
//! client.migrate().await?;
//! welcome::enqueue(&client, 7, "Ada".to_owned()).await?;
//! Runtime::new(client).state(Mailer).run().await?;
//! # Ok(())
//! # }
//! ```
//!
//! # A job is
//!
//! - **a function**: it stays one, to be called in a unit test. Beside it `#[job]` makes a type of
//!   the same name with `new`, `enqueue` and `NAME`.
//! - **a row**: written in your own transaction if you like (`welcome::enqueue(&mut tx, ..)`), so
//!   that it exists exactly when your data does.
//! - **run at least once, and fenced**: who holds a job, until when and under which token is data in
//!   the database. Whoever comes too late writes nothing. With
//!   [`JobContext::complete_in`] effects in the same database happen exactly once.
//! - **never silently lost**: it completes, or is retried, or ends as a dead letter with every
//!   error it had, to be looked at and redriven.
//!
//! # Where to look
//!
//! | to | see |
//! |---|---|
//! | annotate a function | [`job`] |
//! | enqueue | [`NewJob`], [`enqueue_many`], [`EnqueueTarget`] |
//! | run | [`Runtime`] |
//! | know about and steer a running job | [`JobContext`], [`retry_after`], [`snooze`], [`discard`], [`cancel`] |
//! | look, cancel, redrive, pause, limit | [`Client`], [`QueueLimit`] |
//!
//! # Features
//!
//! | feature | what for | default |
//! |---|---|---|
//! | `mysql` | MySQL 8.0.16 and MariaDB 10.6, and newer | yes |
//! | `sqlite` | SQLite in a file, built in | yes |
//! | `postgres` | PostgreSQL 15 and newer | yes |
//! | `runtime` | running jobs; leave it out where they are only enqueued | yes |
//! | `tls` | TLS connections to PostgreSQL, MySQL and MariaDB | no |

pub use jobq_core::job::{JobId, JobState, Lease, SessionId, Token, UnknownWord};
pub use jobq_core::outcome::{AttemptReason, DeathReason};
pub use jobq_core::payload::PayloadError;
pub use jobq_core::queue::BadName;
pub use jobq_core::retry::Backoff;
pub use jobq_core::time::{TimeOutOfRange, Timestamp};
pub use jobq_core::{duration, lifecycle};
pub use jobq_macros::job;
pub use jobq_migrations as migrations;
pub use jobq_runtime::*;

#[doc(hidden)]
pub mod __private {
    pub use jobq_runtime::__private::*;
}
