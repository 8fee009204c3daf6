//! Looking at jobs, cancelling and redriving them.

use jobq_core::job::{JobId, JobState, Token};
use jobq_core::outcome::DeathReason;
use jobq_core::time::{Timestamp, micros};
use sqlx::sqlite::{SqliteConnection, SqliteRow};
use sqlx::{Decode, Sqlite};

use super::{
    AttemptInfo, CancelReply, DeadFilter, DeadJob, Error, Lookup, QueueCount, Result, SqliteStore,
    count, get, json, sql, unique,
};
use crate::store::twins::Retake;
use crate::store::{DEFAULT_RETENTION, JobInfo, Redriven};

impl SqliteStore {
    pub(super) async fn job(&self, id: JobId) -> Result<Lookup> {
        let action = "look up a job";
        let mut reader = self.reader().await.map_err(Error::database(action))?;
        let row = self.job_row(&mut reader, id).await.map_err(Error::database(action))?;
        if let Some(row) = row {
            let mut info = job_info(&row)?;
            info.attempts = self.attempts(&mut reader, id).await?;
            return Ok(Lookup::Found(Box::new(info)));
        }
        let used: bool = sqlx::query_scalar(self.sql(
            "select ?1 > 0 and exists (
                 select 1 from sqlite_sequence where name = 'jobq_jobs' and ?1 <= seq
             )",
        ))
        .bind(id.0)
        .fetch_one(&mut *reader)
        .await
        .map_err(Error::database(action))?;
        Ok(if used { Lookup::Gone } else { Lookup::NotFound })
    }

    async fn job_row(
        &self,
        connection: &mut SqliteConnection,
        id: JobId,
    ) -> sqlx::Result<Option<SqliteRow>> {
        sqlx::query(self.sql(
            "select id,
                    case
                        when leased_by <> 0 then 'running'
                        when run_after = 9223372036854775807 then 'waiting'
                        else 'pending'
                    end as state,
                    kind, queue, attempt, max_attempts, crashes, interruptions, token, run_after,
                    created_at, null as finished_at,
                    coalesce(
                        (select worker from jobq_sessions where id = job.leased_by),
                        (select worker from jobq_closed_sessions where id = job.leased_by)
                    ) as worker,
                    coalesce(
                        (select leased_until from jobq_sessions where id = job.leased_by),
                        (select leased_until from jobq_closed_sessions where id = job.leased_by)
                    ) as leased_until,
                    payload, null as result, null as reason, job_key
             from jobq_jobs as job
             where id = ?1
             union all
             select id, state, kind, queue, attempt, max_attempts, crashes, interruptions, token,
                    null, created_at, finished_at, null, null, payload, result, null, job_key
             from jobq_finished
             where id = ?1
             union all
             select id, 'dead', kind, queue, attempt, max_attempts, crashes, interruptions, token,
                    null, created_at, died_at, null, null, payload, null, reason, job_key
             from jobq_dead
             where id = ?1",
        ))
        .bind(id.0)
        .fetch_optional(connection)
        .await
    }

    async fn attempts(
        &self,
        connection: &mut SqliteConnection,
        id: JobId,
    ) -> Result<Vec<AttemptInfo>> {
        let rows = sqlx::query(self.sql(
            "select attempt, token, reason, error, at, worker
             from jobq_attempts where job_id = ?1 order by token",
        ))
        .bind(id.0)
        .fetch_all(connection)
        .await
        .map_err(Error::database("look up a job's attempts"))?;
        rows.iter()
            .map(|row| {
                Ok(AttemptInfo {
                    attempt: read_count(row, "attempt")?,
                    token: Token(read(row, "token")?),
                    reason: read::<String>(row, "reason")?.parse()?,
                    error: read(row, "error")?,
                    at: Timestamp(read(row, "at")?),
                    worker: read(row, "worker")?,
                })
            })
            .collect()
    }

    pub(super) async fn counts(&self) -> Result<Vec<QueueCount>> {
        let action = "count jobs";
        let mut reader = self.reader().await.map_err(Error::database(action))?;
        let rows = sqlx::query(self.sql(
            "select queue, state, count(*) as jobs from (
                 select queue,
                        case
                            when leased_by <> 0 then 'running'
                            when run_after = 9223372036854775807 then 'waiting'
                            else 'pending'
                        end as state
                 from jobq_jobs
                 union all
                 select queue, state from jobq_finished
                 union all
                 select queue, 'dead' from jobq_dead
             ) as job
             group by queue, state
             order by queue, state",
        ))
        .fetch_all(&mut *reader)
        .await
        .map_err(Error::database(action))?;
        rows.iter()
            .map(|row| {
                Ok(QueueCount {
                    queue: read(row, "queue")?,
                    state: read::<String>(row, "state")?.parse()?,
                    count: read::<i64>(row, "jobs")?.unsigned_abs(),
                })
            })
            .collect()
    }

    pub(super) async fn dead(&self, filter: &DeadFilter, limit: u32) -> Result<Vec<DeadJob>> {
        let action = "list dead letters";
        let mut reader = self.reader().await.map_err(Error::database(action))?;
        let text = if filter.id.is_some() { DEAD_ONE } else { DEAD_ALL };
        let rows = sqlx::query(self.sql(text))
            .bind(filter.id.map(|id| id.0))
            .bind(filter.queue.as_ref())
            .bind(filter.kind.as_ref())
            .bind(filter.reason.map(DeathReason::as_str))
            .bind(i64::from(limit))
            .fetch_all(&mut *reader)
            .await
            .map_err(Error::database(action))?;
        rows.iter()
            .map(|row| {
                Ok(DeadJob {
                    id: JobId(read(row, "id")?),
                    kind: read(row, "kind")?,
                    queue: read(row, "queue")?,
                    reason: read::<String>(row, "reason")?.parse()?,
                    died_at: Timestamp(read(row, "died_at")?),
                    attempt: read_count(row, "attempt")?,
                    error: read(row, "error")?,
                    payload: read(row, "payload")?,
                    duplicate_of: read::<Option<i64>>(row, "duplicate_of")?.map(JobId),
                })
            })
            .collect()
    }

    pub(super) async fn cancel(&self, id: JobId) -> sqlx::Result<(CancelReply, Option<String>)> {
        let schema = self.schema.clone();
        self.write(async move |locked| {
            let asked = sqlx::query(sql(
                &schema,
                "update jobq_jobs set cancel_requested = 1 where id = ?1 and leased_by <> 0",
            ))
            .bind(id.0)
            .execute(&mut **locked)
            .await?;
            if asked.rows_affected() > 0 {
                return Ok((CancelReply::Requested, None));
            }
            let there: Option<Option<String>> =
                sqlx::query_scalar(sql(&schema, "select job_key from jobq_jobs where id = ?1"))
                    .bind(id.0)
                    .fetch_optional(&mut **locked)
                    .await?;
            if let Some(key) = there {
                sqlx::query(sql(
                    &schema,
                    "insert into jobq_do_finish values (?1, 'cancelled', ?2, 'cancelled before it ran')",
                ))
                .bind(id.0)
                .bind(micros(DEFAULT_RETENTION))
                .execute(&mut **locked)
                .await?;
                return Ok((CancelReply::Cancelled, key));
            }
            let state: Option<String> = sqlx::query_scalar(sql(
                &schema,
                "select state from jobq_finished where id = ?1
                 union all
                 select 'dead' from jobq_dead where id = ?1",
            ))
            .bind(id.0)
            .fetch_optional(&mut **locked)
            .await?;
            let reply = match state {
                Some(state) => CancelReply::AlreadyFinal(
                    state.parse().map_err(|error| sqlx::Error::Decode(Box::new(error)))?,
                ),
                None => CancelReply::NotFound,
            };
            Ok((reply, None))
        })
        .await
    }

    pub(super) async fn redrive(
        &self,
        filter: &DeadFilter,
        after: JobId,
        limit: u32,
    ) -> sqlx::Result<Redriven> {
        let (schema, filter) = (self.schema.clone(), filter.clone());
        let redriven = self.write(async move |locked| {
            let text = if filter.id.is_some() { REDRIVABLE_ONE } else { REDRIVABLE_ALL };
            let mut found: Vec<Redrivable> = sqlx::query_as(sql(&schema, text))
                .bind(filter.id.map(|id| id.0))
                .bind(filter.queue.as_ref())
                .bind(filter.kind.as_ref())
                .bind(filter.reason.map(DeathReason::as_str))
                .bind(i64::from(limit))
                .bind(after.0)
                .fetch_all(&mut **locked)
                .await?;
            if let (Some(id), None, true) = (filter.id, filter.reason, found.is_empty()) {
                // One job by id may also be a cancelled one; that has no reason of death.
                found = sqlx::query_as(sql(
                    &schema,
                    "select id, token, unique_key, unique_scope
                     from jobq_finished as job
                     where id = ?1
                       and state = 'cancelled'
                       and (?2 is null or queue = ?2)
                       and (?3 is null or kind = ?3)
                       and (select 1 from jobq_jobs where id = job.id) is null",
                ))
                .bind(id.0)
                .bind(filter.queue)
                .bind(filter.kind)
                .fetch_all(&mut **locked)
                .await?;
            }
            let mut retake = Retake::default();
            let mut ids = Vec::new();
            for (id, token, key, scope) in found {
                ids.push(JobId(id));
                retake.add(JobId(id), token, key, &scope.unwrap_or_default());
            }
            unique::retake(locked, &schema, &mut retake).await?;
            let redriven = retake.split(ids);
            for (job, of) in &retake.duplicates {
                sqlx::query(sql(&schema, "update jobq_dead set duplicate_of = ?2 where id = ?1"))
                    .bind(job.0)
                    .bind(of.0)
                    .execute(&mut **locked)
                    .await?;
            }
            sqlx::query(sql(
                &schema,
                "insert into jobq_do_redrive select value from json_each(?1)",
            ))
            .bind(json(redriven.jobs.iter().map(|job| job.0).collect::<Vec<_>>()))
            .execute(&mut **locked)
            .await?;
            Ok(redriven)
        });
        let redriven = redriven.await?;
        if !redriven.jobs.is_empty() {
            crate::wake::poke();
        }
        Ok(redriven)
    }
}

/// A job that may be redriven: its id and token, and what makes it unique.
type Redrivable = (i64, i64, Option<Vec<u8>>, Option<String>);

macro_rules! dead {
    ($id:literal) => {
        concat!(
            "select id, kind, queue, reason, died_at, attempt, error, payload, duplicate_of
             from jobq_dead
             where ",
            $id,
            "
               and (?2 is null or queue = ?2)
               and (?3 is null or kind = ?3)
               and (?4 is null or reason = ?4)
             order by id desc
             limit ?5"
        )
    };
}

const DEAD_ONE: &str = dead!("id = ?1");
const DEAD_ALL: &str = dead!("?1 is null");

macro_rules! redrivable {
    ($id:literal) => {
        concat!(
            "select id, token, unique_key, unique_scope
             from jobq_dead as dead
             where ",
            $id,
            "
               and (?2 is null or queue = ?2)
               and (?3 is null or kind = ?3)
               and (?4 is null or reason = ?4)
               and (select 1 from jobq_jobs where id = dead.id) is null
               and id > ?6
             order by id
             limit ?5"
        )
    };
}

const REDRIVABLE_ONE: &str = redrivable!("id = ?1");
const REDRIVABLE_ALL: &str = redrivable!("?1 is null");

/// Makes a dead or cancelled job pending again, due now.
pub(super) const DO_REDRIVE: &str = "
    create temp view jobq_do_redrive (id) as select null;
    create temp trigger jobq_do_redrive_row instead of insert on jobq_do_redrive
    begin
        insert into jobq_jobs (
            id, token, created_at, max_attempts, max_crashes, priority, band, queue, kind, tags,
            metadata, payload, unique_key, unique_scope, job_key, on_block
        )
        select id, token, created_at, max_attempts, max_crashes, priority, priority, queue, kind,
               tags, metadata, payload, unique_key, unique_scope, job_key, on_block
        from jobq_dead
        where id = new.id
        union all
        select id, token, created_at, max_attempts, max_crashes, priority, priority, queue, kind,
               tags, metadata, payload, unique_key, unique_scope, job_key, on_block
        from jobq_finished
        where id = new.id and state = 'cancelled';
        delete from jobq_dead where id = new.id;
        delete from jobq_finished where id = new.id and state = 'cancelled';
    end;";

fn job_info(row: &SqliteRow) -> Result<JobInfo> {
    let state: JobState = read::<String>(row, "state")?.parse()?;
    let reason: Option<String> = read(row, "reason")?;
    let worker: Option<String> = read(row, "worker")?;
    let leased_until: Option<i64> = read(row, "leased_until")?;
    Ok(JobInfo {
        id: JobId(read(row, "id")?),
        state,
        kind: read(row, "kind")?,
        queue: read(row, "queue")?,
        attempt: read_count(row, "attempt")?,
        max_attempts: read_count(row, "max_attempts")?,
        crashes: read_count(row, "crashes")?,
        interruptions: read_count(row, "interruptions")?,
        token: Token(read(row, "token")?),
        run_after: read::<Option<i64>>(row, "run_after")?
            .map(Timestamp)
            .filter(|time| *time != Timestamp::INFINITY),
        created_at: Timestamp(read(row, "created_at")?),
        finished_at: read::<Option<i64>>(row, "finished_at")?.map(Timestamp),
        leased_by: worker.zip(leased_until.map(Timestamp)),
        key: read(row, "job_key")?,
        payload: read(row, "payload")?,
        result: read(row, "result")?,
        death_reason: reason.map(|reason| reason.parse()).transpose()?,
        attempts: Vec::new(),
    })
}

pub(super) fn read<'r, T: Decode<'r, Sqlite>>(row: &'r SqliteRow, column: &str) -> Result<T> {
    get(row, column).map_err(Error::database("read a job"))
}

fn read_count(row: &SqliteRow, column: &str) -> Result<u32> {
    count(row, column).map_err(Error::database("read a job"))
}
