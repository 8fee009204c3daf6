//! Values and decisions of jobq: what a job is, how long things take, and what an outcome does
//! to a job's row.
//!
//! Nothing in this crate waits, reads a clock, draws a random number or touches a database, so
//! every rule can be checked by calling a function. The runtime feeds these functions and
//! writes down what they decide; the `#[job]` macro uses the same parsers at compile time, so a
//! bad value is refused with the same words in both places.
//!
//! Start with [`lifecycle`]: it is the heart.

pub mod duration;
pub mod job;
pub mod key;
pub mod lifecycle;
pub mod limit;
pub mod outcome;
pub mod pause;
pub mod payload;
pub mod queue;
pub mod retry;
pub mod text;
pub mod time;
pub mod unique;
