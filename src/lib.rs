//! Background jobs you can trust, from one annotated function.

pub use jobq_core::{duration, job as ids, lifecycle, outcome, payload, queue, retry, time};
pub use jobq_macros::job;
pub use jobq_runtime::*;

#[doc(hidden)]
pub mod __private {
    pub use jobq_runtime::__private::*;
}
