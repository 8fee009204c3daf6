//! Enqueueing.

use std::time::Duration;

use jobq_core::job::JobId;
use jobq_core::time::micros;
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnection, PgPool, Postgres};
use sqlx::{Connection, Executor, Transaction};

use super::{
    Checkout, Error, PostgresStore, Result, Schema, Time, channel, is_connection_loss, sql,
};
use crate::context::CompleteTarget;
use crate::enqueue::EnqueueTarget;
use crate::enqueue::sealed::Sealed;
use crate::job::{CheckedDue, CheckedJob};
use crate::store::{Completion, in_a_task};
use crate::wake;

/// The most jobs, and the most bytes of their payloads, metadata and tags, that one statement writes.
const CHUNK_JOBS: usize = 5_000;
const CHUNK_BYTES: usize = 16 * 1024 * 1024;

/// Tries at an insert that the server refused for a passing reason (deadlock, serialization).
const TRIES: u32 = 5;

impl PostgresStore {
    pub(super) async fn insert(&self, jobs: Vec<CheckedJob>) -> Result<Vec<JobId>> {
        (&self.pool).write(jobs, self.schema.clone()).await
    }
}

/// Writes jobs in a transaction of our own.
async fn insert_owned(pool: &PgPool, schema: &Schema, jobs: &[CheckedJob]) -> Result<Vec<JobId>> {
    let action = "enqueue jobs";
    if jobs.is_empty() {
        return Ok(Vec::new());
    }
    let mut tried = 0;
    loop {
        tried += 1;
        let connection = pool.acquire().await.map_err(Error::database(action))?;
        let mut connection = Checkout(Some(connection));
        // The ids come first: if the connection breaks, the caller knows which jobs to look for.
        let ids: Vec<i64> = sqlx::query_scalar(sql(
            schema,
            "select nextval('jobq.jobs_id_seq') from generate_series(1, $1)",
        ))
        .bind(jobs.len() as i64)
        .fetch_all(&mut *connection)
        .await
        .map_err(Error::database(action))?;
        match write(&mut connection, schema, jobs, &ids).await {
            Ok(()) => {
                connection.hand_back();
                wake::poke();
                return Ok(ids.into_iter().map(JobId).collect());
            }
            Err(source) if is_connection_loss(&source) => {
                return Err(Error::CommitUnknown {
                    ids: ids.into_iter().map(JobId).collect(),
                    source,
                });
            }
            Err(source) if tried < TRIES && crate::error::is_transient(&source) => {
                let wait = Duration::from_millis(10 << tried).mul_f64(rand::random());
                tokio::time::sleep(wait).await;
            }
            Err(source) => return Err(Error::database(action)(source)),
        }
    }
}

/// Writes jobs under ids of our own, all or none.
async fn write(
    connection: &mut Checkout,
    schema: &Schema,
    jobs: &[CheckedJob],
    ids: &[i64],
) -> sqlx::Result<()> {
    let chunks = chunks(jobs);
    let whole = chunks.len() == 1;
    if !whole {
        connection.execute("begin isolation level read committed").await?;
    }
    let mut done = 0;
    for chunk in chunks {
        insert_chunk(connection, schema, chunk, Some(&ids[done..done + chunk.len()])).await?;
        done += chunk.len();
    }
    if !whole {
        connection.execute("commit").await?;
    }
    Ok(())
}

/// Writes jobs on the caller's connection, in whatever transaction it has open.
async fn insert_on(
    connection: &mut PgConnection,
    schema: &Schema,
    jobs: &[CheckedJob],
) -> Result<Vec<JobId>> {
    let chunks = chunks(jobs);
    let written = if chunks.len() < 2 || has_begun(connection).await? {
        insert_chunks(connection, schema, chunks).await
    } else {
        // Without a transaction each statement would be one, and a failure leave half of the jobs.
        async {
            let mut tx = connection.begin().await?;
            let ids = insert_chunks(&mut tx, schema, chunks).await?;
            tx.commit().await?;
            Ok(ids)
        }
        .await
    };
    wake::poke();
    written.map_err(|source| match &source {
        sqlx::Error::Database(error) if error.code().as_deref() == Some("40001") => {
            Error::Serialization(source)
        }
        _ => Error::database("enqueue jobs")(source),
    })
}

/// Whether a transaction is open, however it was begun.
async fn has_begun(connection: &mut PgConnection) -> Result<bool> {
    let probe = "savepoint jobq_probe; release savepoint jobq_probe";
    match connection.execute(probe).await {
        Ok(_) => Ok(true),
        // There is no transaction to have a savepoint in.
        Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some("25P01") => Ok(false),
        Err(source) => Err(Error::database("enqueue jobs")(source)),
    }
}

async fn insert_chunks(
    connection: &mut PgConnection,
    schema: &Schema,
    chunks: Vec<&[CheckedJob]>,
) -> sqlx::Result<Vec<JobId>> {
    let mut ids = Vec::new();
    for chunk in chunks {
        ids.extend(insert_chunk(connection, schema, chunk, None).await?);
    }
    Ok(ids)
}

/// Cuts jobs into pieces that one statement writes well.
fn chunks(jobs: &[CheckedJob]) -> Vec<&[CheckedJob]> {
    let mut chunks = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (index, job) in jobs.iter().enumerate() {
        let size = job.size();
        if index > start && (index - start >= CHUNK_JOBS || bytes + size > CHUNK_BYTES) {
            chunks.push(&jobs[start..index]);
            (start, bytes) = (index, 0);
        }
        bytes += size;
    }
    if start < jobs.len() {
        chunks.push(&jobs[start..]);
    }
    chunks
}

/// Writes jobs with one statement and, unless one was just sent, a wake-up for each band.
async fn insert_chunk(
    connection: &mut PgConnection,
    schema: &Schema,
    jobs: &[CheckedJob],
    ids: Option<&[i64]>,
) -> sqlx::Result<Vec<JobId>> {
    let mut kinds = Vec::with_capacity(jobs.len());
    let mut queues = Vec::with_capacity(jobs.len());
    let mut delays = Vec::with_capacity(jobs.len());
    let mut times = Vec::with_capacity(jobs.len());
    let mut priorities = Vec::with_capacity(jobs.len());
    let mut max_attempts = Vec::with_capacity(jobs.len());
    let mut max_crashes = Vec::with_capacity(jobs.len());
    let mut tags = Vec::with_capacity(jobs.len());
    let mut metadata = Vec::with_capacity(jobs.len());
    let mut payloads = Vec::with_capacity(jobs.len());
    for job in jobs {
        let (delay, time) = match job.due {
            CheckedDue::After(delay) => (micros(delay), None),
            CheckedDue::At(time) => (0, Some(Time(time))),
        };
        kinds.push(&*job.kind);
        queues.push(&*job.queue);
        delays.push(delay);
        times.push(time);
        priorities.push(job.priority);
        max_attempts.push(job.max_attempts as i32);
        max_crashes.push(job.max_crashes as i16);
        tags.push(crate::store::tags_json(&job.tags));
        metadata.push(job.metadata.as_deref());
        payloads.push(&*job.payload);
    }
    // `run_after` is never before the clock: a row must not appear behind what workers have passed.
    // The gate is a sequence because its value takes effect at once: a NOTIFY in every transaction
    // would make all commits of the database wait for each other.
    let statement = if ids.is_some() { INSERT_WITH_IDS } else { INSERT };
    let mut ids: Vec<i64> = sqlx::query_scalar(sql(schema, statement))
        .bind(kinds)
        .bind(queues)
        .bind(delays)
        .bind(times)
        .bind(priorities)
        .bind(max_attempts)
        .bind(max_crashes)
        .bind(tags)
        .bind(metadata)
        .bind(payloads)
        .bind(channel(schema))
        .bind(ids)
        .fetch_all(connection)
        .await?;
    ids.sort_unstable();
    Ok(ids.into_iter().map(JobId).collect())
}

macro_rules! insert_statement {
    ($columns:literal, $values:literal, $overriding:literal) => {
        concat!(
            "with added as (
                 insert into jobq.jobs (",
            $columns,
            "kind, queue, run_after, priority, band, max_attempts, max_crashes, tags, metadata, payload)
                 ",
            $overriding,
            "
                 select ",
            $values,
            "job.kind, job.queue,
                        greatest(
                            coalesce(job.at, clock_timestamp() + job.delay * interval '1 microsecond'),
                            clock_timestamp()
                        ),
                        job.priority, job.priority, job.max_attempts, job.max_crashes, job.tags,
                        job.metadata, job.payload
                 from unnest($1::text[], $2::text[], $3::int8[], $4::timestamptz[], $5::int2[],
                             $6::int4[], $7::int2[], $8::text[], $9::text[], $10::text[], $12::int8[])
                      with ordinality
                      as job (kind, queue, delay, at, priority, max_attempts, max_crashes, tags,
                              metadata, payload, id, n)
                 order by job.n
                 returning id, queue, band, run_after
             ),
             gate as materialized (
                 select setval('jobq.wake_gate', (extract(epoch from clock_timestamp()) * 1000)::int8)
                 from jobq.wake_gate
                 where (extract(epoch from clock_timestamp()) * 1000)::int8
                       not between last_value - 100000 and last_value + 10
             ),
             woken as materialized (
                 select pg_notify($11, band || ',' || (extract(epoch from min(run_after)) * 1000000)::int8 || ',' || queue)
                 from added
                 where exists (select from gate)
                 group by queue, band
             )
             select id from added where (select count(*) from woken) >= 0"
        )
    };
}

const INSERT: &str = insert_statement!("", "", "");
const INSERT_WITH_IDS: &str = insert_statement!("id, ", "job.id, ", "overriding system value");

impl Sealed for &PgPool {}
impl EnqueueTarget for &PgPool {
    async fn write(self, jobs: Vec<CheckedJob>, schema: Schema) -> Result<Vec<JobId>> {
        let pool = self.clone();
        in_a_task(async move { insert_owned(&pool, &schema, &jobs).await }).await
    }
}

targets!(&mut PgConnection, &mut PoolConnection<Postgres>, &mut Transaction<'_, Postgres>);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_bounded_in_all_that_jobs_carry() {
        let small = CheckedJob {
            kind: "k".into(),
            queue: "default".into(),
            payload: "{}".to_owned(),
            due: CheckedDue::After(Duration::ZERO),
            priority: 0,
            max_attempts: 1,
            max_crashes: 1,
            tags: Vec::new(),
            metadata: None,
        };
        let text = "x".repeat(CHUNK_BYTES / 4 + 1);
        for large in [
            CheckedJob { payload: text.clone(), ..small.clone() },
            CheckedJob { metadata: Some(text.clone()), ..small.clone() },
            CheckedJob { tags: vec![text], ..small.clone() },
        ] {
            let sizes =
                |jobs: &[CheckedJob]| chunks(jobs).iter().map(|c| c.len()).collect::<Vec<_>>();
            assert_eq!(sizes(&vec![large; 8]), [3, 3, 2]);
        }
        assert_eq!(chunks(&vec![small; CHUNK_JOBS + 1]).len(), 2);
        assert!(chunks(&[]).is_empty());
    }
}
