//! The database goes away and comes back.

use std::time::Duration;

use jobq::{Client, JobId};
use tokio_util::sync::CancellationToken;

use crate::bed::{Bed, on_every_server};
use crate::jobs::{effect, patient, quick};
use crate::server::{Down, Mode, Server, Wire};

on_every_server! {
    a_stop_ends_by_its_deadline_though_the_database_never_answers
    a_worker_that_is_cut_off_holds_nobody_up
}

mod a_restart_stops_no_worker_and_loses_nothing {
    use crate::server::Server;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn postgres() {
        super::a_restart_stops_no_worker_and_loses_nothing(Server::postgres().await).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn mysql() {
        super::a_restart_stops_no_worker_and_loses_nothing(Server::mysql().await).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn mariadb() {
        super::a_restart_stops_no_worker_and_loses_nothing(Server::mariadb().await).await;
    }
}

async fn a_restart_stops_no_worker_and_loses_nothing(mut server: Server) {
    const JOBS: i64 = 600;
    let bed = Bed::at(&server.url()).await;
    let jobs = (0..JOBS).map(|_| effect::new(20));
    jobq::enqueue_many(&bed.client, jobs).await.expect("enqueued");
    let mut workers = [bed.worker("one", &[]), bed.worker("two", &[])];
    let stop = CancellationToken::new();
    let producer = tokio::spawn(produce(bed.client.clone(), stop.clone()));
    for (down, after) in [(Down::Clean, 100), (Down::Crash, 300)] {
        bed.until("select count(*) from effects", |effects| effects >= after).await;
        server.down(down);
        // Long enough for several failed claims and heartbeats; leases may or may not outlive it.
        tokio::time::sleep(Duration::from_secs(1)).await;
        server.up().await;
        wait_until_reachable(&bed).await;
    }
    stop.cancel();
    let promised = producer.await.expect("no panic");
    println!("{} jobs were enqueued one by one", promised.len());
    assert!(!promised.is_empty());
    bed.until("select count(*) from jobq.jobs", |jobs| jobs == 0).await;
    for worker in &mut workers {
        assert!(worker.is_running(), "{} exited", worker.name);
    }
    for id in &promised {
        let effect = format!("select count(*) from effects where job_id = {id}");
        assert_eq!(bed.db.number(&effect).await, 1, "job {id} is lost");
    }
    // There may be more: of a commit whose answer was cut off nobody knows.
    let done = bed.db.number("select count(*) from effects").await;
    assert!(done >= JOBS + i64::try_from(promised.len()).expect("some"), "{done}");
    assert_eq!(bed.db.number("select count(*) from jobq.dead").await, 0);
    let completed = "select count(*) from jobq.finished where state = 'completed'";
    assert_eq!(bed.db.number(completed).await, done);
}

/// Enqueues one job after the other, whatever happens; returns those that were promised to be kept.
async fn produce(client: Client, stop: CancellationToken) -> Vec<JobId> {
    let mut promised = Vec::new();
    while !stop.is_cancelled() {
        if let Ok(enqueued) = effect::enqueue(&client, 0).await {
            promised.push(enqueued.id());
        }
        // The workers are to get to the others.
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    promised
}

/// The test's own pool has to get over the restart too.
async fn wait_until_reachable(bed: &Bed) {
    for _ in 0..200 {
        if bed.db.execute("select 1").await.is_ok() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("the server does not come back");
}

async fn a_stop_ends_by_its_deadline_though_the_database_never_answers(bed: Bed) {
    let (wire, cut) = Wire::to(&bed.url).await;
    let client = Client::connect(&cut).await.expect("the wire is whole");
    patient::enqueue(&client, false).await.expect("enqueued");
    let stop = CancellationToken::new();
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

/// Whatever it was doing when its connections fell silent: the server does not hear of it.
async fn a_worker_that_is_cut_off_holds_nobody_up(bed: Bed) {
    const JOBS: i64 = 3_000;
    let (wire, cut) = Wire::to(&bed.url).await;
    jobq::enqueue_many(&bed.client, (0..JOBS).map(quick::new)).await.expect("enqueued");
    let mut far = bed.worker("far", &[("JOBQ_WORKER_URL", &cut)]);
    bed.until("select count(*) from jobq.finished", |finished| finished >= 200).await;
    wire.set(Mode::BlackHole);
    let near = bed.worker("near", &[]);
    bed.until("select count(*) from jobq.jobs", |jobs| jobs == 0).await;
    let completed = "select count(*) from jobq.finished where state = 'completed'";
    assert_eq!(bed.db.number(completed).await, JOBS);
    assert!(far.is_running(), "it waits for its database");
    drop(near);
}
