//! Limits of queues across the fleet.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use jobq_core::time::{Timestamp, micros};
use sqlx::Row;
use sqlx::mysql::{MySqlConnection, MySqlRow};

use super::keys::HURRY;
use super::{MysqlStore, Schema, again, execute, get, killed, list, literal, rows};
use crate::limit::{Gate, LimitedQueue, QueueLimit, stored_rate};
use crate::store::{ClaimedJob, Turn};

/// Asks which queues are limited.
pub(crate) const LIMITED: &str = "select queue as limited_queue from jobq_queue_limits";

/// Reads a row of the answer to [`LIMITED`], if it is one.
pub(super) fn limited_queue(row: &MySqlRow) -> Option<String> {
    get(row, "limited_queue").ok()
}

impl MysqlStore {
    pub(super) async fn limit_queue(&self, queue: &str, limit: &QueueLimit) -> sqlx::Result<()> {
        again(|| self.write_limit(queue, limit)).await
    }

    async fn write_limit(&self, queue: &str, limit: &QueueLimit) -> sqlx::Result<()> {
        let queue = literal(queue);
        let number = |n: Option<i64>| n.map_or_else(|| "null".to_owned(), |n| n.to_string());
        let rate = limit.rate;
        let set = format!(
            "max_running = {}, rate_jobs = {}, rate_per = {}, burst = {}",
            number(limit.max_running.map(i64::from)),
            number(rate.map(|rate| i64::from(rate.jobs()))),
            number(rate.map(|rate| micros(rate.per()))),
            number(rate.map(|rate| i64::from(rate.most_at_once()))),
        );
        let mut connection = self.own().await?;
        let most = limit.max_running.unwrap_or(0);
        let look = format!(
            "begin;
             insert into jobq_queue_limits set queue = {queue}, {set}
             on duplicate key update {set};
             select full_at, now_us() as now
             from jobq_queue_limits where queue = {queue} for update;
             select slot from {PLACES} where place.queue = {queue} and slot > {most} and {RUNS} = 0"
        );
        let found = rows(&mut connection, &self.schema, &look).await?;
        let (found, beyond) = found.split_first().ok_or_else(killed)?;
        let (full_at, now) = (Timestamp(get(found, "full_at")?), Timestamp(get(found, "now")?));
        let full_at = rate.map_or(full_at, |rate| rate.emptied(full_at, now)).0;
        let mut text =
            format!("update jobq_queue_limits set full_at = {full_at} where queue = {queue}; ");
        if !beyond.is_empty() {
            // Every claim looks at all of those.
            let slots: Vec<i64> = beyond
                .iter()
                .map(|row| Ok(get::<i32>(row, "slot")?.into()))
                .collect::<sqlx::Result<_>>()?;
            let slots = list(slots);
            write!(
                text,
                "delete from jobq_queue_slots where queue = {queue} and slot in ({slots}); "
            )
            .expect("text grows");
        }
        if let Some(slots) = limit.max_running {
            let slots: Vec<String> = (1..=slots).map(|slot| format!("({queue}, {slot})")).collect();
            write!(
                text,
                "insert ignore into jobq_queue_slots (queue, slot) values {}; ",
                slots.join(", ")
            )
            .expect("text grows");
        }
        text.push_str("commit");
        execute(&mut connection, &self.schema, &text).await?;
        connection.hand_back();
        Ok(())
    }

    pub(super) async fn unlimit_queue(&self, queue: &str) -> sqlx::Result<bool> {
        let queue = literal(queue);
        let delete = format!("delete from jobq_queue_limits where queue = {queue}");
        let done = again(|| async {
            let mut connection = self.own().await?;
            let done = execute(&mut connection, &self.schema, &delete).await?;
            connection.hand_back();
            Ok(done)
        })
        .await?;
        if done == 0 {
            let look = format!("select 1 from jobq_queue_limits where queue = {queue}");
            if !self.rows(&look).await?.is_empty() {
                return Err(killed());
            }
        }
        Ok(done == 1)
    }

    pub(super) async fn limits(&self) -> sqlx::Result<Vec<LimitedQueue>> {
        self.rows(
            "select queue, max_running, rate_jobs, rate_per, burst
             from jobq_queue_limits
             order by queue",
        )
        .await?
        .iter()
        .map(|row| Ok(LimitedQueue { queue: get(row, "queue")?, limit: limit(row)? }))
        .collect()
    }
}

fn limit(row: &MySqlRow) -> sqlx::Result<QueueLimit> {
    let number = |column| {
        Ok::<_, sqlx::Error>(get::<Option<i32>>(row, column)?.map(|n| n.max(0).cast_unsigned()))
    };
    let rate = stored_rate(number("rate_jobs")?, get(row, "rate_per")?, number("burst")?);
    Ok(QueueLimit { max_running: number("max_running")?, rate })
}

/// Begins a transaction, locks the limits of queues of which a claim asks for so many jobs, and sees
/// what is left of them, and the time.
///
/// One claim of a queue so comes after the other, and each sees what the ones before it took: every
/// statement has a snapshot of its own. It is to be ended with [`COMMIT`](super::keys::COMMIT).
pub(super) async fn lock(
    connection: &mut MySqlConnection,
    schema: &Schema,
    queues: &BTreeSet<(String, u32)>,
) -> sqlx::Result<(Vec<Gate>, Timestamp)> {
    let mut text = format!("{HURRY}; begin; ");
    for (queue, _) in queues {
        write!(text, "{}; ", lock_limit_statement(queue)).expect("text grows");
    }
    for (queue, asked) in queues {
        write!(text, "{}; ", slots_statements(queue, *asked)).expect("text grows");
    }
    text.push_str("select now_us() as now");
    let found = rows(connection, schema, &text).await?;
    let mut gates: Vec<Gate> = Vec::new();
    let mut now = Timestamp::NEG_INFINITY;
    let mut crowded = Vec::new();
    for row in &found {
        if row.try_column("queue").is_ok() {
            gates.push(Gate {
                queue: get(row, "queue")?,
                limit: limit(row)?,
                full_at: Timestamp(get(row, "full_at")?),
                free: Vec::new(),
            });
        } else if row.try_column("now").is_ok() {
            now = Timestamp(get(row, "now")?);
        } else {
            let queue: String = get(row, "place_of")?;
            // None if it has no limit any more.
            let Some(gate) = gates.iter_mut().position(|gate| gate.queue == queue) else {
                continue;
            };
            if row.try_column("slot").is_ok() {
                gates[gate].free.push(get(row, "slot")?);
            } else {
                let beyond: i64 = get(row, "beyond")?;
                crowded.extend((beyond > 0).then_some((gate, beyond.unsigned_abs())));
            }
        }
    }
    for (gate, beyond) in crowded {
        let gate = &mut gates[gate];
        let asked = queues.iter().find(|(queue, _)| *queue == gate.queue);
        let asked = asked.map_or(0, |(_, asked)| u64::from(*asked));
        let text = free_slots_statement(&gate.queue, asked + beyond);
        let found = rows(connection, schema, &text).await?;
        let free = found.len().saturating_sub(usize::try_from(beyond).unwrap_or(usize::MAX));
        let slots = found.iter().take(free).map(|row| get(row, "slot"));
        gate.free = slots.collect::<sqlx::Result<_>>()?;
    }
    Ok((gates, now))
}

/// One queue for each: of a list the server may read, and so wait for, all there are.
pub(crate) fn lock_limit_statement(queue: &str) -> String {
    let queue = literal(queue);
    format!(
        "select queue, max_running, rate_jobs, rate_per, burst, full_at
         from jobq_queue_limits force index (primary)
         where queue = {queue}
         for update"
    )
}

const PLACES: &str = "jobq_queue_slots as place force index (primary)";

/// Whether a place is taken: while its job runs under the token that took it.
const RUNS: &str = "coalesce(
    (select leased_by <> 0 and token = place.token
     from jobq_jobs force index (primary) where id = place.job_id),
    0
)";

/// How many jobs run in places beyond the limit, because it was lowered; and the first places that are
/// free, as many as are asked for. For each job that is beyond, one of those is not to be taken.
pub(crate) fn slots_statements(queue: &str, asked: u32) -> String {
    let (name, most) = (literal(queue), most_of(queue));
    format!(
        "select {name} as place_of, count(*) as beyond
         from {PLACES}
         where place.queue = {name} and slot > {most} and {RUNS} = 1;
         {}",
        free_slots_statement(queue, u64::from(asked))
    )
}

fn free_slots_statement(queue: &str, asked: u64) -> String {
    let (queue, most) = (literal(queue), most_of(queue));
    format!(
        "select {queue} as place_of, slot
         from {PLACES}
         where place.queue = {queue} and slot <= {most} and {RUNS} = 0
         order by slot limit {asked}"
    )
}

fn most_of(queue: &str) -> String {
    let queue = literal(queue);
    format!(
        "(select max_running from jobq_queue_limits force index (primary) where queue = {queue})"
    )
}

/// Writes down which places the claimed jobs have, and what is left of the rates; nothing if that
/// stays as it is. What only waits for its key has not started.
pub(super) fn take_statements(gates: &[Gate], jobs: &[ClaimedJob], now: Timestamp) -> String {
    let mut text = String::new();
    for gate in gates {
        let queue = literal(&gate.queue);
        let runs = |job: &&ClaimedJob| job.queue == gate.queue && job.turn == Turn::Runs;
        let mine: Vec<&ClaimedJob> = jobs.iter().filter(runs).collect();
        if gate.limit.max_running.is_some() {
            for (slot, job) in gate.free.iter().zip(&mine) {
                let (id, token) = (job.lease.job.0, job.lease.token.0);
                write!(
                    text,
                    "update jobq_queue_slots set job_id = {id}, token = {token}
                     where queue = {queue} and slot = {slot}; "
                )
                .expect("text grows");
            }
        }
        if let Some(full_at) = gate.spent(mine.len(), now) {
            let full_at = full_at.0;
            write!(
                text,
                "update jobq_queue_limits set full_at = {full_at} where queue = {queue}; "
            )
            .expect("text grows");
        }
    }
    text
}
