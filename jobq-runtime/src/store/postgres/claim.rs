//! Sessions, heartbeats and claims.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use jobq_core::job::{JobId, Lease, SessionId, Token};
use jobq_core::lifecycle::{Counters, Limits};
use jobq_core::queue::is_front;
use jobq_core::time::micros;
use sqlx::Row;
use sqlx::postgres::{PgConnection, PgRow};

use super::limit::{Seen, Taking, claim_limited};
use super::rules::Rules;
use super::{Beat, BeatReply, Claim, Claimed, NewSession, PostgresStore, Schema, Time, sql};
use crate::key::JobKey;
use crate::store::{ClaimedJob, Turn, job_key, metadata_map, tags_list};

impl PostgresStore {
    pub(super) async fn open_session(&self, session: &NewSession) -> sqlx::Result<()> {
        let mut connection = self.own().await?;
        sqlx::query(self.sql(
            "insert into jobq.sessions (id, worker, lease, leased_until, kinds, queues)
             select $1, $2, lease, clock_timestamp() + lease, $4, $5
             from (select $3 * interval '1 microsecond') as of (lease)",
        ))
        .bind(session.id.0)
        .bind(&session.worker)
        .bind(micros(session.lease))
        .bind(&session.kinds)
        .bind(&session.queues)
        .execute(&mut *connection)
        .await?;
        connection.hand_back();
        Ok(())
    }

    pub(super) async fn close_session(&self, session: SessionId) -> sqlx::Result<()> {
        let mut connection = self.own().await?;
        // Moved, not deleted: should a job still be held under it, the sweep finds it there.
        sqlx::query(self.sql(
            "with gone as (
                 delete from jobq.sessions where id = $1 returning id, worker, leased_until
             )
             insert into jobq.closed_sessions (id, worker, leased_until)
             select id, worker, leased_until from gone",
        ))
        .bind(session.0)
        .execute(&mut *connection)
        .await?;
        connection.hand_back();
        Ok(())
    }

    /// Asks for queues that are not limited first, and then, in another statement, for those that are.
    pub(super) async fn claim(&self, claim: &Claim) -> sqlx::Result<Claimed> {
        let mut connection = self.own().await?;
        let keyed = self.meets_keys.load(Ordering::Relaxed);
        let mut left = claim.clone();
        let mut claimed: Option<Claimed> = None;
        let mut claimed = loop {
            let rules = self.rules(&mut connection).await?;
            let part = rules.next_part(&left);
            let reply = if part.queues.iter().any(|asked| rules.limited.contains(&asked.queue)) {
                claim_limited(&mut connection, &self.schema, &part, &rules, keyed).await?
            } else {
                claim_on(&mut connection, &self.schema, &part, &rules, keyed, &[]).await?
            };
            let Reply::Claimed(more) = reply else {
                self.forget_rules(&rules);
                continue;
            };
            left.queues.retain(|asked| part.queues.iter().all(|had| had.queue != asked.queue));
            let is_last = left.queues.is_empty() || !more.sessions_live;
            let all = match claimed.take() {
                Some(claimed) => claimed.and(more),
                None => more,
            };
            if is_last {
                break all;
            }
            claimed = Some(all);
        };
        connection.hand_back();
        if claimed.jobs.iter().any(|job| job.key.is_some()) {
            self.meets_keys.store(true, Ordering::Relaxed);
            self.decide_turns(&mut claimed.jobs).await;
        }
        Ok(claimed)
    }

    pub(super) async fn next_due(
        &self,
        queues: &[String],
        kinds: &[String],
    ) -> sqlx::Result<Option<Duration>> {
        let bands: Vec<i16> = jobq_core::queue::bands().collect();
        let mut connection = self.own().await?;
        let wait: Option<i64> = sqlx::query_scalar(self.sql(NEXT_DUE))
            .bind(queues)
            .bind(bands)
            .bind(kinds)
            .fetch_one(&mut *connection)
            .await?;
        connection.hand_back();
        Ok(wait.map(|wait| Duration::from_micros(wait.max(0).unsigned_abs())))
    }

    pub(super) async fn isolate(&self, lease: Lease) -> sqlx::Result<bool> {
        let mut connection = self.own().await?;
        let done = sqlx::query(self.sql(
            "update jobq.jobs set isolated = true
             where id = $1 and token = $2 and leased_by = $3
               and exists (select from jobq.sessions where id = $3)",
        ))
        .bind(lease.job.0)
        .bind(lease.token.0)
        .bind(lease.session.0)
        .persistent(false)
        .execute(&mut *connection)
        .await?;
        connection.hand_back();
        Ok(done.rows_affected() == 1)
    }
}

// What is paused is asked for once, before any job is looked at.
pub(crate) const NEXT_DUE: &str = "
    select (extract(epoch from min(job.run_after) - statement_timestamp()) * 1000000)::int8
    from unnest(array(
        select unnest($1::text[])
        except
        select name from jobq.pauses where scope = 'queue'
    )) as wanted (queue)
    cross join unnest($2::int2[]) as band (band)
    cross join lateral (
        select run_after
        from jobq.jobs
        where queue = wanted.queue
          and band = band.band
          and run_after > statement_timestamp()
          and run_after < 'infinity'
          and leased_by = 0
          and kind = any (array(
              select unnest($3::text[])
              except
              select name from jobq.pauses where scope = 'kind'
          ))
        order by run_after
        limit 1
    ) as job";

/// What one statement has brought.
pub(crate) enum Reply {
    Claimed(Claimed),
    /// Nothing: the rules are not what it went by any more.
    RulesChanged,
    /// Nothing: another claim has taken from a limit since it was looked at.
    LimitsChanged,
}

/// Claims in one statement; `seen` are the limits of the queues it asks for, or none if they have none.
pub(crate) async fn claim_on(
    connection: &mut PgConnection,
    schema: &Schema,
    claim: &Claim,
    rules: &Rules,
    keyed: bool,
    seen: &[Seen],
) -> sqlx::Result<Reply> {
    let sessions = claim.sessions();
    let paused = rules.paused_of(claim);
    let kinds = claim.kinds.iter().filter(|(kind, _)| !paused.kinds.contains(kind));
    let (kinds, kind_sessions): (Vec<&str>, Vec<i64>) =
        kinds.map(|(kind, session)| (kind.as_str(), session.0)).unzip();
    let wanted = claim
        .queues
        .iter()
        .filter(|asked| !kinds.is_empty() && !paused.queues.contains(&asked.queue));
    let (mut queues, mut limits, mut floor_queues) = (Vec::new(), Vec::new(), Vec::new());
    let (mut bands, mut floor_times, mut floor_ids) = (Vec::new(), Vec::new(), Vec::new());
    for queue in wanted {
        queues.push(queue.queue.as_str());
        limits.push(i64::from(queue.limit));
        for (band, floor) in &queue.floors {
            floor_queues.push(queue.queue.as_str());
            bands.push(*band);
            floor_times.push(Time(floor.run_after));
            floor_ids.push(floor.id);
        }
    }
    let text = match (seen.is_empty(), keyed) {
        (true, false) => CLAIM,
        (true, true) => CLAIM_WITH_KEYS,
        (false, false) => CLAIM_LIMITED,
        (false, true) => CLAIM_LIMITED_WITH_KEYS,
    };
    let query = sqlx::query(sql(schema, text))
        .bind(&sessions)
        .bind(queues)
        .bind(limits)
        .bind(floor_queues)
        .bind(bands)
        .bind(floor_times)
        .bind(floor_ids)
        .bind(kinds)
        .bind(kind_sessions)
        .bind(sessions.len() as i64)
        .bind(rules.version);
    let query = if seen.is_empty() { query } else { Taking::of(claim, seen).bind(query) };
    let rows = query.fetch_all(connection).await?;
    let head = rows.first().ok_or(sqlx::Error::RowNotFound)?;
    if !head.try_get::<bool, _>("rules_stand")? {
        return Ok(Reply::RulesChanged);
    }
    if !head.try_get::<bool, _>("limits_stand")? {
        return Ok(Reply::LimitsChanged);
    }
    let mut claimed = Claimed {
        seen_to: head.try_get::<Time, _>("now")?.0,
        sessions_live: head.try_get("live")?,
        paused,
        limited: Vec::new(),
        jobs: Vec::new(),
    };
    for row in &rows {
        if row.try_get::<Option<i64>, _>("id")?.is_some() {
            claimed.jobs.push(claimed_job(row)?);
        }
    }
    Ok(Reply::Claimed(claimed))
}

// The sessions are pinned: a sweep that closes one waits until this claim is visible, and
// so rescues its jobs too. Rows are joined by ctid: joined by id, a plan made while the
// table was empty reads all of it. A claimed row that was moved meanwhile is missed, not
// lost: the sweep finds it. What is asked for is what the rules let, and with the same snapshot they are
// those still.
macro_rules! claim_statement {
    ($gates:expr, $limits_stand:expr, $grants:expr, $has_grant:expr, $places:expr) => {
        concat!(
            "
    with live as materialized (
        select id from jobq.sessions
        where id = any($1) and leased_until > statement_timestamp()
        order by id
        for key share
    ),",
            $gates,
            "
    due as materialized (
        select found.tid
        from unnest($2::text[], $3::int8[]) as wanted (queue, jobs)
        cross join lateral (
            select job.tid
            from unnest($4::text[], $5::int2[], $6::timestamptz[], $7::int8[])
                 as floor (queue, band, run_after, id)
            cross join lateral (
                select ctid as tid
                from jobq.jobs
                where queue = floor.queue
                  and band = floor.band
                  and run_after <= statement_timestamp()
                  and (run_after, id) > (floor.run_after, floor.id)
                  and leased_by = 0
                  and kind = any($8)
                  and (select count(*) from live) = $10
                  and (select version from jobq.rules) = $11
                  and ",
            $limits_stand,
            "
                order by run_after, id
                limit wanted.jobs
                for no key update skip locked
            ) as job
            where floor.queue = wanted.queue
            limit wanted.jobs
        ) as found
    ),
    taken as (
        update jobq.jobs as job
        set token = token + 1,
            attempt = attempt + case when start_by <= statement_timestamp() then 0 else 1 end,
            leased_by = ($9::int8[])[array_position($8::text[], job.kind)]
        from due
        where job.ctid = due.tid
        returning job.id, job.token, job.leased_by, job.kind, job.queue, job.band,
                  job.run_after, job.priority, job.attempt, job.crashes, job.interruptions,
                  job.max_attempts, job.max_crashes, job.created_at, job.tags,
                  job.metadata, job.payload, job.job_key, job.on_block,
                  coalesce(job.start_by <= statement_timestamp(), false) as expired
    )",
            $grants,
            $places,
            "
    select statement_timestamp() as now,
           (select count(*) from live) = $10 as live,
           (select version from jobq.rules) = $11 as rules_stand,
           ",
            $limits_stand,
            " as limits_stand,
           taken.*, ",
            $has_grant,
            " as has_grant
    from (values (1)) as always (n)
    left join taken on true
    order by taken.queue, taken.band desc, taken.run_after, taken.id"
        )
    };
}

/// The jobs that are the first of keys of which nobody has the grant are given it. Whether
/// they are is decided from what the statement sees, which may be older than the grants are: in doubt a
/// job is not the first, and its turn is decided once its grant is locked. A grant that is seen to be a
/// job's own is: it stays with a job that is due, and who made it due later did so with a later time than
/// the statement's, so that it is not claimed.
macro_rules! grants {
    () => {
        ",
    granted as (
        insert into jobq.key_grants (job_key, job_id)
        select mine.job_key, mine.id
        from (
            select job_key, min(id) as id
            from taken
            where job_key is not null and (band = priority or band = 32767)
            group by job_key
        ) as mine
        where (
            select other.id
            from jobq.jobs as other
            where other.job_key = mine.job_key
              and (other.id + 0) < mine.id
              and (other.on_block = 'block'
                   or other.leased_by <> 0
                   or other.run_after <= statement_timestamp()
                   or other.wait_reason = 'key')
            order by other.job_key, (other.id + 0)
            limit 1
        ) is null
        order by mine.job_key
        on conflict do nothing
        returning job_id
    )"
    };
}

macro_rules! has_grant {
    () => {
        "(taken.id = any (array (select job_id from granted))
      or coalesce(
          taken.id = (
              select job_id from jobq.key_grants where job_key = taken.job_key limit 1
          ),
          false
      ))"
    };
}

/// The limits are locked if nobody has taken from them since they were looked at: then what they leave
/// is still what it was.
macro_rules! gates {
    () => {
        "
    gates as materialized (
        select mine.queue
        from unnest($12::text[], $13::int8[]) as seen (queue, turn)
        join jobq.queue_limits as mine on mine.queue = seen.queue and mine.turn = seen.turn
        order by mine.queue
        for no key update of mine
    ),"
    };
}

macro_rules! limits_stand {
    () => {
        "(select count(*) from gates) = cardinality($12::text[])"
    };
}

/// The nth job of a queue gets the nth place that was free, and with it the bucket is full at the nth
/// time.
macro_rules! places {
    () => {
        ",
    placed as (
        update jobq.queue_slots as place
        set job_id = mine.id, token = mine.token
        from (
            select id, token, queue, row_number() over (partition by queue order by id) as n
            from taken
        ) as mine
        join unnest($14::text[], $15::int8[], $16::int4[]) as free (queue, n, slot) using (queue, n)
        cross join lateral (
            select ctid as tid
            from jobq.queue_slots
            where queue = free.queue and slot = free.slot
            limit 1
        ) as at
        where place.ctid = at.tid
    ),
    spent as (
        update jobq.queue_limits as mine
        set turn = mine.turn + 1, full_at = coalesce(bucket.full_at, mine.full_at)
        from (select queue, count(*) as n from taken group by queue) as started
        left join unnest($17::text[], $18::int8[], $19::timestamptz[]) as bucket (queue, n, full_at)
             using (queue, n)
        where mine.queue = started.queue
    )"
    };
}

pub(crate) const CLAIM: &str = claim_statement!("", "true", "", "false", "");
pub(crate) const CLAIM_WITH_KEYS: &str = claim_statement!("", "true", grants!(), has_grant!(), "");
pub(crate) const CLAIM_LIMITED: &str =
    claim_statement!(gates!(), limits_stand!(), "", "false", places!());
pub(crate) const CLAIM_LIMITED_WITH_KEYS: &str =
    claim_statement!(gates!(), limits_stand!(), grants!(), has_grant!(), places!());

fn claimed_job(row: &PgRow) -> sqlx::Result<ClaimedJob> {
    let (key, band) = (key(row)?, row.try_get("band")?);
    // What comes from a front was given the grant when it was woken.
    let runs = key.is_none() || is_front(band) || row.try_get("has_grant")?;
    Ok(ClaimedJob {
        lease: Lease {
            job: JobId(row.try_get("id")?),
            token: Token(row.try_get("token")?),
            session: SessionId(row.try_get("leased_by")?),
        },
        kind: row.try_get("kind")?,
        queue: row.try_get("queue")?,
        band,
        run_after: row.try_get::<Time, _>("run_after")?.0,
        counters: counters(row)?,
        limits: limits(row)?,
        expired: row.try_get("expired")?,
        created_at: row.try_get::<Time, _>("created_at")?.0,
        tags: tags_list(row.try_get("tags")?),
        metadata: metadata_map(row.try_get("metadata")?),
        payload: row.try_get("payload")?,
        key,
        turn: if runs { Turn::Runs } else { Turn::Undecided },
    })
}

pub(super) fn key(row: &PgRow) -> sqlx::Result<Option<JobKey>> {
    Ok(job_key(row.try_get("job_key")?, row.try_get("on_block")?))
}

pub(super) fn counters(row: &PgRow) -> sqlx::Result<Counters> {
    Ok(Counters {
        attempt: row.try_get::<i32, _>("attempt")?.max(0).unsigned_abs(),
        crashes: u32::from(row.try_get::<i16, _>("crashes")?.max(0).unsigned_abs()),
        interruptions: row.try_get::<i32, _>("interruptions")?.max(0).unsigned_abs(),
    })
}

pub(super) fn limits(row: &PgRow) -> sqlx::Result<Limits> {
    Ok(Limits {
        max_attempts: row.try_get::<i32, _>("max_attempts")?.max(0).unsigned_abs(),
        max_crashes: u32::from(row.try_get::<i16, _>("max_crashes")?.max(0).unsigned_abs()),
    })
}

/// Extends a session and reads what became of its jobs.
///
/// Extending touches the session's row only, which no user transaction ever locks; the news is
/// a plain read. So neither waits for a `complete_in` that is still open.
pub(super) async fn beat(
    connection: &mut PgConnection,
    schema: &Schema,
    beat: &Beat,
) -> sqlx::Result<BeatReply> {
    let floors = serde_json::to_string(&beat.floors).unwrap_or_default();
    let extended = sqlx::query(sql(schema, EXTEND))
        .bind(beat.session)
        .bind(floors)
        .execute(&mut *connection)
        .await?;
    if extended.rows_affected() == 0 {
        return Ok(BeatReply::Closed);
    }
    if beat.held.is_empty() {
        return Ok(BeatReply::Extended { lost: Vec::new(), cancel_requested: Vec::new() });
    }
    let ids: Vec<i64> = beat.held.iter().map(|(job, _)| job.0).collect();
    let rows: Vec<(i64, i64, bool)> = sqlx::query_as(sql(schema, HELD))
        .bind(ids)
        .bind(beat.session)
        .fetch_all(&mut *connection)
        .await?;
    Ok(news(beat, rows.into_iter()))
}

pub(crate) const EXTEND: &str =
    "update jobq.sessions set leased_until = clock_timestamp() + lease, floors = $2 where id = $1";

// In the order of the primary key: else a plan made while the table was empty may take the due
// index, which has the id too, and read all of it.
pub(crate) const HELD: &str = "
    select id, token, cancel_requested
    from jobq.jobs
    where id = any($1) and leased_by = $2
    order by id";

/// Compares the jobs a process believes it holds with the rows it does hold.
fn news(beat: &Beat, rows: impl Iterator<Item = (i64, i64, bool)>) -> BeatReply {
    let rows: HashMap<i64, (i64, bool)> =
        rows.map(|(id, token, cancel_requested)| (id, (token, cancel_requested))).collect();
    let mut lost = Vec::new();
    let mut cancel_requested = Vec::new();
    for (job, token) in &beat.held {
        match rows.get(&job.0) {
            Some((held, cancel)) if *held == token.0 => {
                if *cancel {
                    cancel_requested.push(*job);
                }
            }
            _ => lost.push(*job),
        }
    }
    BeatReply::Extended { lost, cancel_requested }
}
