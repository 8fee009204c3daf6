//! Enqueueing.

use std::time::Duration;

use jobq_core::job::JobId;
use jobq_core::time::micros;
use sqlx::mysql::{MySql, MySqlConnection, MySqlPool};
use sqlx::pool::PoolConnection;
use sqlx::{Connection, Executor, Transaction};

use super::{Checkout, Error, MysqlStore, Result, Schema, killed, number, on_callers, sql};
use crate::context::CompleteTarget;
use crate::enqueue::EnqueueTarget;
use crate::enqueue::sealed::Sealed;
use crate::error::is_connection_loss;
use crate::job::{CheckedDue, CheckedJob};
use crate::store::{Completion, in_a_task, tags_json};
use crate::wake;

/// The most jobs, and the most bytes, that one statement writes: it must fit into a packet, and
/// MariaDB takes 16 MiB, some servers less.
const CHUNK_JOBS: usize = 500;
const CHUNK_BYTES: usize = 2 * 1024 * 1024;

/// With the `sql_mode` ORACLE, `begin` would be that of a block.
const BEGIN: &str = "start transaction";

/// Tries at an insert that the server refused for a passing reason (deadlock, lock wait).
const TRIES: u32 = 5;

impl MysqlStore {
    pub(super) async fn insert(&self, jobs: Vec<CheckedJob>) -> Result<Vec<JobId>> {
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
) -> Result<Vec<JobId>> {
    let action = "enqueue jobs";
    if jobs.is_empty() {
        return Ok(Vec::new());
    }
    let mut tried = 0;
    loop {
        tried += 1;
        let connection = pool.acquire().await.map_err(Error::database(action))?;
        let mut connection = Checkout(Some(connection));
        let written = async {
            connection.execute(BEGIN).await?;
            insert_chunks(&mut connection, schema, chunks(jobs)).await
        };
        match written.await {
            Ok(ids) => match connection.execute("commit and no chain").await {
                Ok(_) => {
                    connection.hand_back();
                    wake::poke();
                    return Ok(ids);
                }
                Err(source) if is_connection_loss(&source) => {
                    return Err(Error::CommitUnknown { ids, source });
                }
                Err(source) => return Err(Error::database(action)(source)),
            },
            Err(source)
                if tried < TRIES
                    && !is_connection_loss(&source)
                    && crate::error::is_transient(&source) =>
            {
                let wait = Duration::from_millis(10 << tried).mul_f64(rand::random());
                tokio::time::sleep(wait).await;
            }
            Err(source) => return Err(Error::database(action)(source)),
        }
    }
}

/// Writes jobs on the caller's connection, in whatever transaction it has open.
async fn insert_on(
    connection: &mut MySqlConnection,
    schema: &Schema,
    jobs: &[CheckedJob],
) -> Result<Vec<JobId>> {
    let chunks = chunks(jobs);
    let written = if chunks.len() < 2 {
        insert_chunks(connection, schema, chunks).await
    } else if has_begun(connection).await? {
        // A statement that fails does not fail the transaction: it could be committed with half of
        // the jobs.
        async {
            connection.execute("savepoint jobq_enqueue").await?;
            let written = insert_chunks(connection, schema, chunks).await;
            let end = if written.is_ok() { "release" } else { "rollback to" };
            let end = sqlx::AssertSqlSafe(format!("{end} savepoint jobq_enqueue"));
            let ended = connection.execute(end).await;
            // After a deadlock there is nothing to go back to; its own error says more.
            written.and_then(|ids| ended.map(|_| ids))
        }
        .await
    } else {
        // Without a transaction each statement would be one, and a failure leave half of the jobs.
        async {
            let mut tx = connection.begin_with(BEGIN).await?;
            let ids = insert_chunks(&mut tx, schema, chunks).await?;
            tx.commit().await?;
            Ok(ids)
        }
        .await
    };
    wake::poke();
    written.map_err(on_callers("enqueue jobs"))
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

async fn insert_chunks(
    connection: &mut MySqlConnection,
    schema: &Schema,
    chunks: Vec<&[CheckedJob]>,
) -> sqlx::Result<Vec<JobId>> {
    let mut ids = Vec::new();
    for chunk in chunks {
        ids.extend(insert_chunk(connection, schema, chunk).await?);
    }
    Ok(ids)
}

/// Cuts jobs into pieces that one statement writes well.
fn chunks(jobs: &[CheckedJob]) -> Vec<&[CheckedJob]> {
    let size = |job: &CheckedJob| {
        job.payload.len()
            + job.metadata.as_ref().map_or(0, String::len)
            + job.tags.iter().map(String::len).sum::<usize>()
    };
    let mut chunks = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (index, job) in jobs.iter().enumerate() {
        if index > start && (index - start >= CHUNK_JOBS || bytes + size(job) > CHUNK_BYTES) {
            chunks.push(&jobs[start..index]);
            (start, bytes) = (index, 0);
        }
        bytes += size(job);
    }
    if start < jobs.len() {
        chunks.push(&jobs[start..]);
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
    let mut text = "insert into jobq_jobs (
             kind, queue, run_after, priority, band, max_attempts, max_crashes, tags, metadata, payload
         ) values "
        .to_owned();
    for index in 0..jobs.len() {
        text.push_str(if index == 0 { "" } else { ", " });
        text.push_str(
            "(?, ?, greatest(coalesce(?, insert_now_us() + ?), insert_now_us()), ?, ?, ?, ?,
              convert(? using utf8mb4), convert(? using utf8mb4), convert(? using utf8mb4))",
        );
    }
    // A text for each number of jobs would fill the connection's cache of statements.
    let mut insert = sqlx::query(sql(schema, &text)).persistent(jobs.len() == 1);
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
            .bind(job.payload.as_bytes());
    }
    let written = insert.execute(connection).await?;
    if written.rows_affected() != jobs.len() as u64 {
        return Err(killed());
    }
    let first = written.last_insert_id() as i64;
    Ok((0..jobs.len() as i64).map(|n| JobId(first + n * step)).collect())
}

impl Sealed for &MySqlPool {}
impl EnqueueTarget for &MySqlPool {
    async fn write(self, jobs: Vec<CheckedJob>, schema: Schema) -> Result<Vec<JobId>> {
        let pool = self.clone();
        in_a_task(async move { insert_owned(&pool, &schema, &jobs).await }).await
    }
}

targets!(&mut MySqlConnection, &mut PoolConnection<MySql>, &mut Transaction<'_, MySql>);
