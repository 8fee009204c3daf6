//! What a runtime does with jobs, on every database, in one process.

mod bed;
mod control;
mod expiry;
mod limits;
mod pause;
mod running;
mod start;
