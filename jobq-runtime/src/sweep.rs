//! The periodic pass that takes back what was lost sight of.
//!
//! Every process rescues: it closes sessions whose lease expired and settles their jobs. Any number
//! of processes may do so at once, since each write is guarded by the lease it ends.
//!
//! The rest is a duty that one process at a time has: finding jobs that every worker able to run
//! them has passed by, parking jobs of kinds that nobody knows or that are paused, pruning the history.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use jobq_core::job::SessionId;
use jobq_core::lifecycle::{self, Transition};
use jobq_core::pause::PauseScope;
use jobq_core::queue::bands_with_fronts;
use jobq_core::time::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::time::sleep;

use crate::error::Result;
use crate::key;
use crate::store::{
    DEFAULT_RETENTION, Floor, HeldJob, Horizon, LiveSession, Pause, QueueFloor, Settled,
    Settlement, Shift, Store, UnleasedJob,
};
use crate::unique::UniqueKey;
use crate::worker::Worker;

/// The time between two passes: jobs of dead workers wait for them.
pub(crate) const EVERY: Duration = Duration::from_secs(3);

/// How long nobody is declared dead after something odd was noticed: the database was away, its
/// clock stepped, this process was paused, or has only just started. Whoever is alive extends its
/// sessions within this time.
const CAREFUL: Duration = Duration::from_secs(6);

/// A pass that comes later than this has not been kept waiting by a busy machine only.
const LATE_PASS: Duration = Duration::from_secs(5);

/// How far the database's clock may go apart from this machine's in one pass.
const CLOCK_STEP: Duration = Duration::from_secs(1);

/// How long a step that goes on while there is more may take.
const STEP_TIME: Duration = Duration::from_secs(1);

/// The longest time between two passes that look for lost jobs; a slow one waits 20 times what it
/// took.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// How many jobs one step reads or moves.
const STEP: u32 = 1_000;

/// How many steps a pass takes in one band.
const STEPS: usize = 20;

/// How late a transaction may draw its number after it has read the clock.
const LATE_NUMBER: Duration = Duration::from_secs(2);

/// How often the sweep forgets what it has proved and looks through everything.
const WHOLE_EVERY: Duration = Duration::from_secs(600);

/// How often jobs that nobody can run are complained about.
const COMPLAIN_EVERY: Duration = Duration::from_secs(60);

pub(crate) const DUTY: &str = "sweep";

/// What the sweep remembers from one pass to the next, whichever process does it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Notes {
    /// Below these nothing is left that is not leased.
    #[serde(default)]
    pub(crate) floors: Vec<QueueFloor>,
    /// A time, and the newest transaction at that time: once that and all older ones have ended,
    /// nothing can appear before the time any more.
    #[serde(default)]
    pub(crate) mark: Option<(i64, i64)>,
    /// The latest time that was proved so.
    #[serde(default)]
    pub(crate) proven: Option<i64>,
    /// When everything was last looked through, in the database's time.
    #[serde(default)]
    pub(crate) whole_at: i64,
}

/// Where claims may begin: below these floors nothing is left that is not leased.
pub(crate) async fn proven_floors(store: &dyn Store) -> Result<Vec<QueueFloor>> {
    Ok(read_notes(&store.duty_notes(DUTY).await?).floors)
}

/// Notes that cannot be read count as none: the sweep then looks through everything.
fn read_notes(text: &str) -> Notes {
    serde_json::from_str(text).unwrap_or_default()
}

/// Sweeps for ever.
pub(crate) async fn run(worker: Arc<Worker>) {
    let mut sweep = Sweep {
        worker: &worker,
        complained: None,
        search_at: Instant::now(),
        last: None,
        keys_to: None,
        grants_to: None,
        unburied: Vec::new(),
        careful_until: Instant::now() + CAREFUL,
    };
    // Spread the processes of a fleet that started together.
    let mut wait = EVERY.mul_f64(rand::random());
    loop {
        sleep(wait).await;
        if let Err(error) = sweep.pass().await {
            sweep.careful_until = Instant::now() + CAREFUL;
            tracing::warn!(error = &error as &dyn std::error::Error, "sweep failed; trying again");
        }
        wait = EVERY;
    }
}

struct Sweep<'w> {
    worker: &'w Arc<Worker>,
    complained: Option<Instant>,
    /// When to look for lost jobs again.
    search_at: Instant,
    /// The database's time in the last pass, and when that was here.
    last: Option<(Timestamp, Instant)>,
    /// Up to where the keys of unique jobs were looked through; `None` is the beginning.
    keys_to: Option<UniqueKey>,
    /// The same with the grants of keys.
    grants_to: Option<String>,
    /// Jobs taken because they have expired that could not be settled yet.
    unburied: Vec<Settlement>,
    careful_until: Instant,
}

impl Sweep<'_> {
    async fn pass(&mut self) -> Result<()> {
        let store = &*self.worker.store;
        let now = store.now().await?;
        if self.is_odd(now, Instant::now()) {
            self.careful_until = Instant::now() + CAREFUL;
        }
        if Instant::now() < self.careful_until {
            return Ok(());
        }
        let _sweeping = self.worker.sweeping.lock().await;
        let rescued = rescue(store, false).await?;
        self.worker.stats.rescued.fetch_add(rescued, Ordering::Relaxed);
        if Instant::now() >= self.search_at {
            let started = Instant::now();
            let whole = self.search().await?;
            let pause = if whole { (started.elapsed() * 20).min(LONGEST_WAIT) } else { EVERY };
            self.search_at = started + pause;
        }
        Ok(())
    }

    /// Whether something happened since the last pass that may have kept others from extending
    /// their sessions. Only a reason to wait: what this machine's clock says decides nothing.
    fn is_odd(&mut self, now: Timestamp, here: Instant) -> bool {
        let sessions = &self.worker.sessions;
        if sessions.by_lease().is_none() || sessions.first_end().is_some_and(|end| end <= here) {
            return true;
        }
        let Some((last, last_here)) = self.last.replace((now, here)) else { return false };
        let passed = here - last_here;
        let (least, most) = (passed.saturating_sub(CLOCK_STEP), passed + CLOCK_STEP);
        passed > EVERY + LATE_PASS || now < last.plus(least) || now > last.plus(most)
    }

    /// What one process at a time does for all; false if there is more to do.
    async fn search(&mut self) -> Result<bool> {
        let store = &*self.worker.store;
        let Some(holder) = self.worker.sessions.all_open().first().map(|session| session.id) else {
            return Ok(true);
        };
        let Some(notes) = store.take_duty(DUTY, holder, EVERY * 3).await? else { return Ok(true) };
        let mut notes = read_notes(&notes);
        let found = find_late(store, &mut notes, store.horizon().await?).await?;
        self.complain(&found.unknown);
        let text = serde_json::to_string(&notes).unwrap_or_default();
        store.note_duty(DUTY, holder, &text).await?;
        let expired = self.bury_expired(holder).await?;
        let pruned = while_full(|| store.prune(STEP)).await?;
        self.prune_keys().await?;
        self.pass_on_grants().await?;
        Ok(found.whole && expired && pruned)
    }

    /// False if there is more to do.
    async fn bury_expired(&mut self, holder: SessionId) -> Result<bool> {
        let started = Instant::now();
        let store = &*self.worker.store;
        while bury_expired(store, holder, &mut self.unburied).await? >= u64::from(STEP) {
            if started.elapsed() > STEP_TIME {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Looks through a part of the keys of unique jobs; the next pass goes on from there.
    async fn prune_keys(&mut self) -> Result<()> {
        let started = Instant::now();
        loop {
            self.keys_to = self.worker.store.prune_keys(self.keys_to, STEP).await?;
            if self.keys_to.is_none() || started.elapsed() > STEP_TIME {
                return Ok(());
            }
        }
    }

    /// Looks through a part of the grants of keys, and passes on those whose job is gone: whoever
    /// settled it was not able to. The next pass goes on from there.
    async fn pass_on_grants(&mut self) -> Result<()> {
        let started = Instant::now();
        loop {
            let store = &*self.worker.store;
            let stale = store.stale_grants(self.grants_to.as_deref(), STEP).await?;
            key::pass_on(store, stale.keys).await;
            self.grants_to = stale.next;
            if self.grants_to.is_none() || started.elapsed() > STEP_TIME {
                return Ok(());
            }
        }
    }

    /// Says once a minute which due jobs nobody can run.
    fn complain(&mut self, unknown: &HashSet<String>) {
        if unknown.is_empty() || self.complained.is_some_and(|at| at.elapsed() < COMPLAIN_EVERY) {
            return;
        }
        self.complained = Some(Instant::now());
        let mut kinds: Vec<&str> = unknown.iter().map(String::as_str).collect();
        kinds.sort_unstable();
        tracing::warn!(
            kinds = kinds.join(", "),
            "jobs of these kinds are due, but no live worker registers them; they wait. \
             Is a worker missing, or the crate with these jobs not linked?"
        );
    }
}

/// Repeats a step for as long as it does all it may, for a moment; false if there is more to do.
async fn while_full<F: Future<Output = Result<u64>>>(mut step: impl FnMut() -> F) -> Result<bool> {
    let started = Instant::now();
    while step().await? >= u64::from(STEP) {
        if started.elapsed() > STEP_TIME {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Passes on all grants of keys whose job is gone; returns how many jobs it has woken.
pub(crate) async fn pass_on_all_grants(store: &dyn Store) -> Result<u64> {
    let (mut woken, mut after) = (0, None);
    loop {
        let stale = store.stale_grants(after.as_deref(), STEP).await?;
        woken += key::pass_on(store, stale.keys).await;
        match stale.next {
            Some(next) => after = Some(next),
            None => return Ok(woken),
        }
    }
}

/// Buries jobs that were not started in time, a step of them; returns how many. Claims do so with those that
/// they meet; what is paused or held up by a limit, and what nobody serves, they do not meet.
///
/// What could not be settled is still ours, and is left to the next time.
pub(crate) async fn bury_expired(
    store: &dyn Store,
    holder: SessionId,
    left: &mut Vec<Settlement>,
) -> Result<u64> {
    left.extend(store.take_expired(holder, STEP).await?.iter().map(burying));
    let settled = match settle_each(store, left).await {
        Ok(settled) => settled,
        Err(error) => {
            for one in left {
                one.doubtful = true;
            }
            return Err(error);
        }
    };
    let mut buried = 0;
    for (mut one, settled) in std::mem::take(left).into_iter().zip(settled) {
        match settled {
            Settled::Written => {
                buried += u64::from(matches!(one.transition, Transition::Bury { .. }));
            }
            Settled::Busy => left.push(one),
            Settled::CancelRequested => {
                one.transition = Transition::Cancel { reason: None };
                left.push(one);
            }
            Settled::Found | Settled::LeaseLost => {}
        }
    }
    if buried > 0 {
        tracing::warn!(jobs = buried, "buried jobs that were not started in time");
    }
    Ok(buried)
}

/// How a job is settled that was taken because it has expired.
pub(crate) fn burying(job: &HeldJob) -> Settlement {
    Settlement { transition: lifecycle::expire(job.counters), ..rescuing(job) }
}

/// Takes back the jobs of sessions whose lease expired; returns how many.
pub(crate) async fn rescue(store: &dyn Store, orphans: bool) -> Result<u64> {
    let mut closed = store.close_expired_sessions().await?;
    if closed.is_empty() && !orphans {
        return Ok(0);
    }
    let mut rescued = 0;
    loop {
        let abandoned = store.abandoned(&closed, orphans, STEP).await?;
        if abandoned.is_empty() {
            break;
        }
        let settlements: Vec<Settlement> = abandoned.iter().map(rescuing).collect();
        let settled = settle_each(store, &settlements).await?;
        let written = settled.iter().filter(|settled| **settled == Settled::Written);
        let written = written.count() as u64;
        rescued += written;
        if written == 0 {
            // Held locked by somebody, such as a handler's open transaction, or settled by another
            // process meanwhile. The sessions stay closed; the next pass looks again.
            closed.clear();
            break;
        }
    }
    if rescued > 0 {
        tracing::warn!(jobs = rescued, "rescued jobs whose lease had expired");
        crate::wake::poke();
    }
    if !closed.is_empty() {
        store.forget_sessions(&closed).await?;
    }
    Ok(rescued)
}

/// Settles jobs, of which one that the database refuses must not hold up the others.
async fn settle_each(store: &dyn Store, settlements: &[Settlement]) -> Result<Vec<Settled>> {
    match key::settle(store, settlements).await {
        Err(error) if !error.is_transient() => (),
        settled => return settled,
    }
    let mut each = Vec::with_capacity(settlements.len());
    for settlement in settlements {
        match key::settle(store, std::slice::from_ref(settlement)).await {
            Ok(settled) => each.extend(settled),
            Err(error) if error.is_transient() => return Err(error),
            Err(error) => {
                tracing::error!(
                    error = &error as &dyn std::error::Error,
                    id = settlement.lease.job.0,
                    "the rescue of a job is refused by the database"
                );
                each.push(Settled::Busy);
            }
        }
    }
    Ok(each)
}

fn rescuing(job: &HeldJob) -> Settlement {
    Settlement {
        lease: job.lease,
        transition: lifecycle::rescue(job.counters, job.limits, job.isolated, job.cancel_requested),
        retention: DEFAULT_RETENTION,
        doubtful: false,
        key: job.key.clone(),
    }
}

/// What [`find_late`] found.
#[derive(Default)]
pub(crate) struct Found {
    /// Kinds of due jobs that no live session knows.
    pub(crate) unknown: HashSet<String>,
    /// Whether everything was looked at.
    pub(crate) whole: bool,
}

/// Finds jobs that were passed by, and kinds that no live session knows.
///
/// A job was passed by when a worker that knows its kind has its floor beyond it: it committed
/// late, or a claim that had locked it was rolled back, or a floor was simply wrong. It is put
/// first in line. A due job whose kind no worker of its queue knows is parked, so that claims need
/// not read past it; so is one whose kind is paused.
pub(crate) async fn find_late(
    store: &dyn Store,
    notes: &mut Notes,
    horizon: Horizon,
) -> Result<Found> {
    begin_anew_if_due(store, notes, horizon).await?;
    prove(notes, horizon);
    let sessions = store.live_sessions().await?;
    // Looked at later than the floors: what these have passed by because of a pause is known as such.
    let pauses = store.pauses().await?;
    let reach = Reach::new(&sessions, &pauses);
    let mut found = Found { unknown: HashSet::new(), whole: true };
    for queue in &reach.queues {
        for band in bands_with_fronts() {
            let Some(to) = reach.farthest(queue, band) else { continue };
            let from = notes
                .floors
                .iter()
                .find(|floor| floor.queue == *queue && floor.band == band)
                .map_or(Floor::START, |floor| floor.floor);
            let clean_to = look_through(store, &reach, queue, band, (from, to), &mut found).await?;
            let proven = Floor { run_after: Timestamp(notes.proven.unwrap_or(i64::MIN)), id: 0 };
            let floor = clean_to.min(proven).max(from);
            match notes.floors.iter_mut().find(|known| known.queue == *queue && known.band == band)
            {
                Some(known) => known.floor = floor,
                None => {
                    notes.floors.push(QueueFloor { queue: (*queue).to_owned(), band, floor });
                }
            }
        }
    }
    // Most sessions of a fleet are alike, and each look may read all that is set aside.
    let mut wanted: Vec<_> =
        sessions.iter().map(|session| (&session.queues, &session.kinds)).collect();
    wanted.sort_unstable();
    wanted.dedup();
    for (queues, kinds) in wanted {
        let unpark = || store.unpark(queues, kinds, STEP);
        found.whole &= while_full(unpark).await?;
    }
    Ok(found)
}

/// Every now and then, and when the clock stepped back, everything is looked through: jobs from
/// the beginning, and leases of sessions that do not exist.
async fn begin_anew_if_due(store: &dyn Store, notes: &mut Notes, horizon: Horizon) -> Result<()> {
    let now = horizon.now;
    let stepped_back = notes.proven.is_some_and(|proven| proven > now.0)
        || notes.mark.is_some_and(|(time, newest)| time > now.0 || newest > horizon.newest);
    let whole_is_due =
        now.since(Timestamp(notes.whole_at)) >= WHOLE_EVERY || notes.whole_at > now.0;
    if stepped_back || whole_is_due {
        *notes = Notes { whole_at: now.0, ..Notes::default() };
        rescue(store, true).await?;
    }
    Ok(())
}

/// Moves the proven time forward if every transaction of the mark has ended, and sets a new mark.
fn prove(notes: &mut Notes, horizon: Horizon) {
    match notes.mark {
        Some((time, newest)) => {
            let ended = horizon.oldest_running >= newest;
            let settled = horizon.now.since(Timestamp(time)) >= LATE_NUMBER;
            if ended && settled {
                // What drew its number after the mark has read the clock this long before at most.
                let proven = Timestamp(time).minus(LATE_NUMBER).0;
                notes.proven = notes.proven.max(Some(proven));
                notes.mark = Some((horizon.now.0, horizon.newest));
            }
        }
        None => notes.mark = Some((horizon.now.0, horizon.newest)),
    }
}

/// Looks through a part of a band; returns up to where nothing pending is left.
async fn look_through(
    store: &dyn Store,
    reach: &Reach<'_>,
    queue: &str,
    band: i16,
    (from, to): (Floor, Floor),
    everything: &mut Found,
) -> Result<Floor> {
    let mut at = from;
    let mut clean_to = None;
    for step in 1.. {
        let found = store.unleased(queue, band, at, to, STEP).await?;
        let (mut late, mut strangers, mut paused) = (Vec::new(), Vec::new(), Vec::new());
        for job in &found {
            let place = Floor { run_after: job.run_after, id: job.id.0 };
            at = place;
            match reach.passed(queue, band, &job.kind, place) {
                Passed::Yes => late.push(job.clone()),
                Passed::NobodyKnowsIt => {
                    everything.unknown.insert(job.kind.clone());
                    strangers.push(job.clone());
                }
                Passed::ItIsPaused => paused.push(job.clone()),
                // Somebody will come to it: the band is clean up to just before it.
                Passed::No => {
                    let before = Floor { run_after: place.run_after, id: place.id - 1 };
                    clean_to = clean_to.or(Some(before));
                }
            }
        }
        // In the express band a late job is as far ahead as it can be; moving it makes it claimable.
        let moved = shift(store, &late, Shift::Hurry).await?;
        if moved > 0 {
            tracing::info!(queue, band, jobs = moved, "found jobs that had been passed by");
            crate::wake::poke();
        }
        let parked = shift(store, &strangers, Shift::Park).await?
            + shift(store, &paused, Shift::Pause).await?;
        if moved + parked < (late.len() + strangers.len() + paused.len()) as u64 {
            // Claimed, cancelled or locked meanwhile: look again from here next time.
            clean_to = clean_to.or(Some(from));
        }
        if found.len() < STEP as usize {
            break;
        }
        if step >= STEPS {
            clean_to = clean_to.or(Some(at));
            everything.whole = false;
            break;
        }
    }
    Ok(clean_to.unwrap_or(to))
}

async fn shift(store: &dyn Store, jobs: &[UnleasedJob], shift: Shift) -> Result<u64> {
    if jobs.is_empty() { Ok(0) } else { store.shift(jobs, shift).await }
}

/// How far the live workers have claimed, what they know, and what keeps them from it.
struct Reach<'s> {
    sessions: &'s [LiveSession],
    paused_kinds: HashSet<&'s str>,
    queues: Vec<&'s str>,
    floors: HashMap<(usize, &'s str, i16), Floor>,
}

enum Passed {
    Yes,
    No,
    NobodyKnowsIt,
    ItIsPaused,
}

impl<'s> Reach<'s> {
    fn new(sessions: &'s [LiveSession], pauses: &'s [Pause]) -> Self {
        let paused_kinds = pauses
            .iter()
            .filter(|pause| pause.scope == PauseScope::Kind)
            .map(|pause| pause.name.as_str())
            .collect();
        let mut queues: Vec<&str> =
            sessions.iter().flat_map(|session| session.queues.iter().map(String::as_str)).collect();
        queues.sort_unstable();
        queues.dedup();
        let mut floors = HashMap::new();
        for (index, session) in sessions.iter().enumerate() {
            for floor in &session.floors {
                floors.insert((index, floor.queue.as_str(), floor.band), floor.floor);
            }
        }
        Self { sessions, paused_kinds, queues, floors }
    }

    /// The farthest floor of any worker in a band.
    fn farthest(&self, queue: &str, band: i16) -> Option<Floor> {
        (0..self.sessions.len())
            .filter_map(|index| self.floors.get(&(index, queue, band)).copied())
            .max()
    }

    /// Whether a worker that could have run this job has passed it by.
    fn passed(&self, queue: &str, band: i16, kind: &str, place: Floor) -> Passed {
        if self.paused_kinds.contains(kind) {
            return Passed::ItIsPaused;
        }
        let mut known = false;
        for (index, session) in self.sessions.iter().enumerate() {
            let serves = session.queues.iter().any(|served| served == queue);
            if serves && session.kinds.iter().any(|registered| registered == kind) {
                known = true;
                if self.floors.get(&(index, queue, band)).is_some_and(|floor| *floor >= place) {
                    return Passed::Yes;
                }
            }
        }
        if known { Passed::No } else { Passed::NobodyKnowsIt }
    }
}
