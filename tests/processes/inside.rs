//! Runtimes in the process of the test: those that end when nothing is due, and several at once.

use jobq::Runtime;

use crate::bed::{Bed, SIGKILL, on_every_database};
use crate::jobs::{late_effect, quick};

on_every_database! {
    the_job_of_a_dead_worker_is_taken_back
    every_parked_job_is_run
    a_job_that_must_run_alone_waits_for_every_runtime_of_its_process
    a_process_in_which_a_job_runs_alone_leaves_the_others_to_others
}

fn runtime(bed: &Bed) -> Runtime {
    Runtime::new(bed.client.clone()).state(bed.db.clone())
}

async fn the_job_of_a_dead_worker_is_taken_back(bed: Bed) {
    late_effect::enqueue(&bed.client, "gate".to_owned()).await.expect("enqueued");
    let worker = bed.worker("first", &[]);
    bed.until("select count(*) from log where what = 'start'", |started| started == 1).await;
    worker.signal(SIGKILL);
    bed.open_gate("gate").await;
    let now = bed.db.now();
    let its_session = "jobq.sessions where id = (select leased_by from jobq.jobs)";
    let expired = format!("select count(*) from {its_session} and leased_until < {now}");
    bed.until(&expired, |expired| expired == 1).await;
    let ended = runtime(&bed).run_until_idle().await.expect("runs");
    assert_eq!(ended.completed, 1, "{ended:?}");
    assert_eq!(bed.db.number("select count(*) from effects").await, 1);
}

async fn every_parked_job_is_run(bed: Bed) {
    let jobs = (0..2_500).map(quick::new);
    jobq::enqueue_many(&bed.client, jobs).await.expect("enqueued");
    let never = bed.db.never();
    let park = format!("update jobq.jobs set run_after = {never}, wait_reason = 'kind'");
    bed.db.execute(&park).await.expect("parks");
    let ended = runtime(&bed).run_until_idle().await.expect("runs");
    assert_eq!(ended.completed, 2_500, "{ended:?}");
}

async fn a_job_that_must_run_alone_waits_for_every_runtime_of_its_process(bed: Bed) {
    late_effect::new("gate".to_owned())
        .queue("elsewhere")
        .enqueue(&bed.client)
        .await
        .expect("enqueued");
    let suspect = quick::enqueue(&bed.client, 0).await.expect("enqueued").id();
    let mark = format!("update jobq.jobs set crashes = 1 where id = {suspect}");
    bed.db.execute(&mark).await.expect("marks");
    let stop = tokio_util::sync::CancellationToken::new();
    let run = |queue: &str| {
        let stop = stop.clone();
        let runtime = runtime(&bed).queue("elsewhere", 1).only_queues([queue]);
        tokio::spawn(runtime.run_until(async move { stop.cancelled().await }))
    };
    let busy = run("elsewhere");
    bed.until("select count(*) from log where what = 'start'", |started| started == 1).await;
    let other = run("default");
    let given_back =
        format!("select count(*) from jobq.jobs where id = {suspect} and interruptions > 0");
    bed.until(&given_back, |given_back| given_back == 1).await;
    let started = format!("select count(*) from log where job_id = {suspect}");
    assert_eq!(bed.db.number(&started).await, 0, "something else runs in this process");
    bed.open_gate("gate").await;
    bed.until(&started, |started| started == 1).await;
    stop.cancel();
    for runtime in [busy, other] {
        let ended = runtime.await.expect("does not panic").expect("runs");
        assert_eq!(ended.completed, 1, "{ended:?}");
    }
}

async fn a_process_in_which_a_job_runs_alone_leaves_the_others_to_others(bed: Bed) {
    late_effect::enqueue(&bed.client, "gate".to_owned()).await.expect("enqueued");
    bed.db.execute("update jobq.jobs set crashes = 1").await.expect("marks");
    let stop = tokio_util::sync::CancellationToken::new();
    let stopped = stop.clone();
    let alone = tokio::spawn(runtime(&bed).run_until(async move { stopped.cancelled().await }));
    bed.until("select count(*) from log where what = 'start'", |started| started == 1).await;
    jobq::enqueue_many(&bed.client, (0..5).map(quick::new)).await.expect("enqueued");
    let other = bed.worker("other", &[]);
    let by_other = "select count(*) from log where what = 'start' and worker = 'other'";
    bed.until(by_other, |started| started == 5).await;
    bed.open_gate("gate").await;
    bed.until("select count(*) from effects", |effects| effects == 1).await;
    stop.cancel();
    let ended = alone.await.expect("does not panic").expect("runs");
    assert_eq!(ended.completed, 1, "{ended:?}");
    drop(other);
}
