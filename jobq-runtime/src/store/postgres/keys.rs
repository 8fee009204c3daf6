//! Who may run of the jobs with one key.
//!
//! Whoever decides about a key has its grant locked, and looks at the jobs in a later statement than
//! the one that has locked it: what was decided before is then visible, and nobody else decides
//! meanwhile. Grants are locked in the order of their keys, and nothing is waited for with one locked.

use std::collections::{HashMap, HashSet};

use jobq_core::job::Lease;
use sqlx::postgres::PgConnection;
use sqlx::{Executor, Row};

use super::{PostgresStore, Result, Schema, Time, sql, within};
use crate::error::Error;
use crate::key::in_order;
use crate::store::{BlockedKey, ClaimedJob, StaleGrants, Turn};

/// Tries at grants that others took and gave back in the same moment.
const TRIES: u32 = 5;

impl PostgresStore {
    pub(super) async fn pass_on(&self, keys: &[String]) -> sqlx::Result<u64> {
        let keys = in_order(keys.iter().map(String::as_str));
        let mut connection = self.own().await?;
        connection.execute(BEGIN).await?;
        lock(&mut connection, &self.schema, &keys).await?;
        let woken = pass_on_locked(&mut connection, &self.schema, &keys, &[]).await?;
        connection.execute("commit").await?;
        connection.hand_back();
        Ok(woken)
    }

    /// Decides about claimed jobs with keys, unless the claim has.
    pub(super) async fn decide_turns(&self, jobs: &mut [ClaimedJob]) {
        let mut undecided: Vec<&mut ClaimedJob> =
            jobs.iter_mut().filter(|job| job.turn == Turn::Undecided).collect();
        if undecided.is_empty() {
            return;
        }
        undecided.sort_by_key(|job| job.lease.job);
        let claimed: Vec<Claimant> = undecided.iter().map(|job| Claimant::of(job)).collect();
        let turns = within("decide whose turn it is", self.turns(&claimed)).await;
        let turns = turns.unwrap_or_else(|error| {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "the keys of claimed jobs could not be taken; giving the jobs back"
            );
            HashMap::new()
        });
        for job in undecided {
            job.turn = turns.get(&job.lease.job.0).copied().unwrap_or(Turn::Undecided);
        }
    }

    async fn turns(&self, claimed: &[Claimant]) -> sqlx::Result<HashMap<i64, Turn>> {
        let mut connection = self.own().await?;
        let turns = turns_on(&mut connection, &self.schema, claimed).await?;
        connection.hand_back();
        Ok(turns)
    }

    pub(super) async fn stale_grants(
        &self,
        after: Option<&str>,
        limit: u32,
    ) -> sqlx::Result<StaleGrants> {
        let mut connection = self.own().await?;
        let page: Vec<(String, bool)> = sqlx::query_as(self.sql(STALE_GRANTS))
            .bind(after.unwrap_or_default())
            .bind(i64::from(limit))
            .fetch_all(&mut *connection)
            .await?;
        connection.hand_back();
        Ok(StaleGrants::of(page, limit))
    }

    pub(super) async fn blocked_keys(
        &self,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Vec<BlockedKey>> {
        let action = "list blocked keys";
        let mut connection = self.shared().await.map_err(Error::database(action))?;
        let rows = sqlx::query(self.sql(
            "select held.job_key, held.job_id, state.state, state.run_after, state.wait_reason,
                    exists (select from jobq.dead where id = held.job_id) as is_dead,
                    (select count(*) from jobq.jobs
                     where job_key = held.job_key and wait_reason = 'key') as waiting
             from jobq.key_grants as held
             left join jobq.job_states as state on state.id = held.job_id
             where held.job_key > $1
               and exists (select from jobq.jobs
                           where job_key = held.job_key and wait_reason = 'key')
             order by held.job_key
             limit $2",
        ))
        .bind(after.unwrap_or_default())
        .bind(i64::from(limit))
        .persistent(false)
        .fetch_all(&mut *connection)
        .await
        .map_err(Error::database(action))?;
        connection.hand_back();
        rows.iter()
            .map(|row| {
                let blocked = (|| {
                    Ok(BlockedKey::of(
                        row.try_get("job_key")?,
                        row.try_get("job_id")?,
                        row.try_get("state")?,
                        row.try_get("is_dead")?,
                        row.try_get::<Option<Time>, _>("run_after")?.map(|time| time.0),
                        row.try_get("waiting")?,
                    ))
                })();
                blocked.map_err(Error::database(action))?
            })
            .collect()
    }

    pub(super) async fn unblock_key(&self, key: &str) -> sqlx::Result<bool> {
        let mut connection = self.own().await?;
        let done = sqlx::query(self.sql(
            "update jobq.dead as dead
             set on_block = 'skip'
             from jobq.key_grants as held
             where held.job_key = $1
               and dead.id = held.job_id
               and dead.job_key = $1
               and dead.on_block = 'block'",
        ))
        .bind(key)
        .persistent(false)
        .execute(&mut *connection)
        .await?;
        connection.hand_back();
        Ok(done.rows_affected() > 0)
    }
}

/// How a transaction begins that decides. Claims of jobs with the same keys wait for it: should we stop in
/// the middle of it (the process is paused, the network cut), it is not for long.
pub(super) const BEGIN: &str = "begin isolation level read committed;
    set local idle_in_transaction_session_timeout = '3s'";

/// Locks the grants of keys.
pub(super) async fn lock(
    connection: &mut PgConnection,
    schema: &Schema,
    keys: &[&str],
) -> sqlx::Result<()> {
    sqlx::query(sql(schema, LOCK_GRANTS)).bind(keys).execute(connection).await.map(drop)
}

/// Passes on keys whose grants are locked, in the transaction that is open. Of the jobs that have `ended`
/// it need not find out that they are gone.
pub(super) async fn pass_on_locked(
    connection: &mut PgConnection,
    schema: &Schema,
    keys: &[&str],
    ended: &[i64],
) -> sqlx::Result<u64> {
    if keys.is_empty() {
        return Ok(0);
    }
    let woken: i64 = sqlx::query_scalar(sql(schema, PASS_ON))
        .bind(keys)
        .bind(ended)
        .fetch_one(connection)
        .await?;
    Ok(woken.unsigned_abs())
}

/// A claimed job with a key.
pub(crate) struct Claimant {
    pub(crate) lease: Lease,
    pub(crate) key: String,
}

impl Claimant {
    fn of(job: &ClaimedJob) -> Self {
        let key = job.key.as_ref().map(|key| key.text.clone()).unwrap_or_default();
        Self { lease: job.lease, key }
    }
}

/// Decides about claimed jobs, given in the order of their ids; what is not in the answer is still to be
/// decided.
pub(crate) async fn turns_on(
    connection: &mut PgConnection,
    schema: &Schema,
    claimed: &[Claimant],
) -> sqlx::Result<HashMap<i64, Turn>> {
    let mut keys = in_order(claimed.iter().map(|job| &*job.key));
    let mut turns = HashMap::new();
    for _ in 0..TRIES {
        connection.execute(BEGIN).await?;
        let locked: Vec<(String, bool)> = sqlx::query_as(sql(schema, TAKE_GRANTS))
            .bind(&keys)
            .bind(keys.iter().map(|key| first(claimed, key)).collect::<Vec<_>>())
            .fetch_all(&mut *connection)
            .await?;
        if !locked.is_empty() {
            decide(connection, schema, &locked, claimed, &mut turns).await?;
        }
        connection.execute("commit").await?;
        keys.retain(|key| !locked.iter().any(|(locked, _)| locked == key));
        if keys.is_empty() {
            break;
        }
    }
    Ok(turns)
}

/// The first claimed job of a key. Most likely it is the first of all: then its grant need not be
/// written again.
fn first(claimed: &[Claimant], key: &str) -> i64 {
    let jobs = claimed.iter().filter(|job| job.key == key);
    jobs.map(|job| job.lease.job.0).min().unwrap_or_default()
}

/// Decides about keys whose grants are locked.
async fn decide(
    connection: &mut PgConnection,
    schema: &Schema,
    locked: &[(String, bool)],
    claimed: &[Claimant],
    turns: &mut HashMap<i64, Turn>,
) -> sqlx::Result<()> {
    let (keys, fresh): (Vec<&str>, Vec<bool>) =
        locked.iter().map(|(key, fresh)| (key.as_str(), *fresh)).unzip();
    let ours: HashSet<&str> = keys.iter().copied().collect();
    let jobs: Vec<&Claimant> = claimed.iter().filter(|job| ours.contains(&*job.key)).collect();
    let (run, wait): (Vec<i64>, Vec<i64>) = sqlx::query_as(sql(schema, DECIDE_GRANTS))
        .bind(&keys)
        .bind(fresh)
        .bind(jobs.iter().map(|job| job.lease.job.0).collect::<Vec<_>>())
        .bind(jobs.iter().map(|job| job.lease.token.0).collect::<Vec<_>>())
        .bind(jobs.iter().map(|job| job.lease.session.0).collect::<Vec<_>>())
        .bind(jobs.iter().map(|job| job.key.as_str()).collect::<Vec<_>>())
        .fetch_one(connection)
        .await?;
    turns.extend(run.into_iter().map(|id| (id, Turn::Runs)));
    turns.extend(wait.into_iter().map(|id| (id, Turn::Waits)));
    Ok(())
}

pub(crate) const LOCK_GRANTS: &str = "
    select job_key from jobq.key_grants where job_key = any($1) order by job_key for update";

// New ones first, for they may have to be waited for; nobody can wait for those that are new meanwhile.
pub(crate) const TAKE_GRANTS: &str = "
    with taken as (
        insert into jobq.key_grants (job_key, job_id)
        select job_key, job_id
        from unnest($1::text[], $2::int8[]) with ordinality as wanted (job_key, job_id, n)
        order by n
        on conflict do nothing
        returning job_key
    ),
    locked as materialized (
        select job_key
        from jobq.key_grants
        where job_key = any($1) and (select count(*) from taken) >= 0
        order by job_key
        for update
    )
    select job_key, true from taken
    union all
    select job_key, false from locked";

/// The job of a grant, if it can use it or is to be waited for. It is looked up as a range of one, which
/// only the primary key has in order: else a plan made while the table was empty may read the due index.
macro_rules! holder {
    () => {
        "coalesce(
             (select case
                         when job.job_key = held.job_key
                              and job.wait_reason is distinct from 'key'
                              and (job.on_block = 'block'
                                   or job.leased_by <> 0
                                   or job.run_after <= statement_timestamp())
                         then job.id
                     end
              from jobq.jobs as job
              where job.id between held.job_id and held.job_id
              order by job.id
              limit 1),
             (select case
                         when dead.job_key = held.job_key
                              and dead.on_block = 'block'
                              and dead.reason <> 'expired'
                         then dead.id
                     end
              from jobq.dead as dead
              where dead.id = held.job_id)
         )"
    };
}

/// Who is to have the grants of `wanted`, and what that changes; of some the job is known to have `ended`. They are locked, so that their places stay
/// the same; joined by their keys they might all be read, for the same reason as above.
macro_rules! decided {
    ($wanted:literal, $ended:literal) => {
        concat!(
            "with state as materialized (
                 select held.tid, held.job_key, held.job_id as had,
                        coalesce(
                            case when not ",
            $ended,
            " then ",
            holder!(),
            " end,
                            (select job.id
                             from jobq.jobs as job
                             where job.job_key = held.job_key
                               and (job.on_block = 'block'
                                    or job.leased_by <> 0
                                    or job.run_after <= statement_timestamp()
                                    or job.wait_reason = 'key')
                             order by job.job_key, (job.id + 0)
                             limit 1)
                        ) as next
                 from ",
            $wanted,
            "
                 cross join lateral (
                     select ctid as tid, job_key, job_id
                     from jobq.key_grants
                     where job_key = wanted.job_key
                     limit 1
                 ) as held
             ),
             moved as (
                 update jobq.key_grants as held set job_id = state.next
                 from state
                 where held.ctid = state.tid and state.next <> state.had
             ),
             ended as (
                 delete from jobq.key_grants as held using state
                 where held.ctid = state.tid and state.next is null
             ),
             woken as (
                 update jobq.jobs as job
                 set run_after = clock_timestamp(), band = priority + 100, wait_reason = null
                 from (
                     select ctid as tid
                     from jobq.jobs
                     where id = any (array (select next from state where next is not null))
                       and wait_reason = 'key'
                     order by id
                     for no key update skip locked
                 ) as next
                 where job.ctid = next.tid
                 returning job.id
             )"
        )
    };
}

pub(crate) const PASS_ON: &str = concat!(
    decided!("unnest($1::text[]) as wanted (job_key)", "(held.job_id = any($2))"),
    " select count(*) from woken"
);

pub(crate) const DECIDE_GRANTS: &str = concat!(
    decided!("unnest($1::text[], $2::bool[]) as wanted (job_key, fresh)", "wanted.fresh"),
    ",
     waiting as (
         update jobq.jobs as job
         set leased_by = 0, isolated = false, attempt = greatest(attempt - 1, 0), band = -32768,
             run_after = 'infinity', wait_reason = 'key'
         from (
             select ctid as tid
             from jobq.jobs
             where id = any($3)
               and token = ($4::int8[])[width_bucket(id, $3::int8[])]
               and leased_by = ($5::int8[])[width_bucket(id, $3::int8[])]
               and id <> all (array (select next from state where next is not null))
               and not cancel_requested
             order by id
             for no key update skip locked
         ) as mine
         where job.ctid = mine.tid
         returning job.id
     ),
     -- Those that come soon, so that they do not have to be claimed one by one.
     aside as (
         update jobq.jobs as job
         set band = -32768, run_after = 'infinity', wait_reason = 'key'
         from (
             select other.ctid as tid
             from (
                 select mine.job_key, max(mine.id) as id, max(state.next) as next
                 from unnest($3::int8[], $6::text[]) as mine (id, job_key)
                 join state on state.job_key = mine.job_key and state.next <> mine.id
                 group by mine.job_key
             ) as behind
             cross join lateral (
                 select ctid as tid
                 from jobq.jobs
                 where job_key = behind.job_key and (id + 0) > behind.id
                 order by job_key, (id + 0)
                 limit 500
             ) as page
             join jobq.jobs as other on other.ctid = page.tid
             where other.id <> behind.next
               and other.leased_by = 0
               and other.run_after <= statement_timestamp()
             for no key update of other skip locked
         ) as other
         where job.ctid = other.tid
     )
     select array (select unnest($3::int8[]) intersect select next from state),
            array (select id from waiting)"
);

pub(crate) const STALE_GRANTS: &str = concat!(
    "select held.job_key, ",
    holder!(),
    " is null
     from (
         select job_key, job_id
         from jobq.key_grants
         where job_key > $1
         order by job_key
         limit $2
     ) as held
     order by held.job_key"
);
