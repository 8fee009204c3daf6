//! Enqueueing.

use std::time::Duration;

use jobq_core::job::JobId;
use jobq_core::time::micros;
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnection, PgPool, Postgres};
use sqlx::{Connection, Executor, Transaction};

use super::{
    Checkout, Error, PostgresStore, Result, Schema, Time, channel, is_conflict, is_connection_loss,
    sql, unique,
};
use crate::context::CompleteTarget;
use crate::enqueue::sealed::Sealed;
use crate::enqueue::{EnqueueTarget, Enqueued};
use crate::job::{CheckedDue, CheckedJob};
use crate::store::twins::{UniqueCall, lasting};
use crate::store::{Completion, in_a_task};
use crate::wake;

/// The most jobs, and the most bytes of their payloads, metadata and tags, that one statement writes.
const CHUNK_JOBS: usize = 5_000;
const CHUNK_BYTES: usize = 16 * 1024 * 1024;

/// Tries at an insert that the server refused for a passing reason (deadlock, serialization).
const TRIES: u32 = 5;

impl PostgresStore {
    pub(super) async fn insert(&self, jobs: Vec<CheckedJob>) -> Result<Vec<Enqueued>> {
        (&self.pool).write(jobs, self.schema.clone()).await
    }
}

/// Writes jobs in a transaction of our own.
async fn insert_owned(
    pool: &PgPool,
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
        // The ids come first: if the connection breaks, the caller knows which jobs to look for.
        let count = call.as_ref().map_or(jobs.len(), |call| call.jobs.len());
        let ids = reserve(&mut connection, schema, count).await.map_err(Error::database(action))?;
        let written = match &call {
            None => write(&mut connection, schema, jobs, &ids).await.map_err(refused),
            Some(call) => write_unique(&mut connection, schema, call, &ids).await,
        };
        match written {
            Ok(enqueued) => {
                connection.hand_back();
                wake::poke();
                return Ok(enqueued);
            }
            Err(error) => match error.into_driver_error() {
                Ok(source) if is_connection_loss(&source) => {
                    return Err(Error::CommitUnknown {
                        ids: ids.into_iter().map(JobId).collect(),
                        source,
                    });
                }
                Ok(source) if tried < TRIES && crate::error::is_transient(&source) => {
                    let wait = Duration::from_millis(10 << tried).mul_f64(rand::random());
                    tokio::time::sleep(wait).await;
                }
                Ok(source) => return Err(Error::database(action)(source)),
                Err(error) => {
                    // A twin that was refused has been rolled back. Of anything else nothing is known.
                    if matches!(error, Error::Duplicate { .. }) {
                        connection.hand_back();
                    }
                    return Err(error);
                }
            },
        }
    }
}

/// Reserves ids.
async fn reserve(
    connection: &mut PgConnection,
    schema: &Schema,
    jobs: usize,
) -> sqlx::Result<Vec<i64>> {
    let text = "select nextval('jobq.jobs_id_seq') from generate_series(1, $1)";
    sqlx::query_scalar(sql(schema, text)).bind(jobs as i64).fetch_all(connection).await
}

/// Writes jobs under ids of our own, all or none.
async fn write(
    connection: &mut Checkout,
    schema: &Schema,
    jobs: &[CheckedJob],
    ids: &[i64],
) -> sqlx::Result<Vec<Enqueued>> {
    let whole = chunks(jobs).len() == 1;
    if !whole {
        connection.execute("begin isolation level read committed").await?;
    }
    with_ids(connection, schema, jobs, ids).await?;
    if !whole {
        connection.execute("commit").await?;
    }
    Ok(ids.iter().map(|id| Enqueued::Inserted(JobId(*id))).collect())
}

/// The same for a call with unique jobs.
async fn write_unique(
    connection: &mut Checkout,
    schema: &Schema,
    call: &UniqueCall,
    ids: &[i64],
) -> Result<Vec<Enqueued>> {
    connection.execute("begin isolation level read committed").await.map_err(refused)?;
    let enqueued = unique::insert(connection, schema, call, ids).await;
    let end = if enqueued.is_ok() { "commit" } else { "rollback" };
    connection.execute(end).await.map_err(refused)?;
    enqueued
}

/// Writes jobs on the caller's connection, in whatever transaction it has open.
async fn insert_on(
    connection: &mut PgConnection,
    schema: &Schema,
    jobs: &[CheckedJob],
) -> Result<Vec<Enqueued>> {
    if let Some(call) = UniqueCall::of(jobs)? {
        let enqueued = insert_unique_on(connection, schema, &call).await;
        wake::poke();
        return enqueued;
    }
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
    let ids = written.map_err(refused)?;
    Ok(ids.into_iter().map(Enqueued::Inserted).collect())
}

/// The same for a call with unique jobs, which takes several statements.
async fn insert_unique_on(
    connection: &mut PgConnection,
    schema: &Schema,
    call: &UniqueCall,
) -> Result<Vec<Enqueued>> {
    let ids = reserve(connection, schema, call.jobs.len()).await.map_err(refused)?;
    if has_begun(connection).await? {
        // One that is to fail because of a twin leaves nothing of itself, and the rest as it was.
        connection.execute("savepoint jobq_enqueue").await.map_err(refused)?;
        let enqueued = unique::insert(connection, schema, call, &ids).await;
        let end = if enqueued.is_ok() {
            "release savepoint jobq_enqueue"
        } else {
            "rollback to savepoint jobq_enqueue; release savepoint jobq_enqueue"
        };
        connection.execute(end).await.map_err(refused)?;
        enqueued
    } else {
        let begin = "begin isolation level read committed";
        let mut tx = connection.begin_with(begin).await.map_err(refused)?;
        let enqueued = unique::insert(&mut tx, schema, call, &ids).await;
        // By itself it would be rolled back with the connection's next use, and hold its keys till then.
        let ended = if enqueued.is_ok() { tx.commit().await } else { tx.rollback().await };
        enqueued.and_then(|enqueued| ended.map(|()| enqueued).map_err(refused))
    }
}

/// An enqueue that the database has refused.
pub(super) fn refused(source: sqlx::Error) -> Error {
    if is_conflict(&source) {
        Error::Serialization(source)
    } else {
        Error::database("enqueue jobs")(source)
    }
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

/// Writes jobs under ids of our own.
pub(super) async fn with_ids(
    connection: &mut PgConnection,
    schema: &Schema,
    jobs: &[CheckedJob],
    ids: &[i64],
) -> sqlx::Result<()> {
    let mut done = 0;
    for chunk in chunks(jobs) {
        insert_chunk(connection, schema, chunk, Some(&ids[done..done + chunk.len()])).await?;
        done += chunk.len();
    }
    Ok(())
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
    // Shorter than the others where no job is unique: what is missing is null.
    let (mut unique_keys, mut unique_scopes) = (Vec::new(), Vec::new());
    let mut last: Vec<Option<i64>> = Vec::new();
    // The same where none expires.
    let mut expires: Vec<Option<i64>> = Vec::new();
    // The same where no job has a key.
    let (mut job_keys, mut on_blocks) = (Vec::new(), Vec::new());
    for (index, job) in jobs.iter().enumerate() {
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
        if let Some(time) = job.expires {
            expires.resize(index, None);
            expires.push(Some(micros(time)));
        }
        if let Some(unique) = job.unique {
            unique_keys.resize(index, None);
            unique_scopes.resize(index, None);
            unique_keys.push(Some(unique.key.0.to_vec()));
            unique_scopes.push(Some(unique.scope.as_str()));
            last.resize(index, None);
            last.push(lasting(unique.scope));
        }
        if let Some(key) = &job.key {
            job_keys.resize(index, None);
            on_blocks.resize(index, None);
            job_keys.push(Some(&*key.text));
            on_blocks.push(Some(key.on_block.as_str()));
        }
    }
    // `run_after` is never before the clock: a row must not appear behind what workers have passed.
    // The gate is a sequence because its value takes effect at once: a NOTIFY in every transaction
    // would make all commits of the database wait for each other.
    let statement = match ids {
        None => INSERT,
        Some(_) if unique_keys.is_empty() => INSERT_WITH_IDS,
        Some(_) => INSERT_UNIQUE,
    };
    let mut insert = sqlx::query_scalar(sql(schema, statement))
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
        .bind(unique_keys)
        .bind(unique_scopes)
        .bind(job_keys)
        .bind(on_blocks)
        .bind(expires);
    if statement == INSERT_UNIQUE {
        // Planned anew: a plan from when the tables were empty would read all of them.
        insert = insert.bind(last).persistent(false);
    }
    let mut ids: Vec<i64> = insert.fetch_all(connection).await?;
    ids.sort_unstable();
    Ok(ids.into_iter().map(JobId).collect())
}

macro_rules! insert_statement {
    ($columns:literal, $values:literal, $overriding:literal, $also:literal) => {
        concat!(
            "with added as (
                 insert into jobq.jobs (",
            $columns,
            "kind, queue, run_after, priority, band, max_attempts, max_crashes, tags, metadata, payload,
                     unique_key, unique_scope, job_key, on_block, start_by)
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
                        job.metadata, job.payload, job.unique_key, job.unique_scope,
                        job.job_key, job.on_block,
                        case when job.expires is not null then
                            greatest(
                                coalesce(job.at, clock_timestamp() + job.delay * interval '1 microsecond'),
                                clock_timestamp()
                            ) + job.expires * interval '1 microsecond'
                        end
                 from unnest($1::text[], $2::text[], $3::int8[], $4::timestamptz[], $5::int2[],
                             $6::int4[], $7::int2[], $8::text[], $9::text[], $10::text[], $12::int8[],
                             $13::bytea[], $14::text[], $15::text[], $16::text[], $17::int8[])
                      with ordinality
                      as job (kind, queue, delay, at, priority, max_attempts, max_crashes, tags,
                              metadata, payload, id, unique_key, unique_scope, job_key,
                              on_block, expires, n)
                 order by job.n
                 returning id, queue, band, run_after, unique_key, unique_scope
             ),
             ",
            $also,
            "
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

const INSERT: &str = insert_statement!("", "", "", "");
const INSERT_WITH_IDS: &str = insert_statement!("id, ", "job.id, ", "overriding system value", "");
// Together with the jobs it sets for how long those keep their twins out that do it for a time.
const INSERT_UNIQUE: &str = insert_statement!(
    "id, ",
    "job.id, ",
    "overriding system value",
    "lasting as (
         update jobq.uniques as changed
         set expires_at = coalesce(
             clock_timestamp() + held.lasting * interval '1 microsecond', 'infinity'
         )
         from (
             select place.tid, twin.lasting
             from added
             join unnest($12::int8[], $18::int8[]) as twin (id, lasting) on twin.id = added.id
             cross join lateral (
                 select ctid as tid
                 from jobq.uniques
                 where unique_key = added.unique_key and job_id = added.id
                 for update
             ) as place
             where added.unique_scope in ('for', 'forever')
         ) as held
         where changed.ctid = held.tid
     ),"
);

impl Sealed for &PgPool {}
impl EnqueueTarget for &PgPool {
    async fn write(self, jobs: Vec<CheckedJob>, schema: Schema) -> Result<Vec<Enqueued>> {
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
            expires: None,
            tags: Vec::new(),
            metadata: None,
            unique: None,
            key: None,
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
