//! What MySQL and MariaDB do for each statement: which index they read it by, and how many rows,
//! never in time.
//!
//! A queue is empty most of its life, and so may be what the statistics say of it. Each statement
//! is looked at on tables of three sizes, with statistics from when they were empty and with new
//! ones.

use sqlx::mysql::{MySqlConnection, MySqlRow};
use sqlx::{ConnectOptions, Executor, Row};

use super::bed::{Bed, LEASE};
use crate::limit::QueueLimit;
use crate::store::mysql::statements::{
    LIMITED, OWN_SETTINGS, PAUSED, Wanted, behind_statement, expired_statement, expiring_statement,
    finish_statement, forget_statement, held_keys_statement, held_statement, keys_after_statement,
    lease_statement, list, lock_keys_statement, lock_limit_statement, lock_waiting_statement,
    look_statement, next_due_statement, next_statement, own_options, parked_statement,
    redrivable_statement, slots_statements, sql, stale_statement, take_grants_statement,
    unleased_statement,
};
use crate::store::{Floor, Schema};
use crate::unique::UniqueKey;
use jobq_core::job::JobId;
use jobq_core::time::Timestamp;

/// A connection like the runtime's own.
struct Server {
    connection: MySqlConnection,
    /// How many rows a question about the rows read reads itself.
    own_reads: i64,
}

impl Server {
    async fn connect(bed: &Bed) -> Self {
        let options = own_options(&bed.mysql_pool().connect_options());
        let mut connection = options.connect().await.expect("connects");
        connection.execute(OWN_SETTINGS).await.expect("settings");
        let settings = "set session sql_safe_updates = 0
                        /*!80032 , explain_format = 'TRADITIONAL' */
                        /*!80000 , max_execution_time = 0 */
                        /*M!100600 , max_statement_time = 0 */";
        connection.execute(settings).await.expect("settings");
        let mut server = Self { connection, own_reads: 0 };
        let before = server.counted().await;
        server.own_reads = server.counted().await - before;
        server
    }

    async fn run(&mut self, text: &str) -> Vec<MySqlRow> {
        let text = sql(&Schema::default(), text);
        let shown = text.as_str().to_owned();
        let rows = sqlx::raw_sql(text).fetch_all(&mut self.connection).await;
        rows.unwrap_or_else(|error| panic!("{error}: {shown}"))
    }

    /// How many rows this connection has read so far.
    async fn counted(&mut self) -> i64 {
        let rows = self.run("show session status like 'Handler_read%'").await;
        let number = |row: &MySqlRow| row.get::<String, _>(1).parse::<i64>().expect("a number");
        rows.iter().map(number).sum()
    }

    /// Fails if a statement reads a table otherwise than from somewhere in an index, sorts, or reads
    /// more rows than it should. What it writes is rolled back.
    async fn assert_reads_little(&mut self, when: &str, text: &str, rows: i64) {
        for row in self.run(&format!("explain {text}")).await {
            let column = |name| row.try_get::<Option<String>, _>(name).expect("a text");
            let table = column("table").unwrap_or_default();
            // What the statement has made itself, what is not a table, and what is written to.
            let written = column("select_type").as_deref() == Some("INSERT");
            if table.is_empty() || table.starts_with('<') || table == "wanted" || written {
                continue;
            }
            let (kind, extra) = (column("type"), column("Extra").unwrap_or_default());
            // In the order of an index up to a limit is as good, where nothing is left of what was done;
            // how far is counted below.
            let is_due = column("key").as_deref() == Some("jobq_jobs_due");
            let led = matches!(kind.as_deref(), Some("const" | "eq_ref" | "ref" | "range"))
                || (kind.as_deref() == Some("index") && text.contains("limit") && !is_due);
            assert!(led, "{when} reads {table} by {kind:?}: {text}");
            // A floor leads as far as its id. The whole key: 402 + 2 + 8 + 8 bytes.
            if text.contains("and id > ") && column("key").as_deref() == Some("jobq_jobs_due") {
                let used = column("key_len");
                assert_eq!(used.as_deref(), Some("420"), "{when} of the key are used: {text}");
            }
            assert!(!extra.contains("filesort"), "{when} sorts {table}: {text}");
            assert!(!extra.contains("temporary"), "{when} copies {table}: {text}");
        }
        self.run("begin").await;
        let before = self.counted().await;
        self.run(text).await;
        let read = self.counted().await - before - self.own_reads;
        self.run("rollback").await;
        assert!(read <= rows, "{when} reads {read} rows, not {rows}: {text}");
    }
}

/// Jobs of which nine in ten are leased, those before the others; a history, attempts and dead
/// letters. All jobs of a band have one time, as one insert gives them.
async fn fill(bed: &Bed, jobs: u32) {
    for table in TABLES {
        bed.execute(&format!("truncate jobq.{table}")).await;
    }
    let now = bed.now().await;
    bed.execute(
        "create table if not exists jobq.numbers (n bigint not null primary key) engine = InnoDB",
    )
    .await;
    bed.execute(
        "insert ignore into jobq.numbers values (0), (1), (2), (3), (4), (5), (6), (7), (8), (9)",
    )
    .await;
    let tens: Vec<String> =
        (0..jobs.ilog10()).map(|n| format!("t{n}.n * {}", 10_i64.pow(n))).collect();
    let tables: Vec<String> = (0..jobs.ilog10()).map(|n| format!("jobq.numbers as t{n}")).collect();
    let numbers = format!("(select {} + 1 as n from {}) as c", tens.join(" + "), tables.join(", "));
    bed.execute(&format!(
        "insert into jobq.jobs (id, kind, run_after, leased_by, priority, band)
         select n, 'k', {now} - 60000000, case when n * 10 <= {jobs} * 9 then 7 else 0 end, 0, 0
         from {numbers}"
    ))
    .await;
    bed.execute(&format!(
        "insert into jobq.jobs (id, kind, run_after, wait_reason)
         select n + {jobs}, 'k', 9223372036854775807, 'kind' from {numbers} where n <= 100"
    ))
    .await;
    bed.execute(&format!(
        "insert into jobq.finished (
             id, token, state, created_at, expires_at, attempt, max_attempts, interruptions, crashes,
             max_crashes, priority, queue, kind, payload
         )
         select n + 10000000, 1, 'completed', 1, {now} - 60000000 + n, 1, 1, 0, 0, 1, 0, 'default',
                'k', '{{}}'
         from {numbers} where n <= 100000"
    ))
    .await;
    bed.execute(&format!(
        "insert into jobq.dead (
             id, token, reason, created_at, attempt, max_attempts, interruptions, crashes,
             max_crashes, priority, queue, kind, error, payload
         )
         select n + 20000000, 1, 'exhausted', 1, 1, 1, 0, 0, 1, 0, 'default', 'k', 'e', '{{}}'
         from {numbers} where n <= 10000"
    ))
    .await;
    bed.execute(&format!(
        "insert into jobq.attempts (job_id, token, attempt, reason, error)
         select n, 1, 1, 'failed', 'e' from {numbers} where n <= 10000"
    ))
    .await;
    bed.execute(&format!(
        "insert into jobq.uniques (unique_key, job_id, scope)
         select unhex(lpad(hex(n), 64, '0')), n, 'until_finished' from {numbers} where n <= 10000"
    ))
    .await;
    bed.execute(&format!(
        "insert into jobq.jobs (id, kind, run_after, wait_reason, band, job_key, on_block)
         select n + 30000000, 'k', 9223372036854775807, 'key', -32768, 'hot', 'block'
         from {numbers} where n <= 10000"
    ))
    .await;
    bed.execute(&format!(
        "insert into jobq.key_grants (job_key, job_id)
         select concat('key-', n), n from {numbers} where n <= 10000
         union all select 'hot', 1"
    ))
    .await;
}

/// The tables that grow.
const TABLES: [&str; 6] = ["jobs", "finished", "attempts", "dead", "uniques", "key_grants"];

/// The key of the job with this number.
fn key(n: u8) -> UniqueKey {
    let mut key = [0; 32];
    key[31] = n;
    UniqueKey(key)
}

/// Every claim variant and every other statement that could read more than it should.
pub(super) async fn d4_every_statement_is_led_by_an_index(bed: Bed) {
    for table in TABLES {
        bed.execute(&format!("alter table jobq.{table} stats_auto_recalc = 0")).await;
        bed.execute(&format!("analyze table jobq.{table}")).await;
    }
    let worker = bed.session(LEASE, &["k", "other"]).await;
    let mut server = Server::connect(&bed).await;
    // Every claim asks for what is paused, and nothing is.
    // The first time the server reads its own tables, too.
    server.run(PAUSED).await;
    let before = server.counted().await;
    server.run(PAUSED).await;
    let read = server.counted().await - before - server.own_reads;
    assert!(read <= 2, "{read} rows are read of a table without any");
    server.run(LIMITED).await;
    let before = server.counted().await;
    server.run(LIMITED).await;
    let read = server.counted().await - before - server.own_reads;
    assert!(read <= 2, "{read} rows are read of a table without any");
    bed.client.limit_queue("default", QueueLimit::running(50)).await.expect("limits");
    bed.execute("update jobq.queue_slots set job_id = slot * 2, token = 0").await;
    for jobs in [10, 10_000, 100_000] {
        fill(&bed, jobs).await;
        for statistics in ["old", "new"] {
            if statistics == "new" {
                for table in TABLES {
                    bed.execute(&format!("analyze table jobq.{table}")).await;
                }
            }
            let when = format!("with {jobs} jobs and {statistics} statistics");
            let first = i64::from(jobs) * 9 / 10;
            let time = bed.job_row(1).await.number("run_after");
            let floor = Floor { run_after: Timestamp(time), id: first };
            let claim = worker.asking("default", 10, floor);
            let wanted = Wanted::new(&claim);
            let now = bed.now().await;
            let places: Vec<usize> = (0..wanted.places.len()).collect();
            for n in &places {
                let lock = wanted.lock_statement(*n, [first + 1], Timestamp(now), 10);
                server.assert_reads_little(&when, &lock, 8).await;
                // A page has 40 keys.
                for from in [floor, Floor::START] {
                    let page = wanted.page_statement(*n, from, wanted.places[*n].first_page());
                    server.assert_reads_little(&when, &page, 43).await;
                }
            }
            let head = look_statement(&wanted, &[], &places);
            server.assert_reads_little(&when, &head, 40).await;
            let (queues, kinds) = (["default".to_owned()], ["k".to_owned()]);
            let bands = [("default".to_owned(), 0), ("default".to_owned(), 2)];
            let ids = list(3..=8);
            let beginning = Floor::START;
            let end = Floor { run_after: Timestamp(i64::MAX), id: i64::MAX };
            let slots = slots_statements("default", 10);
            let mut slots = slots.split(';');
            for (text, rows) in [
                (next_due_statement(&bands, now, &kinds, &[]), 60),
                (next_due_statement(&bands, now, &kinds, &["slow".to_owned()]), 60),
                (unleased_statement("default", 0, floor, end, 10), 40),
                (unleased_statement("default", 2, beginning, end, 10), 10),
                (parked_statement(&queues, &kinds, 20), 60),
                (held_statement(3..=8), 20),
                (lease_statement(3, 7, true), 4),
                (finish_statement(&ids, "completed", 1, "null"), 20),
                (forget_statement(3), 6),
                (expired_statement(5), 8),
                (expiring_statement((0, 0)), 4),
                (redrivable_statement("id > 0", JobId(0), 5), 20),
                ("delete from jobq_jobs where id = 5".to_owned(), 2),
                (held_keys_statement(&[key(2), key(5)]), 8),
                (lock_keys_statement(&[key(2), key(5)], "for update"), 8),
                (keys_after_statement(Some(key(3)), 5), 30),
                (take_grants_statement(&["key-2", "key-5"]), 8),
                (next_statement(&["hot", "key-2", "key-5"]), 30),
                (behind_statement("hot", 30_000_001, Some(30_000_001)), 1_010),
                (stale_statement(Some("key-3"), 5), 45),
                (lock_waiting_statement([30_000_001, 30_000_002]), 20),
                (lock_limit_statement("default"), 4),
                // MariaDB looks at a place again once it is found.
                (slots.next().expect("counts").to_owned(), 160),
                (slots.next().expect("lists").to_owned(), 160),
                ("delete from jobq_key_grants where job_key = x'686f74'".to_owned(), 2),
                (format!("delete from jobq_uniques where unique_key = x'{}'", key(5)), 2),
            ] {
                server.assert_reads_little(&when, &text, rows).await;
            }
        }
    }
}
