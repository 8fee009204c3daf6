//! The keys of unique jobs.
//!
//! An enqueue does everything on its caller's connection, in a transaction that is open, at whatever
//! isolation level: so locks are only taken of rows that are there and by their whole key, or with the
//! insert of one. What it says is text, with keys as hexadecimal digits.

use std::fmt::Write;

use jobq_core::job::JobId;
use jobq_core::time::micros;
use jobq_core::unique::OnConflict;
use sqlx::mysql::{MySqlConnection, MySqlRow};

use super::{
    Error, MysqlStore, Result, Schema, again, execute, get, insert, is_set, killed, literal, rows,
    sql,
};
use crate::enqueue::Enqueued;
use crate::job::{CheckedDue, CheckedJob};
use crate::store::twins::{Held, Holder, Replace, Retake, UniqueCall, lasting, taken_anew};
use crate::unique::UniqueKey;

/// The most keys that one statement is about.
const KEYS: usize = 100;

/// Writes what is to be written of a call, in the transaction that is open on the connection.
pub(super) async fn insert(
    connection: &mut MySqlConnection,
    schema: &Schema,
    call: &UniqueCall,
) -> Result<Vec<Enqueued>> {
    let mut holders = vec![Holder::New; call.jobs.len()];
    let unique: Vec<(UniqueKey, usize)> =
        call.unique().map(|(key, place, _)| (key, place)).collect();
    for keys in unique.chunks(KEYS) {
        find_holders(connection, schema, call, keys, &mut holders).await?;
    }
    let is_new = |place: &usize| holders[*place] == Holder::New;
    let new: Vec<usize> = (0..call.jobs.len()).filter(is_new).collect();
    let jobs: Vec<CheckedJob> = new.iter().map(|place| call.jobs[*place].clone()).collect();
    let ids = insert::insert_chunks(connection, schema, &jobs).await.map_err(insert::refused)?;
    for (place, id) in new.iter().zip(&ids) {
        if call.is_put_off_too_far(*place) {
            let job = &call.jobs[*place];
            replace(connection, schema, *id, job).await.map_err(insert::refused)?;
        }
    }
    // The ids are known only now.
    let rows: Vec<(UniqueKey, &CheckedJob, JobId)> = unique
        .into_iter()
        .filter_map(|(key, place)| {
            let n = new.binary_search(&place).ok()?;
            Some((key, &call.jobs[place], ids[n]))
        })
        .collect();
    for rows in rows.chunks(KEYS) {
        own(connection, schema, rows).await.map_err(insert::refused)?;
    }
    Ok(call.told(&holders, &ids))
}

/// Locks keys, and finds out for each job who has its own.
///
/// A key is locked until the transaction ends, whoever has it: an enqueue of a twin waits. The locks
/// are of what is there now. What the job of a key is up to is read without a lock, so at the moment
/// of the transaction's snapshot, if it has one: above READ COMMITTED a job that has ended since may
/// still keep others out. One that is not in the snapshot although its key was taken since, has been
/// enqueued since.
async fn find_holders(
    connection: &mut MySqlConnection,
    schema: &Schema,
    call: &UniqueCall,
    keys: &[(UniqueKey, usize)],
    holders: &mut [Holder],
) -> Result<()> {
    take(connection, schema, call, keys).await.map_err(insert::refused)?;
    let locked = look_locked(connection, schema, keys).await.map_err(insert::refused)?;
    let others: Vec<(UniqueKey, usize)> =
        keys.iter().copied().filter(|(key, _)| locked.iter().any(|it| it.key == *key)).collect();
    if others.is_empty() {
        return Ok(());
    }
    let seen = look(connection, schema, &others).await.map_err(insert::refused)?;
    for (key, place) in others {
        let Some(locked) = locked.iter().find(|it| it.key == key) else { continue };
        let held = locked.judged_by(seen.iter().find(|it| it.key == key));
        let existing = |replaced| Holder::Existing { id: held.job, replaced };
        match call.judge(place, held)? {
            None => {}
            Some(Replace::No) => holders[place] = existing(false),
            Some(Replace::Try) => {
                let job = &call.jobs[place];
                if replace(connection, schema, held.job, job).await.map_err(insert::refused)? {
                    holders[place] = existing(true);
                    continue;
                }
                // It has been claimed, or has ended; if it cannot be seen that it has, the snapshot is
                // older than that.
                let now = look(connection, schema, &[(key, place)]).await;
                let now = locked.judged_by(now.map_err(insert::refused)?.first());
                match call.judge(place, now)? {
                    None => {}
                    Some(Replace::No) => holders[place] = existing(false),
                    Some(Replace::Try) => return Err(changed_since()),
                }
            }
        }
    }
    Ok(())
}

/// As PostgreSQL says it of itself. The transaction is to be rolled back, which also gives back the
/// locks on what the change was looked for in.
fn changed_since() -> Error {
    let words = "a unique job has been claimed, or has ended, since the transaction's snapshot";
    Error::Serialization(sqlx::Error::Protocol(words.to_owned()))
}

/// Takes the keys that nobody has, for a job that has no id yet, and locks the others.
async fn take(
    connection: &mut MySqlConnection,
    schema: &Schema,
    call: &UniqueCall,
    keys: &[(UniqueKey, usize)],
) -> sqlx::Result<()> {
    // As long as it has no job, it keeps nobody out.
    let values = keys.iter().map(|(key, place)| {
        let scope = call.jobs[*place].unique.map_or("", |unique| unique.scope.as_str());
        format!("({}, 0, {}, 0)", hex(key), literal(scope))
    });
    let take = format!(
        "insert into jobq_uniques (unique_key, job_id, scope, expires_at) values {}
         on duplicate key update taken = taken",
        joined(values, ", ")
    );
    execute(connection, schema, &take).await?;
    Ok(())
}

/// A key that another job has.
struct Row {
    key: UniqueKey,
    job: JobId,
    taken: i64,
    until_started: bool,
    until_finished: bool,
    /// Whether the time of a scope with a time has not come.
    lasts: bool,
    /// The token and the holder of its job, if it is there and has not expired.
    state: Option<(i64, i64)>,
}

impl Row {
    /// Whether it keeps others out, as far as can be seen without locking its job.
    fn judged_by(&self, seen: Option<&Self>) -> Held {
        let seen = seen.filter(|seen| seen.job == self.job && seen.taken == self.taken);
        // Taken after the snapshot.
        let Some(seen) = seen else {
            return Held { job: self.job, taken: self.taken, live: true, idle: true };
        };
        let live = if self.until_started {
            seen.state.is_some_and(|(token, _)| token == 0)
        } else if self.until_finished {
            seen.state.is_some()
        } else {
            self.lasts
        };
        let idle = seen.state.is_some_and(|(_, leased_by)| leased_by == 0);
        Held { job: self.job, taken: self.taken, live, idle }
    }
}

/// The keys that others have, as they are now. They are locked already.
async fn look_locked(
    connection: &mut MySqlConnection,
    schema: &Schema,
    keys: &[(UniqueKey, usize)],
) -> sqlx::Result<Vec<Row>> {
    // Of a list of keys the server may make a scan of a small table, and wait for keys of others.
    let each = keys.iter().map(|(key, _)| {
        format!(
            "(select unique_key, job_id, taken, scope, expires_at > now_us() as lasts,
                     cast(null as signed) as token, cast(null as signed) as leased_by
              from jobq_uniques
              where unique_key = {}
              for update)",
            hex(key)
        )
    });
    let found = rows(connection, schema, &joined(each, " union all ")).await?;
    let found = found.iter().map(read).collect::<sqlx::Result<Vec<Row>>>()?;
    if found.len() != keys.len() {
        // They were not taken.
        return Err(killed());
    }
    Ok(found.into_iter().filter(|row| row.job.0 != 0).collect())
}

/// The same with their jobs, without a lock.
async fn look(
    connection: &mut MySqlConnection,
    schema: &Schema,
    keys: &[(UniqueKey, usize)],
) -> sqlx::Result<Vec<Row>> {
    let text = format!(
        "select held.unique_key, held.job_id, held.taken, held.scope,
                held.expires_at > now_us() as lasts, job.token, job.leased_by
         from jobq_uniques as held force index (primary)
         left join jobq_jobs as job force index (primary)
             on job.id = held.job_id
                and (job.leased_by <> 0 or coalesce(job.start_by > now_us(), 1))
         where held.unique_key in ({})",
        joined(keys.iter().map(|(key, _)| hex(key)), ", ")
    );
    rows(connection, schema, &text).await?.iter().map(read).collect()
}

fn read(row: &MySqlRow) -> sqlx::Result<Row> {
    let scope: String = get(row, "scope")?;
    let token: Option<i64> = get(row, "token")?;
    let leased_by: Option<i64> = get(row, "leased_by")?;
    Ok(Row {
        key: key(row)?,
        job: JobId(get(row, "job_id")?),
        taken: get(row, "taken")?,
        until_started: scope == "until_started",
        until_finished: scope == "until_finished",
        lasts: is_set(row, "lasts")?,
        state: token.zip(leased_by),
    })
}

/// Gives a job the payload, time, expiry and priority of another; false if it is not there, runs, or has
/// started and keeps others out only until then.
async fn replace(
    connection: &mut MySqlConnection,
    schema: &Schema,
    id: JobId,
    job: &CheckedJob,
) -> sqlx::Result<bool> {
    let (delay, time) = match job.due {
        CheckedDue::After(delay) => (micros(delay), None),
        CheckedDue::At(time) => (0, Some(time.0)),
    };
    let max_wait = match job.unique.map(|unique| unique.on_conflict) {
        Some(OnConflict::Debounce { max_wait }) => micros(max_wait),
        _ => micros(jobq_core::duration::MAX),
    };
    // What waits goes on waiting. `run_after` is never before the clock: a row must not appear behind
    // what workers have passed. Columns are set one after the other.
    let done = sqlx::query(sql(
        schema,
        "update jobq_jobs
         set run_after = case
                 when run_after = 9223372036854775807 then run_after
                 else greatest(
                     insert_now_us(),
                     least(coalesce(?, insert_now_us() + ?), created_at + ?)
                 )
             end,
             start_by = greatest(
                 insert_now_us(),
                 least(coalesce(?, insert_now_us() + ?), created_at + ?)
             ) + ?,
             priority = ?,
             band = ?,
             payload = convert(? using utf8mb4)
         where id = ?
           and leased_by = 0
           and (token = 0 or unique_scope <> 'until_started')",
    ))
    .bind(time)
    .bind(delay)
    .bind(max_wait)
    .bind(time)
    .bind(delay)
    .bind(max_wait)
    .bind(job.expires.map(micros))
    .bind(job.priority)
    .bind(job.priority)
    .bind(job.payload.as_bytes())
    .bind(id.0)
    .execute(&mut *connection)
    .await?;
    let replaced = done.rows_affected() == 1;
    if replaced && job.expires.is_some() {
        let list = format!(
            "insert into jobq_expiring (start_by, job_id)
             select start_by, id from jobq_jobs where id = {id} and start_by is not null
             on duplicate key update job_id = jobq_expiring.job_id"
        );
        execute(connection, schema, &list).await?;
    }
    Ok(replaced)
}

/// Writes down the jobs that have keys now. All of these are there and locked.
async fn own(
    connection: &mut MySqlConnection,
    schema: &Schema,
    rows: &[(UniqueKey, &CheckedJob, JobId)],
) -> sqlx::Result<()> {
    let values = rows.iter().filter_map(|(key, job, id)| {
        let (key, scope) = (hex(key), job.unique?.scope);
        let until = match lasting(scope) {
            Some(time) => format!("now_us() + {time}"),
            None => "9223372036854775807".to_owned(),
        };
        Some(format!("({key}, {id}, {}, {until})", literal(scope.as_str())))
    });
    let own = format!(
        "insert into jobq_uniques (unique_key, job_id, scope, expires_at) values {}
         on duplicate key update
             job_id = values(job_id),
             scope = values(scope),
             expires_at = values(expires_at),
             taken = taken + 1",
        joined(values, ", ")
    );
    // Two for each row that was changed.
    if execute(connection, schema, &own).await? != 2 * rows.len() as u64 {
        return Err(killed());
    }
    Ok(())
}

/// Whether a key keeps others out: `live`, from `held` and the `job` that has it.
const LIVE: &str = "
    coalesce(
        case held.scope
            when 'until_started' then job.token = 0
            when 'until_finished' then job.id is not null
            else held.expires_at > now_us()
        end,
        0
    ) as live";

/// Reads who has keys, without a lock.
pub(crate) fn held_keys_statement(keys: &[UniqueKey]) -> String {
    format!(
        "select held.unique_key, held.job_id, held.taken, {LIVE}
         from jobq_uniques as held force index (primary)
         left join jobq_jobs as job force index (primary) on job.id = held.job_id
         where held.unique_key in ({})",
        joined(keys.iter().map(hex), ", ")
    )
}

fn held(row: &MySqlRow) -> sqlx::Result<(UniqueKey, Held)> {
    let (job, taken) = (JobId(get(row, "job_id")?), get(row, "taken")?);
    Ok((key(row)?, Held { job, taken, live: is_set(row, "live")?, idle: false }))
}

fn key(row: &MySqlRow) -> sqlx::Result<UniqueKey> {
    let key: Vec<u8> = get(row, "unique_key")?;
    let key = key.try_into().map_err(|_| sqlx::Error::Decode("a key has 32 bytes".into()))?;
    Ok(UniqueKey(key))
}

fn joined(texts: impl Iterator<Item = String>, between: &str) -> String {
    texts.collect::<Vec<_>>().join(between)
}

fn hex(key: &UniqueKey) -> String {
    format!("x'{key}'")
}

/// Locks keys one by one: of a list of them the server may make a scan of a small table.
pub(crate) fn lock_keys_statement(keys: &[UniqueKey], lock: &str) -> String {
    let each = keys.iter().map(|key| {
        format!("(select unique_key from jobq_uniques where unique_key = {} {lock})", hex(key))
    });
    joined(each, " union all ")
}

/// Takes the keys of jobs that are to be redriven, in the transaction that is open, and sets those
/// aside whose key another job has.
pub(super) async fn retake(
    connection: &mut MySqlConnection,
    schema: &Schema,
    retake: &mut Retake,
) -> sqlx::Result<()> {
    for (key, job, scope) in retake.holders() {
        let (key, scope) = (hex(&key), literal(scope));
        let take = format!(
            "insert into jobq_uniques (unique_key, job_id, scope, expires_at)
             values ({key}, {job}, {scope}, 0)
             on duplicate key update taken = taken"
        );
        execute(connection, schema, &take).await?;
    }
    let keys: Vec<UniqueKey> = retake.keys().collect();
    for keys in keys.chunks(KEYS) {
        rows(connection, schema, &lock_keys_statement(keys, "for update")).await?;
        let found = rows(connection, schema, &held_keys_statement(keys)).await?;
        retake.set_aside(found.iter().map(held).collect::<sqlx::Result<Vec<_>>>()?);
    }
    // Even of the job that has it, `taken` becomes what it never was: whoever has seen the key free
    // finds that it has changed, also if it was pruned and taken again meanwhile.
    let taken = taken_anew();
    for (key, job, scope) in retake.holders() {
        let (key, scope) = (hex(&key), literal(scope));
        let own = format!(
            "update jobq_uniques
             set job_id = {job}, scope = {scope}, taken = {taken}
             where unique_key = {key}"
        );
        if execute(connection, schema, &own).await? != 1 {
            return Err(killed());
        }
    }
    Ok(())
}

impl MysqlStore {
    /// What keeps nobody out is locked first, and then judged once more by what is there now: a job
    /// may be redriven meanwhile.
    pub(super) async fn prune_keys(
        &self,
        after: Option<UniqueKey>,
        limit: u32,
    ) -> sqlx::Result<Option<UniqueKey>> {
        let found = self.rows(&keys_after_statement(after, limit)).await?;
        let page = found.iter().map(held).collect::<sqlx::Result<Vec<_>>>()?;
        let stale: Vec<UniqueKey> =
            page.iter().filter_map(|(key, held)| (!held.live).then_some(*key)).collect();
        for keys in stale.chunks(KEYS) {
            again(|| self.forget_keys(keys)).await?;
        }
        let last = page.last().map(|(key, _)| *key);
        Ok(last.filter(|_| page.len() >= limit as usize))
    }

    async fn forget_keys(&self, keys: &[UniqueKey]) -> sqlx::Result<()> {
        let mut connection = self.own().await?;
        let lock = format!("begin; {}", lock_keys_statement(keys, "for update skip locked"));
        let locked = rows(&mut connection, &self.schema, &lock).await?;
        let locked = locked.iter().map(key).collect::<sqlx::Result<Vec<_>>>()?;
        let mut write = String::new();
        if !locked.is_empty() {
            let found = rows(&mut connection, &self.schema, &held_keys_statement(&locked)).await?;
            for row in &found {
                let (key, held) = held(row)?;
                if !held.live {
                    let forget = "delete from jobq_uniques where unique_key =";
                    write!(write, "{forget} {}; ", hex(&key)).expect("text grows");
                }
            }
        }
        write.push_str("commit");
        execute(&mut connection, &self.schema, &write).await?;
        connection.hand_back();
        Ok(())
    }
}

/// Reads keys in order, and whether they keep others out.
pub(crate) fn keys_after_statement(after: Option<UniqueKey>, limit: u32) -> String {
    let after = after.map_or_else(|| "x''".to_owned(), |key| hex(&key));
    format!(
        "select held.unique_key, held.job_id, held.taken, {LIVE}
         from (
             select unique_key, job_id, scope, expires_at, taken
             from jobq_uniques force index (primary)
             where unique_key > {after}
             order by unique_key
             limit {limit}
         ) as held
         left join jobq_jobs as job force index (primary) on job.id = held.job_id
         order by held.unique_key"
    )
}
