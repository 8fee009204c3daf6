//! Stopping by signals, and cancelling.

use crate::bed::{Bed, SIGTERM, on_every_database};
use crate::jobs::{effect, patient};

on_every_database! {
    sigterm_waits_for_running_jobs_and_ends_clean
    what_outlasts_the_shutdown_timeout_is_told_then_given_back_without_an_attempt
    a_second_signal_stops_now
    a_running_job_is_cancelled_through_the_heartbeat
}

async fn sigterm_waits_for_running_jobs_and_ends_clean(bed: Bed) {
    jobq::enqueue_many(&bed.client, (0..60).map(|_| effect::new(400))).await.expect("enqueued");
    let mut worker = bed.worker("one", &[]);
    bed.until("select count(*) from log where what = 'start'", |n| n > 0).await;
    worker.signal(SIGTERM);
    let status = worker.ended().await;
    assert!(status.success(), "{status}");
    let started = bed.db.number("select count(*) from log where what = 'start'").await;
    assert_eq!(bed.db.number("select count(*) from effects").await, started);
    assert_eq!(bed.db.number("select count(*) from jobq.jobs").await, 60 - started);
    assert_eq!(bed.db.number("select count(*) from jobq.jobs where leased_by <> 0").await, 0);
    assert!(started < 60, "it stopped claiming");
}

async fn what_outlasts_the_shutdown_timeout_is_told_then_given_back_without_an_attempt(bed: Bed) {
    patient::enqueue(&bed.client, true).await.expect("enqueued");
    patient::enqueue(&bed.client, false).await.expect("enqueued");
    let mut worker = bed.worker("one", &[("JOBQ_WORKER_SHUTDOWN_MS", "300")]);
    bed.until("select count(*) from log where what = 'start'", |n| n == 2).await;
    worker.signal(SIGTERM);
    let status = worker.ended().await;
    assert_eq!(status.code(), Some(1), "the exit code tells that jobs were given back");
    assert_eq!(bed.db.number("select count(*) from log where what = 'told'").await, 1);
    let given_back = "select count(*) from jobq.jobs
        where leased_by = 0 and attempt = 0 and interruptions = 1 and band = 32767";
    assert_eq!(bed.db.number(given_back).await, 2);
    let records = "select count(*) from jobq.attempts where reason = 'interrupted'";
    assert_eq!(bed.db.number(records).await, 2);
    // At once claimable by another worker, with a new token.
    let _second = bed.worker("second", &[]);
    bed.until("select count(*) from log where what = 'start' and token = 2", |n| n == 2).await;
}

async fn a_second_signal_stops_now(bed: Bed) {
    patient::enqueue(&bed.client, false).await.expect("enqueued");
    let mut worker = bed.worker("one", &[("JOBQ_WORKER_SHUTDOWN_MS", "3600000")]);
    bed.until("select count(*) from log where what = 'start'", |n| n == 1).await;
    worker.signal(SIGTERM);
    // The first signal is taken when claiming has stopped: a new job is left alone.
    loop {
        let id = effect::enqueue(&bed.client, 1).await.expect("enqueued").id();
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        let waiting = format!("select count(*) from jobq.jobs where id = {id} and token = 0");
        if bed.db.number(&waiting).await == 1 {
            break;
        }
    }
    assert!(worker.is_running(), "it waits for its job");
    worker.signal(SIGTERM);
    let status = worker.ended().await;
    assert_eq!(status.code(), Some(1));
    let given_back = "select count(*) from jobq.jobs where interruptions = 1 and leased_by = 0";
    assert_eq!(bed.db.number(given_back).await, 1);
}

async fn a_running_job_is_cancelled_through_the_heartbeat(bed: Bed) {
    let obedient = patient::enqueue(&bed.client, true).await.expect("enqueued").id();
    let deaf = patient::enqueue(&bed.client, false).await.expect("enqueued").id();
    let _worker = bed.worker("one", &[]);
    bed.until("select count(*) from log where what = 'start'", |n| n == 2).await;
    for id in [obedient, deaf] {
        let reply = bed.client.cancel(id).await.expect("it can be asked");
        assert_eq!(reply, jobq::CancelReply::Requested);
    }
    bed.until("select count(*) from jobq.finished where state = 'cancelled'", |n| n == 2).await;
    assert_eq!(bed.db.number("select count(*) from log where what = 'told'").await, 1);
    assert_eq!(bed.db.number("select count(*) from jobq.jobs").await, 0);
}
