//! Keeping leases alive, from a thread and a connection of their own.
//!
//! A handler that blocks every thread of the application's runtime, a pool without a free
//! connection, a handler's open transaction: none of them holds up a heartbeat. It goes on
//! through a shutdown's drain and is the last thing to stop.
//!
//! Beside it a watchdog follows the machine's monotonic clock: a lease that has not been confirmed
//! shortly before its end is given up here before anybody else can take it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::attempt::Control;
use crate::store::{Beat, BeatReply, Pulse};
use crate::worker::{OpenSession, Worker, locked};

/// The longest time between two heartbeats, whatever the lease: they also carry cancellations.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// How long opening the connection may take, at least.
const CONNECT_PATIENCE: Duration = Duration::from_secs(2);

/// How long a lease is trusted, at least, after a heartbeat found the database locked by a writer.
const BLOCKED: Duration = Duration::from_secs(1);

/// How often the watchdog looks.
const WATCH: Duration = Duration::from_millis(50);

/// The running heartbeat thread; it stops when this is dropped.
pub(crate) struct Heartbeat {
    stop: CancellationToken,
}

impl Heartbeat {
    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// When the system gives no thread.
    pub(crate) fn start(worker: Arc<Worker>) -> std::io::Result<Self> {
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        std::thread::Builder::new().name("jobq-heartbeat".to_owned()).spawn(move || {
            while !stopped.is_cancelled() {
                let run = std::panic::AssertUnwindSafe(|| beat_until(&worker, &stopped));
                if std::panic::catch_unwind(run).is_err() {
                    tracing::error!("the heartbeat panicked; starting it again");
                    worker.stats.restarts.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        })?;
        Ok(Self { stop })
    }
}

impl Drop for Heartbeat {
    /// Stops the thread, without waiting for a database that does not answer.
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

fn beat_until(worker: &Arc<Worker>, stop: &CancellationToken) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(%error, "no runtime for heartbeats; trying again");
            std::thread::sleep(Duration::from_secs(1));
            return;
        }
    };
    runtime.block_on(async {
        tokio::select! {
            () = stop.cancelled() => (),
            () = watch(worker) => (),
            () = beat(worker) => (),
        }
    });
    runtime.shutdown_background();
}

/// Gives up sessions whose lease is about to end unconfirmed.
async fn watch(worker: &Worker) {
    loop {
        for session in worker.sessions.all_open() {
            if Instant::now() + margin(session.lease) >= session.valid_until {
                worker.lose_session(session.id, "its lease could not be extended in time");
            }
        }
        let next = worker
            .sessions
            .first_end()
            .map_or(WATCH, |end| end.saturating_duration_since(Instant::now()).min(WATCH));
        sleep(next.max(Duration::from_millis(5))).await;
    }
}

/// How long before its end a lease is given up: time for attempts to notice.
fn margin(lease: Duration) -> Duration {
    (lease / 10).min(Duration::from_secs(1))
}

fn pause(lease: Duration) -> Duration {
    (lease / 3).min(LONGEST_PAUSE)
}

/// Extends every session well before its lease ends, for ever.
async fn beat(worker: &Worker) {
    let mut pulse: Option<Box<dyn Pulse>> = None;
    let mut due: Vec<(i64, Instant)> = Vec::new();
    loop {
        let mut sessions = worker.sessions.all_open();
        // The shortest first, and none waits longer on a broken connection than the shortest can.
        sessions.sort_by_key(|session| session.lease);
        let patience = sessions.first().map_or(LONGEST_PAUSE, |first| pause(first.lease));
        let patience = patience.max(Duration::from_millis(300));
        due.retain(|(id, _)| sessions.iter().any(|session| session.id.0 == *id));
        for session in &sessions {
            if !due.iter().any(|(id, _)| *id == session.id.0) {
                due.push((session.id.0, Instant::now()));
            }
        }
        for session in sessions {
            let Some(entry) = due.iter_mut().find(|(id, _)| *id == session.id.0) else { continue };
            if entry.1 > Instant::now() {
                continue;
            }
            let next = match extend(worker, session, &mut pulse, patience).await {
                Beaten::Extended => pause(session.lease),
                Beaten::TryAgain(wait) => wait,
            };
            entry.1 = Instant::now() + next;
        }
        let next = due.iter().map(|(_, at)| *at).min();
        let wait = next.map_or(WATCH, |at| at.saturating_duration_since(Instant::now()).min(WATCH));
        sleep(wait).await;
    }
}

enum Beaten {
    Extended,
    TryAgain(Duration),
}

async fn extend(
    worker: &Worker,
    session: OpenSession,
    pulse: &mut Option<Box<dyn Pulse>>,
    patience: Duration,
) -> Beaten {
    if pulse.is_none() {
        // A connection takes several round trips to open, and a beat one or two.
        match timeout(patience.max(CONNECT_PATIENCE), worker.store.pulse()).await {
            Ok(Ok(opened)) => *pulse = Some(opened),
            Ok(Err(error)) => return failed(&error),
            Err(_) => return unanswered(),
        }
    }
    let Some(open) = pulse else { return Beaten::TryAgain(Duration::ZERO) };
    let beat = Beat {
        session: session.id.0,
        held: worker.held(session.id),
        floors: locked(&worker.floors).all(),
    };
    let sent = Instant::now();
    match timeout(patience, open.beat(&beat)).await {
        Ok(Ok(BeatReply::Extended { lost, cancel_requested })) => {
            // Counted from before the question was sent: the true end is never earlier.
            worker.sessions.extend(session.id, sent + session.lease);
            worker.tell(
                |key| beat.held.contains(&key) && lost.contains(&key.0),
                Control::lose_unless_completing,
            );
            worker.tell(
                |key| beat.held.contains(&key) && cancel_requested.contains(&key.0),
                Control::cancel,
            );
            Beaten::Extended
        }
        Ok(Ok(BeatReply::Closed)) => {
            worker.lose_session(session.id, "it was closed after its lease expired");
            Beaten::Extended
        }
        Ok(Ok(BeatReply::Blocked)) => {
            worker.sessions.extend(session.id, Instant::now() + pause(session.lease).max(BLOCKED));
            Beaten::TryAgain(Duration::from_millis(20))
        }
        Ok(Err(error)) => {
            *pulse = None;
            failed(&error)
        }
        Err(_) => {
            *pulse = None;
            unanswered()
        }
    }
}

fn failed(error: &crate::Error) -> Beaten {
    tracing::warn!(error = error as &dyn std::error::Error, "heartbeat failed; trying again");
    Beaten::TryAgain(Duration::from_millis(100).mul_f64(1.0 + rand::random::<f64>()))
}

fn unanswered() -> Beaten {
    tracing::warn!("heartbeat not answered in time; trying again");
    Beaten::TryAgain(Duration::ZERO)
}
