//! What must not cost a lease: blocked threads, an empty pool, a long transaction.

use std::time::Duration;

use crate::bed::{Bed, Db, on_every_database, on_mariadb118};
use crate::jobs::{effect, held_open, hog, late_effect};

on_every_database! {
    handlers_that_block_every_thread_keep_their_leases
    a_pool_of_one_connection_is_enough
    an_open_complete_in_costs_neither_its_own_lease_nor_its_neighbours
}

on_mariadb118! {
    an_open_complete_in_costs_neither_its_own_lease_nor_its_neighbours
}

async fn handlers_that_block_every_thread_keep_their_leases(bed: Bed) {
    // Two threads, two jobs that each block one for three leases.
    hog::enqueue(&bed.client, 6).await.expect("enqueued");
    hog::enqueue(&bed.client, 6).await.expect("enqueued");
    let _hogged = bed.worker("hogged", &[("JOBQ_WORKER_THREADS", "2")]);
    bed.until("select count(*) from log where what = 'start'", |n| n == 2).await;
    // Another process sweeps, and would take the jobs if their lease ended.
    let _sweeper = bed.worker("sweeper", &[("JOBQ_WORKER_QUEUE", "elsewhere")]);
    bed.until("select count(*) from jobq.finished", |finished| finished == 2).await;
    assert_eq!(bed.db.number("select count(*) from effects").await, 2);
    assert_eq!(bed.db.number("select max(token) from jobq.finished").await, 1);
    assert_eq!(bed.db.number("select count(*) from jobq.attempts").await, 0);
}

async fn a_pool_of_one_connection_is_enough(bed: Bed) {
    let pool = Db::connect(&bed.url, 1).await;
    let client = match &pool {
        Db::Postgres(pool) => jobq::ClientOptions::new().postgres(pool.clone()),
        Db::Mysql(pool) => jobq::ClientOptions::new().mysql(pool.clone()),
        Db::Sqlite(pool) => jobq::ClientOptions::new().sqlite(pool.clone()),
    };
    let client = client.expect("any pool will do");
    let jobs = (0..100).map(|_| effect::new(1));
    jobq::enqueue_many(&client, jobs).await.expect("enqueued");
    let ended = jobq::Runtime::new(client).state(pool).run_until_idle().await.expect("it runs");
    assert_eq!(ended.completed, 100, "{ended:?}");
    assert_eq!(bed.db.number("select count(*) from effects").await, 100);
    assert_eq!(bed.db.number("select max(token) from jobq.finished").await, 1);
}

async fn an_open_complete_in_costs_neither_its_own_lease_nor_its_neighbours(bed: Bed) {
    let gate = bed.file("gate").display().to_string();
    let isolations = bed.db.isolations();
    let neighbours = (isolations.len()..20).map(|_| late_effect::new(gate.clone()));
    jobq::enqueue_many(&bed.client, neighbours).await.expect("enqueued");
    let _worker = bed.worker("holder", &[]);
    let _sweeper = bed.worker("sweeper", &[("JOBQ_WORKER_QUEUE", "elsewhere")]);
    let neighbours = 20 - i64::try_from(isolations.len()).expect("few");
    bed.until("select count(*) from log where what = 'start'", |n| n == neighbours).await;
    let gates = isolations.iter().map(|isolation| format!("{gate} {isolation}"));
    let gates: Vec<String> = gates.collect();
    for (gate, isolation) in gates.iter().zip(isolations) {
        let isolation = (*isolation).to_owned();
        held_open::enqueue(&bed.client, gate.clone(), isolation).await.expect("enqueued");
    }
    for gate in &gates {
        bed.until_there_is(&format!("{gate}.open")).await;
    }
    // Two leases of two seconds, and more than a sweep: the test is about this time.
    tokio::time::sleep(Duration::from_secs(5)).await;
    for gate in &gates {
        std::fs::write(gate, "").expect("a gate can be opened");
    }
    bed.open_gate(&gate).await;
    bed.until("select count(*) from jobq.finished", |finished| finished == 20).await;
    assert_eq!(bed.db.number("select count(*) from effects").await, 20);
    assert_eq!(bed.db.number("select max(token) from jobq.finished").await, 1);
    assert_eq!(bed.db.number("select count(*) from jobq.attempts").await, 0);
}
