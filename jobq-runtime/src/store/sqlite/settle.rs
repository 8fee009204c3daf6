//! Writing outcomes, fenced.
//!
//! A statement takes any number of settlements as one table. Each operation reads what it needs of
//! the rows its guard holds for, and then moves them: nothing changes in between, because the write
//! lock is ours. `cross join` and `materialized` fix the plan, whatever the statistics say:
//! settlement by settlement, each row by its id.

use std::collections::{HashMap, HashSet};

use jobq_core::lifecycle::{Transition, When};
use jobq_core::time::micros;
use serde::Serialize;
use sqlx::sqlite::SqliteConnection;

use super::{Result, Schema, Settled, Settlement, SqliteStore, json, on_callers, sql};
use crate::store::{Completion, rounds};

/// The most settlements in one transaction: nobody else can write meanwhile.
const CHUNK: usize = 500;

impl SqliteStore {
    pub(super) async fn settle(&self, settlements: &[Settlement]) -> sqlx::Result<Vec<Settled>> {
        let mut settled = vec![Settled::LeaseLost; settlements.len()];
        for round in rounds(settlements) {
            for chunk in round.chunks(CHUNK) {
                let batch = Batch::new(chunk.iter().map(|index| &settlements[*index]));
                let schema = self.schema.clone();
                let seen = self.write(async move |locked| batch.write(locked, &schema).await);
                let seen = seen.await?;
                for index in chunk {
                    settled[*index] = seen.judge(&settlements[*index]);
                }
            }
        }
        Ok(settled)
    }
}

/// Settlements of different jobs, as the tables that the statements take.
#[derive(Default)]
struct Batch {
    ids: Vec<i64>,
    complete: Vec<Finish>,
    cancel: Vec<Finish>,
    requeue: Vec<Requeue>,
    bury: Vec<Bury>,
}

/// id, token, session, retention, text
#[derive(Serialize)]
struct Finish(i64, i64, i64, i64, Option<String>);

/// id, token, session, attempt, crashes, interruptions, delay, reason, error
#[derive(Serialize)]
struct Requeue(i64, i64, i64, u32, u32, u32, Option<i64>, Option<&'static str>, Option<String>);

/// id, token, session, attempt, crashes, interruptions, reason, error, why it is dead
#[derive(Serialize)]
struct Bury(i64, i64, i64, u32, u32, u32, &'static str, String, &'static str);

/// What became of a batch.
struct Seen {
    written: HashSet<i64>,
    /// Token, session and cancel request of the rows that are still there, of those not written.
    rows: HashMap<i64, (i64, i64, bool)>,
    /// The tokens of those that have ended.
    ended: HashMap<i64, i64>,
    /// The claims they were rescued from.
    crashed: HashSet<(i64, i64)>,
}

impl Batch {
    fn new<'s>(settlements: impl Iterator<Item = &'s Settlement>) -> Self {
        let mut batch = Self::default();
        for settlement in settlements {
            let lease = settlement.lease;
            let (id, token, session) = (lease.job.0, lease.token.0, lease.session.0);
            batch.ids.push(id);
            match &settlement.transition {
                Transition::Complete { result } => {
                    batch.complete.push(Finish::new(settlement, result.clone()));
                }
                Transition::Cancel { reason } => {
                    batch.cancel.push(Finish::new(settlement, reason.clone()));
                }
                Transition::Requeue { when, counters, record } => batch.requeue.push(Requeue(
                    id,
                    token,
                    session,
                    counters.attempt,
                    counters.crashes,
                    counters.interruptions,
                    match when {
                        When::Next => None,
                        // A sum with the clock must stay a time that can be stored.
                        When::After(delay) => Some(micros((*delay).min(jobq_core::duration::MAX))),
                    },
                    record.as_ref().map(|record| record.reason.as_str()),
                    record.as_ref().map(|record| record.error.clone()),
                )),
                Transition::Bury { reason, counters, record } => batch.bury.push(Bury(
                    id,
                    token,
                    session,
                    counters.attempt,
                    counters.crashes,
                    counters.interruptions,
                    record.reason.as_str(),
                    record.error.clone(),
                    reason.as_str(),
                )),
            }
        }
        batch
    }

    async fn write(self, connection: &mut SqliteConnection, schema: &Schema) -> sqlx::Result<Seen> {
        let mut written = HashSet::new();
        if !self.complete.is_empty() {
            written.extend(finish(connection, schema, &self.complete, "completed").await?);
        }
        if !self.cancel.is_empty() {
            written.extend(finish(connection, schema, &self.cancel, "cancelled").await?);
        }
        if !self.requeue.is_empty() {
            written.extend(requeue(connection, schema, &self.requeue).await?);
        }
        if !self.bury.is_empty() {
            written.extend(bury(connection, schema, &self.bury).await?);
        }
        let rest: Vec<i64> = self.ids.into_iter().filter(|id| !written.contains(id)).collect();
        if rest.is_empty() {
            return Ok(Seen {
                written,
                rows: HashMap::new(),
                ended: HashMap::new(),
                crashed: HashSet::new(),
            });
        }
        second_look(connection, schema, written, &rest).await
    }
}

impl Finish {
    fn new(settlement: &Settlement, text: Option<String>) -> Self {
        let lease = settlement.lease;
        // A sum with the clock must stay a time that can be stored.
        let retention = micros(settlement.retention.min(jobq_core::duration::MAX));
        Self(lease.job.0, lease.token.0, lease.session.0, retention, text)
    }
}

impl Seen {
    fn judge(&self, settlement: &Settlement) -> Settled {
        let key = (settlement.lease.job.0, settlement.lease.token.0);
        if self.written.contains(&key.0) {
            return Settled::Written;
        }
        crate::store::judge(
            settlement,
            self.rows.get(&key.0).copied(),
            self.ended.get(&key.0) == Some(&key.1),
            self.crashed.contains(&key),
        )
    }
}

async fn requeue(
    connection: &mut SqliteConnection,
    schema: &Schema,
    rows: &[Requeue],
) -> sqlx::Result<Vec<i64>> {
    let table = json(rows);
    if rows.iter().any(|row| row.7.is_some()) {
        sqlx::query(sql(
            schema,
            "with back (id, token, session, reason, error) as materialized (
                 select value ->> 0, value ->> 1, value ->> 2, value ->> 7, value ->> 8
                 from json_each(?1)
             )
             insert or replace into jobq_attempts (job_id, token, attempt, reason, error, worker)
             select job.id, job.token, job.attempt, back.reason, back.error,
                    coalesce(
                        (select worker from jobq_sessions where id = back.session),
                        (select worker from jobq_closed_sessions where id = back.session)
                    )
             from back
             cross join jobq_jobs as job on job.id = back.id
             where job.token = back.token
               and job.leased_by = back.session
               and job.cancel_requested = 0
               and back.reason is not null",
        ))
        .bind(&table)
        .execute(&mut *connection)
        .await?;
    }
    sqlx::query_scalar(sql(
        schema,
        "with back (id, token, session, attempt, crashes, interruptions, delay) as materialized (
             select value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, value ->> 5,
                    value ->> 6
             from json_each(?1)
         )
         update jobq_jobs
         set leased_by = 0,
             isolated = 0,
             attempt = back.attempt,
             crashes = back.crashes,
             interruptions = back.interruptions,
             band = case when back.delay is null then 32767 else priority end,
             run_after = now_us() + coalesce(back.delay, 0)
         from back
         where jobq_jobs.id = back.id
           and jobq_jobs.token = back.token
           and jobq_jobs.leased_by = back.session
           and jobq_jobs.cancel_requested = 0
         returning id",
    ))
    .bind(table)
    .fetch_all(connection)
    .await
}

async fn bury(
    connection: &mut SqliteConnection,
    schema: &Schema,
    rows: &[Bury],
) -> sqlx::Result<Vec<i64>> {
    let table = json(rows);
    sqlx::query(sql(
        schema,
        "with dead (id, token, session, reason, error) as materialized (
             select value ->> 0, value ->> 1, value ->> 2, value ->> 6, value ->> 7
             from json_each(?1)
         )
         insert or replace into jobq_attempts (job_id, token, attempt, reason, error, worker)
         select job.id, job.token, job.attempt, dead.reason, dead.error,
                coalesce(
                    (select worker from jobq_sessions where id = dead.session),
                    (select worker from jobq_closed_sessions where id = dead.session)
                )
         from dead
         cross join jobq_jobs as job on job.id = dead.id
         where job.token = dead.token and job.leased_by = dead.session",
    ))
    .bind(&table)
    .execute(&mut *connection)
    .await?;
    sqlx::query(sql(
        schema,
        "with dead (id, token, session, attempt, crashes, interruptions, error, reason)
         as materialized (
             select value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, value ->> 5,
                    value ->> 7, value ->> 8
             from json_each(?1)
         )
         insert or replace into jobq_dead (
             id, token, reason, created_at, attempt, max_attempts, interruptions, crashes,
             max_crashes, priority, queue, kind, error, tags, metadata, payload
         )
         select job.id, job.token, dead.reason, job.created_at, dead.attempt, job.max_attempts,
                dead.interruptions, dead.crashes, job.max_crashes, job.priority, job.queue,
                job.kind, dead.error, job.tags, job.metadata, job.payload
         from dead
         cross join jobq_jobs as job on job.id = dead.id
         where job.token = dead.token and job.leased_by = dead.session",
    ))
    .bind(&table)
    .execute(&mut *connection)
    .await?;
    take_out(connection, schema, &table).await
}

/// Tells apart why settlements changed no row.
async fn second_look(
    connection: &mut SqliteConnection,
    schema: &Schema,
    written: HashSet<i64>,
    rest: &[i64],
) -> sqlx::Result<Seen> {
    let ids = json(rest);
    let rows: Vec<(i64, i64, i64, bool)> = sqlx::query_as(sql(
        schema,
        "select id, token, leased_by, cancel_requested from jobq_jobs
         where id in (select value from json_each(?1))",
    ))
    .bind(&ids)
    .fetch_all(&mut *connection)
    .await?;
    let ended: Vec<(i64, i64)> = sqlx::query_as(sql(
        schema,
        "select id, token from jobq_finished where id in (select value from json_each(?1))
         union all
         select id, token from jobq_dead where id in (select value from json_each(?1))",
    ))
    .bind(&ids)
    .fetch_all(&mut *connection)
    .await?;
    let crashed: Vec<(i64, i64)> = sqlx::query_as(sql(
        schema,
        "select job_id, token from jobq_attempts
         where job_id in (select value from json_each(?1)) and reason = 'crashed'",
    ))
    .bind(&ids)
    .fetch_all(connection)
    .await?;
    Ok(Seen {
        written,
        rows: rows.into_iter().map(|(id, token, by, cancel)| (id, (token, by, cancel))).collect(),
        ended: ended.into_iter().collect(),
        crashed: crashed.into_iter().collect(),
    })
}

/// Completes a job in its handler's transaction; false when the lease was lost.
pub(super) async fn complete_on(
    connection: &mut SqliteConnection,
    completion: Completion,
    schema: &Schema,
) -> Result<bool> {
    let lease = completion.lease;
    let retention = micros(completion.retention.min(jobq_core::duration::MAX));
    let row = Finish(lease.job.0, lease.token.0, lease.session.0, retention, None);
    let written = finish(connection, schema, &[row], "completed")
        .await
        .map_err(on_callers("complete a job in your transaction"))?;
    Ok(!written.is_empty())
}

/// Moves jobs to the history.
async fn finish(
    connection: &mut SqliteConnection,
    schema: &Schema,
    rows: &[Finish],
    state: &'static str,
) -> sqlx::Result<Vec<i64>> {
    let table = json(rows);
    if rows.iter().any(|row| row.3 > 0) {
        sqlx::query(sql(
            schema,
            "with done (id, token, session, retention, text) as materialized (
                 select value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4
                 from json_each(?1)
             )
             insert or replace into jobq_finished (
                 id, token, state, created_at, expires_at, attempt, max_attempts, interruptions,
                 crashes, max_crashes, priority, queue, kind, reason, result, tags, metadata, payload
             )
             select job.id, job.token, ?2, job.created_at, now_us() + done.retention, job.attempt,
                    job.max_attempts, job.interruptions, job.crashes, job.max_crashes, job.priority,
                    job.queue, job.kind,
                    case when ?2 = 'cancelled' then done.text end,
                    case when ?2 = 'completed' then done.text end,
                    job.tags, job.metadata, job.payload
             from done
             cross join jobq_jobs as job on job.id = done.id
             where job.token = done.token and job.leased_by = done.session and done.retention > 0",
        ))
        .bind(&table)
        .bind(state)
        .execute(&mut *connection)
        .await?;
    }
    if rows.iter().any(|row| row.3 == 0) {
        sqlx::query(sql(
            schema,
            "with done (id, token, session, retention) as materialized (
                 select value ->> 0, value ->> 1, value ->> 2, value ->> 3 from json_each(?1)
             )
             delete from jobq_attempts
             where job_id in (
                 select job.id
                 from done
                 cross join jobq_jobs as job on job.id = done.id
                 where job.token = done.token
                   and job.leased_by = done.session
                   and done.retention = 0
                   and job.token > 1
             )",
        ))
        .bind(&table)
        .execute(&mut *connection)
        .await?;
    }
    take_out(connection, schema, &table).await
}

/// Deletes the jobs that a table of settlements has moved elsewhere; returns their ids.
async fn take_out(
    connection: &mut SqliteConnection,
    schema: &Schema,
    table: &str,
) -> sqlx::Result<Vec<i64>> {
    sqlx::query_scalar(sql(
        schema,
        "with gone (id, token, session) as materialized (
             select value ->> 0, value ->> 1, value ->> 2 from json_each(?1)
         )
         delete from jobq_jobs
         where id in (
             select job.id
             from gone
             cross join jobq_jobs as job on job.id = gone.id
             where job.token = gone.token and job.leased_by = gone.session
         )
         returning id",
    ))
    .bind(table)
    .fetch_all(connection)
    .await
}
