//! Limits of queues across the fleet.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use jobq_core::time::{Timestamp, micros};
use sqlx::Row;
use sqlx::mysql::{MySqlConnection, MySqlRow};

use super::keys::HURRY;
use super::{MysqlStore, Schema, again, execute, get, killed, literal, rows};
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
        let look = format!(
            "begin;
             insert into jobq_queue_limits set queue = {queue}, {set}
             on duplicate key update {set};
             select full_at, now_us() as now
             from jobq_queue_limits where queue = {queue} for update"
        );
        let found = rows(&mut connection, &self.schema, &look).await?;
        let found = found.first().ok_or_else(killed)?;
        let (full_at, now) = (Timestamp(get(found, "full_at")?), Timestamp(get(found, "now")?));
        let full_at = rate.map_or(full_at, |rate| rate.emptied(full_at, now)).0;
        let mut text =
            format!("update jobq_queue_limits set full_at = {full_at} where queue = {queue}; ");
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
    for row in &found {
        if row.try_column("queue").is_ok() {
            gates.push(Gate {
                queue: get(row, "queue")?,
                limit: limit(row)?,
                full_at: Timestamp(get(row, "full_at")?),
                running: 0,
                free: Vec::new(),
            });
        } else if row.try_column("now").is_ok() {
            now = Timestamp(get(row, "now")?);
        } else {
            let queue: String = get(row, "place_of")?;
            let gate = gates.iter_mut().find(|gate| gate.queue == queue);
            match (gate, row.try_column("slot").is_ok()) {
                (Some(gate), true) => gate.free.push(get(row, "slot")?),
                (Some(gate), false) => {
                    let running: i64 = get(row, "running")?;
                    gate.running = u32::try_from(running).unwrap_or(u32::MAX);
                }
                // It has no limit any more.
                (None, _) => {}
            }
        }
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

/// How many places are taken, and the first ones that are not. A place is taken while its job runs
/// under the token that took it.
pub(crate) fn slots_statements(queue: &str, asked: u32) -> String {
    const RUNS: &str = "coalesce(
        (select leased_by <> 0 and token = place.token
         from jobq_jobs force index (primary) where id = place.job_id),
        0
    )";
    let queue = literal(queue);
    let places =
        format!("from jobq_queue_slots as place force index (primary) where place.queue = {queue}");
    format!(
        "select {queue} as place_of, count(*) as running {places} and {RUNS} = 1;
         select {queue} as place_of, slot {places} and {RUNS} = 0 order by slot limit {asked}"
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
