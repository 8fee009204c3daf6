//! Limits of queues across the fleet.

use jobq_core::time::{Timestamp, micros};
use sqlx::postgres::{PgArguments, PgConnection, PgRow};
use sqlx::query::Query;
use sqlx::{Executor, Postgres, Row};

use super::claim::{Reply, claim_on};
use super::keys::BEGIN;
use super::rules::Rules;
use super::{Claim, Claimed, PostgresStore, Schema, Time, sql};
use crate::limit::{Gate, LimitedQueue, QueueLimit, stored_rate};

impl PostgresStore {
    pub(super) async fn limit_queue(&self, queue: &str, limit: &QueueLimit) -> sqlx::Result<()> {
        let mut connection = self.own().await?;
        connection.execute(BEGIN).await?;
        sqlx::query(self.sql(LIMIT_QUEUE))
            .bind(queue)
            .bind(limit.max_running.map(u32::cast_signed))
            .bind(limit.rate.map(|rate| rate.jobs().cast_signed()))
            .bind(limit.rate.map(|rate| micros(rate.per())))
            .bind(limit.rate.map(|rate| rate.most_at_once().cast_signed()))
            .execute(&mut *connection)
            .await?;
        if let Some(rate) = limit.rate {
            let (full_at, now): (Time, Time) =
                sqlx::query_as(self.sql(
                    "select full_at, clock_timestamp() from jobq.queue_limits where queue = $1",
                ))
                .bind(queue)
                .fetch_one(&mut *connection)
                .await?;
            sqlx::query(self.sql("update jobq.queue_limits set full_at = $2 where queue = $1"))
                .bind(queue)
                .bind(Time(rate.emptied(full_at.0, now.0)))
                .execute(&mut *connection)
                .await?;
        }
        sqlx::query(self.sql(DROP_SLOTS))
            .bind(queue)
            .bind(limit.max_running.unwrap_or(0).cast_signed())
            .execute(&mut *connection)
            .await?;
        sqlx::query(self.sql(
            "insert into jobq.queue_slots (queue, slot)
             select $1, slot from generate_series(1, $2) as slot
             on conflict do nothing",
        ))
        .bind(queue)
        .bind(limit.max_running.unwrap_or(0).cast_signed())
        .execute(&mut *connection)
        .await?;
        connection.execute("commit").await?;
        connection.hand_back();
        Ok(())
    }

    pub(super) async fn unlimit_queue(&self, queue: &str) -> sqlx::Result<bool> {
        let mut connection = self.own().await?;
        let done = sqlx::query(self.sql("delete from jobq.queue_limits where queue = $1"))
            .bind(queue)
            .execute(&mut *connection)
            .await?;
        connection.hand_back();
        Ok(done.rows_affected() == 1)
    }

    pub(super) async fn limits(&self) -> sqlx::Result<Vec<LimitedQueue>> {
        let mut connection = self.own().await?;
        let rows = sqlx::query(self.sql(
            "select queue, max_running, rate_jobs, burst,
                    (extract(epoch from rate_per) * 1000000)::int8 as rate_per
             from jobq.queue_limits
             order by queue",
        ))
        .fetch_all(&mut *connection)
        .await?;
        connection.hand_back();
        rows.iter()
            .map(|row| Ok(LimitedQueue { queue: row.try_get("queue")?, limit: limit(row)? }))
            .collect()
    }
}

const LIMIT_QUEUE: &str = "
    insert into jobq.queue_limits as old (queue, max_running, rate_jobs, rate_per, burst)
    values ($1, $2, $3, $4 * interval '1 microsecond', $5)
    on conflict (queue) do update
    set max_running = excluded.max_running,
        rate_jobs = excluded.rate_jobs,
        rate_per = excluded.rate_per,
        burst = excluded.burst,
        turn = old.turn + 1";

fn limit(row: &PgRow) -> sqlx::Result<QueueLimit> {
    let number = |column| {
        Ok::<_, sqlx::Error>(
            row.try_get::<Option<i32>, _>(column)?.map(|n| n.max(0).cast_unsigned()),
        )
    };
    let rate = stored_rate(number("rate_jobs")?, row.try_get("rate_per")?, number("burst")?);
    Ok(QueueLimit { max_running: number("max_running")?, rate })
}

/// How often a claim tries to be the first to take from limits that it has looked at, before it keeps
/// the others out.
const TRIES: u32 = 3;

/// Claims from queues that are limited.
///
/// What the limits leave is looked at in one statement and taken in the next, which does nothing if
/// another claim has taken from one of them meanwhile: every claim that does raises the limit's turn.
/// One that has lost too often takes its turn: it locks the limits first. Should this process freeze
/// then, the server ends the transaction.
pub(super) async fn claim_limited(
    connection: &mut PgConnection,
    schema: &Schema,
    claim: &Claim,
    rules: &Rules,
    keyed: bool,
) -> sqlx::Result<Reply> {
    for _ in 0..TRIES {
        match look_and_claim(connection, schema, claim, rules, keyed).await? {
            Reply::LimitsChanged => {}
            reply => return Ok(reply),
        }
    }
    let queues: Vec<&str> = claim.queues.iter().map(|asked| asked.queue.as_str()).collect();
    connection.execute(BEGIN).await?;
    sqlx::query(sql(schema, LOCK_LIMITS)).bind(&queues).execute(&mut *connection).await?;
    let reply = look_and_claim(connection, schema, claim, rules, keyed).await?;
    connection.execute("commit").await?;
    Ok(reply)
}

async fn look_and_claim(
    connection: &mut PgConnection,
    schema: &Schema,
    claim: &Claim,
    rules: &Rules,
    keyed: bool,
) -> sqlx::Result<Reply> {
    let seen = look(connection, schema, claim).await?;
    if seen.len() < claim.queues.len() {
        // A limit has ended.
        return Ok(Reply::RulesChanged);
    }
    let paused = rules.paused_of(claim);
    let mut claim = claim.clone();
    let mut limited = Vec::new();
    for (asked, Seen { gate, now, .. }) in claim.queues.iter_mut().zip(&seen) {
        let allowed = gate.allows(asked.limit, *now);
        asked.limit = allowed.jobs;
        limited.push(allowed);
    }
    claim.queues.retain(|asked| asked.limit > 0);
    if claim.queues.is_empty() {
        let seen_to = seen.first().map_or(Timestamp::NEG_INFINITY, |seen| seen.now);
        let (sessions_live, jobs) = (true, Vec::new());
        return Ok(Reply::Claimed(Claimed { seen_to, sessions_live, paused, limited, jobs }));
    }
    let mut reply = claim_on(connection, schema, &claim, rules, keyed, &seen).await?;
    if let Reply::Claimed(claimed) = &mut reply {
        (claimed.limited, claimed.paused) = (limited, paused);
    }
    Ok(reply)
}

/// The limit of a queue as it was when it was looked at.
pub(crate) struct Seen {
    gate: Gate,
    /// Whoever takes from the limit raises it.
    turn: i64,
    now: Timestamp,
}

/// What is left of the limits of a claim's queues, in their order.
async fn look(
    connection: &mut PgConnection,
    schema: &Schema,
    claim: &Claim,
) -> sqlx::Result<Vec<Seen>> {
    let queues: Vec<&str> = claim.queues.iter().map(|asked| asked.queue.as_str()).collect();
    let asked: Vec<i64> = claim.queues.iter().map(|asked| i64::from(asked.limit)).collect();
    let rows =
        sqlx::query(sql(schema, SLOTS)).bind(&queues).bind(asked).fetch_all(connection).await?;
    let mut seen = Vec::new();
    for row in &rows {
        let mut free: Vec<i32> = row.try_get("free")?;
        let beyond = usize::try_from(row.try_get::<i64, _>("beyond")?).unwrap_or(usize::MAX);
        free.truncate(free.len().saturating_sub(beyond));
        let full_at = row.try_get::<Time, _>("full_at")?.0;
        seen.push(Seen {
            gate: Gate { queue: row.try_get("queue")?, limit: limit(row)?, full_at, free },
            turn: row.try_get("turn")?,
            now: row.try_get::<Time, _>("now")?.0,
        });
    }
    Ok(seen)
}

pub(crate) const LOCK_LIMITS: &str = "
    select queue from jobq.queue_limits
    where queue = any($1)
    order by queue
    for no key update";

/// Whether a place is taken is looked up by the primary key, as a range of one: else a plan made while
/// the table was empty may read the due index, which has the id too.
macro_rules! runs {
    () => {
        "coalesce(
            (
                select job.leased_by <> 0 and job.token = place.token
                from jobq.jobs as job
                where job.id between place.job_id and place.job_id
                order by job.id
                limit 1
            ),
            false
        )"
    };
}

/// Forgets the places beyond a limit that are free: every claim looks at all of those.
const DROP_SLOTS: &str = concat!(
    "
    delete from jobq.queue_slots as place
    where queue = $1 and slot > $2 and not ",
    runs!()
);

/// The first places that are free, no more than are asked for. Where the limit was lowered, jobs may run
/// in places beyond it: for each of them one more that is free, which is not to be taken.
pub(crate) const SLOTS: &str = concat!(
    "
    select mine.queue, mine.max_running, mine.rate_jobs, mine.burst, mine.full_at, mine.turn,
           (extract(epoch from mine.rate_per) * 1000000)::int8 as rate_per,
           clock_timestamp() as now,
           beyond.jobs as beyond,
           array(
               select place.slot
               from jobq.queue_slots as place
               where place.queue = mine.queue and place.slot <= mine.max_running and not ",
    runs!(),
    "
               order by place.slot
               limit wanted.jobs + beyond.jobs
           ) as free
    from unnest($1::text[], $2::int8[]) with ordinality as wanted (queue, jobs, n)
    join jobq.queue_limits as mine on mine.queue = wanted.queue
    cross join lateral (
        select count(*) as jobs
        from jobq.queue_slots as place
        where place.queue = mine.queue and place.slot > mine.max_running and ",
    runs!(),
    "
    ) as beyond
    order by wanted.n"
);

/// What a claim takes of limits, as its statement is told: the nth job of a queue takes the nth of its
/// places, and makes its bucket full again at the nth of its times.
#[derive(Default)]
pub(super) struct Taking<'s> {
    queues: Vec<&'s str>,
    turns: Vec<i64>,
    places: (Vec<&'s str>, Vec<i64>, Vec<i32>),
    times: (Vec<&'s str>, Vec<i64>, Vec<Time>),
}

impl<'s> Taking<'s> {
    pub(super) fn of(claim: &Claim, seen: &'s [Seen]) -> Self {
        let mut taking = Self::default();
        for asked in &claim.queues {
            let seen = seen.iter().find(|seen| seen.gate.queue == asked.queue);
            let Some(Seen { gate, turn, now }) = seen else { continue };
            taking.queues.push(&gate.queue);
            taking.turns.push(*turn);
            for (n, slot) in (1..).zip(gate.free.iter().take(asked.limit as usize)) {
                let (queues, numbers, slots) = &mut taking.places;
                queues.push(&gate.queue);
                numbers.push(n);
                slots.push(*slot);
            }
            for n in 1..=asked.limit {
                let Some(full_at) = gate.spent(n as usize, *now) else { break };
                let (queues, numbers, times) = &mut taking.times;
                queues.push(&gate.queue);
                numbers.push(i64::from(n));
                times.push(Time(full_at));
            }
        }
        taking
    }

    pub(super) fn bind<'q>(
        self,
        query: Query<'q, Postgres, PgArguments>,
    ) -> Query<'q, Postgres, PgArguments>
    where
        's: 'q,
    {
        let (places, times) = (self.places, self.times);
        query
            .bind(self.queues)
            .bind(self.turns)
            .bind(places.0)
            .bind(places.1)
            .bind(places.2)
            .bind(times.0)
            .bind(times.1)
            .bind(times.2)
    }
}
