//! The keys of unique jobs.

use jobq_core::job::JobId;
use jobq_core::time::micros;
use jobq_core::unique::OnConflict;
use sqlx::sqlite::SqliteConnection;
use sqlx::{Connection, Executor};

use super::{Result, Schema, SqliteStore, code, insert, json, sql};
use crate::enqueue::Enqueued;
use crate::job::{CheckedDue, CheckedJob};
use crate::store::twins::{Held, Holder, Replace, Retake, UniqueCall, lasting, taken_anew};
use crate::unique::UniqueKey;

/// Writes what is to be written of a call, all or none, with a transaction open or not.
pub(super) async fn insert(
    connection: &mut SqliteConnection,
    schema: &Schema,
    call: &UniqueCall,
) -> sqlx::Result<Result<Vec<Enqueued>>> {
    /// An SQL error: here, that a transaction was begun by a statement of the caller's, which the
    /// driver does not know of.
    const ERROR: u32 = 1;
    let error = match connection.begin().await {
        Ok(mut tx) => {
            let enqueued = write(&mut tx, schema, call).await?;
            match enqueued {
                Ok(_) => tx.commit().await?,
                // It is a twin that was refused.
                Err(_) => tx.rollback().await?,
            }
            return Ok(enqueued);
        }
        Err(error) => error,
    };
    if code(&error) != Some(ERROR) {
        return Err(error);
    }
    connection.execute("savepoint jobq_enqueue").await?;
    let enqueued = write(connection, schema, call).await;
    if !matches!(enqueued, Ok(Ok(_))) {
        connection.execute("rollback to jobq_enqueue").await?;
    }
    connection.execute("release jobq_enqueue").await?;
    enqueued
}

/// The first statement writes, so that nothing is read before the lock is ours.
async fn write(
    connection: &mut SqliteConnection,
    schema: &Schema,
    call: &UniqueCall,
) -> sqlx::Result<Result<Vec<Enqueued>>> {
    take(connection, schema, call).await?;
    let mut holders = vec![Holder::New; call.jobs.len()];
    let keys = call.unique().map(|(key, ..)| key);
    for (key, held) in look(connection, schema, keys).await? {
        let Some(place) = call.place(&key) else { continue };
        match call.judge(place, held) {
            Err(duplicate) => return Ok(Err(duplicate)),
            Ok(None) => {}
            Ok(Some(Replace::No)) => {
                holders[place] = Holder::Existing { id: held.job, replaced: false };
            }
            Ok(Some(Replace::Try)) => {
                replace(connection, schema, held.job, &call.jobs[place]).await?;
                holders[place] = Holder::Existing { id: held.job, replaced: true };
            }
        }
    }
    let is_new = |place: &usize| holders[*place] == Holder::New;
    let new: Vec<usize> = (0..call.jobs.len()).filter(is_new).collect();
    let jobs: Vec<CheckedJob> = new.iter().map(|place| call.jobs[*place].clone()).collect();
    let ids = insert::insert_rows(connection, schema, insert::rows(&jobs)).await?;
    for (place, id) in new.iter().zip(&ids) {
        if call.is_put_off_too_far(*place) {
            replace(connection, schema, *id, &call.jobs[*place]).await?;
        }
    }
    let owned = call.unique().filter_map(|(key, place, job)| {
        let id = ids[new.binary_search(&place).ok()?];
        let scope = job.unique?.scope;
        Some((key.to_string(), id.0, scope.as_str(), lasting(scope)))
    });
    own(connection, schema, json(owned.collect::<Vec<_>>())).await?;
    Ok(Ok(call.told(&holders, &ids)))
}

/// Takes the keys that nobody has, for a job that has no id yet. As long as it has none, it keeps
/// nobody out.
async fn take(
    connection: &mut SqliteConnection,
    schema: &Schema,
    call: &UniqueCall,
) -> sqlx::Result<()> {
    let keys = call
        .unique()
        .filter_map(|(key, _, job)| Some((key.to_string(), job.unique?.scope.as_str())));
    sqlx::query(sql(
        schema,
        "insert into jobq_uniques (unique_key, job_id, scope, expires_at)
         select unhex(value ->> 0), 0, value ->> 1, 0
         from json_each(?1)
         where true
         on conflict do nothing",
    ))
    .bind(json(keys.collect::<Vec<_>>()))
    .execute(connection)
    .await?;
    Ok(())
}

/// Whether a key keeps others out. Everything is looked up in a select of its own: in a join the
/// statistics of a small table make the planner read all of it.
macro_rules! live {
    () => {
        "coalesce(
             case scope
                 when 'until_started' then (
                     select token = 0 and coalesce(start_by > now_us(), 1)
                     from jobq_jobs where id = job_id
                 )
                 when 'until_finished' then (
                     select leased_by <> 0 or coalesce(start_by > now_us(), 1)
                     from jobq_jobs where id = job_id
                 )
                 else expires_at > now_us()
             end,
             0
         )"
    };
}

/// A key as it is stored.
fn key(bytes: Vec<u8>) -> Option<UniqueKey> {
    Some(UniqueKey(bytes.try_into().ok()?))
}

/// The keys that other jobs have, and whether they keep others out.
async fn look(
    connection: &mut SqliteConnection,
    schema: &Schema,
    keys: impl Iterator<Item = UniqueKey>,
) -> sqlx::Result<Vec<(UniqueKey, Held)>> {
    let keys: Vec<UniqueKey> = keys.collect();
    let texts: Vec<String> = keys.iter().map(UniqueKey::to_string).collect();
    let rows: Vec<(i64, Option<String>)> = sqlx::query_as(sql(
        schema,
        concat!(
            "select key, (
                 select json_array(
                     job_id, taken, ",
            live!(),
            ", coalesce((select leased_by = 0 from jobq_jobs where id = job_id), 0)
                 )
                 from jobq_uniques
                 where unique_key = unhex(value) and job_id <> 0
             )
             from json_each(?1)"
        ),
    ))
    .bind(json(texts))
    .fetch_all(connection)
    .await?;
    let held = rows.into_iter().filter_map(|(n, held)| {
        let (job, taken, live, idle): (i64, i64, i64, i64) = serde_json::from_str(&held?).ok()?;
        let held = Held { job: JobId(job), taken, live: live != 0, idle: idle != 0 };
        Some((*keys.get(n as usize)?, held))
    });
    Ok(held.collect())
}

/// Gives a job that is not running the payload, time, expiry and priority of another.
async fn replace(
    connection: &mut SqliteConnection,
    schema: &Schema,
    id: JobId,
    job: &CheckedJob,
) -> sqlx::Result<()> {
    let (delay, time) = match job.due {
        CheckedDue::After(delay) => (micros(delay), None),
        CheckedDue::At(time) => (0, Some(time.0)),
    };
    let max_wait = match job.unique.map(|unique| unique.on_conflict) {
        Some(OnConflict::Debounce { max_wait }) => micros(max_wait),
        _ => micros(jobq_core::duration::MAX),
    };
    // What waits goes on waiting. `run_after` is never before the clock: a row must not appear behind
    // what workers have passed.
    sqlx::query(sql(
        schema,
        "update jobq_jobs
         set payload = ?2,
             priority = ?3,
             band = ?3,
             run_after = case
                 when run_after = 9223372036854775807 then run_after
                 else max(now_us(), min(coalesce(?5, now_us() + ?4), created_at + ?6))
             end,
             start_by = max(now_us(), min(coalesce(?5, now_us() + ?4), created_at + ?6)) + ?7
         where id = ?1",
    ))
    .bind(id.0)
    .bind(&job.payload)
    .bind(job.priority)
    .bind(delay)
    .bind(time)
    .bind(max_wait)
    .bind(job.expires.map(micros))
    .execute(connection)
    .await?;
    Ok(())
}

/// Writes down the jobs that have keys now.
async fn own(connection: &mut SqliteConnection, schema: &Schema, rows: String) -> sqlx::Result<()> {
    // As an insert, which looks each key up by itself, whatever the statistics say.
    sqlx::query(sql(
        schema,
        "insert into jobq_uniques (unique_key, job_id, scope, expires_at)
         select unhex(value ->> 0), value ->> 1, value ->> 2,
                coalesce(now_us() + (value ->> 3), 9223372036854775807)
         from json_each(?1)
         where true
         on conflict do update
         set job_id = excluded.job_id,
             scope = excluded.scope,
             expires_at = excluded.expires_at,
             taken = taken + 1",
    ))
    .bind(rows)
    .execute(connection)
    .await?;
    Ok(())
}

/// Takes the keys of jobs that are to be redriven, and sets those aside whose key another job has.
pub(super) async fn retake(
    connection: &mut SqliteConnection,
    schema: &Schema,
    retake: &mut Retake,
) -> sqlx::Result<()> {
    let held = look(connection, schema, retake.keys()).await?;
    retake.set_aside(held);
    let rows = retake.holders().map(|(key, job, scope)| (key.to_string(), job.0, scope));
    sqlx::query(sql(
        schema,
        "insert into jobq_uniques (unique_key, job_id, scope, taken)
         select unhex(value ->> 0), value ->> 1, value ->> 2, ?2
         from json_each(?1)
         where true
         on conflict do update
         set job_id = excluded.job_id, scope = excluded.scope, taken = excluded.taken",
    ))
    .bind(json(rows.collect::<Vec<_>>()))
    .bind(taken_anew())
    .execute(connection)
    .await?;
    Ok(())
}

impl SqliteStore {
    /// Looks first and writes only if there is something to forget.
    pub(super) async fn prune_keys(
        &self,
        after: Option<UniqueKey>,
        limit: u32,
    ) -> sqlx::Result<Option<UniqueKey>> {
        let page: Vec<(Vec<u8>, bool)> = sqlx::query_as(self.sql(concat!(
            "select unique_key, ",
            live!(),
            " from jobq_uniques where unique_key > ?1 order by unique_key limit ?2"
        )))
        .bind(after.map_or_else(Vec::new, |key| key.0.to_vec()))
        .bind(i64::from(limit))
        .fetch_all(&mut *self.reader().await?)
        .await?;
        let last = page.last().and_then(|(bytes, _)| key(bytes.clone()));
        let is_whole = page.len() < limit as usize;
        let stale = page.into_iter().filter(|(_, live)| !live).filter_map(|(bytes, _)| key(bytes));
        let stale: Vec<String> = stale.map(|key| key.to_string()).collect();
        if !stale.is_empty() {
            let schema = self.schema.clone();
            self.write(async move |locked| {
                for key in stale {
                    sqlx::query(sql(
                        &schema,
                        concat!(
                            "delete from jobq_uniques where unique_key = unhex(?1) and not ",
                            live!()
                        ),
                    ))
                    .bind(key)
                    .execute(&mut **locked)
                    .await?;
                }
                Ok(())
            })
            .await?;
        }
        Ok(if is_whole { None } else { last })
    }
}
