//! The moving parts of jobq: stores, client, enqueueing and the runtime.
//!
//! Applications use the facade crate `jobq` (package `jobq-rs`), which re-exports all of this.
//! Everything that waits is here; what decides is in `jobq-core`; SQL exists only in the store
//! modules.

mod context;
mod enqueue;
mod error;
mod handler;
mod job;
mod store;
mod wake;

pub use context::{CompleteTarget, JobContext};
pub use enqueue::{EnqueueTarget, Enqueued, enqueue_many};
pub use error::{Error, Result, StartProblem};
pub use handler::{
    BoxError, Control, Inject, IntoOutcome, State, cancel, discard, retry_after, snooze,
};
pub use job::{Job, JobDef, JobOptions, NewJob};
pub use store::{
    AttemptInfo, CancelReply, DEFAULT_RETENTION, DeadFilter, DeadJob, JobInfo, Lookup, QueueCount, Schema,
};
pub use tokio_util::sync::CancellationToken;

/// What the code made by `#[job]` names. Not for people; may change at any time.
#[doc(hidden)]
pub mod __private {
    pub use jobq_core::outcome::Outcome;
    pub use jobq_core::retry::Backoff;
    pub use serde;

    pub use crate::handler::{BoxFuture, Call, Handler, Need};
    pub use crate::__register as register;
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
