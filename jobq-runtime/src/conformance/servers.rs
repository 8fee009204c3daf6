//! PostgreSQL servers that cannot be reached, or not used as they are.

use std::time::Duration;

use jobq_core::text::error_chain;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::bed::{Bed, LEASE};
use super::sample::passwords;
use super::settle::snoozed;
use super::wait::join_all;
use super::worker::job;
use crate::client::{Client, ClientOptions};
use crate::error::Error;

/// Fails to connect and returns the error with all that it says.
async fn refused(url: &str) -> (Error, String) {
    let error = Client::connect(url).await.expect_err(url);
    let text = format!("{error:?} {}", error_chain(&error));
    assert!(!text.contains("secret"), "{text}");
    (error, text)
}

pub(super) async fn s5_a_server_that_is_not_there_is_named(bed: Bed) {
    drop(bed);
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("bound").port();
    drop(listener);
    let (error, text) = refused(&format!("postgres://me:secret@127.0.0.1:{port}/jobs")).await;
    assert!(matches!(error, Error::Connect { .. }), "{text}");
    assert!(error.is_transient(), "it may come up");
    assert!(
        text.contains(&format!("cannot connect to postgres://me@127.0.0.1:{port}/jobs")),
        "{text}"
    );
    assert!(text.contains("is the server running"), "{text}");
}

pub(super) async fn s5_a_url_that_cannot_be_read_is_shown_without_its_password(bed: Bed) {
    drop(bed);
    for url in ["postgres://me:secret@host:notaport/jobs", "postgres://me:secret@[::1/jobs"] {
        let (error, text) = refused(url).await;
        assert!(matches!(error, Error::BadUrl { .. }), "{text}");
        assert!(text.contains("postgres://user:password@host/database"), "{text}");
    }
}

pub(super) async fn s5_no_part_of_a_password_is_ever_shown(bed: Bed) {
    drop(bed);
    let port = refusing("28P01", "password authentication failed for user \"me\"").await;
    for password in passwords() {
        for url in [
            format!("postgres://me:{password}@127.0.0.1:{port}/jobs"),
            format!("postgresql://:{password}@127.0.0.1:{port}/jobs?sslmode=disable"),
            format!("postgres://me:{password}@127.0.0.1:notaport/jobs"),
            format!("postgres://me:{password}@[::1/jobs"),
            format!("postgres:///me:{password}@127.0.0.1:{port}/jobs"),
            format!("postgres:me:{password}@127.0.0.1:{port}/jobs"),
            format!("postgres://127.0.0.1:{port}/jobs?password={password}"),
            format!("me:{password}@127.0.0.1:{port}/jobs"),
            format!("mongodb://me:{password}@127.0.0.1:{port}/jobs"),
            format!("host=127.0.0.1 port={port} user=me password={password}"),
        ] {
            let error = Client::connect(&url).await.expect_err(&url);
            let text = format!("{error} {error:?} {}", error_chain(&error));
            assert!(!text.contains("hunter2") && !text.contains("sesame"), "{url}: {text}");
        }
    }
}

/// A server that answers every connection with one error.
async fn refusing(code: &'static str, message: &'static str) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("bound").port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut length = [0; 4];
                while stream.read_exact(&mut length).await.is_ok() {
                    let mut rest = vec![0; u32::from_be_bytes(length) as usize - 4];
                    stream.read_exact(&mut rest).await.ok();
                    if rest.starts_with(&80_877_103_u32.to_be_bytes()) {
                        // It has no TLS.
                        stream.write_all(b"N").await.ok();
                        continue;
                    }
                    let fields = format!("SFATAL\0VFATAL\0C{code}\0M{message}\0\0");
                    let size = (fields.len() as u32 + 4).to_be_bytes();
                    let reply = [b"E", &size[..], fields.as_bytes()].concat();
                    stream.write_all(&reply).await.ok();
                    return;
                }
            });
        }
    });
    port
}

pub(super) async fn s5_a_refused_login_says_what_the_server_said(bed: Bed) {
    drop(bed);
    let message = "password authentication failed for user \"me\"";
    let port = refusing("28P01", message).await;
    let (error, text) = refused(&format!("postgres://me:secret@127.0.0.1:{port}/jobs")).await;
    assert!(matches!(error, Error::Connect { .. }), "{text}");
    assert!(text.contains("are host, port, user and password right?"), "{text}");
    assert!(text.contains(message.split('"').next().expect("text")), "{text}");
    assert!(!error.is_transient(), "trying again will not help");
}

pub(super) async fn s5_a_database_that_does_not_exist_is_named(bed: Bed) {
    let options = bed.postgres_pool().connect_options();
    let url = format!(
        "postgres://{}:secret@{}:{}/no_such_database",
        options.get_username(),
        options.get_host(),
        options.get_port()
    );
    let (error, text) = refused(&url).await;
    assert!(matches!(error, Error::Connect { .. }), "{text}");
    assert!(text.contains("no_such_database"), "{text}");
}

/// A client of a server that only a lazy pool knows.
fn client_of(port: u16) -> Client {
    let url = format!("postgres://me:secret@127.0.0.1:{port}/jobs?sslmode=disable");
    let pool = sqlx::postgres::PgPoolOptions::new()
        .acquire_timeout(Duration::from_secs(5))
        .connect_lazy(&url)
        .expect("a URL");
    ClientOptions::new().postgres(pool).expect("a good name")
}

pub(super) async fn s7_pgbouncer_in_the_way_is_recognised(bed: Bed) {
    drop(bed);
    let message = "unsupported startup parameter in options: enable_seqscan";
    let client = client_of(refusing("08P01", message).await);
    let error = client.check().await.expect_err("it refuses");
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    assert!(error.to_string().contains("direct connection"), "{error}");
}

pub(super) async fn s5_a_check_that_cannot_connect_names_the_server(bed: Bed) {
    drop(bed);
    let client = client_of(refusing("28P01", "password authentication failed").await);
    let error = client.check().await.expect_err("it refuses");
    let text = format!("{error:?} {}", error_chain(&error));
    assert!(matches!(error, Error::Connect { .. }), "{text}");
    assert!(text.contains("postgres://me@127.0.0.1:") && !text.contains("secret"), "{text}");
}

pub(super) async fn s5_a_database_of_another_encoding_is_refused_with_the_cure(bed: Bed) {
    for encoding in ["LATIN1", "SQL_ASCII"] {
        let name = format!("{}_{}", bed.schema, encoding.to_lowercase());
        bed.execute(&format!(
            "create database {name} encoding '{encoding}' locale_provider libc locale 'C'
             template template0"
        ))
        .await;
        let options = (*bed.postgres_pool().connect_options()).clone().database(&name);
        let pool = sqlx::postgres::PgPoolOptions::new().connect_lazy_with(options);
        let client = ClientOptions::new().postgres(pool.clone()).expect("a good name");
        let refused = [client.check().await, client.migrate().await];
        let schemas = "select count(*) from pg_namespace where nspname = 'jobq'";
        let schemas: i64 = sqlx::query_scalar(schemas).fetch_one(&pool).await.expect("counts");
        pool.close().await;
        drop(client);
        bed.execute(&format!("drop database {name} with (force)")).await;
        for error in refused {
            let error = error.expect_err("not every text can be stored");
            assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
            let text = error.to_string();
            assert!(text.contains(&format!("its encoding is {encoding}")), "{text}");
            assert!(text.contains("encoding 'UTF8' template template0"), "{text}");
        }
        assert_eq!(schemas, 0, "nothing was made");
    }
}

/// What an administrator or the application's role may have set changes nothing for us.
pub(super) async fn f1_the_databases_own_settings_do_not_matter(bed: Bed) {
    let bed = bed.with_default_names().await;
    let database = bed.texts("select current_database()::text").await.remove(0);
    for setting in [
        "default_transaction_isolation = 'serializable'",
        "timezone = 'Asia/Seoul'",
        "search_path = ''",
        "statement_timeout = '1h'",
        "enable_seqscan = on",
        "plan_cache_mode = force_custom_plan",
    ] {
        bed.execute(&format!("alter database {database} set {setting}")).await;
    }
    let options = (*bed.postgres_pool().connect_options()).clone();
    let fresh = sqlx::postgres::PgPoolOptions::new().connect_lazy_with(options);
    let client = ClientOptions::new().postgres(fresh.clone()).expect("a good name");
    client.check().await.expect("it fits");
    let store = client.store();
    store.insert((0..100).map(|_| job("k")).collect()).await.expect("enqueues");
    let worker = bed.session(LEASE, &["k"]).await;
    let claims: Vec<_> = (0..6)
        .map(|_| async {
            let mut claimed = 0;
            for _ in 0..20 {
                let claim = worker.asking("default", 10, crate::store::Floor::START);
                // Above READ COMMITTED this fails with 40001 again and again.
                let jobs = store.claim(&claim).await.expect("claims").jobs;
                claimed += jobs.len();
                let mut batch: Vec<_> = jobs
                    .iter()
                    .map(|job| super::worker::settlement(job.lease, snoozed(job.counters)))
                    .collect();
                while !batch.is_empty() {
                    let mut settled = store.settle(&batch).await.expect("settles").into_iter();
                    batch.retain(|_| settled.next() == Some(crate::store::Settled::Busy));
                }
            }
            claimed
        })
        .collect();
    assert!(join_all(claims).await.into_iter().sum::<usize>() > 100);
    assert_eq!(bed.number("select count(*) from jobq.jobs where leased_by <> 0").await, 0);
    let time = std::time::SystemTime::UNIX_EPOCH + Duration::from_micros(4_102_444_800_123_456);
    let id = super::sample::plain().run_at(time).enqueue(&client).await.expect("enqueues").id();
    assert_eq!(bed.job_row(id).await.number("run_after"), 4_102_444_800_123_456);
    fresh.close().await;
}
