//! Writing outcomes, fenced.
//!
//! A batch is one transaction: it locks its rows in id order (one lock order for every writer),
//! finds out which of its settlements still hold their leases, and writes those. Rows that somebody
//! else has locked are skipped, so that an operator's open client holds up one job and not the
//! batch.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use jobq_core::job::Lease;
use jobq_core::lifecycle::{Transition, When};
use jobq_core::outcome::AttemptRecord;
use jobq_core::time::micros;
use sqlx::mysql::MySqlConnection;

use super::due::{LOCK_JOBS, jobs_by_id};
use super::{
    LIST, MysqlStore, Result, Schema, Settled, Settlement, again, execute, get, is_set, keys,
    killed, list, literal, literal_or_null, on_callers, rows, sql,
};
use crate::key::in_order;
use crate::store::{Completion, rounds};

/// How often a batch looks at rows that were locked before it calls them busy: a claim that reads
/// past a leased row has it locked for a moment.
const LOOKS: u32 = 3;

/// How long a claim takes, about.
const A_CLAIM: Duration = Duration::from_millis(5);

/// The most bytes of statements that are sent at once: they must fit into a packet.
const PACKET: usize = 1024 * 1024;

impl MysqlStore {
    pub(super) async fn settle(&self, settlements: &[Settlement]) -> sqlx::Result<Vec<Settled>> {
        let mut settled = vec![Settled::LeaseLost; settlements.len()];
        for round in rounds(settlements) {
            for chunk in round.chunks(LIST) {
                let mut rest = chunk.to_vec();
                for look in 0..LOOKS {
                    if look > 0 {
                        tokio::time::sleep(A_CLAIM).await;
                    }
                    let batch: Vec<&Settlement> =
                        rest.iter().map(|index| &settlements[*index]).collect();
                    let written = again(|| self.settle_batch(&batch)).await?;
                    for (index, became) in rest.iter().zip(written) {
                        settled[*index] = became;
                    }
                    rest.retain(|index| settled[*index] == Settled::Busy);
                    if rest.is_empty() {
                        break;
                    }
                }
            }
        }
        Ok(settled)
    }

    /// Settles different jobs, given in id order.
    async fn settle_batch(&self, batch: &[&Settlement]) -> sqlx::Result<Vec<Settled>> {
        let mut connection = self.own().await?;
        let written = write(&mut connection, &self.schema, batch).await?;
        let rest: Vec<&Settlement> =
            batch.iter().copied().filter(|one| !written.contains(&one.lease.job.0)).collect();
        let seen = if rest.is_empty() {
            HashMap::new()
        } else {
            second_look(&mut connection, &self.schema, &rest).await?
        };
        connection.hand_back();
        let became =
            |one: &&Settlement| seen.get(&one.lease.job.0).copied().unwrap_or(Settled::Written);
        Ok(batch.iter().map(became).collect())
    }
}

/// A job that still is its settlement's, and locked.
struct Held {
    attempt: i64,
    cancel_requested: bool,
}

/// Writes what can be written, in one transaction; returns the ids.
async fn write(
    connection: &mut MySqlConnection,
    schema: &Schema,
    batch: &[&Settlement],
) -> sqlx::Result<HashSet<i64>> {
    let held = lock(connection, schema, batch).await?;
    let writable: Vec<&Settlement> = batch
        .iter()
        .copied()
        .filter(|one| {
            let yields =
                matches!(one.transition, Transition::Requeue { .. } | Transition::Bury { .. });
            held.get(&one.lease.job.0).is_some_and(|held| !(yields && held.cancel_requested))
        })
        .collect();
    let workers = workers(connection, schema, &writable).await?;
    let writes = writes(&writable, &held, &workers);
    if send(connection, schema, &writes.statements).await? != writes.rows {
        // MariaDB may answer a write that was killed with success and no rows; see `written`.
        let killed = std::io::Error::new(
            std::io::ErrorKind::Interrupted,
            "a statement was killed while it wrote",
        );
        return Err(sqlx::Error::Io(killed));
    }
    let left = in_order(writable.iter().filter_map(|one| one.leaves()));
    let woken = keys::pass_on_with(connection, schema, &left).await?;
    let mut last: Vec<String> = writes.forgotten.into_iter().map(forget_statement).collect();
    last.push(if left.is_empty() { "commit" } else { keys::COMMIT }.to_owned());
    send(connection, schema, &last).await?;
    if woken > 0 {
        crate::wake::poke();
    }
    Ok(writable.iter().map(|one| one.lease.job.0).collect())
}

/// Begins a transaction and locks the jobs whose settlements still hold their leases.
async fn lock(
    connection: &mut MySqlConnection,
    schema: &Schema,
    batch: &[&Settlement],
) -> sqlx::Result<HashMap<i64, Held>> {
    let guards: HashMap<i64, (i64, i64)> = batch
        .iter()
        .map(|one| (one.lease.job.0, (one.lease.token.0, one.lease.session.0)))
        .collect();
    let text = held_statement(batch.iter().map(|one| one.lease.job.0));
    let mut held = HashMap::new();
    for row in rows(connection, schema, &format!("begin; {text}")).await? {
        let id = get(&row, "id")?;
        if guards.get(&id) == Some(&(get(&row, "token")?, get(&row, "leased_by")?)) {
            let attempt = get(&row, "attempt")?;
            let cancel_requested = is_set(&row, "cancel_requested")?;
            held.insert(id, Held { attempt, cancel_requested });
        }
    }
    Ok(held)
}

pub(crate) fn held_statement(ids: impl IntoIterator<Item = i64>) -> String {
    let jobs = jobs_by_id(ids);
    format!(
        "select job.id, token, leased_by, attempt, cancel_requested
         from {jobs}
         {LOCK_JOBS}"
    )
}

/// The names of the workers whose attempts are recorded.
async fn workers(
    connection: &mut MySqlConnection,
    schema: &Schema,
    batch: &[&Settlement],
) -> sqlx::Result<HashMap<i64, String>> {
    let sessions: HashSet<i64> =
        batch.iter().filter(|one| record(one).is_some()).map(|one| one.lease.session.0).collect();
    if sessions.is_empty() {
        return Ok(HashMap::new());
    }
    let sessions = list(sessions);
    let text = format!(
        "select id, worker from jobq_closed_sessions force index (primary) where id in ({sessions})
         union all
         select id, worker from jobq_sessions force index (primary) where id in ({sessions})"
    );
    let rows = rows(connection, schema, &text).await?;
    rows.iter().map(|row| Ok((get(row, "id")?, get(row, "worker")?))).collect()
}

fn record(settlement: &Settlement) -> Option<&AttemptRecord> {
    match &settlement.transition {
        Transition::Complete { .. } | Transition::Cancel { .. } => None,
        Transition::Requeue { record, .. } => record.as_ref(),
        Transition::Bury { record, .. } => Some(record),
    }
}

/// What writes a batch.
struct Writes {
    statements: Vec<String>,
    /// How many rows they write, all together.
    rows: u64,
    /// Jobs whose attempts are not to be kept.
    forgotten: Vec<i64>,
}

/// What is copied alike for many jobs is one statement.
///
/// Rows are deleted one by one: for a list of ids the server may read all of a small table, and a
/// delete waits for every row that it reads.
fn writes(
    batch: &[&Settlement],
    held: &HashMap<i64, Held>,
    workers: &HashMap<i64, String>,
) -> Writes {
    let mut statements = Vec::new();
    let mut alike: BTreeMap<(&str, i64), Vec<i64>> = BTreeMap::new();
    let mut gone = Vec::new();
    let mut forgotten = Vec::new();
    for one in batch {
        let id = one.lease.job.0;
        let retention = storable_micros(one.retention);
        let mut finish = |state: &'static str, text: Option<&str>| {
            gone.push(id);
            match text {
                // An attempt is only kept of an earlier claim.
                _ if retention == 0 && one.lease.token.0 > 1 => forgotten.push(id),
                _ if retention == 0 => {}
                Some(text) => {
                    let finish = finish_statement(&list([id]), state, retention, &literal(text));
                    statements.push(format!("{finish} {UNLESS_THERE}"));
                }
                None => alike.entry((state, retention)).or_default().push(id),
            }
        };
        match &one.transition {
            Transition::Complete { result } => finish("completed", result.as_deref()),
            Transition::Cancel { reason } => finish("cancelled", reason.as_deref()),
            Transition::Requeue { when, counters, .. } => {
                let (band, delay) = match when {
                    When::Next => ("32767", 0),
                    When::After(delay) => ("priority", storable_micros(*delay)),
                };
                let (attempt, crashes) = (counters.attempt, counters.crashes);
                let interruptions = counters.interruptions;
                statements.push(format!(
                    "update jobq_jobs
                     set leased_by = 0,
                         -- Of one that was started; what was claimed to be buried has no attempt.
                         start_by = if(attempt = 0, start_by, null),
                         isolated = 0,
                         attempt = {attempt},
                         crashes = {crashes},
                         interruptions = {interruptions},
                         band = {band},
                         run_after = now_us() + {delay}
                     where id = {id}"
                ));
            }
            Transition::Bury { reason, counters, record } => {
                let (attempt, crashes) = (counters.attempt, counters.crashes);
                let interruptions = counters.interruptions;
                let (reason, error) = (literal(reason.as_str()), literal(&record.error));
                statements.push(format!(
                    "insert into jobq_dead (
                         id, token, reason, created_at, attempt, max_attempts, interruptions,
                         crashes, max_crashes, priority, queue, kind, error, tags, metadata, payload,
                         unique_key, unique_scope, job_key, on_block
                     )
                     select id, token, {reason}, created_at, {attempt}, max_attempts,
                            {interruptions}, {crashes}, max_crashes, priority, queue, kind, {error},
                            tags, metadata, payload, unique_key, unique_scope, job_key, on_block
                     from jobq_jobs
                     where id = {id}"
                ));
                gone.push(id);
            }
        }
        if let Some(record) = record(one) {
            let (token, attempt) = (one.lease.token, held.get(&id).map_or(0, |held| held.attempt));
            let (reason, error) = (literal(record.reason.as_str()), literal(&record.error));
            let worker = workers.get(&one.lease.session.0).map(String::as_str);
            let worker = literal_or_null(worker);
            statements.push(format!(
                "insert into jobq_attempts (job_id, token, attempt, reason, error, worker)
                 values ({id}, {token}, {attempt}, {reason}, {error}, {worker})"
            ));
        }
    }
    let mut rows = (statements.len() + gone.len()) as u64;
    for ((state, retention), ids) in alike {
        rows += ids.len() as u64;
        let finish = finish_statement(&list(ids), state, retention, "null");
        statements.push(format!("{finish} {UNLESS_THERE}"));
    }
    statements.extend(gone.into_iter().map(|id| format!("delete from jobq_jobs where id = {id}")));
    Writes { statements, rows, forgotten }
}

/// Behind a copy to the history: one that is there already stays, and counts as written. Without a
/// transaction `complete_in` may have broken off between its copy and its deletion.
pub(super) const UNLESS_THERE: &str = "on duplicate key update token = jobq_finished.token";

/// Copies jobs to the history.
pub(crate) fn finish_statement(ids: &str, state: &str, retention: i64, text: &str) -> String {
    let (reason, result) = if state == "cancelled" { (text, "null") } else { ("null", text) };
    format!(
        "insert into jobq_finished (
             id, token, state, created_at, expires_at, attempt, max_attempts, interruptions, crashes,
             max_crashes, priority, queue, kind, reason, result, tags, metadata, payload,
             unique_key, unique_scope, job_key, on_block
         )
         select id, token, '{state}', created_at, now_us() + {retention}, attempt, max_attempts,
                interruptions, crashes, max_crashes, priority, queue, kind, {reason}, {result},
                tags, metadata, payload, unique_key, unique_scope, job_key, on_block
         from jobq_jobs force index (primary)
         where id in ({ids})"
    )
}

/// Deletes the attempts of a job.
pub(crate) fn forget_statement(id: i64) -> String {
    format!(
        "delete attempt from jobq_attempts as attempt force index (primary)
         where attempt.job_id = {id}"
    )
}

/// Sends statements, as many at once as fit; returns how many rows they have written.
async fn send(
    connection: &mut MySqlConnection,
    schema: &Schema,
    statements: &[String],
) -> sqlx::Result<u64> {
    let (mut text, mut rows) = (String::new(), 0);
    for statement in statements {
        if !text.is_empty() && text.len() + statement.len() > PACKET {
            rows += execute(connection, schema, &text).await?;
            text.clear();
        }
        text.push_str(statement);
        text.push_str(";\n");
    }
    if !text.is_empty() {
        rows += execute(connection, schema, text.trim_end_matches([';', '\n'])).await?;
    }
    Ok(rows)
}

/// Tells apart why settlements were not written.
async fn second_look(
    connection: &mut MySqlConnection,
    schema: &Schema,
    rest: &[&Settlement],
) -> sqlx::Result<HashMap<i64, Settled>> {
    let ids = list(rest.iter().map(|one| one.lease.job.0));
    let text = format!(
        "select id, token, leased_by, cancel_requested
         from jobq_jobs force index (primary)
         where id in ({ids})"
    );
    let mut unfinished: HashMap<i64, (i64, i64, bool)> = HashMap::new();
    for row in rows(connection, schema, &text).await? {
        let cancel = is_set(&row, "cancel_requested")?;
        unfinished.insert(get(&row, "id")?, (get(&row, "token")?, get(&row, "leased_by")?, cancel));
    }
    let text = format!(
        "select id, token from jobq_finished force index (primary) where id in ({ids})
         union all
         select id, token from jobq_dead force index (primary) where id in ({ids})"
    );
    let mut ended = HashSet::new();
    for row in rows(connection, schema, &text).await? {
        ended.insert((get::<i64>(&row, "id")?, get::<i64>(&row, "token")?));
    }
    let text = format!(
        "select job_id, token
         from jobq_attempts force index (primary)
         where job_id in ({ids}) and reason = 'crashed'"
    );
    let mut crashed = HashSet::new();
    for row in rows(connection, schema, &text).await? {
        crashed.insert((get::<i64>(&row, "job_id")?, get::<i64>(&row, "token")?));
    }
    Ok(rest
        .iter()
        .map(|one| {
            let key = (one.lease.job.0, one.lease.token.0);
            let row = unfinished.get(&key.0).copied();
            (key.0, crate::store::judge(one, row, ended.contains(&key), crashed.contains(&key)))
        })
        .collect())
}

/// A sum with the clock must stay a time that can be stored.
fn storable_micros(duration: Duration) -> i64 {
    micros(duration.min(jobq_core::duration::MAX))
}

/// Completes a job in its handler's transaction; false when the lease was lost.
///
/// Unlike a settlement it waits for whoever has the row locked: there is no later try.
pub(super) async fn complete_on(
    connection: &mut MySqlConnection,
    completion: Completion,
    schema: &Schema,
) -> Result<bool> {
    complete(connection, completion, schema)
        .await
        .map_err(on_callers("complete a job in your transaction"))
}

/// Every statement is about rows that are there, by their whole key: so nothing but these rows is
/// locked above READ COMMITTED either.
async fn complete(
    connection: &mut MySqlConnection,
    completion: Completion,
    schema: &Schema,
) -> sqlx::Result<bool> {
    let Completion { lease, retention } = completion;
    if !holds(connection, schema, lease).await? {
        return Ok(false);
    }
    if !retention.is_zero() {
        let kept = sqlx::query(sql(
            schema,
            "insert into jobq_finished (
                 id, token, state, created_at, expires_at, attempt, max_attempts, interruptions,
                 crashes, max_crashes, priority, queue, kind, tags, metadata, payload,
                 unique_key, unique_scope, job_key, on_block
             )
             select id, token, 'completed', created_at, now_us() + ?, attempt, max_attempts,
                    interruptions, crashes, max_crashes, priority, queue, kind, tags, metadata,
                    payload, unique_key, unique_scope, job_key, on_block
             from jobq_jobs
             where id = ? and token = ? and leased_by = ?",
        ))
        .bind(storable_micros(retention))
        .bind(lease.job.0)
        .bind(lease.token.0)
        .bind(lease.session.0)
        .execute(&mut *connection)
        .await?;
        if kept.rows_affected() != 1 {
            // Without a transaction nothing was locked any more.
            return if holds(connection, schema, lease).await? { Err(killed()) } else { Ok(false) };
        }
    } else if lease.token.0 > 1 {
        let tokens: Vec<i64> =
            sqlx::query_scalar(sql(schema, "select token from jobq_attempts where job_id = ?"))
                .bind(lease.job.0)
                .fetch_all(&mut *connection)
                .await?;
        for token in tokens {
            sqlx::query(sql(schema, "delete from jobq_attempts where job_id = ? and token = ?"))
                .bind(lease.job.0)
                .bind(token)
                .execute(&mut *connection)
                .await?;
        }
    }
    let gone = sqlx::query(sql(
        schema,
        "delete from jobq_jobs where id = ? and token = ? and leased_by = ?",
    ))
    .bind(lease.job.0)
    .bind(lease.token.0)
    .bind(lease.session.0)
    .execute(connection)
    .await?;
    Ok(gone.rows_affected() == 1)
}

/// Whether a job is still leased so, and locks it.
async fn holds(
    connection: &mut MySqlConnection,
    schema: &Schema,
    lease: Lease,
) -> sqlx::Result<bool> {
    let held: Option<(i64, i64)> = sqlx::query_as(sql(
        schema,
        "select token, leased_by from jobq_jobs where id = ? for update",
    ))
    .bind(lease.job.0)
    .fetch_optional(connection)
    .await?;
    Ok(held == Some((lease.token.0, lease.session.0)))
}
