//! Looking at jobs, cancelling and redriving them.

use jobq_core::job::{JobId, JobState, Token};
use jobq_core::time::{Timestamp, micros};
use sqlx::sqlite::{SqliteConnection, SqliteRow};
use sqlx::{Decode, SqlStr, Sqlite};

use super::{
    AttemptInfo, CancelReply, DeadFilter, DeadJob, Error, Lookup, QueueCount, Result, SqliteStore,
    count, get, json, sql,
};
use crate::store::{DEFAULT_RETENTION, JobInfo};

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
            "select job.id, state.state, job.kind, job.queue, job.attempt, job.max_attempts,
                    job.crashes, job.interruptions, job.token, job.run_after, job.created_at,
                    null as finished_at, state.worker, state.leased_until, job.payload,
                    null as result, null as reason
             from jobq_jobs as job
             join jobq_job_states as state on state.id = job.id
             where job.id = ?1
             union all
             select id, state, kind, queue, attempt, max_attempts, crashes, interruptions, token,
                    null, created_at, finished_at, null, null, payload, result, null
             from jobq_finished
             where id = ?1
             union all
             select id, 'dead', kind, queue, attempt, max_attempts, crashes, interruptions, token,
                    null, created_at, died_at, null, null, payload, null, reason
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
        let rows = sqlx::query(self.sql(
            "select id, kind, queue, reason, died_at, attempt, error, payload
             from jobq_dead
             where id between ?1 and ?2
               and (?3 is null or queue = ?3)
               and (?4 is null or kind = ?4)
               and (?5 is null or reason = ?5)
             order by id desc
             limit ?6",
        ))
        .bind(filter.id.map_or(i64::MIN, |id| id.0))
        .bind(filter.id.map_or(i64::MAX, |id| id.0))
        .bind(filter.queue.as_ref())
        .bind(filter.kind.as_ref())
        .bind(filter.reason.map(jobq_core::outcome::DeathReason::as_str))
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
                })
            })
            .collect()
    }

    pub(super) async fn cancel(&self, id: JobId) -> sqlx::Result<CancelReply> {
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
                return Ok(CancelReply::Requested);
            }
            sqlx::query(sql(
                &schema,
                "insert or replace into jobq_finished (
                     id, token, state, created_at, expires_at, attempt, max_attempts, interruptions,
                     crashes, max_crashes, priority, queue, kind, reason, tags, metadata, payload
                 )
                 select id, token, 'cancelled', created_at, now_us() + ?2, attempt, max_attempts,
                        interruptions, crashes, max_crashes, priority, queue, kind,
                        'cancelled before it ran', tags, metadata, payload
                 from jobq_jobs
                 where id = ?1",
            ))
            .bind(id.0)
            .bind(micros(DEFAULT_RETENTION))
            .execute(&mut **locked)
            .await?;
            let gone = sqlx::query(sql(&schema, "delete from jobq_jobs where id = ?1"))
                .bind(id.0)
                .execute(&mut **locked)
                .await?;
            if gone.rows_affected() > 0 {
                return Ok(CancelReply::Cancelled);
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
            Ok(match state {
                Some(state) => CancelReply::AlreadyFinal(
                    state.parse().map_err(|error| sqlx::Error::Decode(Box::new(error)))?,
                ),
                None => CancelReply::NotFound,
            })
        })
        .await
    }

    pub(super) async fn redrive(
        &self,
        filter: &DeadFilter,
        limit: u32,
    ) -> sqlx::Result<Vec<JobId>> {
        let (schema, filter) = (self.schema.clone(), filter.clone());
        let ids = self.write(async move |locked| {
            let chosen: Vec<i64> = sqlx::query_scalar(sql(
                &schema,
                "select id
                 from jobq_dead
                 where id between ?1 and ?2
                   and (?3 is null or queue = ?3)
                   and (?4 is null or kind = ?4)
                   and (?5 is null or reason = ?5)
                 order by id
                 limit ?6",
            ))
            .bind(filter.id.map_or(i64::MIN, |id| id.0))
            .bind(filter.id.map_or(i64::MAX, |id| id.0))
            .bind(filter.queue)
            .bind(filter.kind)
            .bind(filter.reason.map(jobq_core::outcome::DeathReason::as_str))
            .bind(i64::from(limit))
            .fetch_all(&mut **locked)
            .await?;
            if !chosen.is_empty() {
                let chosen = json(chosen);
                let ids = bring_back(locked, sql(&schema, BRING_BACK_DEAD), &chosen).await?;
                sqlx::query(sql(
                    &schema,
                    "delete from jobq_dead where id in (select value from json_each(?1))",
                ))
                .bind(chosen)
                .execute(&mut **locked)
                .await?;
                return Ok(ids);
            }
            // One job by id may also be a cancelled one.
            let Some(id) = filter.id else { return Ok(Vec::new()) };
            let chosen = json([id.0]);
            let ids = bring_back(locked, sql(&schema, BRING_BACK_CANCELLED), &chosen).await?;
            sqlx::query(sql(
                &schema,
                "delete from jobq_finished where id = ?1 and state = 'cancelled'",
            ))
            .bind(id.0)
            .execute(&mut **locked)
            .await?;
            Ok(ids)
        });
        let ids = ids.await?;
        if !ids.is_empty() {
            crate::wake::poke();
        }
        Ok(ids.into_iter().map(JobId).collect())
    }
}

macro_rules! bring_back {
    ($from:literal) => {
        concat!(
            "insert into jobq_jobs (
                 id, token, created_at, max_attempts, max_crashes, priority, band, queue, kind, tags,
                 metadata, payload
             )
             select id, token, created_at, max_attempts, max_crashes, priority, priority, queue, kind,
                    tags, metadata, payload
             from ",
            $from,
            "
             order by id
             on conflict (id) do nothing
             returning id"
        )
    };
}

const BRING_BACK_DEAD: &str =
    bring_back!("jobq_dead where id in (select value from json_each(?1))");
const BRING_BACK_CANCELLED: &str = bring_back!(
    "jobq_finished where id in (select value from json_each(?1)) and state = 'cancelled'"
);

/// Makes jobs pending again, due now; returns their ids in order.
async fn bring_back(
    connection: &mut SqliteConnection,
    statement: SqlStr,
    ids: &str,
) -> sqlx::Result<Vec<i64>> {
    let mut ids: Vec<i64> = sqlx::query_scalar(statement).bind(ids).fetch_all(connection).await?;
    ids.sort_unstable();
    Ok(ids)
}

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
        payload: read(row, "payload")?,
        result: read(row, "result")?,
        death_reason: reason.map(|reason| reason.parse()).transpose()?,
        attempts: Vec::new(),
    })
}

fn read<'r, T: Decode<'r, Sqlite>>(row: &'r SqliteRow, column: &str) -> Result<T> {
    get(row, column).map_err(Error::database("read a job"))
}

fn read_count(row: &SqliteRow, column: &str) -> Result<u32> {
    count(row, column).map_err(Error::database("read a job"))
}
