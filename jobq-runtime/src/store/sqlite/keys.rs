//! Who may run of the jobs with one key.
//!
//! A decision is one transaction, and the write lock is ours: what it has seen does not change.

use std::collections::{HashMap, HashSet};

use jobq_core::queue::is_front;
use jobq_core::time::Timestamp;
use sqlx::sqlite::SqliteConnection;

use super::look::read;
use super::{Error, Result, Schema, SqliteStore, json, sql};
use crate::key::in_order;
use crate::store::{BlockedKey, ClaimedJob, StaleGrants, Turn};

/// The job of the grant `held`, if it can use it or is to be waited for. Everything is looked up in a
/// select of its own: in a join the statistics of a small table make the planner read all of it.
macro_rules! holder {
    () => {
        "coalesce(
             (select id from jobq_jobs
              where id = held.job_id
                and +job_key = held.job_key
                and wait_reason is not 'key'
                and (on_block = 'block' or leased_by <> 0 or run_after <= now_us())),
             (select id from jobq_dead
              where id = held.job_id and job_key = held.job_key and on_block = 'block' and reason <> 'expired')
         )"
    };
}

impl SqliteStore {
    pub(super) async fn pass_on(&self, keys: &[String]) -> sqlx::Result<u64> {
        let (schema, keys) = (self.schema.clone(), keys.to_vec());
        self.write(async move |locked| {
            let keys = in_order(keys.iter().map(String::as_str));
            Ok(decide(locked, &schema, &keys).await?.woken)
        })
        .await
    }

    pub(super) async fn stale_grants(
        &self,
        after: Option<&str>,
        limit: u32,
    ) -> sqlx::Result<StaleGrants> {
        let page: Vec<(String, bool)> = sqlx::query_as(self.sql(concat!(
            "select job_key, ",
            holder!(),
            " is null
             from jobq_key_grants as held
             where job_key > ?1
             order by job_key
             limit ?2"
        )))
        .bind(after.unwrap_or_default())
        .bind(i64::from(limit))
        .fetch_all(&mut *self.reader().await?)
        .await?;
        Ok(StaleGrants::of(page, limit))
    }

    pub(super) async fn blocked_keys(
        &self,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Vec<BlockedKey>> {
        let action = "list blocked keys";
        let mut reader = self.reader().await.map_err(Error::database(action))?;
        let rows = sqlx::query(self.sql(
            "select held.job_key, held.job_id, state.state, state.run_after,
                    exists (select 1 from jobq_dead where id = held.job_id) as is_dead,
                    (select count(*) from jobq_jobs indexed by jobq_jobs_keyed
                     where job_key = held.job_key and wait_reason = 'key') as waiting
             from jobq_key_grants as held
             left join jobq_job_states as state on state.id = held.job_id
             where held.job_key > ?1
               and exists (select 1 from jobq_jobs indexed by jobq_jobs_keyed
                           where job_key = held.job_key and wait_reason = 'key')
             order by held.job_key
             limit ?2",
        ))
        .bind(after.unwrap_or_default())
        .bind(i64::from(limit))
        .fetch_all(&mut *reader)
        .await
        .map_err(Error::database(action))?;
        rows.iter()
            .map(|row| {
                BlockedKey::of(
                    read(row, "job_key")?,
                    read(row, "job_id")?,
                    read(row, "state")?,
                    read(row, "is_dead")?,
                    read::<Option<i64>>(row, "run_after")?.map(Timestamp),
                    read(row, "waiting")?,
                )
            })
            .collect()
    }

    pub(super) async fn unblock_key(&self, key: &str) -> sqlx::Result<bool> {
        let (schema, key) = (self.schema.clone(), key.to_owned());
        self.write(async move |locked| {
            let done = sqlx::query(sql(
                &schema,
                "update jobq_dead
                 set on_block = 'skip'
                 where id = (select job_id from jobq_key_grants where job_key = ?1)
                   and job_key = ?1
                   and on_block = 'block'",
            ))
            .bind(key)
            .execute(&mut **locked)
            .await?;
            Ok(done.rows_affected() > 0)
        })
        .await
    }
}

/// What is to become of a key: its place in the list, the job that had its grant, the one that is to
/// have it, and whether that one waits.
type Decision = (i64, Option<i64>, Option<i64>, bool);

/// Who has the grants of keys.
pub(super) struct Decided<'k> {
    next: HashMap<&'k str, i64>,
    pub(super) woken: u64,
}

/// Decides about keys, each given once.
pub(super) async fn decide<'k>(
    connection: &mut SqliteConnection,
    schema: &Schema,
    keys: &[&'k str],
) -> sqlx::Result<Decided<'k>> {
    let decisions: Vec<Decision> = sqlx::query_as(sql(
        schema,
        concat!(
            "select n, had, next,
                    coalesce((select wait_reason from jobq_jobs where id = next) = 'key', 0)
             from (
                 select wanted.key as n,
                        (select job_id from jobq_key_grants where job_key = wanted.value) as had,
                        coalesce(
                            (select ",
            holder!(),
            "
                             from jobq_key_grants as held
                             where job_key = wanted.value),
                            (select id from jobq_jobs indexed by jobq_jobs_keyed
                             where job_key = wanted.value
                               and (on_block = 'block'
                                    or leased_by <> 0
                                    or run_after <= now_us()
                                    or wait_reason = 'key')
                             order by id
                             limit 1)
                        ) as next
                 from json_each(?1) as wanted
             )"
        ),
    ))
    .bind(json(keys))
    .fetch_all(&mut *connection)
    .await?;
    let mut decided = Decided { next: HashMap::new(), woken: 0 };
    let (mut moved, mut ended) = (Vec::new(), Vec::new());
    for (n, had, next, waits) in decisions {
        let Some(key) = keys.get(n as usize) else { continue };
        match next {
            Some(next) if had != Some(next) || waits => moved.push((key, next)),
            None if had.is_some() => ended.push(key),
            Some(_) | None => {}
        }
        decided.woken += u64::from(waits);
        decided.next.extend(next.map(|next| (*key, next)));
    }
    let grant = "insert into jobq_do_grant select value ->> 0, value ->> 1 from json_each(?1)";
    verb(connection, schema, grant, &moved).await?;
    let ungrant = "insert into jobq_do_ungrant select value from json_each(?1)";
    verb(connection, schema, ungrant, &ended).await?;
    Ok(decided)
}

/// Decides about due jobs with keys that a claim has found, and puts those aside whose turn it is not,
/// and with them others of their keys that come soon, so that they do not have to be found one by one.
pub(super) async fn decide_turns(
    connection: &mut SqliteConnection,
    schema: &Schema,
    jobs: &mut [ClaimedJob],
) -> sqlx::Result<()> {
    // What comes from a front was given the grant when it was woken.
    let asks = |job: &&ClaimedJob| job.key.is_some() && !is_front(job.band);
    let texts = jobs.iter().filter(asks).filter_map(|job| job.key.as_ref());
    let texts: Vec<String> = texts.map(|key| key.text.clone()).collect();
    if texts.is_empty() {
        return Ok(());
    }
    let keys = in_order(texts.iter().map(String::as_str));
    let decided = decide(connection, schema, &keys).await?;
    let mut aside: HashSet<i64> = HashSet::new();
    let mut last_of: HashMap<String, i64> = HashMap::new();
    for job in jobs.iter_mut().filter(|job| asks(&&**job)) {
        let Some(key) = &job.key else { continue };
        let id = job.lease.job.0;
        if decided.next.get(&*key.text) != Some(&id) {
            job.turn = Turn::Waits;
            aside.insert(id);
            let last = last_of.entry(key.text.clone()).or_default();
            *last = (*last).max(id);
        }
    }
    for (key, last) in last_of {
        let others: Vec<i64> = sqlx::query_scalar(sql(
            schema,
            "select id
             from (
                 select id, leased_by, run_after
                 from jobq_jobs indexed by jobq_jobs_keyed
                 where job_key = ?1 and id > ?2
                 order by id
                 limit 500
             )
             where leased_by = 0 and run_after <= now_us() and id is not ?3",
        ))
        .bind(&key)
        .bind(last)
        .bind(decided.next.get(&*key))
        .fetch_all(&mut *connection)
        .await?;
        aside.extend(others);
    }
    let aside: Vec<i64> = aside.into_iter().collect();
    let put_aside = "insert into jobq_do_put_aside select value from json_each(?1)";
    verb(connection, schema, put_aside, &aside).await
}

/// Does something to each of some rows.
async fn verb(
    connection: &mut SqliteConnection,
    schema: &Schema,
    text: &'static str,
    rows: &[impl serde::Serialize],
) -> sqlx::Result<()> {
    if !rows.is_empty() {
        sqlx::query(sql(schema, text)).bind(json(rows)).execute(connection).await?;
    }
    Ok(())
}

/// Gives a key's grant to a job, and wakes it if it waits for it.
pub(super) const DO_GRANT: &str = "
    create temp view jobq_do_grant (job_key, job_id) as select null, null;
    create temp trigger jobq_do_grant_row instead of insert on jobq_do_grant
    begin
        insert or replace into jobq_key_grants (job_key, job_id) values (new.job_key, new.job_id);
        update jobq_jobs
        set band = priority + 100, run_after = now_us(), wait_reason = null
        where id = new.job_id and wait_reason = 'key';
    end;";

/// Ends a grant.
pub(super) const DO_UNGRANT: &str = "
    create temp view jobq_do_ungrant (job_key) as select null;
    create temp trigger jobq_do_ungrant_row instead of insert on jobq_do_ungrant
    begin
        delete from jobq_key_grants where job_key = new.job_key;
    end;";

/// Puts a job that is not leased to wait for its key.
pub(super) const DO_PUT_ASIDE: &str = "
    create temp view jobq_do_put_aside (id) as select null;
    create temp trigger jobq_do_put_aside_row instead of insert on jobq_do_put_aside
    begin
        update jobq_jobs
        set band = -32768, run_after = 9223372036854775807, wait_reason = 'key'
        where id = new.id;
    end;";
