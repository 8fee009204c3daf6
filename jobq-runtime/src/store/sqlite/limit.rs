//! Limits of queues across the fleet.

use jobq_core::time::{Timestamp, micros};
use sqlx::Row;
use sqlx::sqlite::{SqliteConnection, SqliteRow};

use super::claim::{Look, Wanted};
use super::{Schema, SqliteStore, get, json, sql};
use crate::limit::{Gate, LimitedQueue, QueueLimit, stored_rate};
use crate::store::{ClaimedJob, Turn};

impl SqliteStore {
    pub(super) async fn limit_queue(&self, queue: &str, limit: &QueueLimit) -> sqlx::Result<()> {
        let (schema, queue, limit) = (self.schema.clone(), queue.to_owned(), *limit);
        self.write(async move |locked| {
            let (full_at, now): (Option<i64>, i64) = sqlx::query_as(sql(
                &schema,
                "select (select full_at from jobq_queue_limits where queue = ?1), now_us()",
            ))
            .bind(&queue)
            .fetch_one(&mut **locked)
            .await?;
            let full_at = full_at.map_or(Timestamp::NEG_INFINITY, Timestamp);
            let rate = limit.rate;
            sqlx::query(sql(
                &schema,
                "insert into jobq_queue_limits
                     (queue, max_running, rate_jobs, rate_per, burst, full_at)
                 values (?1, ?2, ?3, ?4, ?5, ?6)
                 on conflict (queue) do update
                 set max_running = excluded.max_running,
                     rate_jobs = excluded.rate_jobs,
                     rate_per = excluded.rate_per,
                     burst = excluded.burst,
                     full_at = excluded.full_at",
            ))
            .bind(&queue)
            .bind(limit.max_running)
            .bind(rate.map(|rate| rate.jobs()))
            .bind(rate.map(|rate| micros(rate.per())))
            .bind(rate.map(|rate| rate.most_at_once()))
            .bind(rate.map_or(full_at, |rate| rate.emptied(full_at, Timestamp(now))).0)
            .execute(&mut **locked)
            .await?;
            // Every claim looks at all there are.
            sqlx::query(sql(
                &schema,
                "delete from jobq_queue_slots
                 where queue = ?1 and slot > ?2
                   and not coalesce(
                           (select leased_by <> 0 and token = jobq_queue_slots.token
                            from jobq_jobs where id = job_id),
                           false
                       )",
            ))
            .bind(&queue)
            .bind(limit.max_running.unwrap_or(0))
            .execute(&mut **locked)
            .await?;
            sqlx::query(sql(
                &schema,
                "insert into jobq_queue_slots (queue, slot)
                 select ?1, value from json_each(?2) where true
                 on conflict do nothing",
            ))
            .bind(&queue)
            .bind(json((1..=limit.max_running.unwrap_or(0)).collect::<Vec<_>>()))
            .execute(&mut **locked)
            .await?;
            Ok(())
        })
        .await
    }

    pub(super) async fn unlimit_queue(&self, queue: &str) -> sqlx::Result<bool> {
        let (schema, queue) = (self.schema.clone(), queue.to_owned());
        self.write(async move |locked| {
            let done = sqlx::query(sql(&schema, "delete from jobq_queue_limits where queue = ?1"))
                .bind(queue)
                .execute(&mut **locked)
                .await?;
            Ok(done.rows_affected() == 1)
        })
        .await
    }

    pub(super) async fn limits(&self) -> sqlx::Result<Vec<LimitedQueue>> {
        let mut reader = self.reader().await?;
        let rows = sqlx::query(self.sql(
            "select queue, max_running, rate_jobs, rate_per, burst
             from jobq_queue_limits
             order by queue",
        ))
        .fetch_all(&mut *reader)
        .await?;
        rows.iter()
            .map(|row| Ok(LimitedQueue { queue: get(row, "queue")?, limit: limit(row)? }))
            .collect()
    }
}

fn limit(row: &SqliteRow) -> sqlx::Result<QueueLimit> {
    let rate = stored_rate(get(row, "rate_jobs")?, get(row, "rate_per")?, get(row, "burst")?);
    Ok(QueueLimit { max_running: get(row, "max_running")?, rate })
}

/// Asks for the limits of those queues that have something due, and what is left of them. Where
/// nothing is, nothing is due for this claim.
pub(super) async fn ask(
    connection: &mut SqliteConnection,
    schema: &Schema,
    wanted: &Wanted,
    look: &mut Look,
) -> sqlx::Result<Vec<Gate>> {
    let mut queues: Vec<&str> = look.due.iter().map(|n| wanted.places[*n].queue.as_str()).collect();
    queues.dedup();
    let rows = sqlx::query(sql(
        schema,
        "select queue, max_running, rate_jobs, rate_per, burst, full_at,
                (select json_group_array(slot)
                 from jobq_queue_slots as place
                 where place.queue = limited.queue
                   and not coalesce(
                           (select leased_by <> 0 and token = place.token
                            from jobq_jobs where id = place.job_id),
                           false
                       )) as free,
                (select count(*) from jobq_queue_slots as place
                 where place.queue = limited.queue) as places
         from jobq_queue_limits as limited
         where queue in (select value from json_each(?1))",
    ))
    .bind(json(&queues))
    .fetch_all(connection)
    .await?;
    let mut gates = Vec::new();
    for row in &rows {
        let mut free: Vec<i32> = serde_json::from_str(row.try_get("free")?).unwrap_or_default();
        free.sort_unstable();
        let places: i64 = get(row, "places")?;
        let running = usize::try_from(places).unwrap_or(usize::MAX).saturating_sub(free.len());
        let (limit, full_at) = (limit(row)?, Timestamp(get(row, "full_at")?));
        // If it was lowered, jobs may run in places beyond it.
        free.truncate((limit.max_running.unwrap_or(0) as usize).saturating_sub(running));
        gates.push(Gate { queue: get(row, "queue")?, limit, full_at, free });
    }
    for gate in &gates {
        let asked = wanted.places.iter().find(|place| place.queue == gate.queue);
        look.limited.push(gate.allows(asked.map_or(0, |place| place.limit), look.now));
    }
    let is_allowed = |n: &usize| {
        let queue = &wanted.places[*n].queue;
        !look.limited.iter().any(|allowed| allowed.queue == *queue && allowed.jobs == 0)
    };
    look.due.retain(is_allowed);
    Ok(gates)
}

/// Writes down which places the claimed jobs have, and what is left of the rates. What only waits for
/// its key has not started.
pub(super) async fn take(
    connection: &mut SqliteConnection,
    schema: &Schema,
    gates: &[Gate],
    jobs: &[ClaimedJob],
    now: Timestamp,
) -> sqlx::Result<()> {
    for gate in gates {
        let runs = |job: &&ClaimedJob| job.queue == gate.queue && job.turn == Turn::Runs;
        let mine: Vec<&ClaimedJob> = jobs.iter().filter(runs).collect();
        if gate.limit.max_running.is_some() && !mine.is_empty() {
            let taken = gate.free.iter().zip(&mine);
            let taken: Vec<(i32, i64, i64)> =
                taken.map(|(slot, job)| (*slot, job.lease.job.0, job.lease.token.0)).collect();
            sqlx::query(sql(
                schema,
                "insert into jobq_queue_slots (queue, slot, job_id, token)
                 select ?1, value ->> 0, value ->> 1, value ->> 2 from json_each(?2) where true
                 on conflict (queue, slot) do update
                 set job_id = excluded.job_id, token = excluded.token",
            ))
            .bind(&gate.queue)
            .bind(json(taken))
            .execute(&mut *connection)
            .await?;
        }
        if let Some(full_at) = gate.spent(mine.len(), now) {
            sqlx::query(sql(schema, "update jobq_queue_limits set full_at = ?2 where queue = ?1"))
                .bind(&gate.queue)
                .bind(full_at.0)
                .execute(&mut *connection)
                .await?;
        }
    }
    Ok(())
}
