//! Limits of queues across the fleet.

use std::collections::HashMap;

use jobq_core::time::{Timestamp, micros};
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{Executor, Row};

use super::claim::claim_on;
use super::keys::BEGIN;
use super::{Claim, Claimed, Paused, PostgresStore, Schema, Time, sql};
use crate::limit::{Gate, LimitedQueue, QueueLimit, stored_rate};
use crate::store::Allowed;

impl PostgresStore {
    pub(super) async fn limit_queue(&self, queue: &str, limit: &QueueLimit) -> sqlx::Result<()> {
        let mut connection = self.own().await?;
        connection.execute(BEGIN).await?;
        sqlx::query(self.sql(LIMIT_QUEUE))
            .bind(queue)
            .bind(limit.max_running.map(u32::cast_signed))
            .bind(limit.rate.map(|rate| rate.jobs().cast_signed()))
            .bind(limit.rate.map(|rate| micros(rate.per())))
            .bind(limit.rate.map(|rate| rate.most_at_once().cast_signed()))
            .execute(&mut *connection)
            .await?;
        if let Some(rate) = limit.rate {
            let (full_at, now): (Time, Time) =
                sqlx::query_as(self.sql(
                    "select full_at, clock_timestamp() from jobq.queue_limits where queue = $1",
                ))
                .bind(queue)
                .fetch_one(&mut *connection)
                .await?;
            sqlx::query(self.sql("update jobq.queue_limits set full_at = $2 where queue = $1"))
                .bind(queue)
                .bind(Time(rate.emptied(full_at.0, now.0)))
                .execute(&mut *connection)
                .await?;
        }
        sqlx::query(self.sql(
            "insert into jobq.queue_slots (queue, slot)
             select $1, slot from generate_series(1, $2) as slot
             on conflict do nothing",
        ))
        .bind(queue)
        .bind(limit.max_running.unwrap_or(0).cast_signed())
        .execute(&mut *connection)
        .await?;
        connection.execute("commit").await?;
        connection.hand_back();
        Ok(())
    }

    pub(super) async fn unlimit_queue(&self, queue: &str) -> sqlx::Result<bool> {
        let mut connection = self.own().await?;
        let done = sqlx::query(self.sql("delete from jobq.queue_limits where queue = $1"))
            .bind(queue)
            .execute(&mut *connection)
            .await?;
        connection.hand_back();
        Ok(done.rows_affected() == 1)
    }

    pub(super) async fn limits(&self) -> sqlx::Result<Vec<LimitedQueue>> {
        let mut connection = self.own().await?;
        let rows = sqlx::query(self.sql(
            "select queue, max_running, rate_jobs, burst,
                    (extract(epoch from rate_per) * 1000000)::int8 as rate_per
             from jobq.queue_limits
             order by queue",
        ))
        .fetch_all(&mut *connection)
        .await?;
        connection.hand_back();
        rows.iter()
            .map(|row| Ok(LimitedQueue { queue: row.try_get("queue")?, limit: limit(row)? }))
            .collect()
    }
}

const LIMIT_QUEUE: &str = "
    insert into jobq.queue_limits as old (queue, max_running, rate_jobs, rate_per, burst)
    values ($1, $2, $3, $4 * interval '1 microsecond', $5)
    on conflict (queue) do update
    set max_running = excluded.max_running,
        rate_jobs = excluded.rate_jobs,
        rate_per = excluded.rate_per,
        burst = excluded.burst";

fn limit(row: &PgRow) -> sqlx::Result<QueueLimit> {
    let number = |column| {
        Ok::<_, sqlx::Error>(
            row.try_get::<Option<i32>, _>(column)?.map(|n| n.max(0).cast_unsigned()),
        )
    };
    let rate = stored_rate(number("rate_jobs")?, row.try_get("rate_per")?, number("burst")?);
    Ok(QueueLimit { max_running: number("max_running")?, rate })
}

/// Claims from queues that are limited, in a transaction of its own.
///
/// Their limits are locked, so that one claim of a queue comes after the other, and each sees what the
/// ones before it took: every statement has a snapshot of its own. Should this process freeze
/// meanwhile, the server ends the transaction.
pub(super) async fn claim_limited(
    connection: &mut PgConnection,
    schema: &Schema,
    claim: &Claim,
    keyed: bool,
) -> sqlx::Result<Claimed> {
    connection.execute(BEGIN).await?;
    let (gates, now) = gates(connection, schema, claim).await?;
    let mut claim = claim.clone();
    let mut limited = Vec::new();
    for asked in &mut claim.queues {
        // One whose limit has ended meanwhile is not limited.
        if let Some(gate) = gates.get(&asked.queue) {
            let allowed = gate.allows(asked.limit, now);
            asked.limit = allowed.jobs;
            limited.push(allowed);
        }
    }
    claim.queues.retain(|asked| asked.limit > 0);
    if claim.queues.is_empty() {
        connection.execute("commit").await?;
        let (paused, jobs) = (Paused::default(), Vec::new());
        return Ok(Claimed { seen_to: now, sessions_live: true, paused, limited, jobs });
    }
    let queues: Vec<String> = gates.keys().cloned().collect();
    let mut claimed = claim_on(connection, schema, &claim, keyed, &queues).await?;
    if !claimed.jobs.is_empty() {
        take(connection, schema, &gates, &claimed, now).await?;
    }
    connection.execute("commit").await?;
    claimed.limited.extend(limited);
    Ok(claimed)
}

/// Locks the limits of a claim's queues, and sees what is left of them.
async fn gates(
    connection: &mut PgConnection,
    schema: &Schema,
    claim: &Claim,
) -> sqlx::Result<(HashMap<String, Gate>, Timestamp)> {
    let queues: Vec<&str> = claim.queues.iter().map(|asked| asked.queue.as_str()).collect();
    let asked: Vec<i64> = claim.queues.iter().map(|asked| i64::from(asked.limit)).collect();
    let rows =
        sqlx::query(sql(schema, LOCK_LIMITS)).bind(&queues).fetch_all(&mut *connection).await?;
    let mut gates = HashMap::new();
    for row in &rows {
        let queue: String = row.try_get("queue")?;
        let gate = Gate {
            queue: queue.clone(),
            limit: limit(row)?,
            full_at: row.try_get::<Time, _>("full_at")?.0,
            running: 0,
            free: Vec::new(),
        };
        gates.insert(queue, gate);
    }
    let rows = sqlx::query(sql(schema, SLOTS))
        .bind(&queues)
        .bind(asked)
        .fetch_all(&mut *connection)
        .await?;
    let mut now = Timestamp::NEG_INFINITY;
    for row in &rows {
        now = row.try_get::<Time, _>("now")?.0;
        let queue: Option<String> = row.try_get("queue")?;
        if let Some(gate) = queue.and_then(|queue| gates.get_mut(&queue)) {
            gate.running = u32::try_from(row.try_get::<i64, _>("running")?).unwrap_or(u32::MAX);
            gate.free = row.try_get("free")?;
        }
    }
    Ok((gates, now))
}

pub(crate) const LOCK_LIMITS: &str = "
    select queue, max_running, rate_jobs, burst, full_at,
           (extract(epoch from rate_per) * 1000000)::int8 as rate_per
    from jobq.queue_limits
    where queue = any($1)
    order by queue
    for no key update";

/// In a statement of its own: it sees what was committed while the lock was waited for. Whether a place is
/// taken is looked up for each by the primary key, as a range of one: else a plan made while the table
/// was empty may read the due index, which has the id too.
pub(crate) const SLOTS: &str = "
    select clock_timestamp() as now, taken.queue, taken.running, taken.free
    from (values (1)) as always (n)
    left join (
        select wanted.queue,
               count(*) filter (where place.runs) as running,
               coalesce(
                   (array_agg(place.slot order by place.slot) filter (where not place.runs))
                       [:wanted.jobs::int4],
                   '{}'
               ) as free
        from unnest($1::text[], $2::int8[]) as wanted (queue, jobs)
        cross join lateral (
            select slot,
                   coalesce(
                       (
                           select job.leased_by <> 0 and job.token = place.token
                           from jobq.jobs as job
                           where job.id between place.job_id and place.job_id
                           order by job.id
                           limit 1
                       ),
                       false
                   ) as runs
            from jobq.queue_slots as place
            where place.queue = wanted.queue
            order by place.slot
        ) as place
        group by wanted.queue, wanted.jobs
    ) as taken on true";

/// Writes down which places the claimed jobs have, and what is left of the rates.
async fn take(
    connection: &mut PgConnection,
    schema: &Schema,
    gates: &HashMap<String, Gate>,
    claimed: &Claimed,
    now: Timestamp,
) -> sqlx::Result<()> {
    let (mut queues, mut slots) = (Vec::new(), Vec::new());
    let (mut jobs, mut tokens) = (Vec::new(), Vec::new());
    let (mut rated, mut full_at) = (Vec::new(), Vec::new());
    for gate in gates.values() {
        let mine = claimed.jobs.iter().filter(|job| job.queue == gate.queue);
        if gate.limit.max_running.is_some() {
            for (job, slot) in mine.clone().zip(&gate.free) {
                queues.push(gate.queue.as_str());
                slots.push(*slot);
                jobs.push(job.lease.job.0);
                tokens.push(job.lease.token.0);
            }
        }
        if let Some(time) = gate.spent(mine.count(), now) {
            rated.push(gate.queue.as_str());
            full_at.push(Time(time));
        }
    }
    sqlx::query(sql(schema, TAKE_SLOTS))
        .bind(queues)
        .bind(slots)
        .bind(jobs)
        .bind(tokens)
        .bind(rated)
        .bind(full_at)
        .execute(connection)
        .await?;
    Ok(())
}

pub(crate) const TAKE_SLOTS: &str = "
    with spent as (
        update jobq.queue_limits as mine
        set full_at = rated.full_at
        from unnest($5::text[], $6::timestamptz[]) as rated (queue, full_at)
        where mine.queue = rated.queue
    )
    update jobq.queue_slots as place
    set job_id = taken.job_id, token = taken.token
    from unnest($1::text[], $2::int4[], $3::int8[], $4::int8[]) as taken (queue, slot, job_id, token)
    where place.queue = taken.queue and place.slot = taken.slot";

/// Of queues that limits are not known of, nothing is allowed until they are asked for with their limits.
pub(super) fn not_yet_allowed(queues: Vec<String>) -> Vec<Allowed> {
    queues.into_iter().map(|queue| Allowed { queue, jobs: 0, next: None }).collect()
}
