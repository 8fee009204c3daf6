//! What the sweep does: duties, expired sessions, late jobs, pruning.

use std::time::Duration;

use jobq_core::job::{JobId, Lease, SessionId, Token};
use jobq_core::time::{Timestamp, micros};
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::claim::{counters, key, limits};
use super::{
    Floor, HeldJob, Horizon, LiveSession, PostgresStore, Result, Shift, Time, UnleasedJob, within,
};

impl PostgresStore {
    pub(super) async fn take_duty(
        &self,
        name: &'static str,
        holder: SessionId,
        span: Duration,
    ) -> sqlx::Result<Option<String>> {
        let mut connection = self.own().await?;
        let notes = sqlx::query_scalar(self.sql(
            "insert into jobq.duties as duty (name, held_by, held_until)
             values ($1, $2, clock_timestamp() + $3 * interval '1 microsecond')
             on conflict (name) do update
             -- Not what was to be inserted: the last holder may have been waited for since.
             set held_by = excluded.held_by,
                 held_until = clock_timestamp() + $3 * interval '1 microsecond'
             where duty.held_by = excluded.held_by
                or duty.held_until not between clock_timestamp()
                                       and clock_timestamp() + $3 * interval '1 microsecond'
             returning notes",
        ))
        .bind(name)
        .bind(holder.0)
        .bind(micros(span))
        .fetch_optional(&mut *connection)
        .await?;
        connection.hand_back();
        Ok(notes)
    }

    pub(super) async fn duty_notes(&self, name: &'static str) -> sqlx::Result<String> {
        let mut connection = self.own().await?;
        let notes: Option<String> =
            sqlx::query_scalar(self.sql("select notes from jobq.duties where name = $1"))
                .bind(name)
                .fetch_optional(&mut *connection)
                .await?;
        connection.hand_back();
        Ok(notes.unwrap_or_default())
    }

    pub(super) async fn note_duty(
        &self,
        name: &'static str,
        holder: SessionId,
        notes: &str,
    ) -> sqlx::Result<()> {
        let mut connection = self.own().await?;
        sqlx::query(self.sql("update jobq.duties set notes = $3 where name = $1 and held_by = $2"))
            .bind(name)
            .bind(holder.0)
            .bind(notes)
            .execute(&mut *connection)
            .await?;
        connection.hand_back();
        Ok(())
    }

    pub(super) async fn close_expired_sessions(&self) -> sqlx::Result<Vec<SessionId>> {
        let mut connection = self.own().await?;
        // A session that is locked is left for a later pass: a claim has pinned it, or a heartbeat is
        // about to extend it. One that comes too late finds no row. The jobs are looked for in a
        // later statement, which sees every claim.
        sqlx::query(self.sql(
            "with expired as materialized (
                 select id
                 from jobq.sessions
                 where leased_until < statement_timestamp()
                    or leased_until > statement_timestamp() + lease + interval '10 seconds'
                 for update skip locked
             ),
             gone as (
                 delete from jobq.sessions as session
                 using expired
                 where session.id = expired.id
                 returning session.id, worker, leased_until
             )
             insert into jobq.closed_sessions (id, worker, leased_until)
             select id, worker, leased_until from gone",
        ))
        .execute(&mut *connection)
        .await?;
        let closed: Vec<i64> =
            sqlx::query_scalar(self.sql("select id from jobq.closed_sessions order by id"))
                .fetch_all(&mut *connection)
                .await?;
        connection.hand_back();
        Ok(closed.into_iter().map(SessionId).collect())
    }

    /// No index has `leased_by`: all jobs are read, page by page, so that no statement runs long.
    pub(super) async fn abandoned(
        &self,
        closed: &[SessionId],
        orphans: bool,
        limit: u32,
    ) -> Result<Vec<HeldJob>> {
        let closed: Vec<i64> = closed.iter().map(|session| session.0).collect();
        let mut abandoned = Vec::new();
        let mut after = i64::MIN;
        loop {
            let page = self.abandoned_page(&closed, orphans, after);
            let (found, last) = within("find abandoned jobs", page).await?;
            abandoned.extend(found);
            match last {
                Some(last) if abandoned.len() < limit as usize => after = last,
                _ => return Ok(abandoned),
            }
        }
    }

    /// What a page after an id holds, and the last id in it; `None` at the end.
    async fn abandoned_page(
        &self,
        closed: &[i64],
        orphans: bool,
        after: i64,
    ) -> sqlx::Result<(Vec<HeldJob>, Option<i64>)> {
        let mut connection = self.own().await?;
        let rows = sqlx::query(self.sql(
            "with page as materialized (
                 select id, token, leased_by, attempt, crashes, interruptions, max_attempts,
                        max_crashes, isolated, cancel_requested, job_key, on_block
                 from jobq.jobs
                 where id > $3
                 order by id
                 limit 50000
             )
             select page.*, (select max(id) from page) as last
             from (values (1)) as always (n)
             left join page on leased_by <> 0
               and (
                   leased_by = any($1)
                   or ($2
                       and not exists (select from jobq.sessions where id = page.leased_by)
                       and not exists (select from jobq.closed_sessions where id = page.leased_by))
               )",
        ))
        .bind(closed)
        .bind(orphans)
        .bind(after)
        .fetch_all(&mut *connection)
        .await?;
        connection.hand_back();
        let last = rows.first().map(|row| row.try_get("last")).transpose()?.flatten();
        let found =
            rows.iter().filter(|row| !matches!(row.try_get::<Option<i64>, _>("id"), Ok(None)));
        let found = found.map(held_job).collect::<sqlx::Result<Vec<_>>>()?;
        Ok((found, last))
    }

    pub(super) async fn forget_sessions(&self, closed: &[SessionId]) -> sqlx::Result<()> {
        let closed: Vec<i64> = closed.iter().map(|session| session.0).collect();
        let mut connection = self.own().await?;
        sqlx::query(self.sql("delete from jobq.closed_sessions where id = any($1)"))
            .bind(closed)
            .execute(&mut *connection)
            .await?;
        connection.hand_back();
        Ok(())
    }

    pub(super) async fn live_sessions(&self) -> sqlx::Result<Vec<LiveSession>> {
        let mut connection = self.own().await?;
        let rows: Vec<(Vec<String>, Vec<String>, String)> = sqlx::query_as(self.sql(
            "select kinds, queues, floors from jobq.sessions
             where leased_until >= statement_timestamp()",
        ))
        .fetch_all(&mut *connection)
        .await?;
        connection.hand_back();
        Ok(rows
            .into_iter()
            .map(|(kinds, queues, floors)| LiveSession {
                kinds,
                queues,
                floors: serde_json::from_str(&floors).unwrap_or_default(),
            })
            .collect())
    }

    pub(super) async fn now(&self) -> sqlx::Result<Timestamp> {
        let mut connection = self.own().await?;
        let now: Time =
            sqlx::query_scalar("select statement_timestamp()").fetch_one(&mut *connection).await?;
        connection.hand_back();
        Ok(now.0)
    }

    pub(super) async fn horizon(&self) -> sqlx::Result<Horizon> {
        let mut connection = self.own().await?;
        let (now, oldest_running, newest): (Time, i64, i64) = sqlx::query_as(
            "select statement_timestamp(),
                    pg_snapshot_xmin(pg_current_snapshot())::text::int8,
                    pg_snapshot_xmax(pg_current_snapshot())::text::int8",
        )
        .fetch_one(&mut *connection)
        .await?;
        connection.hand_back();
        Ok(Horizon { now: now.0, oldest_running, newest })
    }

    pub(super) async fn unleased(
        &self,
        queue: &str,
        band: i16,
        from: Floor,
        to: Floor,
        limit: u32,
    ) -> sqlx::Result<Vec<UnleasedJob>> {
        let mut connection = self.own().await?;
        let rows: Vec<(i64, i64, String, Time)> = sqlx::query_as(self.sql(UNLEASED))
            .bind(queue)
            .bind(band)
            .bind(Time(from.run_after))
            .bind(from.id)
            .bind(Time(to.run_after))
            .bind(to.id)
            .bind(i64::from(limit))
            .fetch_all(&mut *connection)
            .await?;
        connection.hand_back();
        Ok(rows
            .into_iter()
            .map(|(id, token, kind, run_after)| UnleasedJob {
                id: JobId(id),
                token: Token(token),
                kind,
                run_after: run_after.0,
            })
            .collect())
    }

    pub(super) async fn shift(&self, jobs: &[UnleasedJob], shift: Shift) -> sqlx::Result<u64> {
        let mut sorted: Vec<(i64, i64)> = jobs.iter().map(|job| (job.id.0, job.token.0)).collect();
        sorted.sort_unstable();
        let (ids, tokens): (Vec<i64>, Vec<i64>) = sorted.into_iter().unzip();
        let mut connection = self.own().await?;
        let done = sqlx::query(self.sql(SHIFT))
            .bind(ids)
            .bind(tokens)
            .bind(shift.wait_reason())
            .execute(&mut *connection)
            .await?;
        connection.hand_back();
        Ok(done.rows_affected())
    }

    pub(super) async fn unpark(
        &self,
        queues: &[String],
        kinds: &[String],
        limit: u32,
    ) -> sqlx::Result<u64> {
        let mut connection = self.own().await?;
        let done = sqlx::query(self.sql(UNPARK))
            .bind(queues)
            .bind(kinds)
            .bind(i64::from(limit))
            .execute(&mut *connection)
            .await?;
        connection.hand_back();
        Ok(done.rows_affected())
    }

    pub(super) async fn take_expired(
        &self,
        session: SessionId,
        limit: u32,
    ) -> sqlx::Result<Vec<HeldJob>> {
        let mut connection = self.own().await?;
        let rows = sqlx::query(self.sql(TAKE_EXPIRED))
            .bind(session.0)
            .bind(i64::from(limit))
            .fetch_all(&mut *connection)
            .await?;
        connection.hand_back();
        rows.iter().map(held_job).collect()
    }

    pub(super) async fn prune(&self, limit: u32) -> sqlx::Result<u64> {
        let mut connection = self.own().await?;
        let pruned: i64 = sqlx::query_scalar(self.sql(PRUNE))
            .bind(i64::from(limit))
            .fetch_one(&mut *connection)
            .await?;
        connection.hand_back();
        Ok(pruned.unsigned_abs())
    }
}

pub(crate) const UNLEASED: &str = "
    select id, token, kind, run_after
    from jobq.jobs
    where queue = $1
      and band = $2
      and (run_after, id) > ($3, $4)
      and (run_after, id) <= ($5, $6)
      and run_after <= statement_timestamp()
      and leased_by = 0
    order by run_after, id
    limit $7";

// The time is looked at last: among the first conditions, it makes a plan made while the table was
// empty read all of the due index.
pub(crate) const SHIFT: &str = "
    with held as materialized (
        select ctid as tid
        from jobq.jobs
        where id = any($1)
          and token = ($2::int8[])[width_bucket(id, $1::int8[])]
          and leased_by = 0
        order by id
        for no key update skip locked
    )
    update jobq.jobs as job
    set band = case when $3::text is null then 32767 else priority end,
        run_after = case when $3 is null then clock_timestamp() else 'infinity' end,
        wait_reason = $3
    from held
    where job.ctid = held.tid and job.run_after <= statement_timestamp()";

// Every band by itself, as a claim looks at them, for the index to lead to the waiting jobs of each;
// and nothing is read beyond the limit.
pub(crate) const UNPARK: &str = "
    with held as materialized (
        select job.tid
        from unnest($1::text[]) as wanted (queue)
        cross join unnest(array(
            select unnest($2::text[])
            except
            select name from jobq.pauses where scope = 'kind'
        )) as known (kind)
        cross join lateral (
            select ctid as tid
            from jobq.jobs
            where queue = wanted.queue
              and kind = known.kind
              and wait_reason in ('kind', 'paused')
              and leased_by = 0
            order by id
            limit $3
            for no key update skip locked
        ) as job
        limit $3
    )
    update jobq.jobs as job
    set band = priority, run_after = clock_timestamp(), wait_reason = null
    from held
    where job.ctid = held.tid";

fn held_job(row: &PgRow) -> sqlx::Result<HeldJob> {
    Ok(HeldJob {
        lease: Lease {
            job: JobId(row.try_get("id")?),
            token: Token(row.try_get("token")?),
            session: SessionId(row.try_get("leased_by")?),
        },
        counters: counters(row)?,
        limits: limits(row)?,
        isolated: row.try_get("isolated")?,
        cancel_requested: row.try_get("cancel_requested")?,
        key: key(row)?,
    })
}

// Those that run are past their time, too, for they were started in it.
pub(crate) const TAKE_EXPIRED: &str = "
    with live as materialized (
        select id from jobq.sessions
        where id = $1 and leased_until > statement_timestamp()
        for key share
    ),
    expired as materialized (
        select ctid as tid
        from jobq.jobs
        where start_by <= statement_timestamp()
          and leased_by = 0
          and (select count(*) from live) = 1
        order by start_by
        limit $2
        for no key update skip locked
    )
    update jobq.jobs as job
    set token = token + 1, leased_by = $1
    from expired
    where job.ctid = expired.tid
    returning id, token, leased_by, attempt, crashes, interruptions, max_attempts, max_crashes,
              isolated, cancel_requested, job_key, on_block";

pub(crate) const PRUNE: &str = "
    with expired as materialized (
        select ctid as tid
        from jobq.finished
        where expires_at <= statement_timestamp()
        order by expires_at
        limit $1
        for update skip locked
    ),
    gone as (
        delete from jobq.finished as job using expired where job.ctid = expired.tid
        returning job.id, job.token, job.state
    ),
    forgotten as (
        delete from jobq.attempts
        where job_id = any (array (
            select id from gone where token > 1 or state = 'cancelled'
        ))
    )
    select count(*) from gone";
