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
//! All that concerns jobq is in this file, in the order in which it happens. Beside it: `photo`
//! resizes one photo, `folder` knows which copies are made, and `args`, `progress` and `report` are
//! about the terminal.

mod args;
mod folder;
mod photo;
mod progress;
mod report;

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime};

use jobq::ids::JobId;
use jobq::outcome::DeathReason;
use jobq::{BoxError, Client, DeadFilter, DeadJob, Job, JobContext, Runtime, State, job};
use serde::{Deserialize, Serialize};

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
/// It is a plain `fn`, because it keeps a processor busy and never waits: jobq runs it on a thread
/// of its own, where it holds up nobody. An `async fn` is for jobs that mostly wait.
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
    // A process can die after it has written the copy and before jobq has heard of it; the job then
    // runs again. What every job should do, this one does: it sees that its work is done.
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

/// What all jobs of this process share; they get it as `State<Arc<Album>>`.
struct Album {
    worker: String,
    /// The jobs to tell of at the end: those enqueued, and those that an earlier run left.
    jobs: Mutex<BTreeSet<JobId>>,
    /// How many jobs run in this process.
    running: AtomicU64,
}

impl Album {
    /// Notes that a job runs here, until what this returns is dropped.
    fn enter(&self, job: JobId) -> impl Drop {
        struct Running<'a>(&'a AtomicU64);
        impl Drop for Running<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Ordering::Relaxed);
            }
        }
        self.jobs().insert(job);
        self.running.fetch_add(1, Ordering::Relaxed);
        Running(&self.running)
    }

    fn jobs(&self) -> MutexGuard<'_, BTreeSet<JobId>> {
        self.jobs.lock().expect("nobody panics while holding the lock")
    }
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
    let (folder, out) = (args.folder.display(), args.out.display());
    println!("photos: {folder}\ncopies: {out}\njobs:   {}", args.database_name());
    if args.retry {
        let redriven = client.redrive(&DeadFilter::all().kind(resize::NAME)).await?;
        println!("{} dead letters are pending again", redriven.len());
    }

    let worker = format!("images:{}", std::process::id());
    let album = Arc::new(Album {
        worker: worker.clone(),
        jobs: Mutex::default(),
        running: AtomicU64::new(0),
    });
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
                println!("stopping: waiting for running jobs; the same command goes on from here");
            }
        })
        .await?;
    let all_done = followed?;

    let jobs = album.jobs().clone();
    let made = report::jobs(&client, jobs).await?;
    let dead = report::dead_letters(&client, args).await?;
    println!(
        "{made} copies made, {} dead letters, {} jobs taken over from a killed process, in {:.1} s",
        dead.len(),
        ended.rescued,
        started.elapsed().as_secs_f32(),
    );
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
    // What an earlier run left is done first. It says itself what it is: nothing else was stored.
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
        progress.say("nothing to enqueue: every photo has its copies, or is a dead letter");
        return Ok(());
    }
    // One call is one transaction: whenever this process dies, all of the jobs exist or none.
    let jobs = missing.into_iter().map(|copy| resize::new(copy.source, copy.target, copy.width));
    let enqueued = jobq::enqueue_many(client, jobs).await?;
    progress.say(&format!("enqueued: {} jobs", enqueued.len()));
    album.jobs().extend(enqueued.iter().map(|job| job.id));
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
    let mut copies = folder::copies(&args.folder, &args.out, &WIDTHS)?;
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
                progress.show(counts, before, album.running.load(Ordering::Relaxed), patience);
                if counts.unfinished() == 0 {
                    return;
                }
            }
            // The runtime outlives an outage of the database; so do we.
            Err(error) => progress.say(&format!("waiting for the database: {error}")),
        }
        // Counting reads every row: at many, less often.
        tokio::time::sleep(Duration::from_millis(100).max(asked.elapsed() * 20)).await;
    }
}
