//! The database goes away and comes back.

use std::time::Duration;

use crate::bed::{Bed, Db};
use crate::jobs::effect;
use crate::server::{Mode, Server, Wire};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_of_postgres_stops_no_worker_and_loses_nothing() {
    const JOBS: i64 = 600;
    let server = Server::start();
    let bed = Bed::postgres_at(&server.url()).await;
    let jobs = (0..JOBS).map(|_| effect::new(20));
    jobq::enqueue_many(&bed.client, jobs).await.expect("enqueued");
    let mut workers = [bed.worker("one", &[]), bed.worker("two", &[])];
    for (mode, after) in [("fast", 100), ("immediate", 300)] {
        bed.until("select count(*) from effects", |effects| effects >= after).await;
        server.down(mode);
        // Long enough for several failed claims and heartbeats; leases may or may not outlive it.
        tokio::time::sleep(Duration::from_secs(1)).await;
        server.up();
        wait_until_reachable(&bed).await;
    }
    bed.until("select count(*) from jobq.jobs", |jobs| jobs == 0).await;
    for worker in &mut workers {
        assert!(worker.is_running(), "{} exited", worker.name);
    }
    assert_eq!(bed.db.number("select count(*) from effects").await, JOBS);
    assert_eq!(bed.db.number("select count(*) from jobq.dead").await, 0);
    assert_eq!(
        bed.db.number("select count(*) from jobq.finished where state = 'completed'").await,
        JOBS
    );
}

/// The test's own pool has to get over the restart too.
async fn wait_until_reachable(bed: &Bed) {
    let Db::Postgres(pool) = &bed.db else { unreachable!("the test is about PostgreSQL") };
    for _ in 0..200 {
        if sqlx::query("select 1").execute(pool).await.is_ok() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("the server does not come back");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_ends_by_its_deadline_though_the_database_never_answers() {
    let url = std::env::var("JOBQ_TEST_POSTGRES_URL").expect("run scripts/test");
    let bed = Bed::postgres_at(&url).await;
    let Db::Postgres(pool) = &bed.db else { unreachable!("the test is about PostgreSQL") };
    let options = pool.connect_options();
    let wire = Wire::to(options.get_port()).await;
    let cut = bed.url.replace(&format!(":{}/", options.get_port()), &format!(":{}/", wire.port));
    assert_ne!(cut, bed.url, "the URL names its port");

    let client = jobq::Client::connect(&cut).await.expect("the wire is whole");
    crate::jobs::patient::enqueue(&client, false).await.expect("enqueued");
    let stop = tokio_util::sync::CancellationToken::new();
    let stopped = stop.clone();
    let runtime =
        jobq::Runtime::new(client).state(bed.db.clone()).shutdown_timeout(Duration::from_secs(1));
    let run = tokio::spawn(runtime.run_until(async move { stopped.cancelled().await }));
    bed.until("select count(*) from log where what = 'start'", |n| n == 1).await;
    wire.set(Mode::BlackHole);
    stop.cancel();
    // The promise is the timeout and two seconds; the rest is room for a busy machine.
    let ended = tokio::time::timeout(Duration::from_secs(10), run).await;
    let ended = ended.expect("it ends").expect("it does not panic").expect("it does not fail");
    assert_eq!(ended.abandoned, 1, "{ended:?}");
    assert!(!ended.is_clean());
}
