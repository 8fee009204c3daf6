//! Sessions, heartbeats and claims.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jobq_core::job::{JobId, Lease, SessionId, Token};
use jobq_core::lifecycle::{Counters, Limits};
use jobq_core::time::{Timestamp, micros};
use sqlx::Row;
use sqlx::mysql::{MySqlConnection, MySqlRow};

use super::due::{DUE, Key, LOCK_JOBS, Range, band_has_any, jobs_by_id};
use super::limit::{self, LIMITED, limited_queue};
use super::pause::{PAUSED, is_pause, read_paused};
use super::{
    Beat, BeatReply, CHECK_FAILED, Claim, Claimed, Floor, LIST, MysqlStore, NewSession, Paused,
    Schema, again, check, count, execute, get, is_set, json, keys, killed, list, literal, literals,
    number, rows,
};
use crate::key::JobKey;
use crate::store::{ClaimedJob, Turn, job_key, metadata_map, tags_list};

impl MysqlStore {
    pub(super) async fn open_session(&self, session: &NewSession) -> sqlx::Result<()> {
        let (id, lease) = (session.id, micros(session.lease));
        let worker = literal(&session.worker);
        let (kinds, queues) = (literal(&json(&session.kinds)), literal(&json(&session.queues)));
        self.rows(&format!(
            "insert into jobq_sessions (id, worker, lease, leased_until, kinds, queues)
             values ({id}, {worker}, {lease}, now_us() + {lease}, {kinds}, {queues})"
        ))
        .await?;
        Ok(())
    }

    pub(super) async fn close_session(&self, session: SessionId) -> sqlx::Result<()> {
        // Moved, not deleted: should a job still be held under it, the sweep finds it there.
        again(|| async {
            self.rows(&close_statement(session.0, "true")).await?;
            Ok(())
        })
        .await
    }

    pub(super) async fn claim(&self, claim: &Claim) -> sqlx::Result<Claimed> {
        let wanted = Wanted::new(claim);
        again(|| async {
            let mut connection = self.own().await?;
            let claimed = claim_on(&mut connection, &self.schema, &wanted, &self.met).await?;
            connection.hand_back();
            Ok(claimed)
        })
        .await
    }

    pub(super) async fn next_due(
        &self,
        queues: &[String],
        kinds: &[String],
    ) -> sqlx::Result<Option<Duration>> {
        let paused = self.paused().await?;
        let queues: Vec<String> =
            queues.iter().filter(|queue| !paused.queues.contains(queue)).cloned().collect();
        let bands = queues
            .iter()
            .flat_map(|queue| jobq_core::queue::bands().map(move |band| (queue.clone(), band)));
        let now = self.meet(bands).await?;
        let bands = self.met.of(&queues);
        if bands.is_empty() {
            return Ok(None);
        }
        let rows = self.rows(&next_due_statement(&bands, now, kinds, &paused.kinds)).await?;
        let wait: Option<i64> = rows.first().map(|row| get(row, "wait")).transpose()?.flatten();
        Ok(wait.map(|wait| Duration::from_micros(wait.max(0).unsigned_abs())))
    }

    /// Asks whether there are jobs in those bands in which none was met so far, and for the time.
    pub(super) async fn meet(
        &self,
        bands: impl Iterator<Item = (String, i16)>,
    ) -> sqlx::Result<i64> {
        let unknown: Vec<_> = bands.filter(|band| !self.met.contains(band)).collect();
        let mut ask = "select now_us() as now".to_owned();
        for (queue, band) in &unknown {
            write!(ask, ", {}", band_has_any(queue, *band)).expect("text grows");
        }
        let answer = self.rows(&ask).await?;
        let answer = answer.first().ok_or(sqlx::Error::RowNotFound)?;
        for (column, band) in unknown.into_iter().enumerate() {
            if answer.try_get::<i64, _>(column + 1)? != 0 {
                self.met.insert(band);
            }
        }
        get(answer, "now")
    }

    pub(super) async fn isolate(&self, lease: Lease) -> sqlx::Result<bool> {
        let Lease { job, token, session } = lease;
        let mut connection = self.own().await?;
        let done = execute(
            &mut connection,
            &self.schema,
            &format!(
                "update jobq_jobs set isolated = 1
                 where id = {job} and token = {token} and leased_by = {session}
                   and exists (select 1 from jobq_sessions where id = {session})"
            ),
        )
        .await?;
        connection.hand_back();
        Ok(done == 1)
    }
}

/// Moves a session that fits a condition to the closed ones, as one transaction.
pub(super) fn close_statement(session: i64, fits: &str) -> String {
    let moved = check(&format!(
        "not exists (
             select 1
             from jobq_sessions as here, jobq_closed_sessions as moved
             where here.id = {session} and moved.id = {session}
         )"
    ));
    format!(
        "begin;
         select id from jobq_sessions where id = {session} for update;
         insert into jobq_closed_sessions (id, worker, leased_until)
         select id, worker, leased_until from jobq_sessions where id = {session} and {fits};
         delete from jobq_sessions
         where id = {session}
           and exists (select 1 from jobq_closed_sessions where id = {session});
         {moved};
         commit"
    )
}

/// The earliest time at which a job of these kinds is due in one of the bands. Where many others come
/// before, it is a time before that: then one looks again. Paused kinds are none of those: they are
/// read past.
pub(crate) fn next_due_statement(
    bands: &[(String, i16)],
    now: i64,
    kinds: &[String],
    paused: &[String],
) -> String {
    const PAGE: u32 = 20;
    let mut and = "run_after < 9223372036854775807".to_owned();
    if !paused.is_empty() {
        let paused = literals(paused.iter().map(String::as_str));
        write!(and, " and kind not in ({paused})").expect("text grows");
    }
    let kinds = literals(kinds.iter().map(String::as_str));
    let fits = format!("leased_by = 0 and kind in ({kinds})");
    let bands: Vec<String> = bands
        .iter()
        .map(|(queue, band)| {
            let range = Range {
                queue: queue.clone(),
                band: *band,
                from: Floor { run_after: Timestamp(now), id: 0 },
                and: and.clone(),
            };
            let page = range.page("", &fits, PAGE);
            format!(
                "(select coalesce(
                             min(case when fits then run_after end),
                             case when count(*) = {PAGE} then max(run_after) end
                         ) as run_after
                  from ({page}) as page)"
            )
        })
        .collect();
    format!("select min(run_after) - now_us() as wait from ({}) as next", bands.join(" union all "))
}

/// A claim as the statements take it.
pub(crate) struct Wanted {
    sessions: Vec<i64>,
    /// The session for each kind.
    by_kind: HashMap<String, SessionId>,
    /// The kinds as a list.
    kinds: String,
    /// Every band of every queue, in the order in which they are looked at.
    pub(crate) places: Vec<Place>,
}

pub(crate) struct Place {
    pub(crate) range: Range,
    /// How many jobs may be claimed from the queue, all its bands together.
    limit: u32,
}

impl Wanted {
    pub(crate) fn new(claim: &Claim) -> Self {
        let places = claim.queues.iter().flat_map(|queue| {
            queue.floors.iter().map(|(band, floor)| Place {
                range: Range {
                    queue: queue.queue.clone(),
                    band: *band,
                    from: *floor,
                    and: DUE.to_owned(),
                },
                limit: queue.limit,
            })
        });
        Self {
            sessions: claim.sessions(),
            by_kind: claim.kinds.iter().cloned().collect(),
            kinds: literals(claim.kinds.iter().map(|(kind, _)| kind.as_str())),
            places: places.collect(),
        }
    }

    /// What of it is paused, of all that is.
    fn paused(&self, mut all: Paused) -> Paused {
        all.queues.retain(|queue| self.places.iter().any(|place| place.range.queue == *queue));
        all.kinds.retain(|kind| self.by_kind.contains_key(kind));
        all
    }

    /// Counts the sessions that are live.
    fn live_statement(&self) -> String {
        let sessions = list(self.sessions.iter().copied());
        format!(
            "select count(*) from jobq_sessions force index (primary)
             where id in ({sessions}) and leased_until > now_us()"
        )
    }

    /// Reads so many keys of a place that are due.
    pub(crate) fn page_statement(&self, n: usize, from: Floor, keys: u32) -> String {
        let range = Range { from, ..self.places[n].range.clone() };
        let fits = format!("leased_by = 0 and kind in ({})", self.kinds);
        range.page(&format!("{n} as place, kind, "), &fits, keys)
    }

    /// Locks jobs of a place that are still to be claimed, in the order of their ids here and up to a
    /// limit, and reads them whole.
    pub(crate) fn lock_statement(
        &self,
        n: usize,
        ids: impl IntoIterator<Item = i64>,
        now: Timestamp,
        limit: usize,
    ) -> String {
        let Range { queue, band, .. } = &self.places[n].range;
        let (jobs, queue, kinds, now) = (jobs_by_id(ids), literal(queue), &self.kinds, now.0);
        format!(
            "select job.id, token, kind, run_after, attempt, crashes, interruptions, max_attempts,
                    max_crashes, created_at, tags, metadata, payload, job_key, on_block,
                    coalesce(start_by <= {now}, 0) as expired
             from {jobs}
             where queue = {queue}
               and band = {band}
               and run_after <= {now}
               and leased_by = 0
               and kind in ({kinds})
             limit {limit}
             {LOCK_JOBS}"
        )
    }
}

impl Place {
    /// How many keys are read first: a few more than jobs are wanted, for some are leased.
    pub(crate) fn first_page(&self) -> u32 {
        /// Jobs that others have claimed since.
        const LEASED: u32 = 30;
        self.limit.saturating_add(LEASED)
    }

    /// How many are read after a page of so many in which there was not enough: more each time, for
    /// there may be a hundred thousand that are paused.
    fn next_page(&self, keys: u32) -> u32 {
        const LARGEST: u32 = 2_000;
        keys.saturating_mul(2).min(LARGEST).max(self.first_page())
    }

    fn band(&self) -> (String, i16) {
        (self.range.queue.clone(), self.range.band)
    }
}

/// Looks first: an idle worker's poll takes no lock and needs no transaction.
///
/// The jobs are then locked band by band, each time as many as are left to the limit: what was locked
/// and not claimed would be invisible to others, who would pass it by. Where somebody else was faster
/// it goes on, to the end of the band: a claim that brings less than its limit has seen everything.
pub(super) async fn claim_on(
    connection: &mut MySqlConnection,
    schema: &Schema,
    wanted: &Wanted,
    met: &Met,
) -> sqlx::Result<Claimed> {
    let look = look(connection, schema, wanted, met).await?;
    let mut claimed = Claimed {
        seen_to: look.now,
        sessions_live: look.live,
        paused: look.paused,
        limited: Vec::new(),
        jobs: Vec::new(),
    };
    if !look.live || look.pages.is_empty() {
        return Ok(claimed);
    }
    let mut text = "begin; ".to_owned();
    let places = look.pages.keys().map(|n| &wanted.places[*n]);
    let limited: BTreeSet<(String, u32)> = places
        .filter(|place| look.limited.contains(&place.range.queue))
        .map(|place| (place.range.queue.clone(), place.limit))
        .collect();
    let (mut gates, mut gates_at) = (Vec::new(), look.now);
    if !limited.is_empty() {
        (gates, gates_at) = limit::lock(connection, schema, &limited).await?;
        text.clear();
        for gate in &gates {
            let asked = limited.iter().find(|(queue, _)| *queue == gate.queue);
            let allowed = gate.allows(asked.map_or(0, |(_, asked)| *asked), gates_at);
            claimed.limited.push(allowed);
        }
    }
    let mut taken: HashMap<&str, usize> = HashMap::new();
    for (n, mut page) in look.pages {
        let place = &wanted.places[n];
        let allowed = claimed.limited.iter().find(|allowed| allowed.queue == place.range.queue);
        let most = allowed.map_or(place.limit, |allowed| allowed.jobs) as usize;
        if most == 0 {
            continue;
        }
        let taken = taken.entry(place.range.queue.as_str()).or_default();
        let mut jobs = Vec::new();
        let mut keys = place.first_page();
        loop {
            let left = most.saturating_sub(*taken + jobs.len());
            let free: Vec<i64> = page.iter().filter(|key| key.fits).map(|key| key.id).collect();
            if left > 0 && !free.is_empty() {
                text.push_str(&wanted.lock_statement(n, free, look.now, left));
                let found = rows(connection, schema, &text).await?;
                text.clear();
                for row in &found {
                    let kind: String = get(row, "kind")?;
                    // MySQL may say that another kind is the same only if the collation was changed.
                    if let Some(session) = wanted.by_kind.get(&kind) {
                        jobs.push(claimed_job(row, &place.range, kind, *session)?);
                    }
                }
            }
            let (true, Some(last)) = (page.len() >= keys as usize, page.last()) else {
                break;
            };
            if *taken + jobs.len() >= most {
                break;
            }
            keys = place.next_page(keys);
            let next = wanted.page_statement(n, last.floor(), keys);
            let found = rows(connection, schema, &next).await?;
            page = found
                .iter()
                .map(|row| read_key(row, &claimed.paused))
                .collect::<sqlx::Result<Vec<Key>>>()?;
            page.sort_by_key(Key::floor);
        }
        *taken += jobs.len();
        jobs.sort_by_key(|job| (job.run_after, job.lease.job));
        claimed.jobs.append(&mut jobs);
    }
    // It was sent with the first that were locked.
    let begun = text.is_empty();
    keys::decide_turns(connection, schema, &mut claimed.jobs).await?;
    let hurries = !limited.is_empty() || claimed.jobs.iter().any(|job| job.key.is_some());
    let commit = if hurries { keys::COMMIT } else { "commit" };
    let end = limit::take_statements(&gates, &claimed.jobs, gates_at) + commit;
    if begun && !lease(connection, schema, wanted, &claimed.jobs, &end).await? {
        claimed.sessions_live = false;
        claimed.jobs.clear();
    }
    Ok(claimed)
}

/// What a claim sees before it locks anything.
struct Look {
    now: Timestamp,
    /// Whether all sessions are.
    live: bool,
    /// What is paused; the pages have nothing of that.
    paused: Paused,
    /// Which queues are limited.
    limited: Vec<String>,
    /// The first keys of each place that has something to claim, in the order of the places.
    pages: BTreeMap<usize, Vec<Key>>,
}

async fn look(
    connection: &mut MySqlConnection,
    schema: &Schema,
    wanted: &Wanted,
    met: &Met,
) -> sqlx::Result<Look> {
    loop {
        let (known, unknown): (Vec<usize>, Vec<usize>) =
            (0..wanted.places.len()).partition(|n| met.contains(&wanted.places[*n].band()));
        let look = look_statement(wanted, &known, &unknown);
        let text = format!("{look}; {PAUSED}; {LIMITED}");
        let found = rows(connection, schema, &text).await?;
        let (head, keys) = found.split_first().ok_or(sqlx::Error::RowNotFound)?;
        let mut unread = false;
        for (column, n) in unknown.iter().enumerate() {
            if head.try_get::<i64, _>(column + 2)? != 0 {
                met.insert(wanted.places[*n].band());
                unread = true;
            }
        }
        if unread {
            continue;
        }
        let (pauses, keys): (Vec<_>, Vec<_>) = keys.iter().partition(|row| is_pause(row));
        let limited: Vec<String> = keys.iter().filter_map(|row| limited_queue(row)).collect();
        let keys = keys.into_iter().filter(|row| row.try_column("place").is_ok());
        let paused = wanted.paused(read_paused(pauses)?);
        let mut pages: BTreeMap<usize, Vec<Key>> = BTreeMap::new();
        for row in keys {
            let place: i64 = get(row, "place")?;
            pages.entry(place as usize).or_default().push(read_key(row, &paused)?);
        }
        for page in pages.values_mut() {
            page.sort_by_key(Key::floor);
        }
        pages.retain(|n, page| {
            let place = &wanted.places[*n];
            let has_more = page.len() >= place.first_page() as usize;
            !paused.queues.contains(&place.range.queue)
                && (has_more || page.iter().any(|key| key.fits))
        });
        return Ok(Look {
            now: Timestamp(get(head, "now")?),
            live: get::<i64>(head, "live")? == wanted.sessions.len() as i64,
            paused,
            limited,
            pages,
        });
    }
}

/// A key that a claim may take, unless its kind is paused.
fn read_key(row: &MySqlRow, paused: &Paused) -> sqlx::Result<Key> {
    let mut key = Key::read(row)?;
    key.fits &= paused.kinds.is_empty() || !paused.kinds.contains(&get(row, "kind")?);
    Ok(key)
}

/// The time, how many sessions live, and for each unknown place whether it has any jobs; then the
/// first keys of the known ones.
pub(crate) fn look_statement(wanted: &Wanted, known: &[usize], unknown: &[usize]) -> String {
    let mut text = format!("select now_us() as now, ({}) as live", wanted.live_statement());
    for n in unknown {
        let Range { queue, band, .. } = &wanted.places[*n].range;
        write!(text, ", {}", band_has_any(queue, *band)).expect("text grows");
    }
    let pages: Vec<String> = known
        .iter()
        .map(|n| {
            let place = &wanted.places[*n];
            format!("({})", wanted.page_statement(*n, place.range.from, place.first_page()))
        })
        .collect();
    if !pages.is_empty() {
        write!(text, "; {}", pages.join(" union all ")).expect("text grows");
    }
    text
}

/// The bands in which this process has met a job.
#[derive(Default)]
pub(crate) struct Met(Mutex<BTreeSet<(String, i16)>>);

impl Met {
    pub(super) fn contains(&self, band: &(String, i16)) -> bool {
        self.bands().contains(band)
    }

    fn insert(&self, band: (String, i16)) {
        self.bands().insert(band);
    }

    fn of(&self, queues: &[String]) -> Vec<(String, i16)> {
        self.bands().iter().filter(|(queue, _)| queues.contains(queue)).cloned().collect()
    }

    fn bands(&self) -> MutexGuard<'_, BTreeSet<(String, i16)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Leases locked jobs to their sessions, and does what `end` says, which commits; false if a session is not live any more.
///
/// The sessions are locked: a sweep that closes one waits until this has committed, and so rescues its
/// jobs too. All of it is one text: their heartbeats wait for the server at most, never for us.
async fn lease(
    connection: &mut MySqlConnection,
    schema: &Schema,
    wanted: &Wanted,
    jobs: &[ClaimedJob],
    end: &str,
) -> sqlx::Result<bool> {
    if jobs.iter().all(|job| job.turn != Turn::Runs) {
        execute(connection, schema, end).await?;
        return Ok(true);
    }
    let mut by_session: BTreeMap<i64, Vec<(i64, bool)>> = BTreeMap::new();
    for job in jobs.iter().filter(|job| job.turn == Turn::Runs) {
        let jobs = by_session.entry(job.lease.session.0).or_default();
        jobs.push((job.lease.job.0, !job.expired));
    }
    let all_live =
        |lock: &str| format!("({} {lock}) = {}", wanted.live_statement(), wanted.sessions.len());
    let mut text = format!("{}; ", check(&all_live("lock in share mode")));
    for (session, mut jobs) in by_session {
        jobs.sort_unstable();
        for (id, starts) in &jobs {
            write!(text, "{}; ", lease_statement(*id, session, *starts)).expect("text grows");
        }
        let (leased, ids) = (jobs.len(), list(jobs.into_iter().map(|(id, _)| id)));
        let all = check(&format!(
            "(select count(*) from jobq_jobs where id in ({ids}) and leased_by = {session}) = {leased}"
        ));
        write!(text, "{all}; ").expect("text grows");
    }
    text.push_str(end);
    match execute(connection, schema, &text).await {
        Ok(_) => Ok(true),
        Err(error) if number(&error) == Some(CHECK_FAILED) => {
            let why =
                format!("rollback; set session wait_timeout = 14; select {} as live", all_live(""));
            let answer = rows(connection, schema, &why).await?;
            if is_set(answer.first().ok_or(sqlx::Error::RowNotFound)?, "live")? {
                return Err(error);
            }
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// One by one: for a list of ids the server may read all of a small table, and what it locks for a
/// moment meanwhile another claim would skip.
pub(crate) fn lease_statement(id: i64, session: i64, starts: bool) -> String {
    let attempt = u8::from(starts);
    format!(
        "update jobq_jobs
         set token = token + 1, attempt = attempt + {attempt}, leased_by = {session}
         where id = {id}"
    )
}

/// A locked job, as it will be once it is leased.
fn claimed_job(
    row: &MySqlRow,
    range: &Range,
    kind: String,
    session: SessionId,
) -> sqlx::Result<ClaimedJob> {
    let mut counters = counters(row)?;
    let expired = is_set(row, "expired")?;
    counters.attempt += u32::from(!expired);
    Ok(ClaimedJob {
        lease: Lease {
            job: JobId(get(row, "id")?),
            token: Token(get::<i64>(row, "token")? + 1),
            session,
        },
        kind,
        queue: range.queue.clone(),
        band: range.band,
        run_after: Timestamp(get(row, "run_after")?),
        counters,
        limits: limits(row)?,
        expired,
        created_at: Timestamp(get(row, "created_at")?),
        tags: tags_list(get(row, "tags")?),
        metadata: metadata_map(get(row, "metadata")?),
        payload: get(row, "payload")?,
        key: key(row)?,
        turn: Turn::Runs,
    })
}

pub(super) fn key(row: &MySqlRow) -> sqlx::Result<Option<JobKey>> {
    let bytes: Option<Vec<u8>> = get(row, "job_key")?;
    let text = bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    Ok(job_key(text, get(row, "on_block")?))
}

pub(super) fn counters(row: &MySqlRow) -> sqlx::Result<Counters> {
    Ok(Counters {
        attempt: count(row, "attempt")?,
        crashes: count(row, "crashes")?,
        interruptions: count(row, "interruptions")?,
    })
}

pub(super) fn limits(row: &MySqlRow) -> sqlx::Result<Limits> {
    Ok(Limits {
        max_attempts: count(row, "max_attempts")?,
        max_crashes: count(row, "max_crashes")?,
    })
}

/// Extends a session and reads what became of its jobs.
///
/// Extending touches the session's row only, which no user transaction ever locks; the news is
/// a plain read. So neither waits for a `complete_in` that is still open.
pub(super) async fn beat(
    connection: &mut MySqlConnection,
    schema: &Schema,
    beat: &Beat,
) -> sqlx::Result<BeatReply> {
    let (session, floors) = (beat.session, literal(&json(&beat.floors)));
    let extended = execute(
        connection,
        schema,
        &format!(
            "update jobq_sessions
             set leased_until = now_us() + lease, floors = {floors}
             where id = {session}"
        ),
    )
    .await?;
    if extended == 0 {
        let look = format!("select 1 from jobq_sessions where id = {session}");
        if rows(connection, schema, &look).await?.is_empty() {
            return Ok(BeatReply::Closed);
        }
        return Err(killed());
    }
    let mut held = HashMap::new();
    for jobs in beat.held.chunks(LIST) {
        let ids = list(jobs.iter().map(|(job, _)| job.0));
        let text = format!(
            "select id, token, cancel_requested
             from jobq_jobs force index (primary)
             where id in ({ids}) and leased_by = {session}"
        );
        for row in rows(connection, schema, &text).await? {
            let news = (get::<i64>(&row, "token")?, is_set(&row, "cancel_requested")?);
            held.insert(get::<i64>(&row, "id")?, news);
        }
    }
    let mut lost = Vec::new();
    let mut cancel_requested = Vec::new();
    for (job, token) in &beat.held {
        match held.get(&job.0) {
            Some((held, cancel)) if *held == token.0 => {
                if *cancel {
                    cancel_requested.push(*job);
                }
            }
            _ => lost.push(*job),
        }
    }
    Ok(BeatReply::Extended { lost, cancel_requested })
}
