//! The keys of unique jobs.

use std::collections::{HashMap, HashSet};

use jobq_core::job::JobId;
use jobq_core::time::micros;
use jobq_core::unique::OnConflict;
use sqlx::Executor;
use sqlx::postgres::PgConnection;

use super::{PostgresStore, Result, Schema, Time, insert, sql};
use crate::enqueue::Enqueued;
use crate::job::{CheckedDue, CheckedJob};
use crate::store::twins::{Held, Holder, Replace, Retake, UniqueCall, taken_anew};
use crate::unique::UniqueKey;

/// Writes what is to be written of a call, in the transaction that is open on the connection.
pub(super) async fn insert(
    connection: &mut PgConnection,
    schema: &Schema,
    call: &UniqueCall,
    ids: &[i64],
) -> Result<Vec<Enqueued>> {
    let holders = holders(connection, schema, call, ids).await?;
    let (mut jobs, mut new_ids) = (Vec::new(), Vec::new());
    for (place, holder) in holders.iter().enumerate() {
        if *holder == Holder::New {
            jobs.push(call.jobs[place].clone());
            new_ids.push(ids[place]);
        }
    }
    insert::with_ids(connection, schema, &jobs, &new_ids).await.map_err(insert::refused)?;
    for (place, id) in ids.iter().enumerate() {
        if holders[place] == Holder::New && call.is_put_off_too_far(place) {
            let job = &call.jobs[place];
            replace(connection, schema, JobId(*id), job).await.map_err(insert::refused)?;
        }
    }
    let new_ids: Vec<JobId> = new_ids.into_iter().map(JobId).collect();
    Ok(call.told(&holders, &new_ids))
}

/// Finds out for each job who has its key, and takes those that are free.
///
/// No lock is kept on a key that another job has: whoever enqueues a twin of it at the same time does
/// not wait. Only for a transaction that has just taken the key everybody waits, until it is known
/// whether it commits.
async fn holders(
    connection: &mut PgConnection,
    schema: &Schema,
    call: &UniqueCall,
    ids: &[i64],
) -> Result<Vec<Holder>> {
    let mut holders = vec![Holder::New; call.jobs.len()];
    let mut open: Vec<(UniqueKey, usize)> =
        call.unique().map(|(key, place, _)| (key, place)).collect();
    loop {
        let taken = take(connection, schema, call, &open, ids).await.map_err(insert::refused)?;
        open.retain(|(key, _)| !taken.contains(key));
        if open.is_empty() {
            return Ok(holders);
        }
        // In a statement of its own: what was waited for is visible to a later one only.
        let held = look(connection, schema, open.iter().map(|(key, _)| *key))
            .await
            .map_err(insert::refused)?;
        let mut again = Vec::new();
        let mut free = Vec::new();
        for (key, place) in open {
            // Pruned since.
            let Some(held) = held.get(&key) else {
                again.push((key, place));
                continue;
            };
            let existing = |replaced| Holder::Existing { id: held.job, replaced };
            match call.judge(place, *held)? {
                None => free.push((key, place, *held)),
                Some(Replace::No) => holders[place] = existing(false),
                Some(Replace::Try) => {
                    let job = &call.jobs[place];
                    if replace(connection, schema, held.job, job).await.map_err(insert::refused)? {
                        holders[place] = existing(true);
                    } else {
                        // It has been claimed, or has ended.
                        again.push((key, place));
                    }
                }
            }
        }
        if !free.is_empty() {
            let taken =
                take_over(connection, schema, call, &free, ids).await.map_err(insert::refused)?;
            let lost = free.into_iter().filter(|(key, ..)| !taken.contains(key));
            again.extend(lost.map(|(key, place, _)| (key, place)));
            again.sort_unstable();
        }
        if again.is_empty() {
            return Ok(holders);
        }
        open = again;
    }
}

/// Takes keys that nobody has; returns those taken.
async fn take(
    connection: &mut PgConnection,
    schema: &Schema,
    call: &UniqueCall,
    open: &[(UniqueKey, usize)],
    ids: &[i64],
) -> sqlx::Result<HashSet<UniqueKey>> {
    let columns = Columns::new(call, open.iter().copied(), ids);
    let taken: Vec<Vec<u8>> = sqlx::query_scalar(sql(schema, TAKE))
        .bind(columns.keys)
        .bind(columns.ids)
        .bind(columns.scopes)
        .fetch_all(connection)
        .await?;
    Ok(taken.into_iter().filter_map(key).collect())
}

// A key keeps nobody out before its job is there: should that never be written, nothing is to be
// undone. The time of a scope with a time is set together with it.
pub(crate) const TAKE: &str = "
    insert into jobq.uniques (unique_key, job_id, scope, expires_at)
    select unique_key, id, scope, '-infinity'
    from unnest($1::bytea[], $2::int8[], $3::text[]) as twin (unique_key, id, scope)
    order by unique_key
    on conflict (unique_key) do nothing
    returning unique_key";

/// Takes keys over from jobs that keep nobody out any more, unless somebody else was faster; returns
/// those taken.
async fn take_over(
    connection: &mut PgConnection,
    schema: &Schema,
    call: &UniqueCall,
    free: &[(UniqueKey, usize, Held)],
    ids: &[i64],
) -> sqlx::Result<HashSet<UniqueKey>> {
    let columns = Columns::new(call, free.iter().map(|(key, place, _)| (*key, *place)), ids);
    let old: Vec<i64> = free.iter().map(|(.., held)| held.job.0).collect();
    let taken: Vec<i64> = free.iter().map(|(.., held)| held.taken).collect();
    let taken: Vec<Vec<u8>> = sqlx::query_scalar(sql(schema, TAKE_OVER))
        .bind(columns.keys)
        .bind(columns.ids)
        .bind(columns.scopes)
        .bind(old)
        .bind(taken)
        .persistent(false)
        .fetch_all(connection)
        .await?;
    Ok(taken.into_iter().filter_map(key).collect())
}

/// A key as it is stored.
fn key(bytes: Vec<u8>) -> Option<UniqueKey> {
    Some(UniqueKey(bytes.try_into().ok()?))
}

pub(crate) const TAKE_OVER: &str = "
    with twin as materialized (
        select * from unnest($1::bytea[], $2::int8[], $3::text[], $4::int8[], $5::int8[])
             as twin (unique_key, id, scope, old_id, taken)
    ),
    held as materialized (
        select held.ctid as tid, twin.*
        from twin
        cross join lateral (
            select ctid
            from jobq.uniques
            where unique_key = twin.unique_key and job_id = twin.old_id and taken = twin.taken
            for update
        ) as held
    )
    update jobq.uniques as changed
    set job_id = held.id,
        scope = held.scope,
        expires_at = '-infinity',
        taken = 0
    from held
    where changed.ctid = held.tid
    returning changed.unique_key";

/// Who has these keys, and whether they keep others out.
async fn look(
    connection: &mut PgConnection,
    schema: &Schema,
    keys: impl Iterator<Item = UniqueKey>,
) -> sqlx::Result<HashMap<UniqueKey, Held>> {
    let keys: Vec<Vec<u8>> = keys.map(|key| key.0.to_vec()).collect();
    let rows: Vec<(Vec<u8>, i64, i64, bool, bool)> = sqlx::query_as(sql(schema, LOOK))
        .bind(keys)
        // Planned anew: a plan from when the tables were empty would read all of them.
        .persistent(false)
        .fetch_all(connection)
        .await?;
    let held = rows.into_iter().filter_map(|(bytes, job, taken, live, idle)| {
        Some((key(bytes)?, Held { job: JobId(job), taken, live, idle }))
    });
    Ok(held.collect())
}

/// Whether a key keeps others out: `live`, from `held`. The job is looked up for each key, by its primary
/// key: of an `exists` the server makes a list of all jobs, and an order that is not given by the condition
/// keeps a plan from when the table was empty off the due index, which has the id too.
macro_rules! live {
    () => {
        "case held.scope
             when 'until_started' then coalesce(
                 (
                     select token = 0 and coalesce(start_by > statement_timestamp(), true)
                     from jobq.jobs
                     where id between held.job_id and held.job_id order by id limit 1
                 ),
                 false
             )
             when 'until_finished' then coalesce(
                 (
                     select leased_by <> 0 or coalesce(start_by > statement_timestamp(), true)
                     from jobq.jobs
                     where id between held.job_id and held.job_id order by id limit 1
                 ),
                 false
             )
             else held.expires_at > statement_timestamp()
         end"
    };
}

pub(crate) const LOOK: &str = concat!(
    "select held.unique_key, held.job_id, held.taken, ",
    live!(),
    " as live,
            coalesce(
                (
                    select leased_by from jobq.jobs
                    where id between held.job_id and held.job_id order by id limit 1
                ) = 0,
                false
            ) as idle
     from jobq.uniques as held
     where held.unique_key = any($1)"
);

/// Gives a job the payload, time, expiry and priority of another; false if it is not there, runs, or has
/// started and keeps others out only until then.
async fn replace(
    connection: &mut PgConnection,
    schema: &Schema,
    id: JobId,
    job: &CheckedJob,
) -> sqlx::Result<bool> {
    let (delay, time) = match job.due {
        CheckedDue::After(delay) => (micros(delay), None),
        CheckedDue::At(time) => (0, Some(Time(time))),
    };
    let max_wait = match job.unique.map(|unique| unique.on_conflict) {
        Some(OnConflict::Debounce { max_wait }) => Some(micros(max_wait)),
        _ => None,
    };
    let done = sqlx::query(sql(schema, REPLACE))
        .bind(id.0)
        .bind(&job.payload)
        .bind(job.priority)
        .bind(delay)
        .bind(time)
        .bind(max_wait)
        .bind(job.expires.map(micros))
        .persistent(false)
        .execute(connection)
        .await?;
    Ok(done.rows_affected() == 1)
}

// What waits goes on waiting. `run_after` is never before the clock: a row must not appear behind
// what workers have passed.
pub(crate) const REPLACE: &str = "
    update jobq.jobs as job
    set payload = $2,
        priority = $3,
        band = $3,
        run_after = case
            when run_after = 'infinity' then run_after
            else greatest(
                clock_timestamp(),
                least(
                    coalesce($5, clock_timestamp() + $4 * interval '1 microsecond'),
                    created_at + $6 * interval '1 microsecond'
                )
            )
        end,
        start_by = greatest(
            clock_timestamp(),
            least(
                coalesce($5, clock_timestamp() + $4 * interval '1 microsecond'),
                created_at + $6 * interval '1 microsecond'
            )
        ) + $7 * interval '1 microsecond'
    where id = $1
      and leased_by = 0
      and (token = 0 or unique_scope <> 'until_started')";

/// Takes the keys of jobs that are to be redriven, in the transaction that is open, and sets those
/// aside whose key another job has.
pub(super) async fn retake(
    connection: &mut PgConnection,
    schema: &Schema,
    retake: &mut Retake,
) -> sqlx::Result<()> {
    let columns = Columns::of(retake);
    let keys: Vec<Vec<u8>> = retake.keys().map(|key| key.0.to_vec()).collect();
    loop {
        sqlx::query(sql(schema, TAKE))
            .bind(&columns.keys)
            .bind(&columns.ids)
            .bind(&columns.scopes)
            .execute(&mut *connection)
            .await?;
        let locked: HashSet<Vec<u8>> = sqlx::query_scalar(sql(schema, LOCK))
            .bind(&keys)
            .fetch_all(&mut *connection)
            .await?
            .into_iter()
            .collect();
        // One that was not taken, because it was there, may have been pruned since.
        if columns.keys.iter().all(|key| locked.contains(key)) {
            break;
        }
    }
    let held = look(connection, schema, retake.keys()).await?;
    retake.set_aside(held);
    let columns = Columns::of(retake);
    sqlx::query(sql(schema, OWN))
        .bind(columns.keys)
        .bind(columns.ids)
        .bind(columns.scopes)
        .bind(taken_anew())
        .execute(&mut *connection)
        .await?;
    Ok(())
}

pub(crate) const LOCK: &str =
    "select unique_key from jobq.uniques where unique_key = any($1) order by unique_key for update";

// Even of the job that has it, `taken` becomes what it never was: whoever has seen the key free finds
// that it has changed, also if it was pruned and taken again meanwhile.
pub(crate) const OWN: &str = "
    with twin as materialized (
        select * from unnest($1::bytea[], $2::int8[], $3::text[]) as twin (unique_key, id, scope)
    ),
    held as materialized (
        select held.ctid as tid, twin.*
        from twin
        cross join lateral (
            select ctid from jobq.uniques where unique_key = twin.unique_key for update
        ) as held
    )
    update jobq.uniques as changed
    set job_id = held.id, scope = held.scope, taken = $4
    from held
    where changed.ctid = held.tid";

impl PostgresStore {
    /// What keeps nobody out is locked first, and then judged once more by what is there now: a job
    /// may be redriven meanwhile.
    pub(super) async fn prune_keys(
        &self,
        after: Option<UniqueKey>,
        limit: u32,
    ) -> sqlx::Result<Option<UniqueKey>> {
        let mut connection = self.own().await?;
        let after = after.map_or_else(Vec::new, |key| key.0.to_vec());
        let page: Vec<(Vec<u8>, bool)> = sqlx::query_as(self.sql(KEYS_AFTER))
            .bind(after)
            .bind(i64::from(limit))
            .fetch_all(&mut *connection)
            .await?;
        let last = page.last().and_then(|(bytes, _)| key(bytes.clone()));
        let is_whole = page.len() < limit as usize;
        let stale: Vec<Vec<u8>> =
            page.into_iter().filter_map(|(key, live)| (!live).then_some(key)).collect();
        if !stale.is_empty() {
            connection.execute("begin isolation level read committed").await?;
            let locked: Vec<Vec<u8>> = sqlx::query_scalar(self.sql(LOCK_STALE))
                .bind(stale)
                .fetch_all(&mut *connection)
                .await?;
            sqlx::query(self.sql(PRUNE_KEYS)).bind(locked).execute(&mut *connection).await?;
            connection.execute("commit").await?;
        }
        connection.hand_back();
        Ok(if is_whole { None } else { last })
    }
}

pub(crate) const KEYS_AFTER: &str = concat!(
    "with held as materialized (
         select * from jobq.uniques where unique_key > $1 order by unique_key limit $2
     )
     select held.unique_key, ",
    live!(),
    " as live from held order by unique_key"
);

pub(crate) const LOCK_STALE: &str = "
    select unique_key
    from jobq.uniques
    where unique_key = any($1)
    order by unique_key
    for update skip locked";

pub(crate) const PRUNE_KEYS: &str =
    concat!("delete from jobq.uniques as held where unique_key = any($1) and not (", live!(), ")");

/// The rows of the table of keys that some jobs of a call become.
#[derive(Default)]
struct Columns {
    keys: Vec<Vec<u8>>,
    ids: Vec<i64>,
    scopes: Vec<String>,
}

impl Columns {
    fn new(call: &UniqueCall, open: impl Iterator<Item = (UniqueKey, usize)>, ids: &[i64]) -> Self {
        let mut columns = Self::default();
        for (key, place) in open {
            let Some(unique) = call.jobs[place].unique else { continue };
            columns.add(key, ids[place], unique.scope.as_str());
        }
        columns
    }

    fn of(retake: &Retake) -> Self {
        let mut columns = Self::default();
        for (key, job, scope) in retake.holders() {
            columns.add(key, job.0, scope);
        }
        columns
    }

    fn add(&mut self, key: UniqueKey, id: i64, scope: &str) {
        self.keys.push(key.0.to_vec());
        self.ids.push(id);
        self.scopes.push(scope.to_owned());
    }
}
