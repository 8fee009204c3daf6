//! Real worker processes on real databases, stopped, cut off and killed by real signals.
//!
//! A worker process is this test program started again: see [`jobs::worker_process`].

mod bed;
mod contention;
mod crash;
mod history;
mod inside;
mod jobs;
mod keys;
mod leases;
mod limits;
mod outage;
mod server;
mod settings;
mod stop;
