//! The lab: replays the experiments that explain jobq's design, on a real server, and checks itself.
//!
//! ```text
//! cargo run --example lab                                                  all of them, on SQLite
//! scripts/test --env cargo run --release --example lab -- mysql            on MySQL
//! scripts/test --env cargo run --release --example lab -- postgres a b e   three, on PostgreSQL
//! ```
//!
//! In one sentence: *a row lock is not ownership.* A lock says that a transaction is open; it ends
//! with the connection, and holds up others. Who runs a job, until when and under which token must
//! be data.
//!
//! Each experiment is a file, in the order of the list below, and can be read by itself: what it
//! does in plain SQL, what it expects, and what it measured. No number is written down beforehand.
//! If an expectation is not met, the lab says which and fails.
//!
//! Beside them, `server` makes a database of the lab's own, `session` is one connection, `queue` is a
//! queue with nothing but a lock, `effects` is what jobs have done, `observer` and `cost` are what the
//! server tells, and `args` and `report` are about the terminal.

mod args;
mod cost;
mod effects;
mod observer;
mod queue;
mod report;
mod server;
mod session;

mod bloat;
mod deadlock;
mod double_submit;
mod gap_locks;
mod history;
mod long_jobs;
mod order;
mod ownership;
mod skip_locked;
mod throughput;

use std::process::ExitCode;
use std::sync::Arc;

use jobq::BoxError;

use args::{Args, Sizes};
use report::Report;
use server::Server;

struct Experiment {
    letter: char,
    title: &'static str,
}

const EXPERIMENTS: [Experiment; 8] = [
    Experiment { letter: 'a', title: "Three ways to ask for a row that somebody has locked" },
    Experiment { letter: 'b', title: "A lock is not ownership" },
    Experiment { letter: 'c', title: "Five workers" },
    Experiment { letter: 'd', title: "Order: who is overtaken" },
    Experiment { letter: 'e', title: "Gap locks: a claim that keeps producers waiting" },
    Experiment { letter: 'f', title: "Deadlock: what has to be tried again" },
    Experiment { letter: 'g', title: "Double submit: one key, one job" },
    Experiment { letter: 'h', title: "History and bloat: what finished rows cost" },
];

/// Runs one experiment.
async fn run(experiment: char, server: &Server, sizes: Sizes, report: &Report) -> Result<()> {
    match experiment {
        'a' => skip_locked::run(server, report).await,
        'b' => ownership::run(server, report).await,
        'c' => throughput::run(server, sizes.time, report).await,
        'd' => order::run(server, report).await,
        'e' => gap_locks::run(server, report).await,
        'f' => deadlock::run(server, report).await,
        'g' => double_submit::run(server, report).await,
        _ => history::run(server, sizes.rows, report).await,
    }
}

type Result<T, E = BoxError> = std::result::Result<T, E>;

#[tokio::main]
async fn main() -> ExitCode {
    let ended = match Args::parse() {
        Ok(Some(args)) => perform(args).await,
        Ok(None) => Ok(ExitCode::SUCCESS),
        Err(problem) => Err(problem.into()),
    };
    ended.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        ExitCode::FAILURE
    })
}

/// Runs what was asked for, and leaves the server as it was, however that ends.
async fn perform(args: Args) -> Result<ExitCode> {
    let server = Arc::new(Server::open(args.product).await?);
    // In a task, so that the database is dropped after a panic, too.
    let mut experiments = tokio::spawn(experiments(Arc::clone(&server), args));
    let ended = tokio::select! {
        ended = &mut experiments => ended.map_err(BoxError::from).flatten(),
        _ = tokio::signal::ctrl_c() => {
            experiments.abort();
            drop(experiments.await);
            Err("interrupted".into())
        }
    };
    server.drop_database().await?;
    let failed = ended?;
    if failed.is_empty() {
        println!("everything as expected");
        return Ok(ExitCode::SUCCESS);
    }
    for expectation in &failed {
        eprintln!("not as expected: {expectation}");
    }
    Ok(ExitCode::FAILURE)
}

/// Runs experiments one after the other; returns the expectations that were not met.
async fn experiments(server: Arc<Server>, args: Args) -> Result<Vec<String>> {
    println!("{} {}", server.product.name(), server.version);
    println!("{}\n", server.settings().await?);
    let mut failed = Vec::new();
    for Experiment { letter, title } in EXPERIMENTS {
        if args.experiments.contains(&letter) {
            let report = Report::new(letter, title, args.markdown);
            let ran = run(letter, &server, args.sizes, &report).await;
            ran.map_err(|error| format!("experiment {letter} broke off: {error}"))?;
            failed.extend(report.close());
        }
    }
    Ok(failed)
}
