//! Tables and start checks.

use std::time::Duration;

use jobq_core::job::JobId;
use jobq_migrations::{Dialect, all, needed};
use sqlx::Executor;

use super::bed::{Bed, LEASE, on_pool};
use super::sample::plain;
use super::settle::buried;
use super::wait::join_all;
use crate::client::ClientOptions;
use crate::error::Error;
use crate::store::{CancelReply, DeadFilter, Lookup};
use jobq_core::unique::Unique;

fn dialect(bed: &Bed) -> Dialect {
    match bed.store.database() {
        "SQLite" => Dialect::Sqlite,
        "MySQL" => Dialect::Mysql,
        _ => Dialect::Postgres,
    }
}

fn newest(bed: &Bed) -> i64 {
    needed(dialect(bed))
}

pub(super) async fn d1_many_processes_migrate_at_once_and_again(bed: Bed) {
    let bed = bed.with_default_names().await;
    for _ in 0..2 {
        let migrations: Vec<_> = (0..8)
            .map(|_| {
                let client = bed.another_client("fresh");
                tokio::spawn(async move { client.migrate().await })
            })
            .collect();
        for migrated in join_all(migrations).await {
            migrated.expect("no panic").expect("migrates");
        }
    }
    let fresh = bed.another_client("fresh");
    fresh.check().await.expect("the tables fit");
    plain().enqueue(&fresh).await.expect("enqueues");
    let table = if bed.is_postgres() { "fresh.migrations" } else { "fresh_migrations" };
    assert_eq!(bed.number(&format!("select count(*) from {table}")).await, newest(&bed));
}

pub(super) async fn d1_a_good_database_passes_the_check(bed: Bed) {
    bed.client.check().await.expect("it fits");
}

pub(super) async fn d1_missing_tables_are_an_error_that_names_the_cure(bed: Bed) {
    let absent = bed.another_client("absent");
    let error = absent.check().await.expect_err("there are no tables");
    assert!(
        matches!(error, Error::Schema { found: 0, needed } if needed == newest(&bed)),
        "{error:?}"
    );
    assert!(error.to_string().contains("call `client.migrate()`"), "{error}");
    assert!(!error.is_transient());
    let error = plain().enqueue(&absent).await.expect_err("there are no tables");
    assert!(matches!(error, Error::Schema { found: 0, .. }), "{error:?}");
}

/// Programs of the version before keep working on newer tables, and leave them as they are.
pub(super) async fn d1_newer_tables_are_left_as_they_are(bed: Bed) {
    bed.execute("insert into jobq.migrations (version, name) values (999, 'future')").await;
    bed.client.check().await.expect("newer tables still fit");
    bed.client.migrate().await.expect("there is nothing to do");
    assert_eq!(bed.count("migrations").await, newest(&bed) + 1);
}

/// What a database says of the tables of a name, their migrations included.
async fn made(bed: &Bed, name: &str) -> Vec<String> {
    let (objects, separator) = if bed.is_sqlite() {
        (format!("select sql from sqlite_master where name like '{name}%'"), '_')
    } else if bed.is_mysql() {
        let columns = format!(
            "select concat(table_name, column_name, column_type, coalesce(column_default, ''),
                           extra, coalesce(collation_name, ''))
             from information_schema.columns
             where table_schema = database() and table_name like '{name}%'
             union all
             select concat(table_name, index_name, seq_in_index, column_name)
             from information_schema.statistics
             where table_schema = database() and table_name like '{name}%'
             union all
             select concat(constraint_name, check_clause)
             from information_schema.check_constraints
             where constraint_schema = database() and constraint_name like '{name}%'"
        );
        (columns, '_')
    } else {
        let columns = format!(
            "select table_name || column_name || data_type || coalesce(column_default, '')
             from information_schema.columns where table_schema = '{name}'
             union all
             select indexdef from pg_indexes where schemaname = '{name}'"
        );
        (columns, '.')
    };
    let mut made = bed.texts(&objects).await;
    assert!(made.len() > 10, "{made:?}");
    let version = if bed.is_mysql() { "concat(version, name)" } else { "version || name" };
    let applied = format!("select {version} from {name}{separator}migrations");
    made.extend(bed.texts(&applied).await);
    let mut made: Vec<_> = made.into_iter().map(|text| text.replace(name, "NAME")).collect();
    made.sort_unstable();
    made
}

pub(super) async fn d1_older_tables_are_upgraded_with_all_that_is_in_them(bed: Bed) {
    let bed = bed.with_default_names().await;
    let client = bed.another_client("older");
    let (first, later) = all(dialect(&bed)).split_first().expect("there are steps");
    let apply = async |script: String| {
        on_pool!(bed, pool => {
            let mut tx = pool.begin_with(bed.begin()).await.expect("begins");
            (&mut *tx).execute(sqlx::AssertSqlSafe(script)).await.expect("applies");
            tx.commit().await.expect("commits");
        });
    };
    apply(first.sql("older")).await;
    let table = if bed.is_postgres() { "older.jobs" } else { "older_jobs" };
    let insert = format!("insert into {table} (kind, payload) values ('k', '{{\"n\":7}}')");
    apply(insert).await;
    let needed = jobq_migrations::needed(dialect(&bed));
    let is_told = |error: Error| match error {
        Error::Schema { found, needed: asked } => assert_eq!((found, asked), (1, needed)),
        other => panic!("{other:?}"),
    };
    is_told(client.check().await.expect_err("too old"));
    is_told(plain().enqueue(&client).await.expect_err("too old"));
    let error = client.pause_queue("default", None).await.expect_err("too old");
    assert!(matches!(error, Error::Schema { found: 3, .. }), "it has no such table: {error:?}");
    if bed.is_mysql() {
        // Every statement commits by itself: a step that broke off before its end is begun anew.
        for step in later {
            let text = step.sql("older");
            let (all_but_the_note, _) = text.rsplit_once("insert into").expect("a note");
            apply(all_but_the_note.to_owned()).await;
        }
    }
    client.migrate().await.expect("upgrades");
    client.check().await.expect("the tables fit");
    let Lookup::Found(job) = client.job(JobId(1)).await.expect("looks") else { panic!("gone") };
    assert_eq!(job.payload, r#"{"n":7}"#);
    let first = plain().unique(Unique::DEFAULT).enqueue(&client).await.expect("enqueues");
    assert!(first.is_new());
    let second = plain().unique(Unique::DEFAULT).enqueue(&client).await.expect("enqueues");
    assert_eq!(second.id(), first.id());
    assert!(client.pause_queue("default", None).await.expect("pauses"));
}

pub(super) async fn d1_tables_made_by_hand_are_those_that_migrate_makes(bed: Bed) {
    let bed = bed.with_default_names().await;
    let client = bed.another_client("byhand");
    for step in all(dialect(&bed)) {
        on_pool!(bed, pool => {
            let mut tx = pool.begin_with(bed.begin()).await.expect("begins");
            let script = sqlx::AssertSqlSafe(step.sql("byhand"));
            (&mut *tx).execute(script).await.expect("applies");
            tx.commit().await.expect("commits");
        });
    }
    let by_hand = made(&bed, "byhand").await;
    client.check().await.expect("the tables fit");
    client.migrate().await.expect("there is nothing to do");
    assert_eq!(made(&bed, "byhand").await, by_hand);
    client.migrate().await.expect("nor the second time");
    plain().enqueue(&client).await.expect("enqueues");

    let other = bed.another_client("migrated");
    other.migrate().await.expect("the tables can be made");
    assert_eq!(made(&bed, "migrated").await, by_hand);
}

/// A team may give jobq a schema made beforehand, and no right to make any.
#[cfg(feature = "postgres")]
pub(super) async fn d1_a_schema_that_is_there_is_used(bed: Bed) {
    let bed = bed.with_default_names().await;
    let role = format!("r{:x}", rand::random::<u64>());
    bed.execute(&format!("create role {role}")).await;
    bed.execute(&format!("create schema given authorization {role}")).await;
    let options = (*bed.postgres_pool().connect_options()).clone();
    let options = options.options([("role", &*role)]);
    let pool = sqlx::postgres::PgPoolOptions::new().max_connections(1).connect_lazy_with(options);
    let client = ClientOptions::new().schema("given").postgres(pool.clone()).expect("a good name");
    let migrated = client.migrate().await;
    pool.close().await;
    bed.execute("drop schema given cascade").await;
    bed.execute(&format!("drop role {role}")).await;
    migrated.expect("the schema is there");
}

pub(super) async fn d1_tables_of_two_names_do_not_mix(bed: Bed) {
    let other = bed.another_client(&format!("{}_b", bed.schema));
    other.migrate().await.expect("the tables can be made");
    let mine = plain().enqueue(&bed.client).await.expect("enqueues").id();
    let theirs = plain().enqueue(&other).await.expect("enqueues").id();
    assert_eq!(mine, theirs, "each counts for itself");
    assert_eq!(other.cancel(theirs).await.expect("cancels"), CancelReply::Cancelled);
    let worker = bed.session(LEASE, &["k"]).await;
    assert_eq!(worker.claim_one().await.lease.job, mine);
    if bed.is_postgres() {
        bed.execute(&format!("drop schema {}_b cascade", bed.schema)).await;
    }
}

pub(super) async fn d1_a_name_that_is_no_identifier_is_refused(bed: Bed) {
    let names = ["", "1st", "Jobs", "a-b", "a b", "jobs;drop", "é", &"x".repeat(41)];
    for name in names {
        let error = ClientOptions::new().schema(name).connect("sqlite:never-opened.db").await;
        let error = error.expect_err(name);
        assert!(matches!(error, Error::BadOption { option: "schema", .. }), "{error:?}");
        assert!(error.to_string().contains("lower-case letters"), "{error}");
    }
    let longest = "x".repeat(40);
    let client = bed.another_client(&longest);
    client.migrate().await.expect("the longest name will do");
    plain().enqueue(&client).await.expect("enqueues");
    if bed.is_postgres() {
        bed.execute(&format!("drop schema {longest} cascade")).await;
    }
}

pub(super) async fn d1_a_name_that_cannot_be_is_refused_with_the_cure(bed: Bed) {
    drop(bed);
    for (name, cure) in [
        ("pg_jobs", "put `my_` before it"),
        ("information_schema", "put `my_` before it"),
        ("sqlite", "put `my_` before it"),
        ("sqlite_jobs", "put `my_` before it"),
        ("app_closed", "put `_jobs` behind it"),
    ] {
        let error = crate::Schema::new(name).expect_err(name);
        assert!(matches!(error, Error::BadOption { option: "schema", .. }), "{error:?}");
        assert!(error.to_string().contains(cure), "{error}");
    }
    for name in ["closed", "pgjobs", "sqlitejobs", "my_pg_jobs", "app_closed_jobs"] {
        crate::Schema::new(name).expect(name);
    }
}

pub(super) async fn d1_a_word_of_sql_will_do_as_a_name(bed: Bed) {
    let mut bed = bed.with_default_names().await;
    for name in ["order", "user", "select", "table", "null", "current_user", "index", "closed"] {
        bed.client = bed.another_client(name);
        bed.store = bed.client.store();
        bed.client.migrate().await.expect(name);
        bed.client.migrate().await.expect(name);
        bed.client.check().await.expect(name);
        let id = plain().enqueue(&bed.client).await.expect(name).id();
        let worker = bed.session(LEASE, &["k"]).await;
        let job = worker.claim_one().await;
        assert_eq!(job.lease.job, id);
        bed.settle(job.lease, buried(job.counters)).await;
        assert_eq!(bed.client.redrive(&DeadFilter::id(id)).await.expect(name), [id]);
        let job = worker.claim_one().await;
        on_pool!(bed, pool => {
            let mut tx = pool.begin_with(bed.begin()).await.expect("begins");
            bed.context(job.lease, Duration::ZERO).complete_in(&mut tx).await.expect(name);
            tx.commit().await.expect("commits");
        });
        assert_eq!(bed.client.job(id).await.expect(name), Lookup::Gone);
        crate::sweep::rescue(&*bed.store, true).await.expect(name);
        bed.store.prune(1).await.expect(name);
        assert_eq!(bed.client.counts().await.expect(name), []);
    }
}

/// On SQLite the schema is a prefix: no two names may come to the same table.
pub(super) async fn d1_no_name_meets_the_tables_of_another(bed: Bed) {
    let bed = bed.with_default_names().await;
    for name in ["app", "app_closed_jobs", "app_job", "app_jobs", "app_finished", "app_do", "app_"]
    {
        bed.another_client(name).migrate().await.expect(name);
    }
    for name in ["app", "app_closed_jobs", "app_job", "app_jobs", "app_finished", "app_do", "app_"]
    {
        let client = bed.another_client(name);
        client.check().await.expect(name);
        assert_eq!(plain().enqueue(&client).await.expect(name).id(), JobId(1), "{name}");
    }
}

pub(super) async fn f1_a_view_shows_who_runs_a_job_and_until_when(bed: Bed) {
    let id = bed.one().await;
    let shown = || async { bed.rows("job_states", &format!("where id = {id}")).await.remove(0) };
    assert_eq!(shown().await.text("state"), "pending");
    assert!(shown().await.is_null("worker") && shown().await.is_null("leased_until"));
    let worker = bed.session(LEASE, &["k"]).await;
    worker.claim_one().await;
    let running = shown().await;
    assert_eq!(running.text("state"), "running");
    assert_eq!(running.text("worker"), format!("worker-{}", worker.id));
    let session = bed.row("sessions", worker.id).await.expect("open");
    assert_eq!(running.number("leased_until"), session.number("leased_until"));
    bed.store.close_session(worker.id).await.expect("closes");
    assert_eq!(
        shown().await.text("worker"),
        format!("worker-{}", worker.id),
        "and once it is over"
    );
}

pub(super) async fn s5_a_url_of_another_database_is_refused_with_the_ones_that_will_do(bed: Bed) {
    drop(bed);
    for url in ["oracle://me:secret@db/x", "db/jobs", "", "http://x"] {
        let error = crate::Client::connect(url).await.expect_err(url);
        assert!(matches!(error, Error::BadUrl { .. }), "{error:?}");
        let text = format!("{error} {error:?}");
        assert!(
            text.contains(
                "it must begin with `postgres://`, `mysql://`, `mariadb://` or `sqlite:`"
            ),
            "{text}"
        );
        assert!(!text.contains("secret"), "{text}");
    }
}
