//! MySQL and MariaDB servers as people set them up, and ones that cannot be used as they are.

use std::time::{Duration, SystemTime};

use jobq_core::job::{JobId, JobState};
use jobq_core::lifecycle::Transition;
use jobq_core::text::error_chain;
use jobq_core::time::Timestamp;
use sqlx::mysql::{MySqlConnectOptions, MySqlConnection, MySqlPoolOptions};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Executor};

use super::bed::{Bed, LEASE, RETENTION};
use super::enqueue::{assert_in_order, of_mixed_kinds};
use super::late::{at, pass, publish};
use super::sample::{ids_of, new_job, passwords, plain};
use super::settle::{completed, snoozed};
use super::wait::{join_all, until};
use super::worker::{job, settlement};
use crate::client::{Client, ClientOptions};
use crate::enqueue::{EnqueueTarget, Enqueued};
use crate::error::Error;
use crate::store::mysql::statements::{OWN_SETTINGS, Wanted, own_options, sql};
use crate::store::{Beat, BeatReply, CancelReply, Floor, Lookup, Schema, Settled};
use crate::sweep::Notes;

const LEVELS: [&str; 4] = ["read uncommitted", "read committed", "repeatable read", "serializable"];

fn options(bed: &Bed) -> MySqlConnectOptions {
    (*bed.mysql_pool().connect_options()).clone()
}

fn database(bed: &Bed) -> String {
    options(bed).get_database().expect("a bed has a database").to_owned()
}

async fn set(connection: &mut MySqlConnection, settings: &str) {
    let text = AssertSqlSafe(format!("set session {settings}"));
    connection.execute(text).await.unwrap_or_else(|error| panic!("{settings}: {error}"));
}

/// E1: the clock of a statement is that of its beginning; a row must not appear behind what workers have
/// passed while it waited.
pub(super) async fn e1_an_insert_that_waited_has_the_time_after_the_wait(bed: Bed) {
    for plain_sql in [false, true] {
        let mut backup = bed.mysql_pool().acquire().await.expect("connects").detach();
        let lock = bed.statement("lock tables jobq.jobs read");
        sqlx::raw_sql(lock).execute(&mut backup).await.expect("locks");
        let (store, pool) = (bed.store.clone(), bed.mysql_pool().clone());
        let text = bed.statement("insert into jobq.jobs (kind) values ('k')");
        let insert = tokio::spawn(async move {
            if plain_sql {
                sqlx::raw_sql(text).execute(&pool).await.expect("writes");
            } else {
                store.insert(vec![job("k")]).await.expect("writes");
            }
        });
        let waiting = "select count(*) from information_schema.processlist
             where db = database() and state = 'Waiting for table metadata lock'";
        until("it waits", || async { bed.number(waiting).await > 0 }).await;
        // The test is about this time.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let unlocked = bed.now().await;
        backup.execute("unlock tables").await.expect("unlocks");
        insert.await.expect("no panic");
        let newest = bed.number("select max(run_after) from jobq.jobs").await;
        assert!(newest >= unlocked, "{} us too early", unlocked - newest);
    }
}

/// F2: an administrator, or a time limit, kills statements as they go.
pub(super) async fn f2_killed_statements_leave_no_job_in_two_places_or_none(bed: Bed) {
    const JOBS: usize = 2_000;
    let options = options(&bed);
    let ids = bed.enqueue((0..JOBS).map(|_| job("k")).collect()).await;
    let worker = bed.session(LEASE * 100, &["k"]).await;
    let database = database(&bed);
    let killing = tokio::spawn(async move {
        let mut killer = options.connect().await.expect("connects");
        loop {
            let busy = format!(
                "select cast(id as signed) from information_schema.processlist
                 where db = '{database}' and command = 'Query' and id <> connection_id()"
            );
            let busy: Vec<i64> =
                sqlx::query_scalar(AssertSqlSafe(busy)).fetch_all(&mut killer).await.expect("asks");
            for id in busy {
                // It may be gone by now.
                let _ = killer.execute(AssertSqlSafe(format!("kill query {id}"))).await;
            }
        }
    });
    let end = std::time::Instant::now() + Duration::from_secs(3);
    let mut enqueued = Vec::new();
    let mut to_be_cancelled = Vec::new();
    while std::time::Instant::now() < end {
        if let Ok(more) = bed.store.insert((0..3).map(|_| job("other")).collect()).await {
            let asked = bed.store.cancel(more[0].id()).await;
            if matches!(asked, Ok((CancelReply::Cancelled, _))) {
                to_be_cancelled.push(more[0].id());
            }
            enqueued.extend(more);
        }
        if let Ok(mut pulse) = bed.store.pulse().await {
            let beat = Beat { session: worker.id.0, ..Beat::default() };
            let reply = pulse.beat(&beat).await;
            assert!(!matches!(reply, Ok(BeatReply::Closed)), "nobody has closed it");
        }
        let Ok(claimed) = bed.store.claim(&worker.asking("default", 20, Floor::START)).await else {
            continue;
        };
        let batch: Vec<_> = claimed
            .jobs
            .iter()
            .enumerate()
            .map(|(n, job)| {
                let transition = if n % 2 == 0 { completed() } else { snoozed(job.counters) };
                settlement(job.lease, transition)
            })
            .collect();
        let _ = bed.store.settle(&batch).await;
    }
    killing.abort();
    let twice =
        "select count(*) from jobq.jobs as job join jobq.finished as done on done.id = job.id";
    assert_eq!(bed.number(twice).await, 0, "in both places");
    let of_kind = |table: &str| format!("select count(*) from jobq.{table} where kind = 'k'");
    let there = bed.number(&of_kind("jobs")).await + bed.number(&of_kind("finished")).await;
    assert_eq!(there, ids.len() as i64, "none is lost");
    assert!(!enqueued.is_empty(), "some got through");
    for id in enqueued.into_iter().map(Enqueued::id) {
        let found = bed.client.job(id).await.expect("looks");
        let Lookup::Found(job) = found else { panic!("{id} was written, and now: {found:?}") };
        let state = job.state;
        if to_be_cancelled.contains(&id) {
            assert_eq!(state, JobState::Cancelled);
        }
    }
    // What was claimed is leased, and nothing else.
    let wrong = "select count(*) from jobq.jobs where leased_by <> 0 and token = 0";
    assert_eq!(bed.number(wrong).await, 0);
}

/// F2: `complete_in` without a transaction broke off after its first write, and so has committed it.
pub(super) async fn f2_a_job_that_was_completed_by_half_is_settled_whole(bed: Bed) {
    let cancelled = || Transition::Cancel { reason: None };
    let with_result = || Transition::Complete { result: Some("1".to_owned()) };
    for transition in [completed(), with_result(), cancelled()] {
        let id = bed.one().await;
        let job = bed.session(LEASE, &["k"]).await.claim_one().await;
        complete_by_half(&bed, id).await;
        assert_eq!(bed.settle(job.lease, transition).await, Settled::Written);
        assert_eq!((bed.count("jobs").await, bed.count("finished").await), (0, 1));
        bed.execute("delete from jobq.finished").await;
    }
    let id = bed.one().await;
    complete_by_half(&bed, id).await;
    assert_eq!(bed.client.cancel(id).await.expect("answers"), CancelReply::Cancelled);
    assert_eq!((bed.count("jobs").await, bed.count("finished").await), (0, 1));
}

/// Counting waits for a table that somebody has locked; so do all who count.
pub(super) async fn m1_what_people_ask_holds_up_no_claim(bed: Bed) {
    let id = bed.one().await;
    let worker = bed.session(LEASE, &["k"]).await;
    let mut backup = bed.mysql_pool().acquire().await.expect("connects").detach();
    let lock = bed.statement("lock tables jobq.finished write");
    sqlx::raw_sql(lock).execute(&mut backup).await.expect("locks");
    let counts: Vec<_> = (0..8)
        .map(|_| {
            let store = bed.store.clone();
            tokio::spawn(async move { store.counts().await })
        })
        .collect();
    let waiting = "select count(*) from information_schema.processlist
         where db = database() and state = 'Waiting for table metadata lock'";
    until("they wait", || async { bed.number(waiting).await > 0 }).await;
    assert_eq!(worker.claim_one().await.lease.job, id);
    assert!(counts.iter().all(|count| !count.is_finished()), "they are still waiting");
    backup.execute("unlock tables").await.expect("unlocks");
    for count in counts {
        assert_eq!(count.await.expect("no panic").expect("counts")[0].count, 1);
    }
}

async fn complete_by_half(bed: &Bed, id: JobId) {
    bed.execute(&format!(
        "insert into jobq.finished (
             id, token, state, created_at, expires_at, attempt, max_attempts, interruptions, crashes,
             max_crashes, priority, queue, kind, payload
         )
         select id, token, 'completed', created_at, created_at, attempt, max_attempts,
                interruptions, crashes, max_crashes, priority, queue, kind, payload
         from jobq.jobs
         where id = {id}"
    ))
    .await;
}

/// D4: what a claim has locked, and the gaps between, keep no producer waiting; and a producer that
/// has not committed keeps no claim waiting.
pub(super) async fn d4_a_claim_never_makes_an_enqueue_wait(bed: Bed) {
    let ids = bed.enqueue((0..50).map(|_| job("k")).collect()).await;
    let worker = bed.session(LEASE, &["k"]).await;
    let wanted = Wanted::new(&worker.asking("default", 100, Floor::START));
    let now = Timestamp(bed.now().await);
    let mut claim = own_options(&options(&bed)).connect().await.expect("connects");
    claim.execute(OWN_SETTINGS).await.expect("settings");
    claim.execute("begin").await.expect("begins");
    let mut locked = 0;
    for n in 0..wanted.places.len() {
        let text = wanted.lock_statement(n, ids.iter().map(|id| id.0), now, 100);
        let rows = sqlx::raw_sql(sql(&Schema::default(), &text)).fetch_all(&mut claim).await;
        locked += rows.expect("locks").len();
    }
    assert_eq!(locked, 50);
    for level in LEVELS {
        let mut producer = bed.mysql_pool().acquire().await.expect("connects").detach();
        set(&mut producer, "innodb_lock_wait_timeout = 1").await;
        producer.execute(bed.begin_at(level)).await.expect("begins");
        let jobs = (0..3).map(|_| plain().priority(2));
        crate::enqueue_many(&mut producer, jobs).await.expect("nobody is waited for");
        // What is not committed is neither seen nor waited for.
        assert!(worker.claim(10).await.is_empty(), "{level}");
        producer.execute("commit").await.expect("commits");
        assert_eq!(worker.claim(10).await.len(), 3, "{level}");
    }
    claim.execute("rollback").await.expect("rolls back");
    assert_eq!(worker.claim(100).await.len(), 50);
}

/// R6: the server has rolled back all of the caller's transaction, not one statement.
pub(super) async fn d4_a_deadlock_is_a_serialization_failure_to_the_caller(bed: Bed) {
    bed.execute("create table jobq.seats (id int primary key) engine = InnoDB").await;
    bed.execute("insert into jobq.seats values (1)").await;
    let pool = bed.mysql_pool();
    let seat = || sqlx::query("select id from jobq_seats where id = 1 for update");
    let mut victim = pool.begin_with(bed.begin_at("repeatable read")).await.expect("begins");
    seat().fetch_all(&mut *victim).await.expect("locks");
    let mut other = pool.begin_with(bed.begin_at("repeatable read")).await.expect("begins");
    // Who has written more is spared.
    let more = "insert into jobq_seats select seq.n from
                (select 10 as n union all select 11 union all select 12) as seq";
    other.execute(more).await.expect("writes");
    // The end of the table: where an enqueue inserts.
    let gap = "select id from jobq_jobs where id > 1000000 for update";
    sqlx::query(gap).fetch_all(&mut *other).await.expect("locks");
    let waits = tokio::spawn(async move {
        let locked = sqlx::query("select id from jobq_seats where id = 1 for update")
            .fetch_all(&mut *other)
            .await;
        locked.map(|rows| rows.len())
    });
    bed.until_one_waits_for_a_lock().await;
    let error = plain().enqueue(bed.client.within(&mut victim)).await.expect_err("a deadlock");
    assert!(matches!(error, Error::Serialization(_)), "{error:?}");
    assert!(error.is_transient() && error.to_string().contains("roll it back"), "{error}");
    drop(victim);
    assert_eq!(waits.await.expect("no panic").expect("goes on"), 1);
}

/// Whatever `auto_increment_increment` and `innodb_autoinc_lock_mode` are, and whoever inserts
/// beside us: the ids given back are those of the jobs.
pub(super) async fn e1_ids_follow_the_sessions_increment_and_others_do_not_mix_in(bed: Bed) {
    let schema = || bed.store.schema().clone();
    let mut calls: Vec<crate::handler::BoxFuture<'_, ()>> = Vec::new();
    for increment in [1, 2, 7] {
        let (bed, schema) = (&bed, &schema);
        calls.push(Box::pin(async move {
            let mut producer = bed.mysql_pool().acquire().await.expect("connects").detach();
            set(&mut producer, &format!("auto_increment_increment = {increment}")).await;
            for jobs in [1, 2, 300, 700, 1_200] {
                let written = (&mut producer).write(of_mixed_kinds(jobs), schema()).await;
                assert_in_order(bed, &ids_of(written.expect("writes")), jobs).await;
            }
        }));
    }
    for _ in 0..2 {
        let bed = &bed;
        calls.push(Box::pin(async move {
            for _ in 0..20 {
                // Of such an insert the server does not know the number of rows before.
                bed.execute(
                    "insert into jobq.jobs (kind)
                     select 'bulk' from (select 1 as n union all select 2 union all select 3) as a,
                                        (select 1 as n union all select 2 union all select 3) as b",
                )
                .await;
            }
        }));
    }
    join_all(calls).await;
}

/// How an application may have set up its connections.
async fn settings(bed: &Bed) -> Vec<&'static str> {
    let mut settings = vec![
        "sql_mode = ''",
        "sql_mode = 'ANSI_QUOTES,NO_BACKSLASH_ESCAPES,PIPES_AS_CONCAT,IGNORE_SPACE'",
        "sql_mode = 'TRADITIONAL,ONLY_FULL_GROUP_BY,HIGH_NOT_PRECEDENCE,NO_UNSIGNED_SUBTRACTION'",
        "time_zone = '+13:00'",
        "time_zone = '-11:00'",
        "sql_safe_updates = 1",
        "transaction isolation level serializable",
        "transaction isolation level repeatable read",
        "transaction isolation level read uncommitted",
    ];
    if bed.number("select version() like '%MariaDB%'").await == 1 {
        settings.push("sql_mode = 'ORACLE'");
    }
    settings
}

/// More than one statement writes.
pub(super) async fn e1_many_jobs_are_written_whatever_the_settings(bed: Bed) {
    for settings in settings(&bed).await {
        let schema = || bed.store.schema().clone();
        let options = options(&bed);
        let pool = MySqlPoolOptions::new()
            .max_connections(1)
            .after_connect(move |connection, _| {
                Box::pin(async move {
                    set(connection, settings).await;
                    Ok(())
                })
            })
            .connect_lazy_with(options);
        let written = (&pool).write(of_mixed_kinds(600), schema()).await.expect(settings);
        assert_in_order(&bed, &ids_of(written), 600).await;
        let mut producer = pool.acquire().await.expect("connects");
        let written = (&mut producer).write(of_mixed_kinds(600), schema()).await.expect(settings);
        assert_in_order(&bed, &ids_of(written), 600).await;
        let mut tx = producer.begin_with("start transaction").await.expect("begins");
        (&mut tx).write(of_mixed_kinds(600), schema()).await.expect(settings);
        tx.rollback().await.expect("rolls back");
        assert_eq!(bed.count("jobs").await, 1_200, "{settings}");
        bed.execute("delete from jobq.jobs").await;
    }
}

/// The application's connections may be set up in any way, and stay so.
pub(super) async fn e1_the_sessions_own_settings_do_not_matter(bed: Bed) {
    let text = "back\\slash ' \" ` ? % \u{1F980}\n";
    for (n, settings) in settings(&bed).await.into_iter().enumerate() {
        let mut producer = bed.mysql_pool().acquire().await.expect("connects").detach();
        set(&mut producer, settings).await;
        let facts =
            "select concat_ws('|', @@sql_mode, @@time_zone, @@sql_safe_updates, @@autocommit)";
        let before: String =
            sqlx::query_scalar(facts).fetch_one(&mut producer).await.expect("reads");
        let earliest = bed.now().await;
        let payload = serde_json::json!({ "text": text, "n": n });
        let id = new_job(&payload).tag(text).enqueue(&mut producer).await.expect(settings).id();
        let row = bed.job_row(id).await;
        assert!((earliest..=bed.now().await).contains(&row.number("run_after")), "{settings}");
        let worker = bed.session(LEASE, &["k"]).await;
        let job = worker.claim_one().await;
        assert_eq!(job.lease.job, id);
        assert_eq!(job.payload, payload.to_string(), "{settings}");
        assert_eq!(job.tags, [text], "{settings}");
        let mut tx = producer.begin_with("start transaction").await.expect("begins");
        bed.context(job.lease, RETENTION).complete_in(&mut tx).await.expect(settings);
        tx.commit().await.expect("commits");
        assert!(bed.row("finished", id).await.is_some(), "{settings}");
        let after: String =
            sqlx::query_scalar(facts).fetch_one(&mut producer).await.expect("reads");
        assert_eq!(before, after);
    }
}

/// Old applications speak other character sets than the tables.
pub(super) async fn e4_text_is_kept_whatever_the_connection_says_it_sends(bed: Bed) {
    let text = "na\u{ef}ve \u{1F980} \u{6f22}\u{5b57} \u{feff}";
    for charset in ["latin1", "utf8mb3", "sjis", "utf8mb4"] {
        let client = client_of(options(&bed).charset(charset));
        let payload = serde_json::json!({ "text": text });
        let job = new_job(&payload).tag(text).metadata(text, text);
        let id = job.enqueue(&client).await.expect(charset).id();
        let job = bed.session(LEASE, &["k"]).await.claim_one().await;
        assert_eq!(job.lease.job, id);
        assert_eq!(job.payload, payload.to_string(), "{charset}");
        assert_eq!(job.tags, [text], "{charset}");
        assert_eq!(job.metadata[text], text, "{charset}");
    }
}

/// A cancel may have to wait long, for a handler's transaction: not on a connection that somebody else
/// needs, and not with that connection's settings.
pub(super) async fn e1_a_cancel_leaves_the_applications_connections_alone(bed: Bed) {
    let pool = MySqlPoolOptions::new().max_connections(1).connect_lazy_with(options(&bed));
    let client = ClientOptions::new().mysql(pool.clone()).expect("a good name");
    let id = bed.one().await;
    let mut only = pool.acquire().await.expect("connects");
    set(&mut only, "autocommit = 0").await;
    assert_eq!(client.cancel(id).await.expect("needs none of them"), CancelReply::Cancelled);
    drop(only);
    let id = bed.one().await;
    assert_eq!(client.cancel(id).await.expect("answers"), CancelReply::Cancelled);
    assert_eq!((bed.count("jobs").await, bed.count("finished").await), (0, 2));
}

pub(super) async fn e1_without_autocommit_jobs_are_the_callers_to_commit(bed: Bed) {
    let schema = || bed.store.schema().clone();
    for jobs in [1, 1_200] {
        let before = bed.count("jobs").await;
        let mut producer = bed.mysql_pool().acquire().await.expect("connects").detach();
        set(&mut producer, "autocommit = 0").await;
        (&mut producer).write(of_mixed_kinds(jobs), schema()).await.expect("writes");
        assert_eq!(bed.count("jobs").await, before);
        producer.execute("rollback").await.expect("rolls back");
        assert_eq!(bed.count("jobs").await, before);
        (&mut producer).write(of_mixed_kinds(jobs), schema()).await.expect("writes");
        producer.execute("commit").await.expect("commits");
        assert_eq!(bed.count("jobs").await, before + jobs as i64);
    }
}

/// A user of the server with some rights to the bed's database, to be dropped by the case.
async fn user(bed: &Bed, rights: &str) -> (String, MySqlConnectOptions) {
    let name = format!("jobq_u{:x}", rand::random::<u64>());
    let database = database(bed);
    for text in [
        format!("create user '{name}'@'%' identified by 'secret'"),
        format!("grant {rights} on `{database}`.* to '{name}'@'%'"),
    ] {
        bed.mysql_pool().execute(AssertSqlSafe(text)).await.expect(
            "the user of JOBQ_TEST_MYSQL_URL or JOBQ_TEST_MARIADB_URL needs all privileges, with \
             grant option",
        );
    }
    let options = options(bed).username(&name).password("secret");
    (name, options)
}

async fn drop_user(bed: &Bed, name: &str) {
    let text = format!("drop user '{name}'@'%'");
    bed.mysql_pool().execute(AssertSqlSafe(text)).await.expect("users can be dropped");
}

fn client_of(options: MySqlConnectOptions) -> Client {
    let pool =
        MySqlPoolOptions::new().acquire_timeout(Duration::from_secs(5)).connect_lazy_with(options);
    ClientOptions::new().mysql(pool).expect("a good name")
}

/// Who may not see the transactions proves nothing; what was passed by is found all the same.
pub(super) async fn e1_without_the_privilege_nothing_is_proved(bed: Bed) {
    let (name, options) = user(&bed, "select, insert, update, delete").await;
    let client = client_of(options);
    client.check().await.expect("these rights are enough");
    let store = client.store();
    let worker = bed.session(LEASE, &["k"]).await;
    let id = bed.one().await;
    let past = bed.seconds_away(-600);
    bed.execute(&format!("update jobq.jobs set run_after = {past} where id = {id}")).await;
    let mut notes = Notes::default();
    for _ in 0..3 {
        publish(&bed, &worker, at(&bed, 0).await).await;
        let horizon = store.horizon().await.expect("reads");
        crate::sweep::find_late(&*store, &mut notes, horizon).await.expect("sweeps");
        let now = bed.now().await;
        if let Some((time, _)) = &mut notes.mark {
            *time = now - 3_000_000;
        }
        assert_eq!(notes.proven, None);
        assert!(notes.floors.iter().all(|known| known.floor <= Floor::START));
    }
    assert_eq!(bed.job_row(id).await.number("band"), 32_767, "found, and first in line");
    // With the privilege the same notes do not prove what was not seen.
    pass(&bed, &mut notes).await;
    assert_eq!(notes.proven, None);
    drop_user(&bed, &name).await;
}

pub(super) async fn f1_the_servers_own_settings_do_not_matter(bed: Bed) {
    let pool = bed.mysql_pool();
    // Connections of other cases have a time zone of their own.
    pool.execute("set global time_zone = '+09:00'").await.expect("may be set");
    let client = client_of(options(&bed).timezone(None));
    client.check().await.expect("it fits");
    let id = plain().enqueue(&client).await.expect("enqueues").id();
    let worker = bed.session(LEASE, &["k"]).await;
    assert_eq!(worker.claim_one().await.lease.job, id);
    let since = SystemTime::UNIX_EPOCH.elapsed().expect("after 1970").as_micros() as i64;
    let created = bed.job_row(id).await.number("created_at");
    assert!((since - created).abs() < 60_000_000, "{created} is not {since}");
    pool.execute("set global time_zone = 'SYSTEM'").await.expect("may be set");
}

/// Fails to connect and returns the error with all that it says.
async fn refused(url: &str) -> (Error, String) {
    let error = Client::connect(url).await.expect_err(url);
    let text = format!("{error:?} {}", error_chain(&error));
    assert!(!text.contains("secret"), "{text}");
    (error, text)
}

fn address(bed: &Bed) -> String {
    let options = options(bed);
    format!("{}:{}", options.get_host(), options.get_port())
}

pub(super) async fn s5_a_server_that_is_not_there_is_named(bed: Bed) {
    drop(bed);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("bound").port();
    drop(listener);
    for scheme in ["mysql", "mariadb"] {
        let (error, text) = refused(&format!("{scheme}://me:secret@127.0.0.1:{port}/jobs")).await;
        assert!(matches!(error, Error::Connect { .. }), "{text}");
        assert!(error.is_transient(), "it may come up");
        let named = format!("cannot connect to {scheme}://me@127.0.0.1:{port}/jobs");
        assert!(text.contains(&named), "{text}");
    }
}

pub(super) async fn s5_a_url_without_a_database_is_refused_with_the_cure(bed: Bed) {
    for url in [format!("mysql://me:secret@{}", address(&bed)), "mysql://me:secret@[::1/x".into()] {
        let (error, text) = refused(&url).await;
        assert!(matches!(error, Error::BadUrl { .. }), "{text}");
        assert!(text.contains("mysql://user:password@host/database"), "{text}");
    }
}

pub(super) async fn s5_a_wrong_password_is_refused_without_showing_it(bed: Bed) {
    let url = format!("mysql://nobody:secret@{}/{}", address(&bed), database(&bed));
    let (error, text) = refused(&url).await;
    assert!(matches!(error, Error::Connect { .. }), "{text}");
    assert!(text.contains("are host, port, user and password right?"), "{text}");
    assert!(!error.is_transient(), "trying again will not help");
}

pub(super) async fn s5_no_part_of_a_password_is_ever_shown(bed: Bed) {
    let (address, database) = (address(&bed), database(&bed));
    for password in passwords() {
        for url in [
            format!("mysql://nobody:{password}@{address}/{database}"),
            format!("mariadb://:{password}@{address}/{database}?ssl-mode=disabled"),
            format!("mysql://nobody:{password}@127.0.0.1:notaport/{database}"),
            format!("mysql://nobody:{password}@[::1/{database}"),
            format!("mysql:///nobody:{password}@{address}/{database}"),
            format!("mysql:nobody:{password}@{address}/{database}"),
            format!("nobody:{password}@{address}/{database}"),
        ] {
            let error = Client::connect(&url).await.expect_err(&url);
            let text = format!("{error} {error:?} {}", error_chain(&error));
            assert!(!text.contains("hunter2") && !text.contains("sesame"), "{url}: {text}");
        }
    }
}

pub(super) async fn s5_a_database_that_does_not_exist_is_named(bed: Bed) {
    let client = client_of(options(&bed).database("no_such_database"));
    let error = client.check().await.expect_err("there is none");
    let text = format!("{error:?} {}", error_chain(&error));
    assert!(matches!(error, Error::Connect { .. }), "{text}");
    assert!(text.contains("no_such_database"), "{text}");
}

pub(super) async fn s5_a_user_without_rights_is_told_which(bed: Bed) {
    let (name, options) = user(&bed, "select, insert").await;
    let client = client_of(options);
    for error in [
        client.check().await.expect_err("it may not delete"),
        ClientOptions::new()
            .schema("others")
            .mysql(
                MySqlPoolOptions::new()
                    .connect_lazy_with(self::options(&bed).username(&name).password("secret")),
            )
            .expect("a good name")
            .migrate()
            .await
            .expect_err("it may not create"),
    ] {
        let text = format!("{error:?} {error}");
        assert!(matches!(error, Error::Unsupported { .. }), "{text}");
        assert!(text.contains("grant the user select, insert, update and delete"), "{text}");
        assert!(!text.contains("secret"), "{text}");
    }
    drop_user(&bed, &name).await;
}
