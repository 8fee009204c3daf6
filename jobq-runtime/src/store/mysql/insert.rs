//! Enqueueing.

use std::time::Duration;

use jobq_core::job::JobId;
use jobq_core::time::micros;
use sqlx::mysql::{MySql, MySqlConnection, MySqlPool};
use sqlx::pool::PoolConnection;
use sqlx::{Connection, Executor, Transaction};

use super::{
    Checkout, Error, MysqlStore, Result, Schema, execute, killed, number, on_callers, sql, unique,
};
use crate::context::CompleteTarget;
use crate::enqueue::sealed::Sealed;
use crate::enqueue::{EnqueueTarget, Enqueued};
use crate::error::is_connection_loss;
use crate::job::{CheckedDue, CheckedJob};
use crate::store::twins::UniqueCall;
use crate::store::{Completion, in_a_task, tags_json};
use crate::wake;

/// How many jobs one statement writes. There are a few numbers only, so that their statements stay
/// prepared: one that is prepared for a single use has to be closed after it, which the driver does
/// without waiting for an answer, and the network then holds back for 40 ms what comes next (Nagle's
/// algorithm, delayed acknowledgements). And they are prepared so that payloads are in no log.
const SIZES: [usize; 5] = [500, 100, 20, 5, 1];

/// The most bytes that one statement writes: it must fit into a packet, and MariaDB takes 16 MiB, some
/// servers less.
const CHUNK_BYTES: usize = 2 * 1024 * 1024;

/// How a transaction of our own begins on a connection of the application's: READ COMMITTED is for this
/// one only. (With the `sql_mode` ORACLE, `begin` would be that of a block.)
const BEGIN: &str = "set transaction isolation level read committed; start transaction";

/// Tries at an insert that the server refused for a passing reason (deadlock, lock wait).
const TRIES: u32 = 5;

impl MysqlStore {
    pub(super) async fn insert(&self, jobs: Vec<CheckedJob>) -> Result<Vec<Enqueued>> {
        (&self.pool).write(jobs, self.schema.clone()).await
    }
}

/// Writes jobs in a transaction of our own.
///
/// The ids are known before the commit: if that breaks, the caller knows which jobs to look for.
/// What breaks before is not written.
async fn insert_owned(
    pool: &MySqlPool,
    schema: &Schema,
    jobs: &[CheckedJob],
) -> Result<Vec<Enqueued>> {
    let action = "enqueue jobs";
    if jobs.is_empty() {
        return Ok(Vec::new());
    }
    let call = UniqueCall::of(jobs)?;
    let mut tried = 0;
    loop {
        tried += 1;
        let connection = pool.acquire().await.map_err(Error::database(action))?;
        let mut connection = Checkout(Some(connection));
        connection.execute(BEGIN).await.map_err(Error::database(action))?;
        let error = match insert_all(&mut connection, schema, jobs, call.as_ref()).await {
            Ok(enqueued) => match connection.execute("commit and no chain").await {
                Ok(_) => {
                    connection.hand_back();
                    wake::poke();
                    return Ok(enqueued);
                }
                Err(source) if is_connection_loss(&source) => {
                    let ids = enqueued.into_iter().map(Enqueued::id).collect();
                    return Err(Error::CommitUnknown { ids, source });
                }
                Err(source) => return Err(Error::database(action)(source)),
            },
            Err(error) => error,
        };
        match error {
            // A deadlock, or a twin that has changed meanwhile.
            Error::Serialization(_) if tried < TRIES => {}
            Error::Duplicate { .. } => {
                connection
                    .execute("rollback and no chain")
                    .await
                    .map_err(Error::database(action))?;
                connection.hand_back();
                return Err(error);
            }
            Error::Database { source, .. }
                if tried < TRIES
                    && !is_connection_loss(&source)
                    && crate::error::is_transient(&source) => {}
            error => return Err(error),
        }
        let wait = Duration::from_millis(10 << tried).mul_f64(rand::random());
        tokio::time::sleep(wait).await;
    }
}

/// Writes jobs in the transaction that is open on the connection.
async fn insert_all(
    connection: &mut MySqlConnection,
    schema: &Schema,
    jobs: &[CheckedJob],
    call: Option<&UniqueCall>,
) -> Result<Vec<Enqueued>> {
    if let Some(call) = call {
        return unique::insert(connection, schema, call).await;
    }
    let ids = insert_chunks(connection, schema, jobs).await.map_err(refused)?;
    Ok(ids.into_iter().map(Enqueued::Inserted).collect())
}

/// Writes jobs on the caller's connection, in whatever transaction it has open.
async fn insert_on(
    connection: &mut MySqlConnection,
    schema: &Schema,
    jobs: &[CheckedJob],
) -> Result<Vec<Enqueued>> {
    let call = UniqueCall::of(jobs)?;
    let expires = jobs.iter().any(|job| job.expires.is_some());
    let is_one_statement = call.is_none() && !expires && chunks(jobs).len() < 2;
    let enqueued = if is_one_statement {
        insert_all(connection, schema, jobs, None).await
    } else if has_begun(connection).await? {
        // A statement that fails does not fail the transaction: it could be committed with half of
        // the jobs.
        async {
            connection.execute("savepoint jobq_enqueue").await.map_err(refused)?;
            let enqueued = insert_all(connection, schema, jobs, call.as_ref()).await;
            let end = if enqueued.is_ok() { "release" } else { "rollback to" };
            let end = sqlx::AssertSqlSafe(format!("{end} savepoint jobq_enqueue"));
            let ended = connection.execute(end).await.map_err(refused);
            // After a deadlock there is nothing to go back to; its own error says more.
            enqueued.and_then(|enqueued| ended.map(|_| enqueued))
        }
        .await
    } else {
        // Without a transaction each statement would be one, and a failure leave half of the jobs.
        async {
            let mut tx = connection.begin_with(BEGIN).await.map_err(refused)?;
            let enqueued = insert_all(&mut tx, schema, jobs, call.as_ref()).await;
            // By itself it would be rolled back with the connection's next use, and hold its keys till
            // then.
            let ended = if enqueued.is_ok() { tx.commit().await } else { tx.rollback().await };
            enqueued.and_then(|enqueued| ended.map(|()| enqueued).map_err(refused))
        }
        .await
    };
    wake::poke();
    enqueued
}

/// An enqueue that the database has refused.
pub(super) fn refused(source: sqlx::Error) -> Error {
    on_callers("enqueue jobs")(source)
}

/// Whether a transaction is open, however it was begun, or will be, with autocommit off.
async fn has_begun(connection: &mut MySqlConnection) -> Result<bool> {
    /// There is no such savepoint: without a transaction it was gone with its own statement.
    const NO_SAVEPOINT: u16 = 1305;
    let probe = "savepoint jobq_probe; release savepoint jobq_probe";
    match connection.execute(probe).await {
        Ok(_) => Ok(true),
        Err(source) if number(&source) == Some(NO_SAVEPOINT) => Ok(false),
        Err(source) => Err(Error::database("enqueue jobs")(source)),
    }
}

pub(super) async fn insert_chunks(
    connection: &mut MySqlConnection,
    schema: &Schema,
    jobs: &[CheckedJob],
) -> sqlx::Result<Vec<JobId>> {
    let mut ids = Vec::new();
    for chunk in chunks(jobs) {
        ids.extend(insert_chunk(connection, schema, chunk).await?);
    }
    Ok(ids)
}

/// Cuts jobs into pieces that one statement writes well.
fn chunks(jobs: &[CheckedJob]) -> Vec<&[CheckedJob]> {
    let fits = |jobs: &[CheckedJob]| {
        jobs.len() == 1 || jobs.iter().map(CheckedJob::size).sum::<usize>() <= CHUNK_BYTES
    };
    let mut chunks = Vec::new();
    let mut rest = jobs;
    while !rest.is_empty() {
        let size = SIZES.into_iter().find(|size| rest.get(..*size).is_some_and(fits)).unwrap_or(1);
        let (chunk, others) = rest.split_at(size);
        chunks.push(chunk);
        rest = others;
    }
    chunks
}

/// Writes jobs with one statement.
///
/// The server says the first id only. It reserves those of one `insert … values` together, in every
/// mode of `innodb_autoinc_lock_mode`, so the others follow at the session's distance.
async fn insert_chunk(
    connection: &mut MySqlConnection,
    schema: &Schema,
    jobs: &[CheckedJob],
) -> sqlx::Result<Vec<JobId>> {
    let step: i64 = if jobs.len() > 1 {
        let step = "select cast(@@session.auto_increment_increment as signed)";
        sqlx::query_scalar(step).fetch_one(&mut *connection).await?
    } else {
        1
    };
    // Text is sent as bytes: the connection's own character set may not have what is in it.
    // `run_after` is never before the clock: a row must not appear behind what workers have passed.
    let due = "greatest(coalesce(?, insert_now_us() + ?), insert_now_us())";
    // A time that is none is not worked out for every job.
    let expires = jobs.iter().any(|job| job.expires.is_some());
    let (start_by, column) =
        if expires { (format!(", {due} + ?"), ", start_by") } else { (String::new(), "") };
    let one = format!(
        "(
             ?, ?, {due}, ?, ?, ?, ?, convert(? using utf8mb4), convert(? using utf8mb4),
             convert(? using utf8mb4), ?, ?, ?, ?{start_by}
         )"
    );
    let text = format!(
        "insert into jobq_jobs (
             kind, queue, run_after, priority, band, max_attempts, max_crashes, tags, metadata, payload,
             unique_key, unique_scope, job_key, on_block{column}
         ) values {}",
        vec![one; jobs.len()].join(", ")
    );
    let mut insert = sqlx::query(sql(schema, &text));
    for job in jobs {
        let (delay, time) = match job.due {
            CheckedDue::After(delay) => (micros(delay), None),
            CheckedDue::At(time) => (0, Some(time.0)),
        };
        insert = insert
            .bind(&*job.kind)
            .bind(&*job.queue)
            .bind(time)
            .bind(delay)
            .bind(job.priority)
            .bind(job.priority)
            .bind(job.max_attempts)
            .bind(job.max_crashes)
            .bind(tags_json(&job.tags).map(String::into_bytes))
            .bind(job.metadata.as_deref().map(str::as_bytes))
            .bind(job.payload.as_bytes())
            .bind(job.unique.map(|unique| unique.key.0.to_vec()))
            .bind(job.unique.map(|unique| unique.scope.as_str()))
            .bind(job.key.as_ref().map(|key| key.text.as_bytes()))
            .bind(job.key.as_ref().map(|key| key.on_block.as_str()));
        if expires {
            insert = insert.bind(time).bind(delay).bind(job.expires.map(micros));
        }
    }
    let written = insert.execute(&mut *connection).await?;
    if written.rows_affected() != jobs.len() as u64 {
        return Err(killed());
    }
    let first = written.last_insert_id() as i64;
    let ids: Vec<JobId> = (0..jobs.len() as i64).map(|n| JobId(first + n * step)).collect();
    if expires {
        list_expiring(connection, schema, jobs, &ids).await?;
    }
    Ok(ids)
}

/// Lists the jobs that expire, for the sweep. It meets them a little later than they do: the clock is read
/// again.
async fn list_expiring(
    connection: &mut MySqlConnection,
    schema: &Schema,
    jobs: &[CheckedJob],
    ids: &[JobId],
) -> sqlx::Result<()> {
    let rows = jobs.iter().zip(ids).filter_map(|(job, id)| {
        let expires = micros(job.expires?);
        let due = match job.due {
            CheckedDue::After(delay) => format!("now_us() + {}", micros(delay)),
            CheckedDue::At(time) => format!("greatest({}, now_us())", time.0),
        };
        Some(format!("({due} + {expires}, {id})"))
    });
    let rows: Vec<String> = rows.collect();
    let text = format!("insert into jobq_expiring (start_by, job_id) values {}", rows.join(", "));
    if execute(connection, schema, &text).await? != rows.len() as u64 {
        return Err(killed());
    }
    Ok(())
}

impl Sealed for &MySqlPool {}
impl EnqueueTarget for &MySqlPool {
    async fn write(self, jobs: Vec<CheckedJob>, schema: Schema) -> Result<Vec<Enqueued>> {
        let pool = self.clone();
        in_a_task(async move { insert_owned(&pool, &schema, &jobs).await }).await
    }
}

targets!(&mut MySqlConnection, &mut PoolConnection<MySql>, &mut Transaction<'_, MySql>);
