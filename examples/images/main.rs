//! Resizes a folder of photos to three widths, each copy one job, on SQLite or PostgreSQL.
//!
//! ```text
//! cargo run --example images                                  the sample photos, on SQLite
//! cargo run --example images -- ~/Pictures                    your own folder
//! cargo run --example images -- --database postgres://user@host/database
//! ```
//!
//! Stop it in the middle, even with `kill -9`, and run the same command again: it goes on where it
//! was. Broken files become dead letters with a clear error, and the rest succeeds.
//!
//! This file is the program: the job, then what happens in order. Beside it, `photo` resizes one
//! photo, `folder` knows which copies are made, `album` is what jobs share, and `args`, `progress`
//! and `report` are about the terminal.

mod album;
mod args;
mod folder;
mod photo;
mod progress;
mod report;

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use jobq::{
    BoxError, Client, DeadFilter, DeadJob, DeathReason, Job, JobContext, Runtime, State, job,
};
use serde::{Deserialize, Serialize};

use album::Album;
use args::Args;
use folder::Copy;
use photo::PhotoError;
use progress::{Counts, Progress};

const QUEUE: &str = "images";
const WIDTHS: [u32; 3] = [100, 200, 400];

/// Writes a copy of the photo `source`, at most `width` pixels wide, to `target`.
///
/// This is the job. Its parameters are stored with it, but for the last two: the runtime provides
/// those. What it returns is kept with the job, and shown in the table at the end.
///
/// It is a plain `fn`, because it keeps a processor busy: jobq runs it on a thread where it holds
/// up nobody. An `async fn` is for jobs that mostly wait.
///
/// `lease` is how long a worker that falls silent keeps its jobs; then others take them over. A
/// living one extends it in time, however busy it is. 5 s instead of the usual 30 s is for your
/// convenience: when you kill this program and run it again, that is how long you wait.
#[job(queue = "images", lease = "5s", max_attempts = 5, backoff(base = "1s", cap = "10s"))]
fn resize(
    source: PathBuf,
    target: PathBuf,
    width: u32,
    State(album): State<Arc<Album>>,
    ctx: &JobContext,
) -> Result<Resized, PhotoError> {
    let _running = album.enter(ctx.id());
    let started = Instant::now();
    // A process can die after it has written the copy and before jobq has heard of it; then the job
    // runs again. It does what every job should: it sees that its work is done.
    let copy = if folder::is_made(&source, &target) {
        photo::measure(&target)?
    } else {
        // An attempt whose lease was lost may still be writing. Tokens tell attempts apart.
        let attempt = format!("{}-{}-{}", album.worker, ctx.id(), ctx.token());
        photo::resize(&source, &target, width, &attempt)?
    };
    let millis = started.elapsed().as_millis() as u64;
    Ok(Resized { copy, worker: album.worker.clone(), millis })
}

/// What a completed job leaves behind.
#[derive(Serialize, Deserialize)]
struct Resized {
    copy: photo::Facts,
    worker: String,
    millis: u64,
}

#[tokio::main]
async fn main() -> ExitCode {
    let ended = match Args::parse() {
        Ok(Some(args)) => run(&args).await,
        Ok(None) => Ok(ExitCode::SUCCESS),
        Err(problem) => Err(problem.into()),
    };
    ended.unwrap_or_else(|error| {
        eprintln!("error: {}", report::with_causes(&*error));
        ExitCode::FAILURE
    })
}

async fn run(args: &Args) -> Result<ExitCode, BoxError> {
    let started = Instant::now();
    // The database is the queue: nothing else has to run or be set up.
    let client = Client::connect(&args.database).await?;
    client.migrate().await?;
    let worker = format!("images:{}", std::process::id());
    let (folder, out) = (args.folder.display(), args.out.display());
    println!("photos: {folder}\ncopies: {out}\njobs:   {}\nworker: {worker}", args.database_name());
    if args.retry {
        let redriven = client.redrive(&DeadFilter::all().kind(resize::NAME)).await?;
        println!("{} dead letters are pending again", redriven.len());
    }

    let album = Arc::new(Album::new(&worker));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let runtime = Runtime::new(client.clone())
        .name(worker)
        .queue(QUEUE, cores)
        .state(Arc::clone(&album))
        .shutdown_timeout(Duration::from_secs(10));

    // The runtime runs jobs until the future it is given completes: here until everything is done,
    // or Ctrl-C. It then waits for the jobs that still run.
    let progress = Progress::new();
    let mut followed = Ok(false);
    let ended = runtime
        .run_until(async {
            followed = tokio::select! {
                done = follow(&client, args, &album, &progress) => done.map(|()| true),
                _ = tokio::signal::ctrl_c() => Ok(false),
            };
            progress.clear();
            if let Ok(false) = followed {
                println!("stopping: waiting for running jobs; Ctrl-C again does not wait");
                tokio::spawn(async {
                    drop(tokio::signal::ctrl_c().await);
                    std::process::exit(130);
                });
            }
        })
        .await?;
    let all_done = followed?;

    let made = report::jobs(&client, album.jobs()).await?;
    let dead = report::dead_letters(&client, args).await?;
    let seconds = started.elapsed().as_secs_f32();
    println!("{made} copies made, {} dead letters, in {seconds:.1} s", dead.len());
    if ended.rescued > 0 {
        println!("{} jobs of a killed process were taken over", ended.rescued);
    }
    if !all_done {
        let left = Counts::read(&client).await?.unfinished();
        println!("{left} jobs are left: the same command goes on with them");
    }
    // Broken files are no failure of this program: what could be resized was.
    let broken = |letter: &DeadJob| letter.reason == DeathReason::Discarded;
    Ok(if all_done && dead.iter().all(broken) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Enqueues what is to be done and returns when it is done.
async fn follow(
    client: &Client,
    args: &Args,
    album: &Album,
    progress: &Progress,
) -> Result<(), BoxError> {
    // What an earlier run left is done first. Its jobs say all there is to know: the database
    // remembers for us.
    let left = Counts::read(client).await?.unfinished();
    if left > 0 {
        progress.say(&format!("continuing: {left} jobs left of an earlier run"));
        finish(client, album, progress).await;
    }

    // Nothing is pending or running now, so a copy that is missing and has no dead letter has no
    // job. Should two of these programs come to this point in the same moment, both enqueue it:
    // the second job then finds the copy made.
    folder::clean(&args.out);
    let missing = missing(client, args).await?;
    if missing.is_empty() {
        if left == 0 {
            progress.say(
                "nothing to do: there is no photo, or each has its copies or is a dead letter",
            );
        }
        return Ok(());
    }
    // One call is one transaction: whenever this process dies, all of the jobs exist or none.
    let jobs = missing.into_iter().map(|copy| resize::new(copy.source, copy.target, copy.width));
    let enqueued = jobq::enqueue_many(client, jobs).await?;
    progress.say(&format!("enqueued: {} jobs", enqueued.len()));
    album.add(enqueued.iter().map(|job| job.id()));
    finish(client, album, progress).await;
    Ok(())
}

/// The copies to make: those that are not there yet, except where a job gave up on the very file.
async fn missing(client: &Client, args: &Args) -> Result<Vec<Copy>, BoxError> {
    let dead = client.dead(&DeadFilter::all().kind(resize::NAME), u32::MAX).await?;
    let died: HashMap<Copy, SystemTime> = dead
        .into_iter()
        .filter_map(|letter| Some((Copy::of(&letter.payload)?, letter.died_at.to_system()?)))
        .rev() // Newest first: of several, the newest stays.
        .collect();
    let mut copies = folder::copies(&args.folder, &args.out, &WIDTHS)
        .map_err(|error| format!("{}: {error}", args.folder.display()))?;
    copies.retain(|copy| {
        // A file that changed after its job died may be mended.
        let given_up =
            died.get(copy).is_some_and(|died| folder::modified(&copy.source) <= Some(*died));
        !copy.is_made() && !given_up
    });
    Ok(copies)
}

/// Waits until no job is left, and shows how it goes on.
async fn finish(client: &Client, album: &Album, progress: &Progress) {
    // A killed process keeps its jobs until its lease ends; every 3 s somebody looks for such.
    let patience = resize::DEF.options.lease + Duration::from_secs(3);
    let mut before = None;
    loop {
        let asked = Instant::now();
        match Counts::read(client).await {
            Ok(counts) => {
                let before = *before.get_or_insert(counts);
                progress.show(counts, before, album.running(), patience);
                if counts.unfinished() == 0 {
                    return;
                }
            }
            // The runtime outlives an outage of the database; so do we.
            Err(error) => {
                progress.say(&format!("waiting for the database: {error}"));
                tokio::time::sleep(Duration::from_secs(5)).await;
            }
        }
        // Counting reads every row: where there are many, less often.
        let pause =
            (asked.elapsed() * 20).clamp(Duration::from_millis(100), Duration::from_secs(5));
        tokio::time::sleep(pause).await;
    }
}
