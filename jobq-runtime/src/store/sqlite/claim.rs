//! Sessions, heartbeats and claims.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use jobq_core::job::{JobId, Lease, SessionId, Token};
use jobq_core::lifecycle::{Counters, Limits};
use jobq_core::time::{Timestamp, micros};
use sqlx::sqlite::{SqliteConnection, SqliteRow};

use super::{
    Beat, BeatReply, Claim, Claimed, Floor, HEARTBEATS_FIRST, NewSession, Paused, Schema,
    SqliteStore, count, get, json, keys, limit, sql,
};
use crate::key::JobKey;
use crate::limit::Gate;
use crate::store::{Allowed, ClaimedJob, Turn, job_key, metadata_map, tags_list};

impl SqliteStore {
    pub(super) async fn open_session(&self, session: &NewSession) -> sqlx::Result<()> {
        let (schema, session) = (self.schema.clone(), session.clone());
        self.write(async move |locked| {
            sqlx::query(sql(
                &schema,
                "insert into jobq_sessions (id, worker, lease, leased_until, kinds, queues)
                 values (?1, ?2, ?3, now_us() + ?3, ?4, ?5)",
            ))
            .bind(session.id.0)
            .bind(session.worker)
            .bind(micros(session.lease))
            .bind(json(session.kinds))
            .bind(json(session.queues))
            .execute(&mut **locked)
            .await?;
            Ok(())
        })
        .await
    }

    pub(super) async fn close_session(&self, session: SessionId) -> sqlx::Result<()> {
        let schema = self.schema.clone();
        self.write(async move |locked| {
            // Moved, not deleted: should a job still be held under it, the sweep finds it there.
            sqlx::query(sql(
                &schema,
                "insert into jobq_closed_sessions (id, worker, leased_until)
                 select id, worker, leased_until from jobq_sessions where id = ?1",
            ))
            .bind(session.0)
            .execute(&mut **locked)
            .await?;
            sqlx::query(sql(&schema, "delete from jobq_sessions where id = ?1"))
                .bind(session.0)
                .execute(&mut **locked)
                .await?;
            Ok(())
        })
        .await
    }

    /// Looks first and writes only if there is something to claim: an idle worker's poll must not
    /// keep others from writing. Where the last claim found something there will be more.
    ///
    /// A look does not see what an open transaction has written, however long ago. Whoever has the
    /// lock sees all, so a look has seen everything up to when this process last had it.
    ///
    /// A session may have expired only because somebody kept the file locked, its heartbeats
    /// included. So an expired session gets the time to be extended, and counts as expired only
    /// if the lock was to be had meanwhile.
    pub(super) async fn claim(&self, claim: &Claim) -> sqlx::Result<Claimed> {
        let wanted = Arc::new(Wanted::new(claim));
        let mut looks = !self.found_last_time.load(Ordering::Relaxed);
        loop {
            if looks {
                let mut reader = self.reader().await?;
                let mut look = look(&mut reader, &self.schema, &wanted).await?;
                if !look.due.is_empty() {
                    limit::ask(&mut reader, &self.schema, &wanted, &mut look).await?;
                }
                drop(reader);
                if look.sessions == Sessions::Live && look.due.is_empty() {
                    let locked_at = Timestamp(self.locked_at.load(Ordering::Relaxed));
                    return Ok(look.empty_handed(locked_at.min(look.now)));
                }
                if look.sessions == Sessions::Expired {
                    tokio::time::sleep(HEARTBEATS_FIRST).await;
                }
            }
            let (schema, wanted) = (self.schema.clone(), Arc::clone(&wanted));
            let locked_at = Arc::clone(&self.locked_at);
            let claimed = self.write(async move |locked| {
                let mut look = self::look(locked, &schema, &wanted).await?;
                let gates = limit::ask(locked, &schema, &wanted, &mut look).await?;
                locked_at.store(look.now.0, Ordering::Relaxed);
                let had_time = looks && locked.waited <= HEARTBEATS_FIRST;
                match look.sessions {
                    Sessions::Live => take(locked, &schema, &wanted, look, &gates).await.map(Some),
                    Sessions::Expired if !had_time => Ok(None),
                    Sessions::Expired | Sessions::Closed => Ok(Some(look.empty_handed(look.now))),
                }
            });
            if let Some(claimed) = claimed.await? {
                self.found_last_time.store(!claimed.jobs.is_empty(), Ordering::Relaxed);
                return Ok(claimed);
            }
            looks = true;
        }
    }

    pub(super) async fn next_due(
        &self,
        queues: &[String],
        kinds: &[String],
    ) -> sqlx::Result<Option<Duration>> {
        let bands: Vec<i16> = jobq_core::queue::bands().collect();
        let mut reader = self.reader().await?;
        let wait: Option<i64> = sqlx::query_scalar(self.sql(
            "select min((
                 select run_after
                 from jobq_jobs indexed by jobq_jobs_due
                 where queue = wanted.value
                   and band = band.value
                   and run_after > now_us()
                   and run_after < 9223372036854775807
                   and leased_by = 0
                   and kind in (
                       select value from json_each(?3)
                       except
                       select name from jobq_pauses where scope = 'kind'
                   )
                 order by run_after
                 limit 1
             )) - now_us()
             from json_each(?1) as wanted
             cross join json_each(?2) as band
             where not exists (
                 select 1 from jobq_pauses where scope = 'queue' and name = wanted.value
             )",
        ))
        .bind(json(queues))
        .bind(json(bands))
        .bind(json(kinds))
        .fetch_one(&mut *reader)
        .await?;
        Ok(wait.map(|wait| Duration::from_micros(wait.max(0).unsigned_abs())))
    }

    pub(super) async fn isolate(&self, lease: Lease) -> sqlx::Result<bool> {
        let schema = self.schema.clone();
        self.write(async move |locked| {
            let done = sqlx::query(sql(
                &schema,
                "update jobq_jobs set isolated = 1
                 where id = ?1 and token = ?2 and leased_by = ?3
                   and exists (select 1 from jobq_sessions where id = ?3)",
            ))
            .bind(lease.job.0)
            .bind(lease.token.0)
            .bind(lease.session.0)
            .execute(&mut **locked)
            .await?;
            Ok(done.rows_affected() == 1)
        })
        .await
    }
}

/// A claim as the statements take it.
pub(super) struct Wanted {
    sessions: Vec<i64>,
    /// The session for each kind.
    by_kind: HashMap<String, SessionId>,
    /// The kinds as a list.
    kinds: String,
    /// Every band of every queue and its floor, in the order in which they are looked at.
    pub(super) places: Vec<Place>,
    /// `places` as a table: queue, band, and the two numbers of the floor.
    floors: String,
}

pub(super) struct Place {
    pub(super) queue: String,
    /// How many jobs may be claimed from the queue, all its bands together.
    pub(super) limit: u32,
    band: i16,
    floor: Floor,
}

impl Wanted {
    fn new(claim: &Claim) -> Self {
        let by_kind: HashMap<String, SessionId> = claim.kinds.iter().cloned().collect();
        let places: Vec<Place> = claim
            .queues
            .iter()
            .flat_map(|queue| {
                queue.floors.iter().map(|(band, floor)| Place {
                    queue: queue.queue.clone(),
                    limit: queue.limit,
                    band: *band,
                    floor: *floor,
                })
            })
            .collect();
        let floors: Vec<_> = places
            .iter()
            .map(|place| (&place.queue, place.band, place.floor.run_after.0, place.floor.id))
            .collect();
        Self {
            sessions: claim.sessions(),
            kinds: json(by_kind.keys().collect::<Vec<_>>()),
            by_kind,
            floors: json(floors),
            places,
        }
    }

    /// What of it is among the queues and kinds that are paused.
    fn paused(&self, queues: &str, kinds: &str) -> Paused {
        let names = |json: &str| serde_json::from_str(json).unwrap_or_default();
        let (mut queues, mut kinds): (Vec<String>, Vec<String>) = (names(queues), names(kinds));
        queues.retain(|queue| self.places.iter().any(|place| place.queue == *queue));
        kinds.retain(|kind| self.by_kind.contains_key(kind));
        Paused { queues, kinds }
    }
}

/// What a claim sees before it writes.
pub(super) struct Look {
    pub(super) now: Timestamp,
    sessions: Sessions,
    /// What is paused; of that, nothing is due.
    paused: Paused,
    /// What the limits of queues allow; of those that allow nothing, nothing is due.
    pub(super) limited: Vec<Allowed>,
    /// Which of the wanted places have something to claim.
    pub(super) due: Vec<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Sessions {
    Live,
    Expired,
    Closed,
}

impl Look {
    fn empty_handed(&self, seen_to: Timestamp) -> Claimed {
        let sessions_live = self.sessions == Sessions::Live;
        let (paused, limited) = (self.paused.clone(), self.limited.clone());
        Claimed { seen_to, sessions_live, paused, limited, jobs: Vec::new() }
    }
}

async fn look(
    connection: &mut SqliteConnection,
    schema: &Schema,
    wanted: &Wanted,
) -> sqlx::Result<Look> {
    let (now, live, open, paused_queues, paused_kinds, due): (
        i64,
        i64,
        i64,
        String,
        String,
        String,
    ) = sqlx::query_as(sql(
        schema,
        "with floor (n, queue, band, run_after, id) as materialized (
             select key, value ->> 0, value ->> 1, value ->> 2, value ->> 3
             from json_each(?1)
             where value ->> 0 not in (select name from jobq_pauses where scope = 'queue')
         ),
         known (kind) as materialized (
             select value from json_each(?3)
             except
             select name from jobq_pauses where scope = 'kind'
         )
         select now_us(),
                (select count(*) from jobq_sessions
                 where id in (select value from json_each(?2)) and leased_until > now_us()),
                (select count(*) from jobq_sessions
                 where id in (select value from json_each(?2))),
                (select json_group_array(name) from jobq_pauses where scope = 'queue'),
                (select json_group_array(name) from jobq_pauses where scope = 'kind'),
                (select json_group_array(n) from floor
                 where exists (
                           select 1 from jobq_jobs indexed by jobq_jobs_due
                           where queue = floor.queue
                             and band = floor.band
                             and run_after = floor.run_after
                             and id > floor.id
                             and run_after <= now_us()
                             and leased_by = 0
                             and kind in (select kind from known)
                       )
                    or exists (
                           select 1 from jobq_jobs indexed by jobq_jobs_due
                           where queue = floor.queue
                             and band = floor.band
                             and run_after > floor.run_after
                             and run_after <= now_us()
                             and leased_by = 0
                             and kind in (select kind from known)
                       ))",
    ))
    .bind(&wanted.floors)
    .bind(json(&wanted.sessions))
    .bind(&wanted.kinds)
    .fetch_one(connection)
    .await?;
    let all = wanted.sessions.len() as i64;
    let sessions = if live == all {
        Sessions::Live
    } else if open == all {
        Sessions::Expired
    } else {
        Sessions::Closed
    };
    let paused = wanted.paused(&paused_queues, &paused_kinds);
    let mut due: Vec<usize> = serde_json::from_str(&due).unwrap_or_default();
    due.sort_unstable();
    Ok(Look { now: Timestamp(now), sessions, paused, limited: Vec::new(), due })
}

/// Claims from the places that have something, in their order, up to each queue's limit.
async fn take(
    connection: &mut SqliteConnection,
    schema: &Schema,
    wanted: &Wanted,
    look: Look,
    gates: &[Gate],
) -> sqlx::Result<Claimed> {
    let kinds = wanted.by_kind.keys().filter(|kind| !look.paused.kinds.contains(kind));
    let kinds = json(kinds.collect::<Vec<_>>());
    let mut jobs = Vec::new();
    let mut taken: HashMap<&str, u32> = HashMap::new();
    for place in look.due.iter().filter_map(|n| wanted.places.get(*n)) {
        let taken = taken.entry(place.queue.as_str()).or_default();
        let allowed = look.limited.iter().find(|allowed| allowed.queue == place.queue);
        let most = allowed.map_or(place.limit, |allowed| allowed.jobs);
        let left = most.saturating_sub(*taken);
        if left > 0 {
            let mut found = due(connection, schema, wanted, &kinds, place, look.now, left).await?;
            keys::decide_turns(connection, schema, &mut found).await?;
            lease(connection, schema, &found).await?;
            *taken += found.len() as u32;
            jobs.extend(found);
        }
    }
    limit::take(connection, schema, gates, &jobs, look.now).await?;
    let Look { now, paused, limited, .. } = look;
    Ok(Claimed { seen_to: now, sessions_live: true, paused, limited, jobs })
}

/// The due jobs of a place, in order, as they will be once they are leased.
async fn due(
    connection: &mut SqliteConnection,
    schema: &Schema,
    wanted: &Wanted,
    kinds: &str,
    place: &Place,
    now: Timestamp,
    limit: u32,
) -> sqlx::Result<Vec<ClaimedJob>> {
    let mut jobs = Vec::new();
    for text in [DUE_AT_THE_FLOORS_TIME, DUE_LATER] {
        let left = limit.saturating_sub(jobs.len() as u32);
        if left == 0 {
            break;
        }
        let rows = sqlx::query(sql(schema, text))
            .bind(&place.queue)
            .bind(place.band)
            .bind(now.0)
            .bind(place.floor.run_after.0)
            .bind(place.floor.id)
            .bind(kinds)
            .bind(i64::from(left))
            .fetch_all(&mut *connection)
            .await?;
        for row in &rows {
            let kind: String = get(row, "kind")?;
            if let Some(session) = wanted.by_kind.get(&kind) {
                jobs.push(claimed_job(row, place, kind, *session)?);
            }
        }
    }
    Ok(jobs)
}

async fn lease(
    connection: &mut SqliteConnection,
    schema: &Schema,
    jobs: &[ClaimedJob],
) -> sqlx::Result<()> {
    let run = jobs.iter().filter(|job| job.turn == Turn::Runs);
    let rows: Vec<(i64, i64, u32)> =
        run.map(|job| (job.lease.job.0, job.lease.session.0, job.counters.attempt)).collect();
    sqlx::query(sql(
        schema,
        "insert into jobq_do_lease select value ->> 0, value ->> 1, value ->> 2 from json_each(?1)",
    ))
    .bind(json(rows))
    .execute(connection)
    .await?;
    Ok(())
}

/// Leases a job to a session.
pub(super) const DO_LEASE: &str = "
    create temp view jobq_do_lease (id, session, attempt) as select null, null, null;
    create temp trigger jobq_do_lease_row instead of insert on jobq_do_lease
    begin
        update jobq_jobs
        set token = token + 1, attempt = new.attempt, leased_by = new.session
        where id = new.id;
    end;";

macro_rules! due {
    ($after_the_floor:literal) => {
        concat!(
            "select id, token + 1 as token, kind, run_after, crashes,
                    attempt + (coalesce(start_by <= ?3, 0) = 0) as attempt,
                    interruptions, max_attempts, max_crashes, created_at, tags, metadata, payload,
                    job_key, on_block, coalesce(start_by <= ?3, 0) as expired
             from jobq_jobs indexed by jobq_jobs_due
             where queue = ?1
               and band = ?2
               and run_after <= ?3
               and ",
            $after_the_floor,
            "
               and leased_by = 0
               and kind in (select value from json_each(?6))
             order by run_after, id
             limit ?7"
        )
    };
}

// A comparison of (run_after, id) with the floor uses the index for run_after only, and one insert
// gives thousands of jobs the same: so the floor's own time is looked at by itself.
const DUE_AT_THE_FLOORS_TIME: &str = due!("run_after = ?4 and id > ?5");
const DUE_LATER: &str = due!("run_after > ?4");

fn claimed_job(
    row: &SqliteRow,
    place: &Place,
    kind: String,
    session: SessionId,
) -> sqlx::Result<ClaimedJob> {
    Ok(ClaimedJob {
        lease: Lease { job: JobId(get(row, "id")?), token: Token(get(row, "token")?), session },
        kind,
        queue: place.queue.clone(),
        band: place.band,
        run_after: Timestamp(get(row, "run_after")?),
        counters: counters(row)?,
        limits: limits(row)?,
        expired: get(row, "expired")?,
        created_at: Timestamp(get(row, "created_at")?),
        // Bytes that are no text must not stop the whole queue: as a payload they are undecodable.
        tags: tags_list(get(row, "tags").unwrap_or_default()),
        metadata: metadata_map(get(row, "metadata").unwrap_or_default()),
        payload: get(row, "payload").unwrap_or_default(),
        key: key(row)?,
        turn: Turn::Runs,
    })
}

pub(super) fn key(row: &SqliteRow) -> sqlx::Result<Option<JobKey>> {
    Ok(job_key(get(row, "job_key")?, get(row, "on_block")?))
}

pub(super) fn counters(row: &SqliteRow) -> sqlx::Result<Counters> {
    Ok(Counters {
        attempt: count(row, "attempt")?,
        crashes: count(row, "crashes")?,
        interruptions: count(row, "interruptions")?,
    })
}

pub(super) fn limits(row: &SqliteRow) -> sqlx::Result<Limits> {
    Ok(Limits {
        max_attempts: count(row, "max_attempts")?,
        max_crashes: count(row, "max_crashes")?,
    })
}

/// Extends a session and reads what became of its jobs.
///
/// Extending needs the write lock for a moment; an error says that somebody keeps it. The news is
/// a plain read, which waits for nobody.
pub(super) async fn beat(
    connection: &mut SqliteConnection,
    schema: &Schema,
    beat: &Beat,
) -> sqlx::Result<BeatReply> {
    let extended = sqlx::query(sql(
        schema,
        "update jobq_sessions set leased_until = now_us() + lease, floors = ?2 where id = ?1",
    ))
    .bind(beat.session)
    .bind(json(&beat.floors))
    .execute(&mut *connection)
    .await?;
    if extended.rows_affected() == 0 {
        return Ok(BeatReply::Closed);
    }
    if beat.held.is_empty() {
        return Ok(BeatReply::Extended { lost: Vec::new(), cancel_requested: Vec::new() });
    }
    let held: Vec<i64> = beat.held.iter().map(|(job, _)| job.0).collect();
    let rows: Vec<(Option<i64>, Option<bool>)> = sqlx::query_as(sql(
        schema,
        "select (select token from jobq_jobs where id = value and leased_by = ?2),
                (select cancel_requested from jobq_jobs where id = value)
         from json_each(?1)
         order by key",
    ))
    .bind(json(held))
    .bind(beat.session)
    .fetch_all(&mut *connection)
    .await?;
    let mut lost = Vec::new();
    let mut cancel_requested = Vec::new();
    for ((job, token), (held, cancel)) in beat.held.iter().zip(rows) {
        if held != Some(token.0) {
            lost.push(*job);
        } else if cancel == Some(true) {
            cancel_requested.push(*job);
        }
    }
    Ok(BeatReply::Extended { lost, cancel_requested })
}
