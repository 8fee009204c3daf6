//! Writing outcomes, fenced.
//!
//! Every statement first locks its rows in id order (one lock order for every writer: no
//! deadlocks) and skips rows that somebody else has locked, so that an operator's open psql
//! holds up one job and not the batch. Arrays are sorted by id; `width_bucket` is a binary search
//! in them, so a row finds its values without a join that the planner could get wrong.

use std::collections::HashMap;
use std::time::Duration;

use jobq_core::job::Lease;
use jobq_core::lifecycle::{Counters, Transition, When};
use jobq_core::outcome::AttemptRecord;
use jobq_core::time::micros;
use sqlx::postgres::PgConnection;
use sqlx::{Executor, SqlStr};

use super::{Checkout, Error, PostgresStore, Result, Schema, Settled, Settlement, keys, sql};
use crate::key::in_order;
use crate::store::{Completion, rounds};

impl PostgresStore {
    pub(super) async fn settle(&self, settlements: &[Settlement]) -> sqlx::Result<Vec<Settled>> {
        let mut connection = self.own().await?;
        let mut settled = vec![Settled::LeaseLost; settlements.len()];
        let mut woken = 0;
        for round in rounds(settlements) {
            // Apart, for whoever leaves no key needs one statement and no transaction.
            let (leaving, others): (Vec<usize>, Vec<usize>) =
                round.iter().partition(|index| settlements[**index].leaves().is_some());
            let mut written = Vec::new();
            if !others.is_empty() {
                written = self.write(&mut connection, settlements, &others, false).await?;
            }
            if !leaving.is_empty() {
                connection.execute(keys::BEGIN).await?;
                // Where all of them are completed, their grants are locked by the statement that does it.
                let locks = leaving.iter().all(|index| {
                    matches!(settlements[*index].transition, Transition::Complete { .. })
                });
                let ended = self.write(&mut connection, settlements, &leaving, locks).await?;
                let left = leaving
                    .iter()
                    .filter(|index| ended.contains(&settlements[**index].lease.job.0))
                    .filter_map(|index| settlements[*index].leaves());
                let left = in_order(left);
                if !locks {
                    keys::lock(&mut connection, &self.schema, &left).await?;
                }
                woken += keys::pass_on_locked(
                    &mut connection,
                    &self.schema,
                    &left,
                    if locks { &ended } else { &[] },
                )
                .await?;
                connection.execute("commit").await?;
                written.extend(ended);
            }
            let mut rest = Vec::new();
            for index in round {
                if written.contains(&settlements[index].lease.job.0) {
                    settled[index] = Settled::Written;
                } else {
                    rest.push(index);
                }
            }
            if !rest.is_empty() {
                self.second_look(&mut connection, settlements, &rest, &mut settled).await?;
            }
        }
        connection.hand_back();
        if woken > 0 {
            crate::wake::poke();
        }
        Ok(settled)
    }

    /// Writes settlements of different jobs, given in id order; returns the ids written. With `locks` it
    /// also locks the grants of their keys; then all of them are completed.
    async fn write(
        &self,
        connection: &mut Checkout,
        settlements: &[Settlement],
        round: &[usize],
        locks: bool,
    ) -> sqlx::Result<Vec<i64>> {
        let statement = self.sql(if locks { FINISH_AND_LOCK } else { FINISH });
        let mut complete = Rows::default();
        let mut cancel = Rows::default();
        let mut requeue = Rows::default();
        let mut bury = Rows::default();
        for index in round {
            let settlement = &settlements[*index];
            match &settlement.transition {
                Transition::Complete { result } => {
                    complete.guard(settlement.lease, settlement.retention);
                    complete.texts.push(result.clone());
                }
                Transition::Cancel { reason } => {
                    cancel.guard(settlement.lease, settlement.retention);
                    cancel.texts.push(reason.clone());
                }
                Transition::Requeue { when, counters, record } => {
                    requeue.guard(settlement.lease, settlement.retention);
                    requeue.count(*counters);
                    requeue.record(record.as_ref());
                    requeue.delays.push(match when {
                        When::Next => None,
                        // A sum with the clock must stay a time that can be stored.
                        When::After(delay) => Some(micros((*delay).min(jobq_core::duration::MAX))),
                    });
                }
                Transition::Bury { reason, counters, record } => {
                    bury.guard(settlement.lease, settlement.retention);
                    bury.count(*counters);
                    bury.record(Some(record));
                    bury.texts.push(Some(reason.as_str().to_owned()));
                }
            }
        }
        let mut written = Vec::new();
        if !complete.ids.is_empty() {
            written.extend(finish(connection, statement.clone(), complete, "completed").await?);
        }
        if !cancel.ids.is_empty() {
            written.extend(finish(connection, statement, cancel, "cancelled").await?);
        }
        if !requeue.ids.is_empty() {
            written.extend(self.requeue(connection, requeue).await?);
        }
        if !bury.ids.is_empty() {
            written.extend(self.bury(connection, bury).await?);
        }
        Ok(written)
    }

    async fn requeue(&self, connection: &mut Checkout, rows: Rows) -> sqlx::Result<Vec<i64>> {
        sqlx::query_scalar(self.sql(REQUEUE))
            .bind(rows.ids)
            .bind(rows.tokens)
            .bind(rows.sessions)
            .bind(rows.attempts)
            .bind(rows.crashes)
            .bind(rows.interruptions)
            .bind(rows.delays)
            .bind(rows.reasons)
            .bind(rows.errors)
            .fetch_all(&mut **connection)
            .await
    }

    async fn bury(&self, connection: &mut Checkout, rows: Rows) -> sqlx::Result<Vec<i64>> {
        sqlx::query_scalar(self.sql(BURY))
            .bind(rows.ids)
            .bind(rows.tokens)
            .bind(rows.sessions)
            .bind(rows.attempts)
            .bind(rows.crashes)
            .bind(rows.interruptions)
            .bind(rows.texts)
            .bind(rows.reasons)
            .bind(rows.errors)
            .fetch_all(&mut **connection)
            .await
    }

    /// Tells apart why settlements changed no row.
    async fn second_look(
        &self,
        connection: &mut Checkout,
        settlements: &[Settlement],
        rest: &[usize],
        settled: &mut [Settled],
    ) -> sqlx::Result<()> {
        let ids: Vec<i64> = rest.iter().map(|index| settlements[*index].lease.job.0).collect();
        let rows: Vec<(i64, i64, i64, bool)> =
            sqlx::query_as(self.sql(LOOK_AT_JOBS)).bind(&ids).fetch_all(&mut **connection).await?;
        let rows: HashMap<i64, (i64, i64, bool)> =
            rows.into_iter().map(|(id, token, by, cancel)| (id, (token, by, cancel))).collect();
        let ended: HashMap<i64, i64> = sqlx::query_as::<_, (i64, i64)>(self.sql(LOOK_AT_ENDED))
            .bind(&ids)
            .fetch_all(&mut **connection)
            .await?
            .into_iter()
            .collect();
        let crashed: Vec<(i64, i64)> = sqlx::query_as(self.sql(LOOK_AT_CRASHED))
            .bind(&ids)
            .fetch_all(&mut **connection)
            .await?;
        for index in rest {
            let settlement = &settlements[*index];
            let key = (settlement.lease.job.0, settlement.lease.token.0);
            settled[*index] = crate::store::judge(
                settlement,
                rows.get(&key.0).copied(),
                ended.get(&key.0) == Some(&key.1),
                crashed.contains(&key),
            );
        }
        Ok(())
    }
}

pub(crate) const REQUEUE: &str = "
    with held as materialized (
        select ctid as tid, attempt, width_bucket(id, $1::int8[]) as n
        from jobq.jobs
        where id = any($1)
          and token = ($2::int8[])[width_bucket(id, $1::int8[])]
          and leased_by = ($3::int8[])[width_bucket(id, $1::int8[])]
          and not cancel_requested
        order by id
        for no key update skip locked
    ),
    moved as (
        update jobq.jobs as job
        set leased_by = 0,
            -- Of one that was started; what was claimed to be buried has no attempt.
            start_by = case when job.attempt = 0 then job.start_by end,
            isolated = false,
            attempt = ($4::int4[])[held.n],
            crashes = ($5::int2[])[held.n],
            interruptions = ($6::int4[])[held.n],
            band = case when ($7::int8[])[held.n] is null then 32767 else priority end,
            run_after = clock_timestamp()
                + coalesce(($7::int8[])[held.n], 0) * interval '1 microsecond'
        from held
        where job.ctid = held.tid
        returning job.id, job.token, held.attempt, held.n
    ),
    recorded as (
        insert into jobq.attempts (job_id, token, attempt, reason, error, worker)
        select id, token, attempt, ($8::text[])[n], ($9::text[])[n],
               (select worker from jobq.sessions where id = ($3::int8[])[n]
                union all
                select worker from jobq.closed_sessions where id = ($3::int8[])[n]
                limit 1)
        from moved
        where ($8::text[])[n] is not null
    )
    select id from moved";

pub(crate) const BURY: &str = "
    with held as materialized (
        select ctid as tid, width_bucket(id, $1::int8[]) as n
        from jobq.jobs
        where id = any($1)
          and token = ($2::int8[])[width_bucket(id, $1::int8[])]
          and leased_by = ($3::int8[])[width_bucket(id, $1::int8[])]
          and not cancel_requested
        order by id
        for update skip locked
    ),
    gone as (
        delete from jobq.jobs as job using held where job.ctid = held.tid
        returning job.*, held.n
    ),
    recorded as (
        insert into jobq.attempts (job_id, token, attempt, reason, error, worker)
        select id, token, attempt, ($8::text[])[n], ($9::text[])[n],
               (select worker from jobq.sessions where id = ($3::int8[])[n]
                union all
                select worker from jobq.closed_sessions where id = ($3::int8[])[n]
                limit 1)
        from gone
    ),
    kept as (
        insert into jobq.dead (
            id, token, reason, created_at, attempt, max_attempts, interruptions, crashes,
            max_crashes, priority, queue, kind, error, tags, metadata, payload,
            unique_key, unique_scope, job_key, on_block
        )
        select id, token, ($7::text[])[n], created_at, ($4::int4[])[n], max_attempts,
               ($6::int4[])[n], ($5::int2[])[n], max_crashes, priority, queue, kind,
               ($9::text[])[n], tags, metadata, payload, unique_key, unique_scope, job_key, on_block
        from gone
    )
    select id from gone";

// In the order of the primary key, for the same reason as a heartbeat's.
pub(crate) const LOOK_AT_JOBS: &str = "
    select id, token, leased_by, cancel_requested
    from jobq.jobs
    where id = any($1)
    order by id";

pub(crate) const LOOK_AT_ENDED: &str = "
    select id, token from jobq.finished where id = any($1)
    union all
    select id, token from jobq.dead where id = any($1)";

pub(crate) const LOOK_AT_CRASHED: &str =
    "select job_id, token from jobq.attempts where job_id = any($1) and reason = 'crashed'";

/// Completes a job in its handler's transaction; false when the lease was lost.
///
/// Unlike a settlement it waits for whoever has the row locked: there is no later try.
pub(super) async fn complete_on(
    connection: &mut PgConnection,
    completion: Completion,
    schema: &Schema,
) -> Result<bool> {
    complete(connection, completion, schema).await.map_err(|source| match &source {
        // At REPEATABLE READ and above: somebody else wrote the row after our snapshot.
        sqlx::Error::Database(error) if error.code().as_deref() == Some("40001") => {
            Error::Serialization(source)
        }
        _ => Error::Database { action: "complete a job in your transaction", source },
    })
}

async fn complete(
    connection: &mut PgConnection,
    completion: Completion,
    schema: &Schema,
) -> sqlx::Result<bool> {
    let lease = completion.lease;
    loop {
        let mut row = Rows::default();
        row.guard(lease, completion.retention);
        row.texts.push(None);
        if !finish(connection, sql(schema, FINISH_WAITING), row, "completed").await?.is_empty() {
            return Ok(true);
        }
        // A row that was written while the statement waited for it is not found at its new place.
        let ours: bool = sqlx::query_scalar(sql(
            schema,
            "select exists (
                 select from jobq.jobs where id = $1 and token = $2 and leased_by = $3
             )",
        ))
        .bind(lease.job.0)
        .bind(lease.token.0)
        .bind(lease.session.0)
        .persistent(false)
        .fetch_one(&mut *connection)
        .await?;
        if !ours {
            return Ok(false);
        }
    }
}

/// Moves jobs to the history.
async fn finish(
    connection: &mut PgConnection,
    statement: SqlStr,
    rows: Rows,
    state: &'static str,
) -> sqlx::Result<Vec<i64>> {
    sqlx::query_scalar(statement)
        .bind(rows.ids)
        .bind(rows.tokens)
        .bind(rows.sessions)
        .bind(rows.retentions)
        .bind(rows.texts)
        .bind(state)
        .fetch_all(connection)
        .await
}

macro_rules! finish_statement {
    ($lock:literal, $also:literal, $after:literal) => {
        concat!(
            "with held as materialized (
                 select ctid as tid, width_bucket(id, $1::int8[]) as n
                 from jobq.jobs
                 where id = any($1)
                   and token = ($2::int8[])[width_bucket(id, $1::int8[])]
                   and leased_by = ($3::int8[])[width_bucket(id, $1::int8[])]
                 order by id
                 ",
            $lock,
            "
             ),
             gone as (
                 delete from jobq.jobs as job using held where job.ctid = held.tid
                 returning job.*, held.n
             ),
             kept as (
                 insert into jobq.finished (
                     id, token, state, created_at, expires_at, attempt, max_attempts, interruptions,
                     crashes, max_crashes, priority, queue, kind, reason, result, tags, metadata,
                     payload, unique_key, unique_scope, job_key, on_block
                 )
                 select id, token, $6, created_at,
                        clock_timestamp() + ($4::int8[])[n] * interval '1 microsecond',
                        attempt, max_attempts, interruptions, crashes, max_crashes, priority, queue,
                        kind,
                        case when $6 = 'cancelled' then ($5::text[])[n] end,
                        case when $6 = 'completed' then ($5::text[])[n] end,
                        tags, metadata, payload, unique_key, unique_scope, job_key, on_block
                 from gone
                 where ($4::int8[])[n] > 0
             ),
             forgotten as (
                 delete from jobq.attempts
                 where job_id = any (array (
                     select id from gone where ($4::int8[])[n] = 0 and token > 1
                 ))
             )",
            $also,
            "
             select id from gone ",
            $after
        )
    };
}

pub(crate) const FINISH: &str = finish_statement!("for update skip locked", "", "");
const FINISH_WAITING: &str = finish_statement!("for update", "", "");
/// The same, and locks the grants of the jobs' keys.
pub(crate) const FINISH_AND_LOCK: &str = finish_statement!(
    "for update skip locked",
    ",
     locked as materialized (
         select job_key
         from jobq.key_grants
         where job_key = any (array (select job_key from gone))
         order by job_key
         for update
     )",
    "where (select count(*) from locked) >= 0"
);

/// Settlements of one kind as the arrays that a statement binds; the ids ascend.
#[derive(Default)]
struct Rows {
    ids: Vec<i64>,
    tokens: Vec<i64>,
    sessions: Vec<i64>,
    retentions: Vec<i64>,
    attempts: Vec<i32>,
    crashes: Vec<i16>,
    interruptions: Vec<i32>,
    delays: Vec<Option<i64>>,
    reasons: Vec<Option<&'static str>>,
    errors: Vec<Option<String>>,
    texts: Vec<Option<String>>,
}

impl Rows {
    fn guard(&mut self, lease: Lease, retention: Duration) {
        self.ids.push(lease.job.0);
        self.tokens.push(lease.token.0);
        self.sessions.push(lease.session.0);
        // A sum with the clock must stay a time that can be stored.
        self.retentions.push(micros(retention.min(jobq_core::duration::MAX)));
    }

    fn count(&mut self, counters: Counters) {
        self.attempts.push(i32::try_from(counters.attempt).unwrap_or(i32::MAX));
        self.crashes.push(i16::try_from(counters.crashes).unwrap_or(i16::MAX));
        self.interruptions.push(i32::try_from(counters.interruptions).unwrap_or(i32::MAX));
    }

    fn record(&mut self, record: Option<&AttemptRecord>) {
        self.reasons.push(record.map(|record| record.reason.as_str()));
        self.errors.push(record.map(|record| record.error.clone()));
    }
}
