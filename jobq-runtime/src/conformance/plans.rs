//! What PostgreSQL does for each statement, counted in rows and buffers, never in time.
//!
//! A queue is empty most of its life, so plans are made while it is, and must still be right when
//! a burst has filled it. The statements are prepared and run on empty tables, which are then
//! filled; nothing makes PostgreSQL plan them again.

use sqlx::Connection;

use super::bed::Bed;
use super::explain::{Server, Statement, statement};
use super::worker::job;
use crate::store::postgres::statements::{
    BURY, CLAIM, CLAIM_LIMITED, CLAIM_LIMITED_WITH_KEYS, CLAIM_WITH_KEYS, DECIDE_GRANTS, EXTEND,
    FINISH, FINISH_AND_LOCK, HELD, KEYS_AFTER, LOCK, LOCK_GRANTS, LOCK_LIMITS, LOOK,
    LOOK_AT_CRASHED, LOOK_AT_ENDED, LOOK_AT_JOBS, NEXT_DUE, OWN, PASS_ON, PRUNE, PRUNE_KEYS,
    REQUEUE, REVIVE_DEAD, RULES, Reply, Rules, SHIFT, SLOTS, STALE_GRANTS, TAKE, TAKE_EXPIRED,
    TAKE_GRANTS, TAKE_OVER, UNLEASED, UNPARK, claim_on,
};
use crate::store::{Claimed, Floor};

const CLAIM_STATEMENT: Statement = statement(
    "claim",
    "int8[], text[], int8[], text[], int2[], timestamptz[], int8[], text[], int8[], int8, int8",
    CLAIM,
);

const CLAIM_WITH_KEYS_STATEMENT: Statement = statement(
    "claim_with_keys",
    "int8[], text[], int8[], text[], int2[], timestamptz[], int8[], text[], int8[], int8, int8",
    CLAIM_WITH_KEYS,
);

const CLAIM_LIMITED_STATEMENT: Statement = statement(
    "claim_limited",
    "int8[], text[], int8[], text[], int2[], timestamptz[], int8[], text[], int8[], int8, int8,
     text[], int8[], text[], int8[], int4[], text[], int8[], timestamptz[]",
    CLAIM_LIMITED,
);

const CLAIM_LIMITED_WITH_KEYS_STATEMENT: Statement =
    statement("claim_limited_with_keys", CLAIM_LIMITED_STATEMENT.types, CLAIM_LIMITED_WITH_KEYS);

const IDS: &str = "int8[]";
const GUARD_AND_COUNTERS: &str = "int8[], int8[], int8[], int4[], int2[], int4[], ";

/// Empty tables that PostgreSQL knows to be empty, and goes on believing so.
async fn believed_empty(bed: &Bed) {
    for table in [
        "jobs",
        "finished",
        "attempts",
        "dead",
        "sessions",
        "closed_sessions",
        "uniques",
        "key_grants",
        "pauses",
        "queue_limits",
        "queue_slots",
        "rules",
    ] {
        bed.execute(&format!("alter table jobq.{table} set (autovacuum_enabled = off)")).await;
        bed.execute(&format!("alter table jobq.{table} set unlogged")).await;
        bed.execute(&format!("analyze jobq.{table}")).await;
    }
    bed.execute(
        "insert into jobq.sessions (id, worker, lease, leased_until, kinds, queues)
         values (1, 'w', '1 day', now() + interval '1 day', '{k}', '{default}')",
    )
    .await;
}

/// Pending jobs spread over every priority and the last hour, or the next one.
async fn fill(bed: &Bed, queue: &str, jobs: u32, sign: &str) {
    bed.execute(&format!(
        "insert into jobq.jobs (queue, kind, priority, band, run_after, payload)
         select '{queue}', 'k', n % 9 - 4, n % 9 - 4,
                now() {sign} interval '1 hour' {sign} n * interval '1 microsecond', '{{\"n\": 1}}'
         from generate_series(1, {jobs}) as n"
    ))
    .await;
}

/// The arguments of a claim of 100 jobs by session 1, with one floor for every band; the rules are those
/// of a new database.
fn claim_of(queue: &str, floor: &str, id: i64) -> String {
    let bands: Vec<i16> = jobq_core::queue::bands().collect();
    let n = bands.len();
    format!(
        "array[1], array['{queue}'], array[100], array_fill('{queue}'::text, array[{n}]),
         array{bands:?}::int2[], array_fill({floor}::timestamptz, array[{n}]),
         array_fill({id}::int8, array[{n}]), array['k'], array[1], 1, 1"
    )
}

/// At most what 100 jobs need: each is met by the index, and then by its place.
const CLAIM_ROWS: f64 = 250.0;
const CLAIM_PAGES: f64 = 2_500.0;

/// A million due jobs and 200,000 scheduled ones in the same bands; and 200,000 scheduled ones in
/// the bands of a queue in which five are due.
pub(super) async fn f1_a_claim_reads_only_the_rows_that_it_takes(bed: Bed) {
    believed_empty(&bed).await;
    let mut planned_on_empty = Server::connect(&bed).await;
    planned_on_empty.prepare(CLAIM_STATEMENT).await;
    let claim = claim_of("default", "'-infinity'", 0);
    let nothing = planned_on_empty.explain("claim", &claim).await;
    nothing.assert_reads_at_most("a claim of nothing", &[("jobs", 0.0)], 100.0);

    fill(&bed, "default", 1_000_000, "-").await;
    fill(&bed, "default", 200_000, "+").await;
    fill(&bed, "later", 200_000, "+").await;
    fill(&bed, "later", 5, "-").await;
    let mut planned_with_stale_statistics = Server::connect(&bed).await;
    planned_with_stale_statistics.prepare(CLAIM_STATEMENT).await;
    let servers = [
        ("planned on empty tables", &mut planned_on_empty),
        ("planned with stale statistics", &mut planned_with_stale_statistics),
    ];
    for (when, server) in servers {
        assert_claims_read_little(when, server).await;
    }
    bed.execute("analyze jobq.jobs").await;
    let mut planned_well = Server::connect(&bed).await;
    planned_well.prepare(CLAIM_STATEMENT).await;
    assert_claims_read_little("planned with statistics", &mut planned_well).await;
}

async fn assert_claims_read_little(when: &str, server: &mut Server) {
    let claim = claim_of("default", "'-infinity'", 0);
    for _ in 0..3 {
        let plan = server.explain("claim", &claim).await;
        assert!((plan.rows_given() - 100.0).abs() < 0.5, "{when}");
        let what = format!("a claim of 100 {when}");
        plan.assert_reads_at_most(&what, &[("jobs", 400.0 + CLAIM_ROWS)], CLAIM_PAGES);
    }
    let few = claim_of("later", "'-infinity'", 0);
    let plan = server.explain("claim", &few).await;
    let what = format!("a claim beside scheduled jobs {when}");
    plan.assert_reads_at_most(&what, &[("jobs", 20.0)], 500.0);
    server.run("update jobq.jobs set leased_by = 0 where leased_by <> 0").await;
    assert!((plan.rows_given() - 5.0).abs() < 0.5, "{when}");
}

/// One insert gives all its rows one time, and every one of them stays in the index while it runs.
pub(super) async fn f1_a_claim_does_not_read_what_is_before_its_floor(bed: Bed) {
    believed_empty(&bed).await;
    let mut server = Server::connect(&bed).await;
    server.prepare(CLAIM_STATEMENT).await;
    server.explain("claim", &claim_of("default", "'-infinity'", 0)).await;
    bed.execute(
        "insert into jobq.jobs (kind, run_after, leased_by)
         select 'k', now() - interval '1 hour', case when n <= 100000 then 7 else 0 end
         from generate_series(1, 100200) as n",
    )
    .await;
    let time = bed.texts("select min(run_after)::text from jobq.jobs").await.remove(0);
    let last = bed.number("select max(id) from jobq.jobs where leased_by = 7").await;
    let plan = server.explain("claim", &claim_of("default", &format!("'{time}'"), last)).await;
    assert!((plan.rows_given() - 100.0).abs() < 0.5);
    plan.assert_reads_at_most("a claim from a floor", &[("jobs", CLAIM_ROWS)], CLAIM_PAGES);
}

/// A claim asks whether the rules are as it remembers them, and reads nothing else of them; if they are
/// not, it reads no jobs.
pub(super) async fn o6_a_claim_reads_nothing_of_what_is_paused(bed: Bed) {
    believed_empty(&bed).await;
    let mut server = Server::connect(&bed).await;
    server.prepare(CLAIM_STATEMENT).await;
    server.prepare(statement("next_due", "text[], int2[], text[]", NEXT_DUE)).await;
    let claim = claim_of("default", "'-infinity'", 0);
    let bands: Vec<i16> = jobq_core::queue::bands().collect();
    let next_due = format!("array['default'], array{bands:?}::int2[], array['k']");
    let plan = server.explain("claim", &claim).await;
    plan.assert_reads_at_most("of nothing a claim", &[("jobs", 0.0), ("pauses", 0.0)], 100.0);
    server.explain("next_due", &next_due).await;

    fill(&bed, "default", 200_000, "-").await;
    fill(&bed, "default", 200_000, "+").await;
    bed.execute(
        "insert into jobq.pauses (scope, name)
         select scope, 'other_' || n
         from generate_series(1, 500) as n, unnest(array['kind', 'queue']) as scope",
    )
    .await;
    let nothing = [("jobs", 0.0), ("pauses", 0.0), ("rules", 3.0)];
    let plan = server.explain("claim", &claim).await;
    plan.assert_reads_at_most("by other rules a claim", &nothing, 50.0);
    assert!(plan.rows_given() < 1.5, "it says so");

    bed.execute("update jobq.rules set version = 1").await;
    let plan = server.explain("claim", &claim).await;
    let rows = [("jobs", 400.0 + CLAIM_ROWS), ("pauses", 0.0), ("rules", 3.0)];
    plan.assert_reads_at_most("beside pauses a claim", &rows, CLAIM_PAGES);
    assert!((plan.rows_given() - 100.0).abs() < 0.5);

    bed.execute("insert into jobq.pauses (scope, name) values ('queue', 'default')").await;
    let plan = server.explain("next_due", &next_due).await;
    // Of the pauses, some pages more than once: by their index.
    let rows = [("jobs", 0.0), ("pauses", 1_001.0)];
    plan.assert_reads_at_most("of a paused queue a look ahead", &rows, 250.0);
}

/// Ids of jobs that session 1 runs, as an array, and their number.
fn ids(from: i64) -> String {
    let ids: Vec<i64> = (from..from + 50).collect();
    format!("array{ids:?}::int8[]")
}

fn fifty(value: &str, kind: &str) -> String {
    format!("array_fill({value}::{kind}, array[50])")
}

/// Every other statement of the runtime's loops, with 50 jobs each.
pub(super) async fn d4_every_statement_touches_only_its_rows(bed: Bed) {
    let counters = |text: &str| -> &'static str {
        Box::leak(format!("{GUARD_AND_COUNTERS}{text}").into_boxed_str())
    };
    let statements = [
        statement("finish", "int8[], int8[], int8[], int8[], text[], text", FINISH),
        statement("requeue", counters("int8[], text[], text[]"), REQUEUE),
        statement("bury", counters("text[], text[], text[]"), BURY),
        statement("extend", "int8, text", EXTEND),
        statement("held", "int8[], int8", HELD),
        statement("look_at_jobs", IDS, LOOK_AT_JOBS),
        statement("look_at_ended", IDS, LOOK_AT_ENDED),
        statement("look_at_crashed", IDS, LOOK_AT_CRASHED),
        statement("next_due", "text[], int2[], text[]", NEXT_DUE),
        statement("unleased", "text, int2, timestamptz, int8, timestamptz, int8, int8", UNLEASED),
        statement("shift", "int8[], int8[], text", SHIFT),
        statement("unpark", "text[], text[], int8", UNPARK),
        statement("prune", "int8", PRUNE),
        statement("revive", IDS, REVIVE_DEAD),
        statement("take_keys", "bytea[], int8[], text[]", TAKE),
        statement("take_keys_over", "bytea[], int8[], text[], int8[], int8[]", TAKE_OVER),
        statement("look_at_keys", "bytea[]", LOOK),
        statement("lock_keys", "bytea[]", LOCK),
        statement("own_keys", "bytea[], int8[], text[], int8", OWN),
        statement("keys_after", "bytea, int8", KEYS_AFTER),
        statement("prune_keys", "bytea[]", PRUNE_KEYS),
        CLAIM_WITH_KEYS_STATEMENT,
        statement(
            "finish_and_lock",
            "int8[], int8[], int8[], int8[], text[], text",
            FINISH_AND_LOCK,
        ),
        statement("lock_grants", "text[]", LOCK_GRANTS),
        statement("take_grants", "text[], int8[]", TAKE_GRANTS),
        statement("pass_on", "text[], int8[]", PASS_ON),
        statement("decide_grants", "text[], bool[], int8[], int8[], int8[], text[]", DECIDE_GRANTS),
        statement("stale_grants", "text, int8", STALE_GRANTS),
        statement("take_expired", "int8, int8", TAKE_EXPIRED),
        statement("lock_limits", "text[]", LOCK_LIMITS),
        statement("slots", "text[], int8[]", SLOTS),
        statement("rules", "", RULES),
        CLAIM_LIMITED_STATEMENT,
        CLAIM_LIMITED_WITH_KEYS_STATEMENT,
    ];
    believed_empty(&bed).await;
    let mut planned_on_empty = Server::connect(&bed).await;
    for statement in statements {
        planned_on_empty.prepare(statement).await;
    }
    assert_each_reads_little("on empty tables", &mut planned_on_empty, 1_000_000_000).await;

    // 1 to 1,000 run; then come 200,000 that are pending, some that are parked, and the history.
    bed.execute(
        "insert into jobq.jobs (kind, token, attempt, leased_by)
         select 'k', 1, 1, 1 from generate_series(1, 1000)",
    )
    .await;
    bed.execute(
        "insert into jobq.queue_limits (queue, max_running, rate_jobs, rate_per, burst)
         values ('default', 50, 1, '1 second', 1), ('lines', 300, 1, '1 second', 300)",
    )
    .await;
    bed.execute(
        "insert into jobq.queue_slots (queue, slot, job_id, token)
         select 'default', n, n * 2, 1 from generate_series(1, 50) as n
         union all
         select 'lines', n, 0, 0 from generate_series(1, 300) as n",
    )
    .await;
    fill(&bed, "default", 200_000, "-").await;
    fill(&bed, "default", 50_000, "+").await;
    bed.execute(
        "insert into jobq.jobs (kind, run_after, wait_reason)
         select 'k', 'infinity', 'kind' from generate_series(1, 60)",
    )
    .await;
    // Of a paused kind as many as there may be.
    bed.execute(
        "insert into jobq.jobs (kind, run_after, wait_reason)
         select 'slow', 'infinity', 'paused' from generate_series(1, 50000)",
    )
    .await;
    bed.execute("insert into jobq.pauses (scope, name) values ('kind', 'slow')").await;
    bed.execute("update jobq.rules set version = 1").await;
    bed.execute(
        "insert into jobq.finished (id, token, state, created_at, expires_at, attempt, max_attempts,
             interruptions, crashes, max_crashes, priority, queue, kind, payload)
         select n, 2, 'completed', now(), now() - n * interval '1 second', 1, 3, 0, 0, 3, 0,
                'default', 'k', '{}'
         from generate_series(2000001, 2100000) as n",
    )
    .await;
    bed.execute(
        "insert into jobq.attempts (job_id, token, attempt, reason, error)
         select n, 1, 1, 'crashed', 'boom' from generate_series(2000001, 2100000) as n",
    )
    .await;
    bed.execute(
        "insert into jobq.dead (id, token, reason, created_at, attempt, max_attempts, interruptions,
             crashes, max_crashes, priority, queue, kind, error, payload)
         select n, 1, 'exhausted', now(), 1, 3, 0, 0, 3, 0, 'default', 'k', 'boom', '{}'
         from generate_series(3000001, 3050000) as n",
    )
    .await;
    bed.execute(
        "insert into jobq.uniques (unique_key, job_id, scope)
         select decode(lpad(to_hex(n), 64, '0'), 'hex'), n, 'until_finished'
         from generate_series(1, 100000) as n",
    )
    .await;
    // 100,000 jobs wait for one key; the jobs that had the others have ended, and two wait for each.
    bed.execute(
        "insert into jobq.jobs (id, kind, token, attempt, leased_by, job_key, on_block)
         overriding system value
         select n, 'k', 1, 1, 1, 'hot', 'block' from generate_series(6000000, 6000001) as n",
    )
    .await;
    bed.execute(
        "insert into jobq.jobs (id, kind, run_after, band, wait_reason, job_key, on_block)
         overriding system value
         select n, 'k', 'infinity', -32768, 'key', 'hot', 'block'
         from generate_series(6100000, 6200000) as n",
    )
    .await;
    bed.execute(
        "insert into jobq.jobs (kind, run_after, band, wait_reason, job_key, on_block)
         select 'k', 'infinity', -32768, 'key', 'key-' || n / 2, 'block'
         from generate_series(2, 100000) as n",
    )
    .await;
    bed.execute(
        "insert into jobq.jobs (queue, kind, job_key, on_block)
         select 'lines', 'k', 'line-' || n, 'block' from generate_series(1, 1000) as n",
    )
    .await;
    bed.execute(
        "insert into jobq.key_grants (job_key, job_id)
         select 'key-' || n, 0 from generate_series(1, 50000) as n union all select 'hot', 6000000",
    )
    .await;
    bed.execute(
        "update jobq.jobs set start_by = now() - interval '1 minute'
         where id between 150000 and 150099",
    )
    .await;
    assert_each_reads_little("planned on empty tables", &mut planned_on_empty, 1).await;
    let mut planned_with_stale_statistics = Server::connect(&bed).await;
    for statement in statements {
        planned_with_stale_statistics.prepare(statement).await;
    }
    let when = "planned with stale statistics";
    assert_each_reads_little(when, &mut planned_with_stale_statistics, 301).await;
}

type Case<'c> = (&'c str, String, &'c [(&'c str, f64)], f64);

/// Runs each statement for 50 jobs of their own, counted from `first`.
async fn assert_each_reads_little(when: &str, server: &mut Server, first: i64) {
    let guard =
        |from: i64| format!("{}, {}, {}", ids(from), fifty("1", "int8"), fifty("1", "int8"));
    let counters =
        format!("{}, {}, {}", fifty("1", "int4"), fifty("0", "int2"), fifty("0", "int4"));
    let text = |value: &str| fifty(value, "text");
    let settle_rows: &[(&str, f64)] = &[("jobs", 150.0), ("attempts", 50.0)];
    let bands = "array[32767,4,3,2,1,0,-1,-2,-3,-4]::int2[]";
    let far = "'-infinity', 0, 'infinity', 0, 50";
    // Its name and arguments, the most rows it may read of each table, and the most pages.
    let keys = |from: i64| {
        let keys: Vec<String> = (from..from + 50).map(|n| format!("'\\x{n:064x}'")).collect();
        format!("array[{}]::bytea[]", keys.join(", "))
    };
    let scopes = text("'until_finished'");
    let key_names = |from: i64| {
        let names: Vec<String> = (from..from + 50).map(|n| format!("'key-{n}'")).collect();
        format!("array[{}]::text[]", names.join(", "))
    };
    let nobody = "'{}'::int8[], '{}'::int8[], '{}'::int8[], '{}'::text[]";
    // A claim of places that are free; each of them raises the turn.
    let limited_claim = |before: i64| {
        let turn = before + if first == 301 { 2 } else { 0 };
        let numbers: Vec<i64> = (1..=100).collect();
        let of_the_queue = "array_fill('lines'::text, array[100])";
        format!(
            "{}, array['lines'], array[{turn}], {of_the_queue}, array{numbers:?}, array{numbers:?},
             {of_the_queue}, array{numbers:?}, array_fill(now(), array[100])",
            claim_of("lines", "'-infinity'", 0)
        )
    };
    let limited_rows: &[(&str, f64)] = &[
        ("jobs", 1_000.0),
        ("key_grants", 0.0),
        ("queue_slots", 200.0),
        ("queue_limits", 4.0),
        ("rules", 3.0),
    ];
    let limited: &[(&str, f64)] = &[("jobs", 60.0), ("queue_slots", 110.0), ("queue_limits", 10.0)];
    let cases: [Case; 37] = [
        ("lock_limits", "array['default', 'other']".to_owned(), limited, 50.0),
        ("slots", "array['default'], array[10]".to_owned(), limited, 500.0),
        ("rules", String::new(), &[("rules", 1.0), ("pauses", 1.0), ("queue_limits", 3.0)], 50.0),
        (
            "finish",
            format!("{}, {}, {}, 'completed'", guard(first), fifty("0", "int8"), text("null")),
            settle_rows,
            2_500.0,
        ),
        (
            "finish",
            format!(
                "{}, {}, {}, 'cancelled'",
                guard(first + 50),
                fifty("60000000", "int8"),
                text("null")
            ),
            settle_rows,
            2_500.0,
        ),
        (
            "requeue",
            format!(
                "{}, {counters}, {}, {}, {}",
                guard(first + 100),
                fifty("0", "int8"),
                text("'failed'"),
                text("'boom'")
            ),
            settle_rows,
            2_500.0,
        ),
        (
            "bury",
            format!(
                "{}, {counters}, {}, {}, {}",
                guard(first + 150),
                text("'exhausted'"),
                text("'failed'"),
                text("'boom'")
            ),
            settle_rows,
            2_500.0,
        ),
        ("extend", "1, '[]'".to_owned(), &[("sessions", 1.0)], 20.0),
        ("held", format!("{}, 1", ids(first + 200)), &[("jobs", 50.0)], 300.0),
        ("look_at_jobs", ids(first + 200), &[("jobs", 50.0)], 300.0),
        ("look_at_ended", ids(2_000_001), &[("finished", 50.0), ("dead", 0.0)], 500.0),
        ("look_at_ended", ids(3_000_001), &[("finished", 0.0), ("dead", 50.0)], 500.0),
        ("look_at_crashed", ids(2_000_001), &[("attempts", 50.0)], 300.0),
        ("next_due", format!("array['default'], {bands}, array['k']"), &[("jobs", 10.0)], 150.0),
        ("unleased", format!("'default', 2, {far}"), &[("jobs", 50.0)], 200.0),
        (
            "shift",
            format!("{}, {}, null", ids(first + 1_050), fifty("0", "int8")),
            settle_rows,
            2_500.0,
        ),
        (
            "unpark",
            "array['default'], array['slow', 'k'], 20".to_owned(),
            &[("jobs", 120.0)],
            1_000.0,
        ),
        ("prune", "50".to_owned(), &[("finished", 100.0), ("attempts", 50.0)], 2_500.0),
        ("revive", ids(3_000_000 + first), &[("dead", 100.0), ("jobs", 50.0)], 2_500.0),
        (
            "take_keys",
            format!("{}, {}, {scopes}", keys(first), ids(9_000_001)),
            &[("uniques", 50.0)],
            1_000.0,
        ),
        (
            "take_keys_over",
            format!(
                "{}, {}, {scopes}, {}, {}",
                keys(first),
                ids(9_000_001),
                ids(first),
                fifty("0", "int8")
            ),
            &[("uniques", 150.0)],
            1_500.0,
        ),
        ("look_at_keys", keys(first + 250), &[("uniques", 50.0), ("jobs", 150.0)], 1_000.0),
        ("lock_keys", keys(first + 250), &[("uniques", 50.0)], 500.0),
        (
            "own_keys",
            format!("{}, {}, {scopes}, 7", keys(first + 250), ids(first + 250)),
            &[("uniques", 150.0)],
            1_500.0,
        ),
        (
            "keys_after",
            "decode(lpad(to_hex(300), 64, '0'), 'hex'), 50".to_owned(),
            &[("uniques", 50.0), ("jobs", 50.0)],
            1_000.0,
        ),
        ("prune_keys", keys(first), &[("uniques", 50.0), ("jobs", 50.0)], 1_500.0),
        (
            "claim_with_keys",
            claim_of("lines", "'-infinity'", 0),
            &[("jobs", 800.0), ("key_grants", 0.0)],
            CLAIM_PAGES * 2.0,
        ),
        ("claim_limited", limited_claim(0), limited_rows, CLAIM_PAGES * 2.0),
        ("claim_limited_with_keys", limited_claim(1), limited_rows, CLAIM_PAGES * 2.0),
        (
            "finish_and_lock",
            format!(
                "{}, {}, {}, 'completed'",
                guard(first + 250),
                fifty("0", "int8"),
                text("null")
            ),
            &[("jobs", 150.0), ("attempts", 50.0), ("key_grants", 50.0)],
            2_500.0,
        ),
        ("lock_grants", key_names(first), &[("key_grants", 50.0)], 1_000.0),
        (
            "pass_on",
            format!("{}, '{{}}'::int8[]", key_names(first + 50)),
            &[("key_grants", 100.0), ("jobs", 150.0)],
            2_500.0,
        ),
        (
            "take_grants",
            format!("{}, {}", key_names(first), fifty("0", "int8")),
            &[("key_grants", 50.0)],
            1_000.0,
        ),
        (
            "decide_grants",
            format!("{}, {}, {nobody}", key_names(first), fifty("false", "bool")),
            &[("key_grants", 100.0), ("jobs", 150.0)],
            2_500.0,
        ),
        (
            "decide_grants",
            "array['hot'], array[false], array[6000001], array[1], array[1], array['hot']"
                .to_owned(),
            &[("key_grants", 2.0), ("jobs", 1_010.0)],
            3_500.0,
        ),
        ("take_expired", "1, 50".to_owned(), &[("jobs", 150.0), ("sessions", 1.0)], 1_000.0),
        (
            "stale_grants",
            "'key-3', 50".to_owned(),
            &[("key_grants", 50.0), ("jobs", 50.0)],
            1_000.0,
        ),
    ];
    for (name, arguments, rows, pages) in cases {
        let plan = server.explain(name, &arguments).await;
        plan.assert_reads_at_most(&format!("{name} {when}"), rows, pages);
        let quiet =
            ["held", "extend", "next_due", "take_keys", "own_keys", "lock_grants", "take_grants"];
        if first == 1 && !quiet.contains(&name) {
            let touched: f64 = rows.iter().map(|(table, _)| plan.rows_read(table)).sum();
            assert!(touched > 0.0, "{name} found nothing: {:#}", plan.0);
        }
    }
}

/// The operations themselves, with whatever their drivers have prepared.
pub(super) async fn d4_operations_first_done_on_empty_tables_stay_cheap(bed: Bed) {
    let bed = bed.with_default_names().await;
    believed_empty(&bed).await;
    let options = (*bed.postgres_pool().connect_options()).clone();
    let pool = sqlx::postgres::PgPoolOptions::new().max_connections(1).connect_lazy_with(options);
    let client = crate::ClientOptions::new().postgres(pool.clone()).expect("a good name");
    do_everything(&client, &pool, 1_000_000_000).await;
    bed.execute(
        "insert into jobq.jobs (kind, token, attempt, leased_by)
         select 'k', 1, 1, 1 from generate_series(1, 1000)",
    )
    .await;
    fill(&bed, "default", 200_000, "-").await;
    bed.execute(
        "insert into jobq.dead (id, token, reason, created_at, attempt, max_attempts, interruptions,
             crashes, max_crashes, priority, queue, kind, error, payload)
         select n, 1, 'exhausted', now(), 1, 3, 0, 0, 3, 0, 'default', 'k', 'boom', '{}'
         from generate_series(3000001, 3050000) as n",
    )
    .await;
    let index_reads = "select sum(pg_stat_get_tuples_returned(indexrelid))::int8 from pg_index
         where indrelid = any(array['jobq.jobs', 'jobq.dead']::regclass[])";
    let table_reads = "select sum(pg_stat_get_tuples_returned(relid))::int8 from pg_class,
         lateral (values (oid)) as of (relid)
         where oid = any(array['jobq.jobs', 'jobq.dead']::regclass[])";
    do_everything(&client, &pool, 1).await;
    do_everything(&client, &pool, 501).await;
    pool.close().await;
    drop(client);
    // What a connection has counted is known to all once it has ended.
    let connected = "select count(*) from pg_stat_activity
         where datname = current_database() and application_name = 'jobq'";
    super::wait::until("the connections have ended", || async { bed.number(connected).await == 0 })
        .await;
    let from_indexes = bed.number(index_reads).await;
    assert!((20..2_000).contains(&from_indexes), "{from_indexes} rows were read from indexes");
    assert_eq!(bed.number(table_reads).await, 0, "nothing was read through");
}

/// Every operation on single jobs, for jobs of their own counted from `first`.
async fn do_everything(client: &crate::Client, pool: &sqlx::PgPool, first: i64) {
    use jobq_core::job::{JobId, Lease, SessionId, Token};
    use jobq_core::lifecycle::Counters;

    use super::settle::{buried, cancelled, completed, failed};
    use super::worker::settlement;
    use crate::store::{Beat, Completion, DeadFilter};

    let store = client.store();
    let lease = |n: i64| Lease { job: JobId(first + n), token: Token(1), session: SessionId(1) };
    let counters = Counters { attempt: 1, ..Counters::default() };
    store.isolate(lease(0)).await.expect("isolates");
    client.job(JobId(first)).await.expect("looks");
    client.cancel(JobId(first + 1)).await.expect("cancels");
    let no_delay = std::time::Duration::ZERO;
    let batch = [
        settlement(lease(2), completed()),
        settlement(lease(3), cancelled()),
        settlement(lease(4), failed(counters, no_delay)),
        settlement(lease(5), buried(counters)),
        // Nothing is written for these, so that they are looked at once more.
        settlement(Lease { token: Token(7), ..lease(6) }, completed()),
        settlement(lease(5_000_000), completed()),
    ];
    store.settle(&batch).await.expect("settles");
    let held = (10..60).map(|n| (JobId(first + n), Token(1))).collect();
    let beat = Beat { session: 1, held, floors: Vec::new() };
    store.pulse().await.expect("connects").beat(&beat).await.expect("beats");
    for lease in [lease(7), Lease { token: Token(7), ..lease(8) }] {
        let mut tx = pool.begin().await.expect("begins");
        let completion = Completion { lease, retention: no_delay };
        let schema = store.schema().clone();
        crate::CompleteTarget::complete(&mut tx, completion, schema).await.expect("completes");
        tx.commit().await.expect("commits");
    }
    let dead = DeadFilter::id(JobId(3_000_000 + first));
    client.dead(&dead, 10).await.expect("lists");
    client.redrive(&dead).await.expect("redrives");
}

/// A claim touches no index: the new version of a row stays in its page.
pub(super) async fn d4_claims_are_hot_updates(bed: Bed) {
    const JOBS: usize = 20_000;
    for bytes in [170, 1_200] {
        bed.execute("truncate jobq.jobs").await;
        let before = (
            bed.number("select pg_stat_get_tuples_updated('jobq.jobs'::regclass)").await,
            bed.number("select pg_stat_get_tuples_hot_updated('jobq.jobs'::regclass)").await,
        );
        let mut new = job("k");
        new.payload = format!("{{\"text\":\"{}\"}}", "x".repeat(bytes - 11));
        bed.enqueue(vec![new; JOBS]).await;
        let worker = bed.session(super::bed::LEASE * 10, &["k"]).await;
        let mut server = Server::connect(&bed).await;
        let mut floor = Floor::START;
        let mut rules = Rules::default();
        rules.version = 1;
        let mut claimed = 0;
        while claimed < JOBS {
            let claim = worker.asking("default", 100, floor);
            let (connection, schema) = (&mut server.connection, bed.store.schema());
            let reply = claim_on(connection, schema, &claim, &rules, false, &[]).await;
            let Reply::Claimed(Claimed { jobs, .. }) = reply.expect("claims") else {
                panic!("there are other rules");
            };
            assert_eq!(jobs.len(), 100, "after {claimed}");
            claimed += 100;
            let last = jobs.last().expect("there are 100");
            floor = Floor { run_after: last.run_after, id: last.lease.job.0 };
        }
        // The counters are published when the connection says so, and when it ends.
        server.connection.close().await.expect("closes");
        let updated = || bed.number("select pg_stat_get_tuples_updated('jobq.jobs'::regclass)");
        super::wait::until("the counters are published", || async {
            updated().await - before.0 >= JOBS as i64
        })
        .await;
        let hot = bed.number("select pg_stat_get_tuples_hot_updated('jobq.jobs'::regclass)").await;
        let (updated, hot) = (updated().await - before.0, hot - before.1);
        assert!(hot * 100 >= updated * 99, "{hot} of {updated} were HOT at {bytes} bytes");
    }
}
