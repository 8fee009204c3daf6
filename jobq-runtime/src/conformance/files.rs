//! SQLite files that cannot be opened, or not used as they are.

use super::bed::Bed;
use super::sample::plain;
use crate::client::Client;
use crate::error::Error;

/// Opens a file as an application does at its start.
async fn start(url: &str) -> Result<Client, Error> {
    let client = Client::connect(url).await?;
    client.migrate().await?;
    client.check().await?;
    Ok(client)
}

pub(super) async fn s5_a_missing_file_is_made(bed: Bed) {
    let file = bed.folder().join("new.db");
    let client = start(&format!("sqlite:{}", file.display())).await.expect("it is made");
    plain().enqueue(&client).await.expect("enqueues");
    assert!(file.exists());
}

pub(super) async fn s5_a_file_in_a_missing_folder_is_named_with_the_cure(bed: Bed) {
    let file = bed.folder().join("missing").join("jobs.db");
    let error = start(&format!("sqlite:{}", file.display())).await.expect_err("no folder");
    assert!(matches!(error, Error::BadUrl { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("missing/jobs.db") && text.contains("directory must exist"), "{text}");
}

pub(super) async fn s5_a_file_that_can_only_be_read_is_refused_with_the_cure(bed: Bed) {
    let url = format!("sqlite:{}?mode=ro", bed.folder().join("jobs.db").display());
    let error = start(&url).await.expect_err("it can only be read");
    assert!(matches!(error, Error::Unsupported { .. }), "{error:?}");
    assert!(error.to_string().contains("it can only be read"), "{error}");
}

pub(super) async fn s5_a_file_that_is_no_database_is_refused(bed: Bed) {
    let file = bed.folder().join("notes.txt");
    std::fs::write(&file, "shopping list\n".repeat(1_000)).expect("writes");
    let error = start(&format!("sqlite:{}", file.display())).await.expect_err("no database");
    assert!(matches!(error, Error::BadUrl { .. }), "{error:?}");
    assert!(error.to_string().contains("not an SQLite database"), "{error}");
    assert!(std::fs::read_to_string(&file).expect("reads").starts_with("shopping"), "untouched");
}

pub(super) async fn s5_a_database_in_memory_is_refused_with_the_cure(bed: Bed) {
    drop(bed);
    for url in ["sqlite::memory:", "sqlite:", "sqlite:x.db?mode=memory"] {
        let error = start(url).await.expect_err(url);
        assert!(matches!(error, Error::BadUrl { .. }), "{error:?}");
        assert!(error.to_string().contains("use a file"), "{error}");
    }
}

pub(super) async fn d3_a_pool_that_undoes_wal_mode_is_refused_with_the_cure(bed: Bed) {
    use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};

    let options = SqliteConnectOptions::new()
        .filename(bed.folder().join("delete.db"))
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Delete);
    let pool = SqlitePoolOptions::new().connect_lazy_with(options);
    let client = crate::ClientOptions::new().sqlite(pool).expect("a file can be used");
    client.migrate().await.expect("the tables can be made");
    let error = client.check().await.expect_err("the pool would set it back");
    assert!(error.to_string().contains("journal_mode"), "{error}");
}

/// Two pools as two processes: each commit of one is seen by the other, and none is refused.
pub(super) async fn d3_two_processes_share_the_file(bed: Bed) {
    let pool = bed.sqlite_pool();
    let other = bed.client_with(crate::ClientOptions::new().schema(&bed.schema));
    let mut tasks = Vec::new();
    for client in [&bed.client, &other, &bed.client, &other] {
        let client = client.clone();
        let pool = pool.clone();
        tasks.push(tokio::spawn(async move {
            for _ in 0..25 {
                plain().enqueue(&client).await.expect("never locked");
                plain().enqueue(&pool).await.expect("never locked");
            }
        }));
    }
    for task in tasks {
        task.await.expect("no panic");
    }
    assert_eq!(bed.count("jobs").await, 200);
}

/// Inside one process an enqueue pokes; across processes the poll is all there is.
pub(super) async fn e6_nothing_is_sent_between_processes(bed: Bed) {
    assert!(bed.store.listen().await.expect("answers").is_none());
}
