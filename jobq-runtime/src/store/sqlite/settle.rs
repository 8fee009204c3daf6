//! Writing outcomes, fenced.
//!
//! A batch is one transaction: it finds out which of its settlements still hold their leases, and
//! writes those. Nothing changes in between, because the write lock is ours.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use jobq_core::lifecycle::{Transition, When};
use jobq_core::time::micros;
use serde::Serialize;
use sqlx::sqlite::SqliteConnection;

use super::{Result, Schema, Settled, Settlement, SqliteStore, json, keys, on_callers, sql};
use crate::key::in_order;
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
                if seen.woken > 0 {
                    crate::wake::poke();
                }
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
    /// id, token, session
    guards: Vec<(i64, i64, i64)>,
    /// The jobs that leave a key.
    leaving: Vec<(i64, String)>,
    complete: Vec<Finish>,
    cancel: Vec<Finish>,
    requeue: Vec<Requeue>,
    bury: Vec<Bury>,
}

/// id, retention, text
#[derive(Serialize)]
struct Finish(i64, i64, Option<String>);

/// id, attempt, crashes, interruptions, delay, reason, error
#[derive(Serialize)]
struct Requeue(i64, u32, u32, u32, Option<i64>, Option<&'static str>, Option<String>);

/// id, attempt, crashes, interruptions, reason, error, why it is dead
#[derive(Serialize)]
struct Bury(i64, u32, u32, u32, &'static str, String, &'static str);

/// Token, session and cancel request of an unfinished job.
type Row = (i64, i64, bool);

/// What became of a batch.
struct Seen {
    written: HashSet<i64>,
    /// How many jobs have got the key of one of them.
    woken: u64,
    /// What was found of those that could not be written.
    rest: HashMap<i64, Found>,
}

/// What there is of a job whose settlement could not be written.
struct Found {
    /// Its row, if it is unfinished.
    row: Option<Row>,
    /// It has ended under the settlement's token.
    ended: bool,
    /// It was rescued from the settlement's claim.
    crashed: bool,
}

impl Batch {
    fn new<'s>(settlements: impl Iterator<Item = &'s Settlement>) -> Self {
        let mut batch = Self::default();
        for settlement in settlements {
            let lease = settlement.lease;
            let id = lease.job.0;
            // A sum with the clock must stay a time that can be stored.
            let retention = storable_micros(settlement.retention);
            batch.guards.push((id, lease.token.0, lease.session.0));
            batch.leaving.extend(settlement.leaves().map(|key| (id, key.to_owned())));
            match &settlement.transition {
                Transition::Complete { result } => {
                    batch.complete.push(Finish(id, retention, result.clone()));
                }
                Transition::Cancel { reason } => {
                    batch.cancel.push(Finish(id, retention, reason.clone()));
                }
                Transition::Requeue { when, counters, record } => batch.requeue.push(Requeue(
                    id,
                    counters.attempt,
                    counters.crashes,
                    counters.interruptions,
                    match when {
                        When::Next => None,
                        When::After(delay) => Some(storable_micros(*delay)),
                    },
                    record.as_ref().map(|record| record.reason.as_str()),
                    record.as_ref().map(|record| record.error.clone()),
                )),
                Transition::Bury { reason, counters, record } => batch.bury.push(Bury(
                    id,
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

    async fn write(
        mut self,
        connection: &mut SqliteConnection,
        schema: &Schema,
    ) -> sqlx::Result<Seen> {
        let rows = self.rows(connection, schema).await?;
        let mut held = HashSet::new();
        let mut not_cancelled = HashSet::new();
        for (id, token, session) in &self.guards {
            if let Some((held_token, by, cancel_requested)) = rows.get(id)
                && (held_token, by) == (token, session)
            {
                held.insert(*id);
                if !cancel_requested {
                    not_cancelled.insert(*id);
                }
            }
        }
        self.complete.retain(|row| held.contains(&row.0));
        self.cancel.retain(|row| held.contains(&row.0));
        self.requeue.retain(|row| not_cancelled.contains(&row.0));
        self.bury.retain(|row| not_cancelled.contains(&row.0));
        if !self.complete.is_empty() {
            finish(connection, schema, "completed", &self.complete).await?;
        }
        if !self.cancel.is_empty() {
            finish(connection, schema, "cancelled", &self.cancel).await?;
        }
        if !self.requeue.is_empty() {
            requeue(connection, schema, &self.requeue).await?;
        }
        if !self.bury.is_empty() {
            bury(connection, schema, &self.bury).await?;
        }
        let written: HashSet<i64> = (self.complete.iter().map(|row| row.0))
            .chain(self.cancel.iter().map(|row| row.0))
            .chain(self.requeue.iter().map(|row| row.0))
            .chain(self.bury.iter().map(|row| row.0))
            .collect();
        self.guards.retain(|(id, ..)| !written.contains(id));
        let rest = second_look(connection, schema, &self.guards, &rows).await?;
        let left = self.leaving.iter().filter(|(id, _)| written.contains(id));
        let left = in_order(left.map(|(_, key)| &**key));
        let woken =
            if left.is_empty() { 0 } else { keys::decide(connection, schema, &left).await?.woken };
        Ok(Seen { written, woken, rest })
    }

    /// What there is of the jobs, before anything is written.
    async fn rows(
        &self,
        connection: &mut SqliteConnection,
        schema: &Schema,
    ) -> sqlx::Result<HashMap<i64, Row>> {
        let ids: Vec<i64> = self.guards.iter().map(|(id, ..)| *id).collect();
        // All in one row: each row costs the driver more than looking it up costs SQLite.
        let rows: String = sqlx::query_scalar(sql(
            schema,
            "select json_group_array(json((
                 select json_array(id, token, leased_by, cancel_requested)
                 from jobq_jobs
                 where id = value
             )))
             from json_each(?1)",
        ))
        .bind(json(ids))
        .fetch_one(connection)
        .await?;
        let rows: Vec<Option<(i64, i64, i64, i64)>> =
            serde_json::from_str(&rows).map_err(|error| sqlx::Error::Decode(Box::new(error)))?;
        Ok(rows
            .into_iter()
            .flatten()
            .map(|(id, token, by, cancel_requested)| (id, (token, by, cancel_requested != 0)))
            .collect())
    }
}

fn storable_micros(duration: Duration) -> i64 {
    micros(duration.min(jobq_core::duration::MAX))
}

impl Seen {
    fn judge(&self, settlement: &Settlement) -> Settled {
        let id = settlement.lease.job.0;
        match self.rest.get(&id) {
            Some(found) => crate::store::judge(settlement, found.row, found.ended, found.crashed),
            None if self.written.contains(&id) => Settled::Written,
            None => Settled::LeaseLost,
        }
    }
}

/// Moves jobs to the history.
async fn finish(
    connection: &mut SqliteConnection,
    schema: &Schema,
    state: &'static str,
    rows: &[Finish],
) -> sqlx::Result<()> {
    sqlx::query(sql(
        schema,
        "insert into jobq_do_finish
         select value ->> 0, ?2, value ->> 1, value ->> 2 from json_each(?1)",
    ))
    .bind(json(rows))
    .bind(state)
    .execute(connection)
    .await?;
    Ok(())
}

pub(super) const DO_FINISH: &str = "
    create temp view jobq_do_finish (id, state, retention, text) as select null, null, null, null;
    create temp trigger jobq_do_finish_row instead of insert on jobq_do_finish
    begin
        insert or replace into jobq_finished (
            id, token, state, created_at, expires_at, attempt, max_attempts, interruptions, crashes,
            max_crashes, priority, queue, kind, reason, result, tags, metadata, payload,
            unique_key, unique_scope, job_key, on_block
        )
        select id, token, new.state, created_at, now_us() + new.retention, attempt, max_attempts,
               interruptions, crashes, max_crashes, priority, queue, kind,
               case when new.state = 'cancelled' then new.text end,
               case when new.state = 'completed' then new.text end,
               tags, metadata, payload, unique_key, unique_scope, job_key, on_block
        from jobq_jobs
        where id = new.id and new.retention > 0;
        delete from jobq_attempts where job_id = new.id and new.retention = 0;
        delete from jobq_jobs where id = new.id;
    end;";

async fn requeue(
    connection: &mut SqliteConnection,
    schema: &Schema,
    rows: &[Requeue],
) -> sqlx::Result<()> {
    sqlx::query(sql(
        schema,
        "insert into jobq_do_requeue
         select value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, value ->> 5,
                value ->> 6
         from json_each(?1)",
    ))
    .bind(json(rows))
    .execute(connection)
    .await?;
    Ok(())
}

pub(super) const DO_REQUEUE: &str = "
    create temp view jobq_do_requeue (id, attempt, crashes, interruptions, delay, reason, error)
    as select null, null, null, null, null, null, null;
    create temp trigger jobq_do_requeue_row instead of insert on jobq_do_requeue
    begin
        insert or replace into jobq_attempts (job_id, token, attempt, reason, error, worker)
        select id, token, attempt, new.reason, new.error,
               coalesce(
                   (select worker from jobq_sessions where id = job.leased_by),
                   (select worker from jobq_closed_sessions where id = job.leased_by)
               )
        from jobq_jobs as job
        where id = new.id and new.reason is not null;
        update jobq_jobs
        set leased_by = 0,
            -- Of one that was started; what was claimed to be buried has no attempt.
            start_by = case when attempt = 0 then start_by end,
            isolated = 0,
            attempt = new.attempt,
            crashes = new.crashes,
            interruptions = new.interruptions,
            band = case when new.delay is null then 32767 else priority end,
            run_after = now_us() + coalesce(new.delay, 0)
        where id = new.id;
    end;";

async fn bury(
    connection: &mut SqliteConnection,
    schema: &Schema,
    rows: &[Bury],
) -> sqlx::Result<()> {
    sqlx::query(sql(
        schema,
        "insert into jobq_do_bury
         select value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, value ->> 5,
                value ->> 6
         from json_each(?1)",
    ))
    .bind(json(rows))
    .execute(connection)
    .await?;
    Ok(())
}

pub(super) const DO_BURY: &str = "
    create temp view jobq_do_bury (id, attempt, crashes, interruptions, reason, error, death)
    as select null, null, null, null, null, null, null;
    create temp trigger jobq_do_bury_row instead of insert on jobq_do_bury
    begin
        insert or replace into jobq_attempts (job_id, token, attempt, reason, error, worker)
        select id, token, attempt, new.reason, new.error,
               coalesce(
                   (select worker from jobq_sessions where id = job.leased_by),
                   (select worker from jobq_closed_sessions where id = job.leased_by)
               )
        from jobq_jobs as job
        where id = new.id;
        insert or replace into jobq_dead (
            id, token, reason, created_at, attempt, max_attempts, interruptions, crashes,
            max_crashes, priority, queue, kind, error, tags, metadata, payload,
            unique_key, unique_scope, job_key, on_block
        )
        select id, token, new.death, created_at, new.attempt, max_attempts, new.interruptions,
               new.crashes, max_crashes, priority, queue, kind, new.error, tags, metadata, payload,
               unique_key, unique_scope, job_key, on_block
        from jobq_jobs
        where id = new.id;
        delete from jobq_jobs where id = new.id;
    end;";

/// Tells apart why settlements could not be written.
async fn second_look(
    connection: &mut SqliteConnection,
    schema: &Schema,
    rest: &[(i64, i64, i64)],
    rows: &HashMap<i64, Row>,
) -> sqlx::Result<HashMap<i64, Found>> {
    if rest.is_empty() {
        return Ok(HashMap::new());
    }
    let ends: Vec<(i64, bool, bool)> = sqlx::query_as(sql(
        schema,
        "select value ->> 0,
                coalesce(
                    (select token from jobq_finished where id = value ->> 0),
                    (select token from jobq_dead where id = value ->> 0)
                ) is value ->> 1,
                (select reason from jobq_attempts
                 where job_id = value ->> 0 and token = value ->> 1) is 'crashed'
         from json_each(?1)",
    ))
    .bind(json(rest))
    .fetch_all(connection)
    .await?;
    Ok(ends
        .into_iter()
        .map(|(id, ended, crashed)| (id, Found { row: rows.get(&id).copied(), ended, crashed }))
        .collect())
}

/// Completes a job in its handler's transaction; false when the lease was lost.
pub(super) async fn complete_on(
    connection: &mut SqliteConnection,
    completion: Completion,
    schema: &Schema,
) -> Result<bool> {
    complete(connection, completion, schema)
        .await
        .map_err(on_callers("complete a job in your transaction"))
}

async fn complete(
    connection: &mut SqliteConnection,
    completion: Completion,
    schema: &Schema,
) -> sqlx::Result<bool> {
    let Completion { lease, retention } = completion;
    if retention.is_zero() {
        sqlx::query(sql(
            schema,
            "delete from jobq_attempts
             where job_id = ?1
               and (select 1 from jobq_jobs where id = ?1 and token = ?2 and leased_by = ?3)",
        ))
        .bind(lease.job.0)
        .bind(lease.token.0)
        .bind(lease.session.0)
        .execute(&mut *connection)
        .await?;
    } else {
        sqlx::query(sql(
            schema,
            "insert or replace into jobq_finished (
                 id, token, state, created_at, expires_at, attempt, max_attempts, interruptions,
                 crashes, max_crashes, priority, queue, kind, tags, metadata, payload,
                 unique_key, unique_scope, job_key, on_block
             )
             select id, token, 'completed', created_at, now_us() + ?4, attempt, max_attempts,
                    interruptions, crashes, max_crashes, priority, queue, kind, tags, metadata,
                    payload, unique_key, unique_scope, job_key, on_block
             from jobq_jobs
             where id = ?1 and token = ?2 and leased_by = ?3",
        ))
        .bind(lease.job.0)
        .bind(lease.token.0)
        .bind(lease.session.0)
        .bind(storable_micros(retention))
        .execute(&mut *connection)
        .await?;
    }
    let gone = sqlx::query(sql(
        schema,
        "delete from jobq_jobs where id = ?1 and token = ?2 and leased_by = ?3",
    ))
    .bind(lease.job.0)
    .bind(lease.token.0)
    .bind(lease.session.0)
    .execute(connection)
    .await?;
    Ok(gone.rows_affected() == 1)
}
