//! What the sweep does: duties, expired sessions, late jobs, pruning.

use std::sync::atomic::Ordering;
use std::time::Duration;

use jobq_core::job::{JobId, Lease, SessionId, Token};
use jobq_core::time::{Timestamp, micros};
use sqlx::sqlite::SqliteRow;

use super::claim::{counters, key, limits};
use super::{
    Floor, HEARTBEATS_FIRST, HeldJob, Horizon, LiveSession, Shift, SqliteStore, UnleasedJob, get,
    json, sql,
};

/// Those that run are past their time, too, for they were started in it.
macro_rules! expiring {
    () => {
        "select id
         from jobq_jobs indexed by jobq_jobs_expiring
         where start_by <= now_us() and leased_by = 0
         order by start_by
         limit ?1"
    };
}

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
                 where duty.held_by = excluded.held_by
                    or duty.held_until < now_us()
                    or duty.held_until > excluded.held_until
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
        let expired: Vec<i64> = sqlx::query_scalar(self.sql(
            "select id from jobq_sessions
                 where leased_until not between now_us() and now_us() + lease + 10000000",
        ))
        .fetch_all(&mut *self.reader().await?)
        .await?;
        if !expired.is_empty() {
            tokio::time::sleep(HEARTBEATS_FIRST).await;
            let (schema, expired) = (self.schema.clone(), json(expired));
            let close = self.write(async move |locked| {
                if locked.waited > HEARTBEATS_FIRST {
                    return Ok(());
                }
                sqlx::query(sql(
                    &schema,
                    "insert into jobq_closed_sessions (id, worker, leased_until)
                     select id, worker, leased_until from jobq_sessions
                     where id in (select value from json_each(?1))
                       and leased_until not between now_us() and now_us() + lease + 10000000",
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
            });
            close.await?;
        }
        let mut reader = self.reader().await?;
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
                    isolated, cancel_requested, job_key, on_block
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
        rows.iter().map(held_job).collect()
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

    /// Under the write lock, so that a claim that only looks knows how far it has seen.
    pub(super) async fn now(&self) -> sqlx::Result<Timestamp> {
        let schema = self.schema.clone();
        let now: i64 = self
            .write(async move |locked| {
                sqlx::query_scalar(sql(&schema, "select now_us()")).fetch_one(&mut **locked).await
            })
            .await?;
        self.locked_at.store(now, Ordering::Relaxed);
        Ok(Timestamp(now))
    }

    /// Whoever has the write lock knows that every earlier writer has ended: there is nothing
    /// else to ask.
    pub(super) async fn horizon(&self) -> sqlx::Result<Horizon> {
        let now = self.now().await?;
        Ok(Horizon { now, oldest_running: now.0, newest: now.0 })
    }

    pub(super) async fn unleased(
        &self,
        queue: &str,
        band: i16,
        from: Floor,
        to: Floor,
        limit: u32,
    ) -> sqlx::Result<Vec<UnleasedJob>> {
        const FIRST: i64 = i64::MIN;
        const LAST: i64 = i64::MAX;
        let (from_time, to_time) = (from.run_after.0, to.run_after.0);
        // A comparison of (run_after, id) uses the index for run_after only, and one insert gives
        // thousands of jobs the same: so the times at both ends are looked at by themselves.
        let ranges = if from_time == to_time {
            vec![(UNLEASED_AT, from_time, from.id, to.id)]
        } else {
            vec![
                (UNLEASED_AT, from_time, from.id, LAST),
                (UNLEASED_BETWEEN, from_time, to_time, LAST),
                (UNLEASED_AT, to_time, FIRST, to.id),
            ]
        };
        let mut reader = self.reader().await?;
        let mut jobs = Vec::new();
        for (text, first, second, third) in ranges {
            let left = limit.saturating_sub(jobs.len() as u32);
            let rows = sqlx::query(self.sql(text))
                .bind(queue)
                .bind(band)
                .bind(first)
                .bind(second)
                .bind(third)
                .bind(i64::from(left))
                .fetch_all(&mut *reader)
                .await?;
            for row in &rows {
                jobs.push(UnleasedJob {
                    id: JobId(get(row, "id")?),
                    token: Token(get(row, "token")?),
                    kind: get(row, "kind")?,
                    run_after: Timestamp(get(row, "run_after")?),
                });
            }
        }
        Ok(jobs)
    }

    pub(super) async fn shift(&self, jobs: &[UnleasedJob], shift: Shift) -> sqlx::Result<u64> {
        let jobs: Vec<(i64, i64)> = jobs.iter().map(|job| (job.id.0, job.token.0)).collect();
        let (schema, jobs) = (self.schema.clone(), json(jobs));
        self.write(async move |locked| {
            let ids: Vec<i64> = sqlx::query_scalar(sql(
                &schema,
                "select value ->> 0
                 from json_each(?1)
                 where (
                     select 1 from jobq_jobs
                     where id = value ->> 0
                       and token = value ->> 1
                       and leased_by = 0
                       and run_after <= now_us()
                 )",
            ))
            .bind(jobs)
            .fetch_all(&mut **locked)
            .await?;
            let text = match shift {
                Shift::Hurry => {
                    "insert into jobq_do_move
                     select value, 32767, now_us(), ?2 from json_each(?1)"
                }
                Shift::Park | Shift::Pause => {
                    "insert into jobq_do_move
                     select value, null, 9223372036854775807, ?2 from json_each(?1)"
                }
            };
            sqlx::query(sql(&schema, text))
                .bind(json(&ids))
                .bind(shift.wait_reason())
                .execute(&mut **locked)
                .await?;
            Ok(ids.len() as u64)
        })
        .await
    }

    pub(super) async fn unpark(
        &self,
        queues: &[String],
        kinds: &[String],
        limit: u32,
    ) -> sqlx::Result<u64> {
        let mut reader = self.reader().await?;
        // Every band by itself, for the index to lead to the waiting jobs of each.
        let parked: Vec<i64> = sqlx::query_scalar(self.sql(
            "select id
             from jobq_jobs indexed by jobq_jobs_due
             where queue in (select value from json_each(?1))
               and band in (4, 3, 2, 1, 0, -1, -2, -3, -4)
               and run_after = 9223372036854775807
               and wait_reason in ('kind', 'paused')
               and leased_by = 0
               and kind in (
                   select value from json_each(?2)
                   except
                   select name from jobq_pauses where scope = 'kind'
               )
             limit ?3",
        ))
        .bind(json(queues))
        .bind(json(kinds))
        .bind(i64::from(limit))
        .fetch_all(&mut *reader)
        .await?;
        drop(reader);
        if parked.is_empty() {
            return Ok(0);
        }
        let (schema, parked) = (self.schema.clone(), json(parked));
        self.write(async move |locked| {
            let ids: Vec<i64> = sqlx::query_scalar(sql(
                &schema,
                "select value
                 from json_each(?1)
                 where (select wait_reason from jobq_jobs where id = value)
                       in ('kind', 'paused')",
            ))
            .bind(parked)
            .fetch_all(&mut **locked)
            .await?;
            sqlx::query(sql(
                &schema,
                "insert into jobq_do_move select value, null, now_us(), null from json_each(?1)",
            ))
            .bind(json(&ids))
            .execute(&mut **locked)
            .await?;
            Ok(ids.len() as u64)
        })
        .await
    }

    pub(super) async fn take_expired(
        &self,
        session: SessionId,
        limit: u32,
    ) -> sqlx::Result<Vec<HeldJob>> {
        // Without the lock: as a rule there are none.
        let mut reader = self.reader().await?;
        let is_any: bool =
            sqlx::query_scalar(self.sql(concat!("select exists (", expiring!(), ")")))
                .bind(1)
                .fetch_one(&mut *reader)
                .await?;
        drop(reader);
        if !is_any {
            return Ok(Vec::new());
        }
        let schema = self.schema.clone();
        self.write(async move |locked| {
            let is_live: bool = sqlx::query_scalar(sql(
                &schema,
                "select exists (
                     select 1 from jobq_sessions where id = ?1 and leased_until > now_us()
                 )",
            ))
            .bind(session.0)
            .fetch_one(&mut **locked)
            .await?;
            if !is_live {
                return Ok(Vec::new());
            }
            let ids: Vec<i64> = sqlx::query_scalar(sql(&schema, expiring!()))
                .bind(i64::from(limit))
                .fetch_all(&mut **locked)
                .await?;
            let rows = sqlx::query(sql(
                &schema,
                "update jobq_jobs
                 set token = token + 1, leased_by = ?2
                 where id in (select value from json_each(?1))
                 returning id, token, leased_by, attempt, crashes, interruptions, max_attempts,
                           max_crashes, isolated, cancel_requested, job_key, on_block",
            ))
            .bind(json(ids))
            .bind(session.0)
            .fetch_all(&mut **locked)
            .await?;
            rows.iter().map(held_job).collect()
        })
        .await
    }

    pub(super) async fn prune(&self, limit: u32) -> sqlx::Result<u64> {
        let schema = self.schema.clone();
        self.write(async move |locked| {
            let ids: Vec<i64> = sqlx::query_scalar(sql(
                &schema,
                "select id
                 from jobq_finished indexed by jobq_finished_expires
                 where expires_at <= now_us()
                 order by expires_at
                 limit ?1",
            ))
            .bind(i64::from(limit))
            .fetch_all(&mut **locked)
            .await?;
            sqlx::query(sql(&schema, "insert into jobq_do_prune select value from json_each(?1)"))
                .bind(json(&ids))
                .execute(&mut **locked)
                .await?;
            Ok(ids.len() as u64)
        })
        .await
    }
}

fn held_job(row: &SqliteRow) -> sqlx::Result<HeldJob> {
    Ok(HeldJob {
        lease: Lease {
            job: JobId(get(row, "id")?),
            token: Token(get(row, "token")?),
            session: SessionId(get(row, "leased_by")?),
        },
        counters: counters(row)?,
        limits: limits(row)?,
        isolated: get::<i64>(row, "isolated")? != 0,
        cancel_requested: get::<i64>(row, "cancel_requested")? != 0,
        key: key(row)?,
    })
}

macro_rules! unleased {
    ($range:literal) => {
        concat!(
            "select id, token, kind, run_after
             from jobq_jobs indexed by jobq_jobs_due
             where queue = ?1
               and band = ?2
               and ",
            $range,
            "
               and run_after <= now_us()
               and leased_by = 0
             order by run_after, id
             limit ?6"
        )
    };
}

/// Of one time, after one id and up to another.
const UNLEASED_AT: &str = unleased!("run_after = ?3 and id > ?4 and id <= ?5");
/// After one time and before another.
const UNLEASED_BETWEEN: &str = unleased!("run_after > ?3 and run_after < ?4");

/// Puts a job elsewhere in its queue; without a band, in that of its priority.
pub(super) const DO_MOVE: &str = "
    create temp view jobq_do_move (id, band, run_after, wait_reason)
    as select null, null, null, null;
    create temp trigger jobq_do_move_row instead of insert on jobq_do_move
    begin
        update jobq_jobs
        set band = coalesce(new.band, priority),
            run_after = new.run_after,
            wait_reason = new.wait_reason
        where id = new.id;
    end;";

/// Forgets a finished job.
pub(super) const DO_PRUNE: &str = "
    create temp view jobq_do_prune (id) as select null;
    create temp trigger jobq_do_prune_row instead of insert on jobq_do_prune
    begin
        delete from jobq_finished where id = new.id;
        delete from jobq_attempts where job_id = new.id;
    end;";
