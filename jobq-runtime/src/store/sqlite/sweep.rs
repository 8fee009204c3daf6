//! What the sweep does: duties, expired sessions, late jobs, pruning.

use std::time::Duration;

use jobq_core::job::{JobId, SessionId, Token};
use jobq_core::time::{Timestamp, micros};

use super::claim::{counters, lease, limits};
use super::{
    Floor, HEARTBEATS_FIRST, HeldJob, Horizon, LiveSession, Shift, SqliteStore, UnleasedJob, get,
    json, sql,
};

impl SqliteStore {
    pub(super) async fn take_duty(
        &self,
        name: &'static str,
        holder: SessionId,
        span: Duration,
    ) -> sqlx::Result<Option<String>> {
        let schema = self.schema.clone();
        self.write(async move |locked| {
            sqlx::query_scalar(sql(
                &schema,
                "insert into jobq_duties as duty (name, held_by, held_until)
                 values (?1, ?2, now_us() + ?3)
                 on conflict (name) do update
                 set held_by = excluded.held_by, held_until = excluded.held_until
                 where duty.held_by = excluded.held_by or duty.held_until < now_us()
                 returning notes",
            ))
            .bind(name)
            .bind(holder.0)
            .bind(micros(span))
            .fetch_optional(&mut **locked)
            .await
        })
        .await
    }

    pub(super) async fn duty_notes(&self, name: &'static str) -> sqlx::Result<String> {
        let mut reader = self.reader().await?;
        let notes: Option<String> =
            sqlx::query_scalar(self.sql("select notes from jobq_duties where name = ?1"))
                .bind(name)
                .fetch_optional(&mut *reader)
                .await?;
        Ok(notes.unwrap_or_default())
    }

    pub(super) async fn note_duty(
        &self,
        name: &'static str,
        holder: SessionId,
        notes: &str,
    ) -> sqlx::Result<()> {
        let (schema, notes) = (self.schema.clone(), notes.to_owned());
        self.write(async move |locked| {
            sqlx::query(sql(
                &schema,
                "update jobq_duties set notes = ?3 where name = ?1 and held_by = ?2",
            ))
            .bind(name)
            .bind(holder.0)
            .bind(notes)
            .execute(&mut **locked)
            .await?;
            Ok(())
        })
        .await
    }

    /// A session may have expired only because somebody kept the file locked, its heartbeats
    /// included: a handler's long transaction must not cost a whole fleet its leases. So expired
    /// sessions get the time to be extended, and are closed only if the lock was to be had
    /// meanwhile; else the next sweep tries again.
    pub(super) async fn close_expired_sessions(&self) -> sqlx::Result<Vec<SessionId>> {
        let mut reader = self.reader().await?;
        let expired: Vec<i64> = sqlx::query_scalar(
            self.sql("select id from jobq_sessions where leased_until < now_us()"),
        )
        .fetch_all(&mut *reader)
        .await?;
        if !expired.is_empty() {
            tokio::time::sleep(HEARTBEATS_FIRST).await;
            let (schema, expired) = (self.schema.clone(), json(expired));
            self.write(async move |locked| {
                if locked.waited > HEARTBEATS_FIRST {
                    return Ok(());
                }
                sqlx::query(sql(
                    &schema,
                    "insert into jobq_closed_sessions (id, worker, leased_until)
                     select id, worker, leased_until from jobq_sessions
                     where id in (select value from json_each(?1)) and leased_until < now_us()",
                ))
                .bind(&expired)
                .execute(&mut **locked)
                .await?;
                sqlx::query(sql(
                    &schema,
                    "delete from jobq_sessions where id in (select id from jobq_closed_sessions)",
                ))
                .execute(&mut **locked)
                .await?;
                Ok(())
            })
            .await?;
        }
        let closed: Vec<i64> =
            sqlx::query_scalar(self.sql("select id from jobq_closed_sessions order by id"))
                .fetch_all(&mut *reader)
                .await?;
        Ok(closed.into_iter().map(SessionId).collect())
    }

    pub(super) async fn abandoned(
        &self,
        closed: &[SessionId],
        orphans: bool,
        limit: u32,
    ) -> sqlx::Result<Vec<HeldJob>> {
        let closed: Vec<i64> = closed.iter().map(|session| session.0).collect();
        let mut reader = self.reader().await?;
        let rows = sqlx::query(self.sql(
            "select id, token, leased_by, attempt, crashes, interruptions, max_attempts, max_crashes,
                    isolated, cancel_requested
             from jobq_jobs as job
             where leased_by <> 0
               and (
                   leased_by in (select value from json_each(?1))
                   or (?2
                       and not exists (select 1 from jobq_sessions where id = job.leased_by)
                       and not exists (select 1 from jobq_closed_sessions where id = job.leased_by))
               )
             limit ?3",
        ))
        .bind(json(closed))
        .bind(orphans)
        .bind(i64::from(limit))
        .fetch_all(&mut *reader)
        .await?;
        rows.iter()
            .map(|row| {
                Ok(HeldJob {
                    lease: lease(row)?,
                    counters: counters(row)?,
                    limits: limits(row)?,
                    isolated: get::<i64>(row, "isolated")? != 0,
                    cancel_requested: get::<i64>(row, "cancel_requested")? != 0,
                })
            })
            .collect()
    }

    pub(super) async fn forget_sessions(&self, closed: &[SessionId]) -> sqlx::Result<()> {
        let closed: Vec<i64> = closed.iter().map(|session| session.0).collect();
        let (schema, closed) = (self.schema.clone(), json(closed));
        self.write(async move |locked| {
            sqlx::query(sql(
                &schema,
                "delete from jobq_closed_sessions where id in (select value from json_each(?1))",
            ))
            .bind(closed)
            .execute(&mut **locked)
            .await?;
            Ok(())
        })
        .await
    }

    pub(super) async fn live_sessions(&self) -> sqlx::Result<Vec<LiveSession>> {
        let mut reader = self.reader().await?;
        let rows: Vec<(String, String, String)> =
            sqlx::query_as(self.sql(
                "select kinds, queues, floors from jobq_sessions where leased_until >= now_us()",
            ))
            .fetch_all(&mut *reader)
            .await?;
        Ok(rows
            .into_iter()
            .map(|(kinds, queues, floors)| LiveSession {
                kinds: serde_json::from_str(&kinds).unwrap_or_default(),
                queues: serde_json::from_str(&queues).unwrap_or_default(),
                floors: serde_json::from_str(&floors).unwrap_or_default(),
            })
            .collect())
    }

    /// Whoever has the write lock knows that every earlier writer has ended: there is nothing
    /// else to ask.
    pub(super) async fn horizon(&self) -> sqlx::Result<Horizon> {
        let schema = self.schema.clone();
        let now: i64 = self
            .write(async move |locked| {
                sqlx::query_scalar(sql(&schema, "select now_us()")).fetch_one(&mut **locked).await
            })
            .await?;
        Ok(Horizon { now: Timestamp(now), oldest_running: now, newest: now })
    }

    pub(super) async fn unleased(
        &self,
        queue: &str,
        band: i16,
        from: Floor,
        to: Floor,
        limit: u32,
    ) -> sqlx::Result<Vec<UnleasedJob>> {
        let mut reader = self.reader().await?;
        let rows = sqlx::query(self.sql(
            "select id, token, kind, run_after
             from jobq_jobs
             where queue = ?1
               and band = ?2
               and (run_after, id) > (?3, ?4)
               and (run_after, id) <= (?5, ?6)
               and run_after <= now_us()
               and leased_by = 0
             order by run_after, id
             limit ?7",
        ))
        .bind(queue)
        .bind(band)
        .bind(from.run_after.0)
        .bind(from.id)
        .bind(to.run_after.0)
        .bind(to.id)
        .bind(i64::from(limit))
        .fetch_all(&mut *reader)
        .await?;
        rows.iter()
            .map(|row| {
                Ok(UnleasedJob {
                    id: JobId(get(row, "id")?),
                    token: Token(get(row, "token")?),
                    kind: get(row, "kind")?,
                    run_after: Timestamp(get(row, "run_after")?),
                })
            })
            .collect()
    }

    pub(super) async fn shift(&self, jobs: &[UnleasedJob], shift: Shift) -> sqlx::Result<u64> {
        let jobs: Vec<(i64, i64)> = jobs.iter().map(|job| (job.id.0, job.token.0)).collect();
        let (schema, jobs) = (self.schema.clone(), json(jobs));
        self.write(async move |locked| {
            let done = sqlx::query(sql(
                &schema,
                "with found (id, token) as materialized (
                     select value ->> 0, value ->> 1 from json_each(?1)
                 )
                 update jobq_jobs
                 set band = case when ?2 then priority else 32767 end,
                     run_after = case when ?2 then 9223372036854775807 else now_us() end,
                     wait_reason = case when ?2 then 'kind' end
                 where id in (
                     select job.id
                     from found
                     cross join jobq_jobs as job on job.id = found.id
                     where job.token = found.token
                       and job.leased_by = 0
                       and job.run_after <= now_us()
                 )",
            ))
            .bind(jobs)
            .bind(shift == Shift::Park)
            .execute(&mut **locked)
            .await?;
            Ok(done.rows_affected())
        })
        .await
    }

    pub(super) async fn unpark(
        &self,
        queues: &[String],
        kinds: &[String],
        limit: u32,
    ) -> sqlx::Result<u64> {
        let (schema, queues, kinds) = (self.schema.clone(), json(queues), json(kinds));
        // Every band by itself, for the index to lead to the waiting jobs of each.
        let bands = json(jobq_core::queue::PRIORITIES.collect::<Vec<i16>>());
        self.write(async move |locked| {
            let done = sqlx::query(sql(
                &schema,
                "update jobq_jobs
                 set band = priority, run_after = now_us(), wait_reason = null
                 where id in (
                     select id
                     from jobq_jobs
                     where queue in (select value from json_each(?1))
                       and band in (select value from json_each(?4))
                       and run_after = 9223372036854775807
                       and wait_reason = 'kind'
                       and leased_by = 0
                       and kind in (select value from json_each(?2))
                     limit ?3
                 )",
            ))
            .bind(queues)
            .bind(kinds)
            .bind(i64::from(limit))
            .bind(bands)
            .execute(&mut **locked)
            .await?;
            Ok(done.rows_affected())
        })
        .await
    }

    pub(super) async fn prune(&self, limit: u32) -> sqlx::Result<u64> {
        let schema = self.schema.clone();
        self.write(async move |locked| {
            let gone: Vec<(i64, bool)> = sqlx::query_as(sql(
                &schema,
                "delete from jobq_finished
                 where id in (
                     select id from jobq_finished
                     where expires_at <= now_us()
                     order by expires_at
                     limit ?1
                 )
                 returning id, token > 1 or state = 'cancelled'",
            ))
            .bind(i64::from(limit))
            .fetch_all(&mut **locked)
            .await?;
            let tried: Vec<i64> =
                gone.iter().filter(|(_, tried)| *tried).map(|(id, _)| *id).collect();
            if !tried.is_empty() {
                sqlx::query(sql(
                    &schema,
                    "delete from jobq_attempts where job_id in (select value from json_each(?1))",
                ))
                .bind(json(tried))
                .execute(&mut **locked)
                .await?;
            }
            Ok(gone.len() as u64)
        })
        .await
    }
}
