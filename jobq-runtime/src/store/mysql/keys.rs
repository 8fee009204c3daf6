//! Who may run of the jobs with one key.
//!
//! Whoever decides about a key has its grant locked, and looks at the jobs in a later statement than
//! the one that has locked it: what was decided before is then visible, and nobody else decides
//! meanwhile. Grants are locked in the order of their keys; jobs that somebody else has locked are left
//! as they are.

use std::collections::{HashMap, HashSet};
use std::fmt::Write;

use jobq_core::queue::is_front;
use jobq_core::time::Timestamp;
use sqlx::mysql::MySqlConnection;

use super::due::{LOCK_JOBS, jobs_by_id};
use super::look::read;
use super::{Error, MysqlStore, Result, Schema, again, execute, get, is_set, json, killed, rows};
use crate::key::in_order;
use crate::store::{BlockedKey, ClaimedJob, StaleGrants, Turn};

/// The most keys that one transaction is about.
const KEYS: usize = 100;

/// Claims of jobs with the same keys wait for a transaction that has locked grants, and those of a limited
/// queue for one that has locked its limit: should we stop in the middle of it (the process is paused, the
/// network cut), it is rolled back soon.
pub(super) const HURRY: &str = "set session wait_timeout = 3";

/// What ends a transaction, and [`HURRY`].
pub(super) const COMMIT: &str = "commit; set session wait_timeout = 14";

/// The job of the grant `held`, if it can use it or is to be waited for.
const HOLDER: &str = "coalesce(
     (select job.id
      from jobq_jobs as job force index (primary)
      where job.id = held.job_id
        and job.job_key = held.job_key
        and coalesce(job.wait_reason, '') <> 'key'
        and (job.on_block = 'block' or job.leased_by <> 0 or job.run_after <= now_us())),
     (select dead.id
      from jobq_dead as dead force index (primary)
      where dead.id = held.job_id
        and dead.job_key = held.job_key
        and dead.on_block = 'block'
        and dead.reason <> 'expired')
 )";

impl MysqlStore {
    pub(super) async fn pass_on(&self, keys: &[String]) -> sqlx::Result<u64> {
        let mut woken = 0;
        for keys in in_order(keys.iter().map(String::as_str)).chunks(KEYS) {
            woken += again(|| self.pass_some_on(keys)).await?;
        }
        Ok(woken)
    }

    async fn pass_some_on(&self, keys: &[&str]) -> sqlx::Result<u64> {
        let mut connection = self.own().await?;
        execute(&mut connection, &self.schema, "begin").await?;
        let woken = pass_on_with(&mut connection, &self.schema, keys).await?;
        execute(&mut connection, &self.schema, COMMIT).await?;
        connection.hand_back();
        Ok(woken)
    }

    pub(super) async fn stale_grants(
        &self,
        after: Option<&str>,
        limit: u32,
    ) -> sqlx::Result<StaleGrants> {
        let page = self.rows(&stale_statement(after, limit)).await?;
        let page = page.iter().map(|row| Ok((text(row, "job_key")?, is_set(row, "stale")?)));
        Ok(StaleGrants::of(page.collect::<sqlx::Result<_>>()?, limit))
    }

    pub(super) async fn blocked_keys(
        &self,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Vec<BlockedKey>> {
        let action = "list blocked keys";
        let after = hex(after.unwrap_or_default());
        let found = self
            .answer(&format!(
                "select held.job_key, held.job_id, state.state, state.run_after,
                        exists (select 1 from jobq_dead as dead where dead.id = held.job_id)
                            as is_dead,
                        (select count(*)
                         from jobq_jobs as job force index (jobq_jobs_keyed)
                         where job.job_key = held.job_key and job.wait_reason = 'key') as waiting
                 from jobq_key_grants as held
                 left join jobq_job_states as state on state.id = held.job_id
                 where held.job_key > {after}
                   and exists (
                       select 1
                       from jobq_jobs as job force index (jobq_jobs_keyed)
                       where job.job_key = held.job_key and job.wait_reason = 'key'
                   )
                 order by held.job_key
                 limit {limit}"
            ))
            .await
            .map_err(Error::database(action))?;
        found
            .iter()
            .map(|row| {
                BlockedKey::of(
                    text(row, "job_key").map_err(Error::database(action))?,
                    read(row, "job_id")?,
                    read(row, "state")?,
                    is_set(row, "is_dead").map_err(Error::database(action))?,
                    read::<Option<i64>>(row, "run_after")?.map(Timestamp),
                    read(row, "waiting")?,
                )
            })
            .collect()
    }

    pub(super) async fn unblock_key(&self, key: &str) -> sqlx::Result<bool> {
        let key = hex(key);
        let text = format!(
            "update jobq_dead
             set on_block = 'skip'
             where id = (select job_id from jobq_key_grants where job_key = {key})
               and job_key = {key}
               and on_block = 'block'"
        );
        let mut connection = self.own().await?;
        let done = execute(&mut connection, &self.schema, &text).await?;
        connection.hand_back();
        Ok(done > 0)
    }
}

/// A key as a literal.
fn hex(key: &str) -> String {
    format!("x'{}'", digits(key))
}

fn digits(key: &str) -> String {
    key.bytes().fold(String::new(), |mut digits, byte| {
        write!(digits, "{byte:02x}").expect("text grows");
        digits
    })
}

/// A key as it is stored.
fn text(row: &sqlx::mysql::MySqlRow, column: &str) -> sqlx::Result<String> {
    Ok(String::from_utf8_lossy(&get::<Vec<u8>>(row, column)?).into_owned())
}

/// Locks grants, and makes those that there are not, for no job.
pub(crate) fn take_grants_statement(keys: &[&str]) -> String {
    let values: Vec<String> = keys.iter().map(|key| format!("({}, 0)", hex(key))).collect();
    format!(
        "insert into jobq_key_grants (job_key, job_id) values {}
         on duplicate key update job_id = jobq_key_grants.job_id",
        values.join(", ")
    )
}

/// Who is to have grants that are locked, and whether that job waits.
pub(crate) fn next_statement(keys: &[&str]) -> String {
    // As digits: a JSON text has characters only.
    let keys = json(keys.iter().map(|key| digits(key)).collect::<Vec<_>>());
    format!(
        "select next.job_key, next.had, next.next,
                coalesce(job.wait_reason = 'key', 0) as waits
         from (
             select held.job_key, held.job_id as had,
                    coalesce(
                        {HOLDER},
                        (select job.id
                         from jobq_jobs as job force index (jobq_jobs_keyed)
                         where job.job_key = held.job_key
                           and (job.on_block = 'block'
                                or job.leased_by <> 0
                                or job.run_after <= now_us()
                                or job.wait_reason = 'key')
                         order by job.job_key, job.id
                         limit 1)
                    ) as next
             from json_table('{keys}', '$[*]' columns (digits varchar(400) path '$')) as wanted
             straight_join jobq_key_grants as held force index (primary)
                 on held.job_key = unhex(wanted.digits)
         ) as next
         left join jobq_jobs as job force index (primary) on job.id = next.next"
    )
}

/// The jobs of a key behind another, of those that come soon, that are due.
pub(crate) fn behind_statement(key: &str, last: i64, next: Option<i64>) -> String {
    let (key, next) = (hex(key), next.unwrap_or_default());
    format!(
        "select id
         from (
             select id, leased_by, run_after
             from jobq_jobs force index (jobq_jobs_keyed)
             where job_key = {key} and id > {last}
             order by id
             limit 500
         ) as page
         where leased_by = 0 and run_after <= now_us() and id <> {next}"
    )
}

pub(crate) fn stale_statement(after: Option<&str>, limit: u32) -> String {
    let after = hex(after.unwrap_or_default());
    format!(
        "select held.job_key, {HOLDER} is null as stale
         from (
             select job_key, job_id
             from jobq_key_grants force index (primary)
             where job_key > {after}
             order by job_key
             limit {limit}
         ) as held
         order by held.job_key"
    )
}

/// Passes keys on, in the transaction that is open; returns how many jobs it has woken.
pub(super) async fn pass_on_with(
    connection: &mut MySqlConnection,
    schema: &Schema,
    keys: &[&str],
) -> sqlx::Result<u64> {
    let mut woken = 0;
    for keys in keys.chunks(KEYS) {
        let decided = decide(connection, schema, keys).await?;
        woken += apply(connection, schema, decided, &HashMap::new()).await?;
    }
    Ok(woken)
}

/// Decides about due jobs with keys that a claim has locked, in its transaction, and puts those aside
/// whose turn it is not, and with them others of their keys that come soon, so that they do not have to
/// be claimed one by one.
pub(super) async fn decide_turns(
    connection: &mut MySqlConnection,
    schema: &Schema,
    jobs: &mut [ClaimedJob],
) -> sqlx::Result<()> {
    // What comes from a front was given the grant when it was woken.
    let asks = |job: &&ClaimedJob| job.key.is_some() && !is_front(job.band);
    let texts = jobs.iter().filter(asks).filter_map(|job| job.key.as_ref());
    let texts: Vec<String> = texts.map(|key| key.text.clone()).collect();
    for keys in in_order(texts.iter().map(String::as_str)).chunks(KEYS) {
        let decided = decide(connection, schema, keys).await?;
        let mut waiting: HashMap<String, Vec<i64>> = HashMap::new();
        for job in jobs.iter_mut().filter(|job| asks(&&**job)) {
            let Some(key) = job.key.as_ref().filter(|key| keys.contains(&&*key.text)) else {
                continue;
            };
            let id = job.lease.job.0;
            if decided.next.get(&key.text) != Some(&id) {
                job.turn = Turn::Waits;
                waiting.entry(key.text.clone()).or_default().push(id);
            }
        }
        apply(connection, schema, decided, &waiting).await?;
    }
    Ok(())
}

/// Who is to have the grants of some keys.
struct Decided {
    next: HashMap<String, i64>,
    /// What writes it down.
    writes: Vec<String>,
    /// The jobs that wait for a grant that they are to have.
    to_wake: HashSet<i64>,
}

async fn decide(
    connection: &mut MySqlConnection,
    schema: &Schema,
    keys: &[&str],
) -> sqlx::Result<Decided> {
    let look = format!("{HURRY}; {}; {}", take_grants_statement(keys), next_statement(keys));
    let found = rows(connection, schema, &look).await?;
    if found.len() != keys.len() {
        // They were not made.
        return Err(killed());
    }
    let mut decided = Decided { next: HashMap::new(), writes: Vec::new(), to_wake: HashSet::new() };
    for row in &found {
        let key = text(row, "job_key")?;
        let literal = hex(&key);
        let (had, next): (i64, Option<i64>) = (get(row, "had")?, get(row, "next")?);
        let Some(next) = next else {
            let ungrant = format!("delete from jobq_key_grants where job_key = {literal}");
            decided.writes.push(ungrant);
            continue;
        };
        if next != had {
            decided.writes.push(format!(
                "update jobq_key_grants set job_id = {next} where job_key = {literal}"
            ));
        }
        if is_set(row, "waits")? {
            decided.to_wake.insert(next);
        }
        decided.next.insert(key, next);
    }
    Ok(decided)
}

/// Writes down what was decided; `waiting` are locked jobs of each key whose turn it is not. Returns how
/// many jobs were woken.
async fn apply(
    connection: &mut MySqlConnection,
    schema: &Schema,
    decided: Decided,
    waiting: &HashMap<String, Vec<i64>>,
) -> sqlx::Result<u64> {
    let mut writes = decided.writes;
    let mut aside: HashSet<i64> = waiting.values().flatten().copied().collect();
    let behind = waiting.iter().map(|(key, ids)| {
        let last = ids.iter().copied().max().unwrap_or_default();
        format!("({})", behind_statement(key, last, decided.next.get(key).copied()))
    });
    let behind = behind.collect::<Vec<_>>().join(" union all ");
    if !behind.is_empty() {
        for row in rows(connection, schema, &behind).await? {
            aside.insert(get(&row, "id")?);
        }
    }
    let mut woken = 0;
    let mut wanted: Vec<i64> = aside.union(&decided.to_wake).copied().collect();
    wanted.sort_unstable();
    if !wanted.is_empty() {
        for row in rows(connection, schema, &lock_waiting_statement(wanted)).await? {
            let id: i64 = get(&row, "id")?;
            if decided.to_wake.contains(&id) && is_set(&row, "waits")? {
                woken += 1;
                writes.push(format!(
                    "update jobq_jobs
                     set band = priority + 100, run_after = now_us(), wait_reason = null
                     where id = {id}"
                ));
            } else if aside.contains(&id) && is_set(&row, "is_due")? {
                writes.push(format!(
                    "update jobq_jobs
                     set band = -32768, run_after = 9223372036854775807, wait_reason = 'key'
                     where id = {id}"
                ));
            }
        }
    }
    let expected = writes.len() as u64;
    if expected > 0 && execute(connection, schema, &writes.join("; ")).await? != expected {
        // MariaDB may answer a write that was killed with success and no rows; see `written`.
        return Err(killed());
    }
    Ok(woken)
}

/// Locks jobs, but for those that somebody else has locked.
pub(crate) fn lock_waiting_statement(ids: impl IntoIterator<Item = i64>) -> String {
    let jobs = jobs_by_id(ids);
    format!(
        "select job.id, leased_by = 0 and run_after <= now_us() as is_due,
                coalesce(wait_reason, '') = 'key' as waits
         from {jobs}
         {LOCK_JOBS}"
    )
}
