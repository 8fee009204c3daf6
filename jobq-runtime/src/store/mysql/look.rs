//! Looking at jobs, cancelling and redriving them.

use std::fmt::Write;

use jobq_core::job::{JobId, JobState, Token};
use jobq_core::outcome::DeathReason;
use jobq_core::time::{Timestamp, micros};
use sqlx::mysql::{MySql, MySqlConnection, MySqlRow};
use sqlx::{Connection, Decode, Executor, Row, Type};

use super::claim::key;
use super::settle::{UNLESS_THERE, finish_statement};
use super::{
    AttemptInfo, CancelReply, DeadFilter, DeadJob, Error, LIST, Lookup, MysqlStore, QueueCount,
    Result, again, apart, check, count, execute, get, list, literal, own_options, rows, unique,
    written,
};
use crate::store::twins::Retake;
use crate::store::{DEFAULT_RETENTION, JobInfo, Redriven};

/// A cancel waits for a lock almost as long as for anything; see [`PATIENCE`](super::PATIENCE).
const CANCEL_SETTINGS: &str = "set session innodb_lock_wait_timeout = 13";

impl MysqlStore {
    pub(super) async fn job(&self, id: JobId) -> Result<Lookup> {
        let action = "look up a job";
        let row = self.job_row(id).await.map_err(Error::database(action))?;
        if let Some(row) = row {
            let mut info = job_info(&row)?;
            info.attempts = self.attempts(id).await?;
            return Ok(Lookup::Found(Box::new(info)));
        }
        let next = self
            .answer(
                "select cast(auto_increment as signed) as next
                 from information_schema.tables
                 where table_schema = database() and table_name = 'jobq_jobs'",
            )
            .await
            .map_err(Error::database(action))?;
        let next = next.first().map(|row| read::<Option<i64>>(row, "next")).transpose()?.flatten();
        let used = id.0 > 0 && next.is_some_and(|next| id.0 < next);
        Ok(if used { Lookup::Gone } else { Lookup::NotFound })
    }

    async fn job_row(&self, id: JobId) -> sqlx::Result<Option<MySqlRow>> {
        let found = self
            .answer(&format!(
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
                        payload, null as result, null as reason, job_key, on_block
                 from jobq_jobs as job
                 where id = {id}
                 union all
                 select id, state, kind, queue, attempt, max_attempts, crashes, interruptions, token,
                        null, created_at, finished_at, null, null, payload, result, null, job_key, on_block
                 from jobq_finished
                 where id = {id}
                 union all
                 select id, 'dead', kind, queue, attempt, max_attempts, crashes, interruptions, token,
                        null, created_at, died_at, null, null, payload, null, reason, job_key, on_block
                 from jobq_dead
                 where id = {id}"
            ))
            .await?;
        Ok(found.into_iter().next())
    }

    async fn attempts(&self, id: JobId) -> Result<Vec<AttemptInfo>> {
        let found = self
            .answer(&format!(
                "select attempt, token, reason, error, at, worker
                 from jobq_attempts where job_id = {id} order by token"
            ))
            .await
            .map_err(Error::database("look up a job's attempts"))?;
        found
            .iter()
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
        let found = self
            .count(
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
            )
            .await
            .map_err(Error::database("count jobs"))?;
        found
            .iter()
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
        let matches = matching(filter);
        let found = self
            .answer(&format!(
                "select id, kind, queue, reason, died_at, attempt, error, payload, duplicate_of
                 from jobq_dead force index (primary)
                 where {matches}
                 order by id desc
                 limit {limit}"
            ))
            .await
            .map_err(Error::database("list dead letters"))?;
        found
            .iter()
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
        again(|| async {
            // A connection that nothing else needs: it may wait for a handler's transaction.
            let mut connection = apart(own_options(&self.pool.connect_options())).await?;
            connection.execute(CANCEL_SETTINGS).await?;
            let reply = self.cancel_on(&mut connection, id).await?;
            // The reply is there, whatever becomes of the connection.
            let _ = connection.close().await;
            Ok(reply)
        })
        .await
    }

    async fn cancel_on(
        &self,
        connection: &mut MySqlConnection,
        id: JobId,
    ) -> sqlx::Result<(CancelReply, Option<String>)> {
        // All of it at once: should we stop after a part, the job would stay locked.
        let retention = micros(DEFAULT_RETENTION);
        let reason = literal("cancelled before it ran");
        let finish = finish_statement(&id.to_string(), "cancelled", retention, &reason);
        let cancel = format!(
            "begin;
             select leased_by, job_key, on_block from jobq_jobs where id = {id} for update;
             {finish} and leased_by = 0 {UNLESS_THERE};
             delete from jobq_jobs where id = {id} and leased_by = 0;
             {};
             update jobq_jobs set cancel_requested = 1 where id = {id} and leased_by <> 0;
             {};
             commit",
            check(&format!(
                "row_count() <= (select count(*) from jobq_finished where id = {id})
                 and not exists (select 1 from jobq_jobs where id = {id} and leased_by = 0)"
            )),
            check(&format!(
                "not exists (select 1 from jobq_jobs where id = {id} and cancel_requested = 0)"
            ))
        );
        let found = rows(connection, &self.schema, &cancel).await?;
        if let Some(row) = found.iter().find(|row| row.try_column("leased_by").is_ok()) {
            let is_free = get::<i64>(row, "leased_by")? == 0;
            return Ok(if is_free {
                (CancelReply::Cancelled, key(row)?.map(|key| key.text))
            } else {
                (CancelReply::Requested, None)
            });
        }
        let look = format!(
            "select state from jobq_finished where id = {id}
             union all
             select 'dead' from jobq_dead where id = {id}"
        );
        match rows(connection, &self.schema, &look).await?.first() {
            Some(row) => {
                let state: JobState = get::<String>(row, "state")?
                    .parse()
                    .map_err(|unknown| sqlx::Error::Decode(Box::new(unknown)))?;
                Ok((CancelReply::AlreadyFinal(state), None))
            }
            None => Ok((CancelReply::NotFound, None)),
        }
    }

    pub(super) async fn redrive(
        &self,
        filter: &DeadFilter,
        after: JobId,
        limit: u32,
    ) -> sqlx::Result<Redriven> {
        let mut all = Redriven::default();
        let mut after = after;
        loop {
            let left = limit as usize - all.jobs.len() - all.duplicates.len();
            let some = left.min(LIST);
            let Redriven { jobs, duplicates } =
                again(|| self.redrive_some(filter, after, some)).await?;
            let last = jobs.len() + duplicates.len() < some || some == left;
            after = jobs.last().max(duplicates.last()).copied().unwrap_or(after);
            all.jobs.extend(jobs);
            all.duplicates.extend(duplicates);
            if last || filter.id.is_some() {
                break;
            }
        }
        if !all.jobs.is_empty() {
            crate::wake::poke();
        }
        Ok(all)
    }

    async fn redrive_some(
        &self,
        filter: &DeadFilter,
        after: JobId,
        limit: usize,
    ) -> sqlx::Result<Redriven> {
        let mut connection = self.own().await?;
        let matches = matching(filter);
        let after = if filter.id.is_some() { JobId(0) } else { after };
        let dead = format!("begin; {}", redrivable_statement(&matches, after, limit));
        let mut from = "jobq_dead";
        let mut found = rows(&mut connection, &self.schema, &dead).await?;
        if filter.id.is_some() && filter.reason.is_none() && found.is_empty() {
            // One job by id may also be a cancelled one; that has no reason of death.
            let cancelled = format!(
                "select id, token, unique_key, unique_scope
                 from jobq_finished as finished force index (primary)
                 where {matches}
                   and state = 'cancelled'
                   and (select 1 from jobq_jobs as job where job.id = finished.id) is null
                 for update"
            );
            from = "jobq_finished";
            found = rows(&mut connection, &self.schema, &cancelled).await?;
        }
        let mut retake = Retake::default();
        let mut ids = Vec::new();
        for row in &found {
            let id = JobId(get(row, "id")?);
            let scope: Option<String> = get(row, "unique_scope")?;
            retake.add(id, get(row, "token")?, get(row, "unique_key")?, &scope.unwrap_or_default());
            ids.push(id);
        }
        unique::retake(&mut connection, &self.schema, &mut retake).await?;
        let redriven = retake.split(ids);
        let mut write = String::new();
        if !redriven.jobs.is_empty() {
            let listed = list(redriven.jobs.iter().map(|job| job.0));
            write = format!(
                "insert into jobq_jobs (
                     id, token, created_at, max_attempts, max_crashes, priority, band, queue, kind,
                     tags, metadata, payload, unique_key, unique_scope, job_key, on_block
                 )
                 select id, token, created_at, max_attempts, max_crashes, priority, priority, queue,
                        kind, tags, metadata, payload, unique_key, unique_scope, job_key, on_block
                 from {from} force index (primary)
                 where id in ({listed})
                 order by id; {}; ",
                written(redriven.jobs.len())
            );
        }
        for id in &redriven.jobs {
            write!(write, "delete from {from} where id = {id}; {}; ", written(1))
                .expect("text grows");
        }
        for (job, of) in &retake.duplicates {
            write!(write, "update jobq_dead set duplicate_of = {of} where id = {job}; ")
                .expect("text grows");
        }
        write.push_str("commit");
        execute(&mut connection, &self.schema, &write).await?;
        connection.hand_back();
        Ok(redriven)
    }
}

// Of `not exists` MariaDB makes a list of all jobs.
pub(crate) fn redrivable_statement(matches: &str, after: JobId, limit: usize) -> String {
    format!(
        "select id, token, unique_key, unique_scope
         from jobq_dead as dead force index (primary)
         where {matches}
           and id > {after}
           and (select 1 from jobq_jobs as job where job.id = dead.id) is null
         order by id
         limit {limit}
         for update skip locked"
    )
}

/// The condition for dead letters that are meant.
fn matching(filter: &DeadFilter) -> String {
    let mut matching = match filter.id {
        Some(id) => format!("id = {id}"),
        None => "id > 0".to_owned(),
    };
    let reason = filter.reason.map(DeathReason::as_str);
    let words =
        [("queue", filter.queue.as_deref()), ("kind", filter.kind.as_deref()), ("reason", reason)];
    for (column, word) in words {
        if let Some(word) = word {
            write!(matching, " and {column} = {}", literal(word)).expect("text grows");
        }
    }
    matching
}

fn job_info(row: &MySqlRow) -> Result<JobInfo> {
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
        key: key(row).map_err(Error::database("read a job"))?.map(|key| key.text),
        payload: read(row, "payload")?,
        result: read(row, "result")?,
        death_reason: reason.map(|reason| reason.parse()).transpose()?,
        attempts: Vec::new(),
    })
}

pub(super) fn read<'r, T: Decode<'r, MySql> + Type<MySql>>(
    row: &'r MySqlRow,
    column: &str,
) -> Result<T> {
    get(row, column).map_err(Error::database("read a job"))
}

fn read_count(row: &MySqlRow, column: &str) -> Result<u32> {
    count(row, column).map_err(Error::database("read a job"))
}
