//! What can be asked for when a job is enqueued, and what is refused.

use std::time::{Duration, SystemTime};

use jobq_core::job::JobId;
use jobq_core::queue::EXPRESS;

use super::bed::{Bed, LEASE, on_pool};
use super::sample::{new_job, plain};
use super::worker::job;
use crate::enqueue::enqueue_many;
use crate::error::Error;
use crate::job::NewJob;
use crate::store::Floor;

const HOUR: Duration = Duration::from_secs(3600);
const HOUR_MICROS: i64 = 3_600_000_000;

pub(super) async fn e3_what_was_asked_for_is_given_back_by_the_claim(bed: Bed) {
    let asked = new_job(&serde_json::json!({"width": 640}))
        .queue("images/eu-1")
        .priority(3)
        .max_attempts(7)
        .tag("tenant:9")
        .tag("ünïcode \"tag\"")
        .metadata("trace", "00-ab-cd")
        .metadata("nested", serde_json::json!({"a": [1, null, "\u{0}x"]}));
    let before = bed.now().await;
    let id = asked.enqueue(&bed.client).await.expect("enqueues").id();
    let after = bed.now().await;
    let worker = bed.session(LEASE, &["k"]).await;
    let claim = worker.asking("images/eu-1", 1, Floor::START);
    let claimed = bed.store.claim(&claim).await.expect("claims").jobs.remove(0);
    assert_eq!(claimed.lease.job, id);
    assert_eq!((&*claimed.kind, &*claimed.queue, claimed.band), ("k", "images/eu-1", 3));
    assert_eq!((claimed.limits.max_attempts, claimed.limits.max_crashes), (7, 3));
    assert_eq!(claimed.tags, ["tenant:9", "ünïcode \"tag\""]);
    let metadata = serde_json::json!({"trace": "00-ab-cd", "nested": {"a": [1, null, "\u{0}x"]}});
    assert_eq!(serde_json::Value::Object(claimed.metadata), metadata);
    assert_eq!(claimed.payload, r#"{"width":640}"#);
    assert!((before..=after).contains(&claimed.created_at.0), "the database's time");
    assert!((before..=after).contains(&claimed.run_after.0), "the database's time");
}

pub(super) async fn e3_a_delayed_job_is_not_claimed_before_its_time(bed: Bed) {
    let before = bed.now().await;
    let delayed = plain().delay(HOUR).enqueue(&bed.client).await.expect("enqueues").id();
    let run_after = bed.job_row(delayed).await.number("run_after");
    assert!((before + HOUR_MICROS..=bed.now().await + HOUR_MICROS).contains(&run_after));
    let worker = bed.session(LEASE, &["k"]).await;
    assert!(worker.claim(1).await.is_empty());
    bed.make_due(delayed).await;
    assert_eq!(worker.claim_one().await.lease.job, delayed);
}

pub(super) async fn e3_run_at_is_kept_to_the_microsecond(bed: Bed) {
    let time = SystemTime::UNIX_EPOCH + Duration::from_micros(4_102_444_800_123_456);
    let id = plain().run_at(time).enqueue(&bed.client).await.expect("enqueues").id();
    assert_eq!(bed.job_row(id).await.number("run_after"), 4_102_444_800_123_456);
}

/// A row must never appear behind what workers have passed.
pub(super) async fn e3_a_time_in_the_past_means_now(bed: Bed) {
    let year_one = SystemTime::UNIX_EPOCH - Duration::from_secs(62_135_596_800);
    let just_now = SystemTime::now() - Duration::from_millis(500);
    for time in [year_one, SystemTime::UNIX_EPOCH, just_now] {
        let before = bed.now().await;
        let id = plain().run_at(time).enqueue(&bed.client).await.expect("enqueues").id();
        let run_after = bed.job_row(id).await.number("run_after");
        assert!((before..=bed.now().await).contains(&run_after));
    }
    let worker = bed.session(LEASE, &["k"]).await;
    assert_eq!(worker.claim(5).await.len(), 3);
}

pub(super) async fn e3_times_count_from_the_statement_and_not_from_begin(bed: Bed) {
    on_pool!(bed, pool => {
        let mut tx = pool.begin_with(bed.begin()).await.expect("begins");
        let begun = bed.now().await;
        // The transaction is seen to have been open for a while.
        while bed.now().await < begun + 20_000 {}
        let before = bed.now().await;
        let jobs = vec![plain(), plain().delay(HOUR), plain().run_at(SystemTime::UNIX_EPOCH)];
        let ids = enqueue_many(bed.client.within(&mut tx), jobs).await.expect("enqueues");
        let after = bed.now().await;
        tx.commit().await.expect("commits");
        for (job, delay) in ids.iter().zip([0, HOUR_MICROS, 0]) {
            let run_after = bed.job_row(job.id()).await.number("run_after");
            assert!((before + delay..=after + delay).contains(&run_after));
        }
    });
}

pub(super) async fn e3_the_ends_of_every_range_are_taken(bed: Bed) {
    let end_of_9999 = SystemTime::UNIX_EPOCH + Duration::from_micros(253_402_300_799_999_999);
    let century = Duration::from_secs(100 * 365 * 86_400);
    let jobs = vec![
        plain().priority(4),
        plain().priority(-4),
        plain().max_attempts(1),
        plain().max_attempts(i32::MAX as u32),
        plain().queue("q".repeat(100)),
        plain().tag("t".repeat(10_000)),
        plain().run_at(end_of_9999),
        plain().delay(century),
    ];
    let ids: Vec<JobId> = enqueue_many(&bed.client, jobs)
        .await
        .expect("every value is allowed")
        .into_iter()
        .map(|job| job.id())
        .collect();
    assert_eq!(bed.job_row(ids[0]).await.number("band"), 4);
    assert_eq!(bed.job_row(ids[1]).await.number("band"), -4);
    assert_eq!(bed.job_row(ids[3]).await.number("max_attempts"), i64::from(i32::MAX));
    assert_eq!(bed.job_row(ids[6]).await.number("run_after"), 253_402_300_799_999_999);
    let wait = bed.job_row(ids[7]).await.number("run_after") - bed.now().await;
    assert!(wait > 99 * 365 * 86_400 * 1_000_000);
}

pub(super) async fn e3_values_out_of_range_are_typed_errors_and_write_nothing(bed: Bed) {
    type Expected = fn(&Error) -> bool;
    fn name(error: &Error) -> bool {
        matches!(error, Error::BadName(_))
    }
    fn time(error: &Error) -> bool {
        matches!(error, Error::TimeOutOfRange(_))
    }
    fn option(error: &Error) -> bool {
        matches!(error, Error::BadOption { .. })
    }
    let far = SystemTime::UNIX_EPOCH + Duration::from_secs(253_402_300_800);
    let mut deep = serde_json::json!(1);
    for _ in 0..200 {
        deep = serde_json::json!([deep]);
    }
    let cases: Vec<(NewJob, Expected, &str)> = vec![
        (plain().priority(5), name, "-4 (last) to 4 (first)"),
        (plain().priority(i64::MIN), name, "-4 (last) to 4 (first)"),
        (plain().queue(""), name, "is empty"),
        (plain().queue("two words"), name, "not allowed"),
        (plain().queue("q".repeat(101)), name, "longer than 100"),
        (plain().queue("nul\0"), name, "not allowed"),
        (plain().max_attempts(0), option, "between 1 and 2147483647"),
        (plain().max_attempts(u32::MAX), option, "between 1 and 2147483647"),
        (plain().tag(""), option, "empty"),
        (plain().tag("a\0b"), option, "NUL"),
        (plain().run_at(far), time, "9999-12-31"),
        (plain().delay(Duration::MAX), option, "100 years"),
        (plain().metadata("deep", deep), option, "levels deep"),
    ];
    for (bad, expected, words) in cases {
        let error = enqueue_many(&bed.client, vec![plain(), bad]).await.expect_err(words);
        assert!(expected(&error), "{words}: {error:?}");
        assert!(error.to_string().contains(words), "{words}: {error}");
    }
    assert_eq!(bed.count("jobs").await, 0);
}

/// O1: jobs enqueued together are claimed in the order in which they were given.
pub(super) async fn o1_jobs_of_one_call_are_claimed_in_their_order(bed: Bed) {
    let ids = bed.enqueue((0..6_000).map(|_| job("k")).collect()).await;
    let worker = bed.session(LEASE, &["k"]).await;
    let mut claimed = Vec::new();
    while claimed.len() < ids.len() {
        let jobs = worker.claim(1_000).await;
        assert!(!jobs.is_empty());
        claimed.extend(jobs.into_iter().map(|job| job.lease.job));
    }
    assert_eq!(claimed, ids);
}

pub(super) async fn o1_next_in_line_comes_before_every_priority(bed: Bed) {
    let mut first = job("k");
    first.priority = 4;
    let ids = bed.enqueue(vec![first, job("k")]).await;
    bed.execute(&format!("update jobq.jobs set band = {EXPRESS} where id = {}", ids[1])).await;
    let worker = bed.session(LEASE, &["k"]).await;
    assert_eq!(worker.claim_one().await.lease.job, ids[1]);
}

/// E7: what other languages and triggers write.
pub(super) async fn e7_a_plain_insert_is_a_job(bed: Bed) {
    let before = bed.now().await;
    bed.execute(r#"insert into jobq.jobs (kind, payload) values ('k', '{"n": 1}')"#).await;
    bed.execute("insert into jobq.jobs (kind) values ('k')").await;
    let worker = bed.session(LEASE, &["k"]).await;
    let jobs = worker.claim(5).await;
    assert_eq!(jobs.len(), 2);
    assert_eq!((&*jobs[0].payload, &*jobs[1].payload), (r#"{"n": 1}"#, "{}"));
    assert_eq!((&*jobs[0].queue, jobs[0].band), ("default", 0));
    assert_eq!((jobs[0].limits.max_attempts, jobs[0].limits.max_crashes), (20, 3));
    assert!(jobs[0].run_after.0 >= before && jobs[0].created_at.0 >= before);
}

/// What the database takes, a worker can find: a job is never lost for a value that is not one.
pub(super) async fn e7_an_insert_of_a_job_that_none_could_claim_is_refused(bed: Bed) {
    let mut refused = vec![
        ("priority", "3"),
        ("band", "4"),
        ("priority, band", "2, 3"),
        ("priority, band", "5, 5"),
        ("priority, band", "3, 102"),
        ("band", "-32768"),
        ("run_after", "'soon'"),
        ("leased_by", "'nobody'"),
    ];
    if bed.is_sqlite() {
        refused.extend([
            ("run_after", "datetime('now')"),
            ("run_after", "julianday('now')"),
            ("run_after", "x'00'"),
            ("priority, band", "1.5, 1.5"),
            ("queue", "x'64656661756c74'"),
            ("leased_by", "''"),
        ]);
    }
    if bed.is_mysql() {
        refused.extend([("queue", "'default '"), ("queue", "concat('k', ' ')")]);
    }
    for (columns, values) in refused {
        let insert = format!("insert into jobq.jobs (kind, {columns}) values ('k', {values})");
        let sql = bed.statement(&insert);
        on_pool!(bed, pool => {
            sqlx::query(sql).execute(pool).await.expect_err(&insert);
        });
    }
    assert_eq!(bed.count("jobs").await, 0);
    let (now, later) = (bed.seconds_away(0), bed.seconds_away(3600));
    bed.execute(&format!("insert into jobq.jobs (kind, run_after) values ('k', {now})")).await;
    bed.execute(&format!("insert into jobq.jobs (kind, run_after) values ('k', {later})")).await;
    bed.execute("insert into jobq.jobs (kind, priority, band) values ('k', 3, 3)").await;
    let express =
        format!("insert into jobq.jobs (kind, priority, band) values ('k', 3, {EXPRESS})");
    bed.execute(&express).await;
    let worker = bed.session(LEASE, &["k"]).await;
    assert_eq!(worker.claim(5).await.len(), 3, "one is for later");
}

pub(super) async fn e3_a_queue_that_nobody_serves_keeps_its_jobs(bed: Bed) {
    plain().queue("elsewhere").enqueue(&bed.client).await.expect("enqueues");
    let worker = bed.session(LEASE, &["k"]).await;
    assert!(worker.claim(5).await.is_empty());
    assert_eq!(bed.count("jobs").await, 1);
}

/// A claim of several queues takes from each up to its own limit, and from none above.
pub(super) async fn f1_each_queue_of_a_claim_has_its_own_limit(bed: Bed) {
    for queue in ["a", "b", "c"] {
        let jobs = (0..5).map(|_| plain().queue(queue)).collect::<Vec<_>>();
        enqueue_many(&bed.client, jobs).await.expect("enqueues");
    }
    let worker = bed.session(LEASE, &["k"]).await;
    let mut claim = worker.asking("a", 2, Floor::START);
    claim.queues.extend(worker.asking("b", 9, Floor::START).queues);
    let jobs = bed.store.claim(&claim).await.expect("claims").jobs;
    let of = |queue: &str| jobs.iter().filter(|job| job.queue == queue).count();
    assert_eq!((of("a"), of("b"), of("c")), (2, 5, 0));
}
