//! The moving parts of jobq: stores, client, enqueueing and the runtime.
//!
//! Applications use the facade crate `jobq` (package `jobq-rs`), which re-exports all of this.
//! Everything that waits is here; what decides is in `jobq-core`; SQL exists only in the store
//! modules.

// What only the runtime or only a database uses is not worth a switch of its own.
#![cfg_attr(
    not(all(
        feature = "runtime",
        any(feature = "postgres", feature = "mysql", feature = "sqlite")
    )),
    allow(dead_code, unused_variables, unused_imports)
)]

#[cfg(feature = "runtime")]
mod attempt;
#[cfg(feature = "runtime")]
mod claimer;
mod client;
mod context;
mod enqueue;
mod error;
#[cfg(feature = "runtime")]
mod floors;
mod handler;
#[cfg(feature = "runtime")]
mod heartbeat;
mod job;
mod key;
mod limit;
#[cfg(feature = "runtime")]
mod registry;
#[cfg(feature = "runtime")]
mod runtime;
#[cfg(feature = "runtime")]
mod settler;
mod store;
#[cfg(feature = "runtime")]
mod sweep;
mod unique;
mod wake;
#[cfg(feature = "runtime")]
mod worker;

#[cfg(all(test, feature = "runtime"))]
mod conformance;

pub use client::{Client, ClientOptions, Within};
pub use context::{CompleteTarget, JobContext};
pub use enqueue::{EnqueueTarget, Enqueued, enqueue_many};
pub use error::{Error, Result, StartProblem};
pub use handler::{
    BoxError, Call, Control, Inject, IntoOutcome, Need, State, cancel, discard, retry_after, snooze,
};
pub use job::{Job, JobDef, JobOptions, NewJob};
pub use jobq_core::key::OnBlock;
pub use jobq_core::limit::Rate;
pub use jobq_core::pause::PauseScope;
pub use jobq_core::unique::{OnConflict, Unique, UniqueScope};
pub use limit::{LimitedQueue, QueueLimit};
#[cfg(feature = "runtime")]
pub use runtime::{DEFAULT_CONCURRENCY, DEFAULT_SHUTDOWN_TIMEOUT, Ended, QueueOptions, Runtime};
pub use store::{
    AttemptInfo, BlockedKey, CancelReply, DEFAULT_RETENTION, DeadFilter, DeadJob, JobInfo, Lookup,
    Pause, QueueCount, Schema,
};
pub use tokio_util::sync::CancellationToken;

/// What the code made by `#[job]` names. Not for people; may change at any time.
#[doc(hidden)]
pub mod __private {
    pub use jobq_core::outcome::Outcome;
    pub use jobq_core::retry::Backoff;
    pub use serde;

    pub use crate::__register as register;
    pub use crate::handler::{
        BoxFuture, Call, DefaultParam, Field, Handler, Injected, Need, Param, PayloadField,
        Returned, boxed, inject, need, outcome,
    };
    #[cfg(feature = "runtime")]
    pub use inventory;

    /// A job function found by the linker.
    #[cfg(feature = "runtime")]
    pub struct Registration(pub &'static crate::JobDef);

    #[cfg(feature = "runtime")]
    inventory::collect!(Registration);
}

/// Registers a job with the runtime.
#[cfg(feature = "runtime")]
#[doc(hidden)]
#[macro_export]
macro_rules! __register {
    ($job:ty) => {
        $crate::__private::inventory::submit! {
            $crate::__private::Registration(<$job as $crate::Job>::DEF)
        }
    };
}

/// Without the runtime there is nothing to register with.
#[cfg(not(feature = "runtime"))]
#[doc(hidden)]
#[macro_export]
macro_rules! __register {
    ($job:ty) => {};
}

/// A list of jobs, to be registered by hand: `runtime.jobs(jobq::jobs![resize, thumbnail])`.
///
/// Its type is `&'static [&'static JobDef]`, so that a module can export its jobs:
///
/// ```
/// # use jobq_runtime as jobq;
/// pub const JOBS: &[&jobq::JobDef] = jobq::jobs![];
/// ```
#[macro_export]
macro_rules! jobs {
    ($($job:path),* $(,)?) => {
        const { &[$(<$job as $crate::Job>::DEF),*] }
    };
}
