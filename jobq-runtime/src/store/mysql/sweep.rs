//! What the sweep does: duties, expired sessions, late jobs, pruning.

use std::fmt::Write;
use std::time::Duration;

use jobq_core::job::{JobId, Lease, SessionId, Token};
use jobq_core::time::{Timestamp, micros};
use sqlx::Row;
use sqlx::mysql::MySqlRow;

use super::claim::{close_statement, counters, key, lease_statement, limits};
use super::due::{DUE, Key, LOCK_JOBS, Range, jobs_by_id};
use super::settle::forget_statement;
use super::{
    CHECK_FAILED, Checkout, Floor, HeldJob, Horizon, LIST, LiveSession, MysqlStore, Result, Shift,
    UnleasedJob, again, check, execute, get, is_set, killed, list, literal, literal_or_null,
    literals, number, rows, within, written,
};

/// How many jobs one statement looks through.
const PAGE: u32 = 50_000;

/// The number of no transaction: those that have not written yet are listed with larger ones.
const NO_TRANSACTION: i64 = 1 << 48;

/// How often the list of transactions is asked for; see [`MysqlStore::horizon`].
const HORIZON_TRIES: u32 = 10;

/// How many lists of jobs whose time is over one look for expired ones reads: most of them were started.
const EXPIRING_ROUNDS: u32 = 100;

/// A job that waits for its kind: for somebody to know it, or for it to be resumed.
const IS_PARKED: &str = "wait_reason in ('kind', 'paused')";

/// A lease that is over, or of a clock that has stepped back since.
const EXPIRED: &str = "leased_until not between now_us() and now_us() + lease + 10000000";

impl MysqlStore {
    pub(super) async fn take_duty(
        &self,
        name: &'static str,
        holder: SessionId,
        span: Duration,
    ) -> sqlx::Result<Option<String>> {
        again(|| async {
            let mut connection = self.own().await?;
            let notes = self.take_duty_on(&mut connection, name, holder, span).await?;
            connection.hand_back();
            Ok(notes)
        })
        .await
    }

    async fn take_duty_on(
        &self,
        connection: &mut Checkout,
        name: &'static str,
        holder: SessionId,
        span: Duration,
    ) -> sqlx::Result<Option<String>> {
        let (name, span) = (literal(name), micros(span));
        // The clock is that of a statement's beginning: a lock that was waited for came later, and
        // what its last holder wrote would seem to be of the future.
        let look = format!(
            "begin;
             select name from jobq_duties where name = {name} for update;
             select held_by, held_until not between now_us() and now_us() + {span} as is_free, notes
             from jobq_duties
             where name = {name}"
        );
        let mut found = rows(connection, &self.schema, &look).await?;
        // One row if somebody made it between the two.
        if found.len() < 2 {
            let make = format!("insert ignore into jobq_duties (name) values ({name}); commit");
            execute(connection, &self.schema, &make).await?;
            found = rows(connection, &self.schema, &look).await?;
        }
        let row = found.get(1).ok_or(sqlx::Error::RowNotFound)?;
        if get::<i64>(row, "held_by")? != holder.0 && !is_set(row, "is_free")? {
            execute(connection, &self.schema, "rollback").await?;
            return Ok(None);
        }
        let notes = get(row, "notes")?;
        let take = format!(
            "update jobq_duties set held_by = {holder}, held_until = now_us() + {span}
             where name = {name};
             commit"
        );
        execute(connection, &self.schema, &take).await?;
        Ok(Some(notes))
    }

    pub(super) async fn duty_notes(&self, name: &'static str) -> sqlx::Result<String> {
        let name = literal(name);
        let rows = self.rows(&format!("select notes from jobq_duties where name = {name}")).await?;
        rows.first().map_or(Ok(String::new()), |row| get(row, "notes"))
    }

    pub(super) async fn note_duty(
        &self,
        name: &'static str,
        holder: SessionId,
        notes: &str,
    ) -> sqlx::Result<()> {
        let (name, notes) = (literal(name), literal(notes));
        self.rows(&format!(
            "update jobq_duties set notes = {notes} where name = {name} and held_by = {holder}"
        ))
        .await?;
        Ok(())
    }

    /// Looks for expired sessions by a plain read, and closes each by its id: a delete that reads
    /// the table would wait for every heartbeat and claim.
    ///
    /// One that is locked is left for a later pass: a claim has pinned it, or a heartbeat is about to
    /// extend it. A heartbeat that comes too late finds no row. The jobs are looked for in a later
    /// statement, which sees every claim.
    pub(super) async fn close_expired_sessions(&self) -> sqlx::Result<Vec<SessionId>> {
        let expired = self.ids(&format!("select id from jobq_sessions where {EXPIRED}")).await?;
        for some in expired.chunks(LIST) {
            let some = list(some.iter().copied());
            let unlocked = format!(
                "select id from jobq_sessions force index (primary)
                 where id in ({some})
                 for update skip locked"
            );
            for session in self.ids(&unlocked).await? {
                let close = close_statement(session, EXPIRED);
                match again(|| self.rows(&close)).await {
                    // It is locked now.
                    Err(error) if number(&error) == Some(LOCK_WAIT) => (),
                    closed => drop(closed?),
                }
            }
        }
        let closed = self.ids("select id from jobq_closed_sessions order by id").await?;
        Ok(closed.into_iter().map(SessionId).collect())
    }

    async fn ids(&self, text: &str) -> sqlx::Result<Vec<i64>> {
        self.rows(text).await?.iter().map(|row| get(row, "id")).collect()
    }

    /// No index has `leased_by`: all jobs are read, page by page, so that no statement runs long.
    pub(super) async fn abandoned(
        &self,
        closed: &[SessionId],
        orphans: bool,
        limit: u32,
    ) -> Result<Vec<HeldJob>> {
        let closed = list(closed.iter().map(|session| session.0));
        let mut abandoned = Vec::new();
        let mut after = 0;
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
        closed: &str,
        orphans: bool,
        after: i64,
    ) -> sqlx::Result<(Vec<HeldJob>, Option<i64>)> {
        let skip = PAGE - 1;
        let last = self
            .rows(&format!(
                "select id
                 from jobq_jobs force index (primary)
                 where id > {after}
                 order by id
                 limit 1 offset {skip}"
            ))
            .await?;
        let last: Option<i64> = last.first().map(|row| get(row, "id")).transpose()?;
        let up_to = last.unwrap_or(i64::MAX);
        let orphaned = if orphans {
            "or (
                 not exists (select 1 from jobq_sessions where id = job.leased_by)
                 and not exists (select 1 from jobq_closed_sessions where id = job.leased_by)
             )"
        } else {
            ""
        };
        let rows = self
            .rows(&format!(
                "select id, token, leased_by, attempt, crashes, interruptions, max_attempts,
                        max_crashes, isolated, cancel_requested, job_key,
                        on_block
                 from jobq_jobs as job force index (primary)
                 where id > {after}
                   and id <= {up_to}
                   and leased_by <> 0
                   and (leased_by in ({closed}) {orphaned})
                 order by id"
            ))
            .await?;
        Ok((rows.iter().map(held_job).collect::<sqlx::Result<_>>()?, last))
    }

    pub(super) async fn forget_sessions(&self, closed: &[SessionId]) -> sqlx::Result<()> {
        // One by one: a list may make the server read, and lock, the others too.
        let text: Vec<String> = closed
            .iter()
            .map(|session| format!("delete from jobq_closed_sessions where id = {session}"))
            .collect();
        if !text.is_empty() {
            let text = text.join("; ");
            again(|| self.rows(&text)).await?;
        }
        Ok(())
    }

    pub(super) async fn live_sessions(&self) -> sqlx::Result<Vec<LiveSession>> {
        let rows = self
            .rows("select kinds, queues, floors from jobq_sessions where leased_until >= now_us()")
            .await?;
        rows.iter()
            .map(|row| {
                Ok(LiveSession {
                    kinds: serde_json::from_str(&get::<String>(row, "kinds")?).unwrap_or_default(),
                    queues: serde_json::from_str(&get::<String>(row, "queues")?)
                        .unwrap_or_default(),
                    floors: serde_json::from_str(&get::<String>(row, "floors")?)
                        .unwrap_or_default(),
                })
            })
            .collect()
    }

    /// Reads the time, draws a number as every transaction that writes does, and asks which others
    /// are running. Transactions that draw a later number have also read the clock later.
    ///
    /// Seeing them takes the privilege PROCESS, and one server that all writers use: else nothing
    /// is ever proved. The server answers from a copy that may be old, and that somebody who asks
    /// all the time keeps old: so the answer counts only if it has this very question in it.
    pub(super) async fn horizon(&self) -> sqlx::Result<Horizon> {
        let mut unproved = Horizon { now: Timestamp(0), oldest_running: 0, newest: i64::MAX };
        for tried in 0..HORIZON_TRIES {
            if tried > 0 {
                // The copy is renewed when nobody has looked for 100 ms; others may be asking too.
                let wait = Duration::from_millis(120).mul_f64(1.0 + rand::random::<f64>());
                tokio::time::sleep(wait).await;
            }
            let question = format!("{:016x}", rand::random::<u64>());
            let answer = self
                .rows(&format!(
                    "select now_us() as now;
                     show global variables
                     where variable_name in ('wsrep_on', 'group_replication_single_primary_mode');
                     begin;
                     select name from jobq_duties where name = '' for update;
                     select cast(trx_id as signed) as number,
                            coalesce(
                                trx_mysql_thread_id = connection_id()
                                    and trx_query like '%{question}%',
                                0
                            ) as asks
                     from information_schema.innodb_trx;
                     rollback"
                ))
                .await;
            let rows = match answer {
                Ok(rows) => rows,
                Err(error) if number(&error) == Some(PRIVILEGE_MISSING) => {
                    unproved.now = self.now().await?;
                    return Ok(unproved);
                }
                Err(error) => return Err(error),
            };
            let seen = Seen::new(&rows)?;
            unproved.now = seen.now;
            if seen.many_writable_servers {
                return Ok(unproved);
            }
            if let Some(ours) = seen.ours {
                let oldest = seen.running.into_iter().min().unwrap_or(ours);
                return Ok(Horizon { now: seen.now, oldest_running: oldest, newest: ours });
            }
        }
        Ok(unproved)
    }

    pub(super) async fn now(&self) -> sqlx::Result<Timestamp> {
        let rows = self.rows("select now_us() as now").await?;
        Ok(Timestamp(get(rows.first().ok_or(sqlx::Error::RowNotFound)?, "now")?))
    }

    pub(super) async fn unleased(
        &self,
        queue: &str,
        band: i16,
        from: Floor,
        to: Floor,
        limit: u32,
    ) -> sqlx::Result<Vec<UnleasedJob>> {
        let place = (queue.to_owned(), band);
        self.meet(std::iter::once(place.clone())).await?;
        if !self.met.contains(&place) {
            return Ok(Vec::new());
        }
        let (mut unleased, mut from) = (Vec::new(), from);
        loop {
            let left = limit - unleased.len() as u32;
            let rows = self.rows(&unleased_statement(queue, band, from, to, left)).await?;
            for row in &rows {
                let key = Key::read(row)?;
                from = from.max(key.floor());
                if key.fits {
                    unleased.push(UnleasedJob {
                        id: JobId(key.id),
                        token: Token(get(row, "token")?),
                        kind: get(row, "kind")?,
                        run_after: key.run_after,
                    });
                }
            }
            if rows.len() < left as usize || unleased.len() >= limit as usize {
                unleased.sort_by_key(|job| (job.run_after, job.id));
                return Ok(unleased);
            }
        }
    }

    pub(super) async fn shift(&self, jobs: &[UnleasedJob], shift: Shift) -> sqlx::Result<u64> {
        let set = match shift {
            Shift::Hurry => "band = 32767, run_after = now_us()",
            Shift::Park | Shift::Pause => "band = priority, run_after = 9223372036854775807",
        };
        let set = format!("{set}, wait_reason = {}", literal_or_null(shift.wait_reason()));
        let mut sorted: Vec<(i64, i64)> = jobs.iter().map(|job| (job.id.0, job.token.0)).collect();
        sorted.sort_unstable();
        let mut moved = 0;
        for jobs in sorted.chunks(LIST) {
            moved += again(|| self.move_jobs(jobs, "run_after <= now_us()", &set)).await?;
        }
        Ok(moved)
    }

    pub(super) async fn unpark(
        &self,
        queues: &[String],
        kinds: &[String],
        limit: u32,
    ) -> sqlx::Result<u64> {
        let paused = self.paused().await?.kinds;
        let kinds: Vec<String> =
            kinds.iter().filter(|kind| !paused.contains(kind)).cloned().collect();
        if queues.is_empty() || kinds.is_empty() {
            return Ok(0);
        }
        let mut moved = 0;
        let rows = self.rows(&parked_statement(queues, &kinds, limit)).await?;
        let mut parked: Vec<(i64, i64)> = rows
            .iter()
            .map(|row| Ok((get(row, "id")?, get(row, "token")?)))
            .collect::<sqlx::Result<_>>()?;
        parked.sort_unstable();
        let set = "band = priority, run_after = now_us(), wait_reason = null";
        for jobs in parked.chunks(LIST) {
            moved += again(|| self.move_jobs(jobs, IS_PARKED, set)).await?;
        }
        Ok(moved)
    }

    /// Writes pending jobs that still have their tokens and fit a condition; returns how many.
    async fn move_jobs(&self, jobs: &[(i64, i64)], fits: &str, set: &str) -> sqlx::Result<u64> {
        let jobs_by_id = jobs_by_id(jobs.iter().map(|(id, _)| *id));
        let mut connection = self.own().await?;
        let look = format!(
            "begin;
             select job.id, token
             from {jobs_by_id}
             where leased_by = 0 and {fits}
             {LOCK_JOBS}"
        );
        let mut held = Vec::new();
        for row in rows(&mut connection, &self.schema, &look).await? {
            let job = (get(&row, "id")?, get(&row, "token")?);
            if jobs.binary_search(&job).is_ok() {
                held.push(job.0);
            }
        }
        let moved = held.len() as u64;
        let ids = list(held);
        let write = format!(
            "update jobq_jobs force index (primary) set {set} where id in ({ids}); {}; commit",
            written(moved as usize)
        );
        execute(&mut connection, &self.schema, &write).await?;
        connection.hand_back();
        Ok(moved)
    }

    pub(super) async fn take_expired(
        &self,
        session: SessionId,
        limit: u32,
    ) -> sqlx::Result<Vec<HeldJob>> {
        let mut taken = Vec::new();
        let mut after = (i64::MIN, 0);
        for _ in 0..EXPIRING_ROUNDS {
            // Without a lock: as a rule there are none.
            let found = self.rows(&expiring_statement(after)).await?;
            let (mut ids, mut forget) = (Vec::new(), Vec::new());
            for row in &found {
                after = (get(row, "start_by")?, get(row, "job_id")?);
                match get::<Option<i64>>(row, "held")? {
                    Some(0) => ids.push(after.1),
                    Some(_) => {}
                    None => forget.push(format!(
                        "delete from jobq_expiring where start_by = {} and job_id = {}",
                        after.0, after.1
                    )),
                }
            }
            if !forget.is_empty() {
                let forget = forget.join("; ");
                again(|| self.rows(&forget)).await?;
            }
            // One that was replaced is there more than once.
            ids.sort_unstable();
            ids.dedup();
            ids.truncate(limit as usize - taken.len());
            if !ids.is_empty() {
                taken.extend(again(|| self.take_these(&ids, session)).await?);
            }
            if found.len() < LIST || taken.len() >= limit as usize {
                break;
            }
        }
        Ok(taken)
    }

    /// Leases those of these jobs that have expired and that nobody has; none if the session is not live.
    async fn take_these(&self, ids: &[i64], session: SessionId) -> sqlx::Result<Vec<HeldJob>> {
        let mut connection = self.own().await?;
        let jobs = jobs_by_id(ids.iter().copied());
        let look = format!(
            "begin;
             select job.id as job, token + 1 as token, cast({session} as signed) as leased_by, attempt,
                    crashes, interruptions, max_attempts, max_crashes, isolated, cancel_requested,
                    job_key, on_block
             from {jobs}
             where leased_by = 0 and start_by <= now_us()
             {LOCK_JOBS}"
        );
        let found = rows(&mut connection, &self.schema, &look).await?;
        let taken: Vec<HeldJob> =
            found.iter().map(|row| held_job_with_id(row, "job")).collect::<sqlx::Result<_>>()?;
        // The session is locked at the end only, so that its heartbeats wait for the server at most.
        let mut write = check(&format!(
            "(
                 select count(*) from jobq_sessions force index (primary)
                 where id = {session} and leased_until > now_us()
                 lock in share mode
             ) = 1"
        ));
        for job in &taken {
            let lease = lease_statement(job.lease.job.0, session.0, false);
            write!(write, "; {lease}").expect("text grows");
        }
        write.push_str("; commit");
        match execute(&mut connection, &self.schema, &write).await {
            Ok(leased) if leased == taken.len() as u64 => {}
            Ok(_) => return Err(killed()),
            // With its connection the transaction ends, too.
            Err(error) if number(&error) == Some(CHECK_FAILED) => return Ok(Vec::new()),
            Err(error) => return Err(error),
        }
        connection.hand_back();
        Ok(taken)
    }

    pub(super) async fn prune(&self, limit: u32) -> sqlx::Result<u64> {
        let mut pruned = 0;
        while pruned < u64::from(limit) {
            let some = (limit - pruned as u32).min(LIST as u32);
            let gone = again(|| self.prune_some(some)).await?;
            pruned += gone;
            if gone < u64::from(some) {
                break;
            }
        }
        Ok(pruned)
    }

    async fn prune_some(&self, limit: u32) -> sqlx::Result<u64> {
        let mut connection = self.own().await?;
        let look = format!("begin; {}", expired_statement(limit));
        let found = rows(&mut connection, &self.schema, &look).await?;
        let mut ids: Vec<i64> =
            found.iter().map(|row| get(row, "id")).collect::<sqlx::Result<_>>()?;
        ids.sort_unstable();
        let mut write = String::new();
        for id in &ids {
            let forget = forget_statement(*id);
            write!(write, "delete from jobq_finished where id = {id}; {forget}; ")
                .expect("text grows");
        }
        write.push_str("commit");
        execute(&mut connection, &self.schema, &write).await?;
        connection.hand_back();
        Ok(ids.len() as u64)
    }
}

/// A lock was waited for as long as is allowed.
const LOCK_WAIT: u16 = 1205;

/// The list of transactions needs PROCESS.
const PRIVILEGE_MISSING: u16 = 1227;

/// What the server said of its transactions.
struct Seen {
    now: Timestamp,
    many_writable_servers: bool,
    /// The number we have drawn, if the answer is new.
    ours: Option<i64>,
    running: Vec<i64>,
}

impl Seen {
    fn new(rows: &[MySqlRow]) -> sqlx::Result<Self> {
        let mut seen = Self {
            now: Timestamp(0),
            many_writable_servers: false,
            ours: None,
            running: Vec::new(),
        };
        for row in rows {
            if row.try_column("now").is_ok() {
                seen.now = Timestamp(get(row, "now")?);
            } else if row.try_column("number").is_ok() {
                let transaction: i64 = get(row, "number")?;
                if (1..NO_TRANSACTION).contains(&transaction) {
                    seen.running.push(transaction);
                    if is_set(row, "asks")? {
                        seen.ours = Some(transaction);
                    }
                }
            } else if row.len() == 2 {
                let variable = (row.try_get::<String, _>(0)?, row.try_get::<String, _>(1)?);
                seen.many_writable_servers |= matches!(
                    (&*variable.0, &*variable.1),
                    ("wsrep_on", "ON") | ("group_replication_single_primary_mode", "OFF")
                );
            }
        }
        Ok(seen)
    }
}

/// A page of the jobs that are due, leased ones among them.
pub(crate) fn unleased_statement(
    queue: &str,
    band: i16,
    from: Floor,
    to: Floor,
    limit: u32,
) -> String {
    // The smallest number has no literal.
    let (last, up_to) = (to.run_after.0.max(-i64::MAX), to.id);
    let range = Range {
        queue: queue.to_owned(),
        band,
        from,
        and: format!("((run_after = {last} and id <= {up_to}) or run_after < {last}) and {DUE}"),
    };
    range.page("token, kind, ", "leased_by = 0", limit)
}

/// Every band by itself, for the index to lead to the waiting jobs of each.
pub(crate) fn parked_statement(queues: &[String], kinds: &[String], limit: u32) -> String {
    let kinds = literals(kinds.iter().map(String::as_str));
    let bands: Vec<String> = queues
        .iter()
        .flat_map(|queue| jobq_core::queue::PRIORITIES.map(move |band| (literal(queue), band)))
        .map(|(queue, band)| {
            format!(
                "(select id, token
                  from jobq_jobs force index (jobq_jobs_due)
                  where queue = {queue}
                    and band = {band}
                    and run_after = 9223372036854775807
                    and {IS_PARKED}
                    and leased_by = 0
                    and kind in ({kinds})
                  order by id
                  limit {limit})"
            )
        })
        .collect();
    format!("{} limit {limit}", bands.join(" union all "))
}

pub(crate) fn expired_statement(limit: u32) -> String {
    format!(
        "select id
         from jobq_finished force index (jobq_finished_expires)
         where expires_at <= now_us()
         order by expires_at
         limit {limit}
         for update skip locked"
    )
}

/// Jobs on the list whose time is over, from a place on: `held` is who has them, 0 for nobody, and null if
/// they need not be on the list any more, for they have ended, were started, or have another time. (The
/// clock may have stepped back between the job's time and the list's.)
pub(crate) fn expiring_statement((start_by, job): (i64, i64)) -> String {
    format!(
        "select listed.start_by, listed.job_id,
                (
                    select leased_by
                    from jobq_jobs as job force index (primary)
                    where job.id = listed.job_id
                      and job.start_by <= now_us() + 60000000
                      and (leased_by = 0 or attempt = 0)
                ) as held
         from jobq_expiring as listed force index (primary)
         where listed.start_by <= now_us()
           and listed.start_by >= {start_by}
           and (listed.start_by > {start_by} or listed.job_id > {job})
         order by listed.start_by, listed.job_id
         limit {LIST}"
    )
}

fn held_job(row: &MySqlRow) -> sqlx::Result<HeldJob> {
    held_job_with_id(row, "id")
}

fn held_job_with_id(row: &MySqlRow, id: &str) -> sqlx::Result<HeldJob> {
    Ok(HeldJob {
        lease: Lease {
            job: JobId(get(row, id)?),
            token: Token(get(row, "token")?),
            session: SessionId(get(row, "leased_by")?),
        },
        counters: counters(row)?,
        limits: limits(row)?,
        isolated: is_set(row, "isolated")?,
        cancel_requested: is_set(row, "cancel_requested")?,
        key: key(row)?,
    })
}
