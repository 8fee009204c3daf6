//! Enqueueing.

use std::time::{Duration, Instant};

use jobq_core::job::JobId;
use jobq_core::time::micros;
use sqlx::Transaction;
use sqlx::pool::PoolConnection;
use sqlx::sqlite::{Sqlite, SqliteConnection, SqlitePool};

use super::{Error, PATIENCE, Result, Schema, SqliteStore, is_busy, json, on_callers, sql, unique};
use crate::context::CompleteTarget;
use crate::enqueue::sealed::Sealed;
use crate::enqueue::{EnqueueTarget, Enqueued};
use crate::job::{CheckedDue, CheckedJob};
use crate::store::twins::UniqueCall;
use crate::store::{Completion, tags_json};
use crate::wake;

impl SqliteStore {
    pub(super) async fn insert(&self, jobs: Vec<CheckedJob>) -> Result<Vec<Enqueued>> {
        if jobs.is_empty() {
            return Ok(Vec::new());
        }
        let insert = Insert::new(&jobs)?;
        let schema = self.schema.clone();
        let written = self.write(async move |locked| insert.run(locked, &schema).await);
        let enqueued = written.await.map_err(Error::database("enqueue jobs"))?;
        wake::poke();
        enqueued
    }
}

/// Writes jobs on a connection of the application's pool.
async fn insert_pooled(
    pool: &SqlitePool,
    schema: &Schema,
    jobs: &[CheckedJob],
) -> Result<Vec<Enqueued>> {
    let action = "enqueue jobs";
    if jobs.is_empty() {
        return Ok(Vec::new());
    }
    let insert = Insert::new(jobs)?;
    let patience_ends = Instant::now() + PATIENCE;
    let mut connection = pool.acquire().await.map_err(Error::database(action))?;
    loop {
        match insert.run(&mut connection, schema).await {
            Ok(enqueued) => {
                wake::poke();
                return enqueued;
            }
            Err(error) if is_busy(&error) && Instant::now() < patience_ends => {
                tokio::time::sleep(Duration::from_millis(20).mul_f64(rand::random())).await;
            }
            Err(source) => return Err(Error::database(action)(source)),
        }
    }
}

/// Writes jobs on the caller's connection, in whatever transaction it has open.
async fn insert_on(
    connection: &mut SqliteConnection,
    schema: &Schema,
    jobs: &[CheckedJob],
) -> Result<Vec<Enqueued>> {
    if jobs.is_empty() {
        return Ok(Vec::new());
    }
    let insert = Insert::new(jobs)?;
    let enqueued = insert.run(connection, schema).await.map_err(on_callers("enqueue jobs"))?;
    wake::poke();
    enqueued
}

/// How a call is written.
enum Insert {
    /// With one statement, as the table that it takes.
    Rows(String),
    /// Key by key.
    Unique(UniqueCall),
}

impl Insert {
    fn new(jobs: &[CheckedJob]) -> Result<Self> {
        Ok(match UniqueCall::of(jobs)? {
            Some(call) => Self::Unique(call),
            None => Self::Rows(rows(jobs)),
        })
    }

    async fn run(
        &self,
        connection: &mut SqliteConnection,
        schema: &Schema,
    ) -> sqlx::Result<Result<Vec<Enqueued>>> {
        match self {
            Self::Unique(call) => unique::insert(connection, schema, call).await,
            Self::Rows(rows) => {
                let ids = insert_rows(connection, schema, rows.clone()).await?;
                Ok(Ok(ids.into_iter().map(Enqueued::Inserted).collect()))
            }
        }
    }
}

/// Jobs as the table that the insert takes.
pub(super) fn rows(jobs: &[CheckedJob]) -> String {
    let rows = jobs.iter().map(|job| {
        let (delay, time) = match job.due {
            CheckedDue::After(delay) => (micros(delay), None),
            CheckedDue::At(time) => (0, Some(time.0)),
        };
        (
            &*job.kind,
            &*job.queue,
            delay,
            time,
            job.priority,
            job.max_attempts,
            job.max_crashes,
            tags_json(&job.tags),
            job.metadata.as_deref(),
            &*job.payload,
            job.unique.map(|unique| (unique.key.to_string(), unique.scope.as_str())),
            job.key.as_ref().map(|key| (&*key.text, key.on_block.as_str())),
            job.expires.map(micros),
        )
    });
    json(rows.collect::<Vec<_>>())
}

/// Writes jobs with one statement, however many: that makes it all or none on any connection, with
/// a transaction open or not.
pub(super) async fn insert_rows(
    connection: &mut SqliteConnection,
    schema: &Schema,
    rows: String,
) -> sqlx::Result<Vec<JobId>> {
    // `run_after` is never before the clock: a row must not appear behind what workers have passed.
    let mut ids: Vec<i64> = sqlx::query_scalar(sql(
        schema,
        "insert into jobq_jobs (
             kind, queue, run_after, priority, band, max_attempts, max_crashes, tags, metadata, payload,
             unique_key, unique_scope, job_key, on_block, start_by
         )
         select value ->> 0, value ->> 1,
                max(coalesce(value ->> 3, now_us() + (value ->> 2)), now_us()),
                value ->> 4, value ->> 4, value ->> 5, value ->> 6, value ->> 7, value ->> 8,
                value ->> 9, unhex(value ->> '$[10][0]'), value ->> '$[10][1]',
                value ->> '$[11][0]', value ->> '$[11][1]',
                max(coalesce(value ->> 3, now_us() + (value ->> 2)), now_us()) + (value ->> 12)
         from json_each(?1)
         order by key
         returning id",
    ))
    .bind(rows)
    .fetch_all(connection)
    .await?;
    // The ids ascend in the order of the rows, but `returning` promises no order.
    ids.sort_unstable();
    Ok(ids.into_iter().map(JobId).collect())
}

impl Sealed for &SqlitePool {}
impl EnqueueTarget for &SqlitePool {
    async fn write(self, jobs: Vec<CheckedJob>, schema: Schema) -> Result<Vec<Enqueued>> {
        insert_pooled(self, &schema, &jobs).await
    }
}

targets!(&mut SqliteConnection, &mut PoolConnection<Sqlite>, &mut Transaction<'_, Sqlite>);
