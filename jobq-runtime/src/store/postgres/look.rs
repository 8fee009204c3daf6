//! Looking at jobs, cancelling and redriving them.

use jobq_core::job::{JobId, JobState, Token};
use jobq_core::outcome::DeathReason;
use jobq_core::time::{Timestamp, micros};
use sqlx::postgres::PgRow;
use sqlx::{Executor, Row};

use super::{
    AttemptInfo, CancelReply, Checkout, DeadFilter, DeadJob, Error, Lookup, PostgresStore,
    QueueCount, Result, Time, again, unique,
};
use crate::store::twins::Retake;
use crate::store::{DEFAULT_RETENTION, JobInfo, Redriven};

impl PostgresStore {
    pub(super) async fn job(&self, id: JobId) -> Result<Lookup> {
        let action = "look up a job";
        let mut connection = self.shared().await.map_err(Error::database(action))?;
        let row = self.job_row(&mut connection, id).await.map_err(Error::database(action))?;
        let lookup = if let Some(row) = row {
            let mut info = job_info(&row)?;
            info.attempts = self.attempts(&mut connection, id).await?;
            Lookup::Found(Box::new(info))
        } else {
            let used: bool = sqlx::query_scalar(
                self.sql("select $1 > 0 and is_called and $1 <= last_value from jobq.jobs_id_seq"),
            )
            .bind(id.0)
            .fetch_one(&mut *connection)
            .await
            .map_err(Error::database(action))?;
            if used { Lookup::Gone } else { Lookup::NotFound }
        };
        connection.hand_back();
        Ok(lookup)
    }

    async fn job_row(&self, connection: &mut Checkout, id: JobId) -> sqlx::Result<Option<PgRow>> {
        sqlx::query(self.sql(
            "select job.id, state.state, job.kind, job.queue, job.attempt, job.max_attempts,
                    job.crashes, job.interruptions, job.token, job.run_after, job.created_at,
                    null::timestamptz as finished_at, state.worker, state.leased_until, job.payload,
                    null as result, null as reason, job.job_key
             from jobq.jobs as job
             join jobq.job_states as state on state.id = job.id
             where job.id = $1
             union all
             select id, state, kind, queue, attempt, max_attempts, crashes, interruptions, token,
                    null, created_at, finished_at, null, null, payload, result, null, job_key
             from jobq.finished
             where id = $1
             union all
             select id, 'dead', kind, queue, attempt, max_attempts, crashes, interruptions, token,
                    null, created_at, died_at, null, null, payload, null, reason, job_key
             from jobq.dead
             where id = $1",
        ))
        .bind(id.0)
        .persistent(false)
        .fetch_optional(&mut **connection)
        .await
    }

    async fn attempts(&self, connection: &mut Checkout, id: JobId) -> Result<Vec<AttemptInfo>> {
        let rows: Vec<(i32, i64, String, String, Time, Option<String>)> = sqlx::query_as(self.sql(
            "select attempt, token, reason, error, at, worker
             from jobq.attempts where job_id = $1 order by token",
        ))
        .bind(id.0)
        .fetch_all(&mut **connection)
        .await
        .map_err(Error::database("look up a job's attempts"))?;
        rows.into_iter()
            .map(|(attempt, token, reason, error, at, worker)| {
                Ok(AttemptInfo {
                    attempt: attempt.max(0).unsigned_abs(),
                    token: Token(token),
                    reason: reason.parse()?,
                    error,
                    at: at.0,
                    worker,
                })
            })
            .collect()
    }

    pub(super) async fn counts(&self) -> Result<Vec<QueueCount>> {
        let action = "count jobs";
        let mut connection = self.shared().await.map_err(Error::database(action))?;
        let rows: Vec<(String, String, i64)> = sqlx::query_as(self.sql(
            "select queue, state, count(*) from (
                 select queue,
                        case
                            when leased_by <> 0 then 'running'
                            when run_after = 'infinity' then 'waiting'
                            else 'pending'
                        end as state
                 from jobq.jobs
                 union all
                 select queue, state from jobq.finished
                 union all
                 select queue, 'dead' from jobq.dead
             ) as job
             group by queue, state
             order by queue, state",
        ))
        .fetch_all(&mut *connection)
        .await
        .map_err(Error::database(action))?;
        connection.hand_back();
        rows.into_iter()
            .map(|(queue, state, count)| {
                Ok(QueueCount { queue, state: state.parse()?, count: count.unsigned_abs() })
            })
            .collect()
    }

    pub(super) async fn dead(&self, filter: &DeadFilter, limit: u32) -> Result<Vec<DeadJob>> {
        let action = "list dead letters";
        let mut connection = self.shared().await.map_err(Error::database(action))?;
        let rows = sqlx::query(self.sql(
            "select id, kind, queue, reason, died_at, attempt, error, payload, duplicate_of
             from jobq.dead
             where id between $1 and $2
               and ($3::text is null or queue = $3)
               and ($4::text is null or kind = $4)
               and ($5::text is null or reason = $5)
             order by id desc
             limit $6",
        ))
        .bind(filter.id.map_or(i64::MIN, |id| id.0))
        .bind(filter.id.map_or(i64::MAX, |id| id.0))
        .bind(&filter.queue)
        .bind(&filter.kind)
        .bind(filter.reason.map(DeathReason::as_str))
        .bind(i64::from(limit))
        .fetch_all(&mut *connection)
        .await
        .map_err(Error::database(action))?;
        connection.hand_back();
        rows.iter()
            .map(|row| {
                let get = Error::database(action);
                (|| {
                    Ok::<_, sqlx::Error>((
                        row.try_get::<String, _>("reason")?,
                        DeadJob {
                            id: JobId(row.try_get("id")?),
                            kind: row.try_get("kind")?,
                            queue: row.try_get("queue")?,
                            reason: DeathReason::Exhausted,
                            died_at: row.try_get::<Time, _>("died_at")?.0,
                            attempt: row.try_get::<i32, _>("attempt")?.max(0).unsigned_abs(),
                            error: row.try_get("error")?,
                            payload: row.try_get("payload")?,
                            duplicate_of: row.try_get::<Option<i64>, _>("duplicate_of")?.map(JobId),
                        },
                    ))
                })()
                .map_err(get)
                .and_then(|(reason, job)| Ok(DeadJob { reason: reason.parse()?, ..job }))
            })
            .collect()
    }

    pub(super) async fn cancel(&self, id: JobId) -> sqlx::Result<(CancelReply, Option<String>)> {
        // The application's connection: it may wait for a handler's transaction, the runtime must not.
        let mut connection = self.shared().await?;
        let mut freed = None;
        let reply = loop {
            let (cancelled, requested, seen, key): (i64, i64, i64, Option<String>) = sqlx::query_as(self.sql(
                "with target as materialized (
                     select ctid as tid, leased_by from jobq.jobs where id = $1 for update
                 ),
                 gone as (
                     delete from jobq.jobs as job using target
                     where job.ctid = target.tid and target.leased_by = 0
                     returning job.*
                 ),
                 kept as (
                     insert into jobq.finished (
                         id, token, state, created_at, expires_at, attempt, max_attempts,
                         interruptions, crashes, max_crashes, priority, queue, kind, reason, tags,
                         metadata, payload, unique_key, unique_scope, job_key, on_block
                     )
                     select id, token, 'cancelled', created_at,
                            clock_timestamp() + $2 * interval '1 microsecond', attempt, max_attempts,
                            interruptions, crashes, max_crashes, priority, queue, kind,
                            'cancelled before it ran', tags, metadata, payload,
                            unique_key, unique_scope, job_key, on_block
                     from gone
                 ),
                 asked as (
                     update jobq.jobs as job set cancel_requested = true from target
                     where job.ctid = target.tid and target.leased_by <> 0
                     returning job.id
                 )
                 select (select count(*) from gone), (select count(*) from asked),
                        (select count(*) from target), (select job_key from gone)",
            ))
            .bind(id.0)
            .bind(micros(DEFAULT_RETENTION))
            .persistent(false)
            .fetch_one(&mut *connection)
            .await?;
            if cancelled > 0 {
                freed = key;
                break CancelReply::Cancelled;
            }
            if requested > 0 {
                break CancelReply::Requested;
            }
            // Seen but not written: its row moved between the snapshot and the lock. Look again.
            if seen > 0 {
                continue;
            }
            let state: Option<String> = sqlx::query_scalar(self.sql(
                "select state from jobq.finished where id = $1
                 union all
                 select 'dead' from jobq.dead where id = $1",
            ))
            .bind(id.0)
            .fetch_optional(&mut *connection)
            .await?;
            break match state.map(|state| state.parse::<JobState>()).transpose() {
                Ok(Some(state)) => CancelReply::AlreadyFinal(state),
                Ok(None) => CancelReply::NotFound,
                Err(unknown) => return Err(sqlx::Error::Decode(unknown.into())),
            };
        };
        connection.hand_back();
        Ok((reply, freed))
    }

    pub(super) async fn redrive(
        &self,
        filter: &DeadFilter,
        after: JobId,
        limit: u32,
    ) -> sqlx::Result<Redriven> {
        // Two that take keys which were pruned meanwhile may each wait for the other's.
        let redriven = again(|| self.redrive_once(filter, after, limit)).await?;
        if !redriven.jobs.is_empty() {
            crate::wake::poke();
        }
        Ok(redriven)
    }

    async fn redrive_once(
        &self,
        filter: &DeadFilter,
        after: JobId,
        limit: u32,
    ) -> sqlx::Result<Redriven> {
        let mut connection = self.own().await?;
        // A key may be locked by a transaction of the application's.
        let begin = "begin isolation level read committed; set local lock_timeout = '2s'";
        connection.execute(begin).await?;
        let mut found: Vec<Redrivable> = sqlx::query_as(self.sql(REDRIVABLE))
            .bind(filter.id.map_or(after.0.saturating_add(1), |id| id.0))
            .bind(filter.id.map_or(i64::MAX, |id| id.0))
            .bind(&filter.queue)
            .bind(&filter.kind)
            .bind(filter.reason.map(DeathReason::as_str))
            .bind(i64::from(limit))
            .fetch_all(&mut *connection)
            .await?;
        let mut revive = REVIVE_DEAD;
        // One job by id may also be a cancelled one; that has no reason of death.
        if let (Some(id), None, true) = (filter.id, filter.reason, found.is_empty()) {
            revive = REVIVE_CANCELLED;
            found = sqlx::query_as(self.sql(REDRIVABLE_CANCELLED))
                .bind(id.0)
                .bind(&filter.queue)
                .bind(&filter.kind)
                .fetch_all(&mut *connection)
                .await?;
        }
        let mut retake = Retake::default();
        let mut ids = Vec::new();
        for (id, token, key, scope) in found {
            ids.push(JobId(id));
            retake.add(JobId(id), token, key, &scope.unwrap_or_default());
        }
        if retake.keys().next().is_some() {
            unique::retake(&mut connection, &self.schema, &mut retake).await?;
        }
        let mut redriven = retake.split(ids);
        if !retake.duplicates.is_empty() {
            let (jobs, of): (Vec<i64>, Vec<i64>) =
                retake.duplicates.iter().map(|(job, of)| (job.0, of.0)).unzip();
            sqlx::query(self.sql(NOTE_DUPLICATES))
                .bind(jobs)
                .bind(of)
                .execute(&mut *connection)
                .await?;
        }
        let ids: Vec<i64> = redriven.jobs.iter().map(|job| job.0).collect();
        let mut ids: Vec<i64> =
            sqlx::query_scalar(self.sql(revive)).bind(ids).fetch_all(&mut *connection).await?;
        connection.execute("commit").await?;
        connection.hand_back();
        ids.sort_unstable();
        redriven.jobs = ids.into_iter().map(JobId).collect();
        Ok(redriven)
    }
}

fn job_info(row: &PgRow) -> Result<JobInfo> {
    let state: JobState = get::<String>(row, "state")?.parse()?;
    let reason: Option<String> = get(row, "reason")?;
    let worker: Option<String> = get(row, "worker")?;
    let leased_until: Option<Time> = get(row, "leased_until")?;
    Ok(JobInfo {
        id: JobId(get(row, "id")?),
        state,
        kind: get(row, "kind")?,
        queue: get(row, "queue")?,
        attempt: get::<i32>(row, "attempt")?.max(0).unsigned_abs(),
        max_attempts: get::<i32>(row, "max_attempts")?.max(0).unsigned_abs(),
        crashes: u32::from(get::<i16>(row, "crashes")?.max(0).unsigned_abs()),
        interruptions: get::<i32>(row, "interruptions")?.max(0).unsigned_abs(),
        token: Token(get(row, "token")?),
        run_after: get::<Option<Time>>(row, "run_after")?
            .map(|time| time.0)
            .filter(|time| *time != Timestamp::INFINITY),
        created_at: get::<Time>(row, "created_at")?.0,
        finished_at: get::<Option<Time>>(row, "finished_at")?.map(|time| time.0),
        leased_by: worker.zip(leased_until.map(|time| time.0)),
        key: get(row, "job_key")?,
        payload: get(row, "payload")?,
        result: get(row, "result")?,
        death_reason: reason.map(|reason| reason.parse()).transpose()?,
        attempts: Vec::new(),
    })
}

fn get<'r, T>(row: &'r PgRow, column: &str) -> Result<T>
where
    T: sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres>,
{
    row.try_get(column).map_err(Error::database("read a job"))
}

/// A job that may be redriven: its id and token, and what makes it unique.
type Redrivable = (i64, i64, Option<Vec<u8>>, Option<String>);

const REDRIVABLE: &str = "
    select id, token, unique_key, unique_scope
    from jobq.dead
    where id between $1 and $2
      and ($3::text is null or queue = $3)
      and ($4::text is null or kind = $4)
      and ($5::text is null or reason = $5)
    order by id
    limit $6
    for update skip locked";

const REDRIVABLE_CANCELLED: &str = "
    select id, token, unique_key, unique_scope
    from jobq.finished
    where id = $1
      and state = 'cancelled'
      and ($2::text is null or queue = $2)
      and ($3::text is null or kind = $3)
    for update";

macro_rules! revive {
    ($table:literal) => {
        concat!(
            "with gone as (
                 delete from jobq.",
            $table,
            " where id = any($1) returning *
             )
             insert into jobq.jobs (
                 id, token, created_at, max_attempts, max_crashes, priority, band, queue, kind, tags,
                 metadata, payload, unique_key, unique_scope, job_key, on_block, run_after
             )
             overriding system value
             select id, token, created_at, max_attempts, max_crashes, priority, priority, queue, kind,
                    tags, metadata, payload, unique_key, unique_scope, job_key, on_block, clock_timestamp()
             from gone
             order by id
             on conflict (id) do nothing
             returning id"
        )
    };
}

pub(crate) const REVIVE_DEAD: &str = revive!("dead");
const REVIVE_CANCELLED: &str = revive!("finished");

const NOTE_DUPLICATES: &str = "
    update jobq.dead as job
    set duplicate_of = twin.of
    from unnest($1::int8[], $2::int8[]) as twin (id, of)
    where job.id = twin.id";
