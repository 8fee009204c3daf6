//! MySQL and MariaDB servers that are set up in other ways, and ones that cannot be used.

use jobq::{Client, Error, Runtime};

use crate::bed::{Bed, Db};
use crate::jobs::{effect, quick};
use crate::server::Server;

/// Settings that change what statements mean, on both.
const ODD: [&str; 12] = [
    "--sql-mode=ANSI_QUOTES,PIPES_AS_CONCAT,NO_BACKSLASH_ESCAPES,IGNORE_SPACE,ONLY_FULL_GROUP_BY,\
     HIGH_NOT_PRECEDENCE,NO_UNSIGNED_SUBTRACTION,NO_AUTO_VALUE_ON_ZERO,TRADITIONAL",
    "--default-time-zone=-11:00",
    "--transaction-isolation=SERIALIZABLE",
    "--completion-type=CHAIN",
    "--character-set-server=latin1",
    "--collation-server=latin1_swedish_ci",
    "--auto-increment-increment=3",
    "--auto-increment-offset=2",
    "--innodb-rollback-on-timeout=1",
    "--innodb-lock-wait-timeout=1",
    "--wait-timeout=5",
    "--optimizer-switch=mrr=on,mrr_cost_based=off",
];

mod a_server_with_odd_settings_will_do {
    use super::{ODD, Server};

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn mysql() {
        super::will_do(Server::mysql_with(&ODD).await).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn mariadb() {
        super::will_do(Server::mariadb_with(&ODD).await).await;
    }
}

async fn will_do(server: Server) {
    const JOBS: i64 = 200;
    let bed = Bed::at(&server.url()).await;
    let (mut one, mut two) = (bed.worker("one", &[]), bed.worker("two", &[]));
    for n in 0..JOBS / 2 {
        effect::enqueue(&bed.client, 0).await.expect("enqueued");
        quick::enqueue(&bed.client, n).await.expect("enqueued");
    }
    bed.until("select count(*) from jobq.jobs", |jobs| jobs == 0).await;
    let completed = "select count(*) from jobq.finished where state = 'completed'";
    assert_eq!(bed.db.number(completed).await, JOBS);
    assert_eq!(bed.db.number("select count(*) from effects").await, JOBS / 2);
    assert_eq!(bed.db.number("select count(*) from jobq.attempts").await, 0);
    // An idle worker's connections are closed by the server sooner than ours would be.
    tokio::time::sleep(std::time::Duration::from_secs(6)).await;
    quick::enqueue(&bed.client, 0).await.expect("enqueued");
    bed.until("select count(*) from jobq.jobs", |jobs| jobs == 0).await;
    assert!(one.is_running() && two.is_running());
}

/// Fails to migrate, to pass the check and to start a runtime, and says why each time.
async fn refused(url: &str, cure: &str) {
    let client = Client::connect(url).await.expect("the server can be reached");
    let runtime = Runtime::new(client.clone()).state(Db::connect(url, 1).await);
    let errors = [
        client.migrate().await.expect_err("it cannot be used"),
        client.check().await.expect_err("it cannot be used"),
        runtime.run_until_idle().await.expect_err("it cannot be used"),
    ];
    for error in errors {
        let text = format!("{error:?}");
        println!("{text}");
        assert!(matches!(error, Error::Unsupported { .. }), "{text}");
        assert!(text.contains(cure), "{text}");
    }
}

mod a_log_of_statements_is_refused_and_others_will_do {
    use super::Server;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn mysql() {
        let with = ["--log-bin=log", "--binlog-format=STATEMENT"];
        super::with_a_log(Server::mysql_with(&with).await).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn mariadb() {
        let with = ["--log-bin=log", "--binlog-format=STATEMENT"];
        super::with_a_log(Server::mariadb_with(&with).await).await;
    }
}

async fn with_a_log(server: Server) {
    refused(&server.url(), "set `binlog_format = ROW` or `MIXED`").await;
    let admin = Db::connect(&server.url(), 1).await;
    for format in ["ROW", "MIXED"] {
        admin.execute(&format!("set global binlog_format = '{format}'")).await.expect("set");
        let bed = Bed::at(&server.url()).await;
        let mut worker = bed.worker("one", &[]);
        for n in 0..20 {
            effect::enqueue(&bed.client, 0).await.expect("enqueued");
            quick::enqueue(&bed.client, n).await.expect("enqueued");
        }
        bed.until("select count(*) from jobq.jobs", |jobs| jobs == 0).await;
        assert_eq!(bed.db.number("select count(*) from jobq.finished").await, 40, "{format}");
        assert!(worker.is_running());
    }
    admin.execute("set global read_only = 1").await.expect("set");
    refused(&server.url(), "connect to the primary").await;
}

/// It has no `skip locked`. scripts/test says when none could be had.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mariadb_of_10_5_is_refused_with_the_version_that_will_do() {
    let Some(server) = Server::mariadb105().await else { return };
    refused(&server.url(), "jobq needs MySQL 8.0.16 or MariaDB 10.6, or newer").await;
}
