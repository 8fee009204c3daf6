//! The tables of jobq, as SQL for each database.
