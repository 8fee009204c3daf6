//! Unique jobs: who keeps whom out, for how long, and what becomes of the second one.

use std::time::Duration;

use jobq_core::job::JobId;
use jobq_core::unique::{OnConflict, Unique};
use serde_json::json;
use sqlx::Executor;

use super::bed::{Bed, LEASE, on_pool};
use super::sample::{new_job, plain};
use super::settle::{buried, cancelled, completed, failed, snoozed};
use super::wait::{join_all, until};
use crate::enqueue::{Enqueued, enqueue_many};
use crate::error::Error;
use crate::job::NewJob;
use crate::store::{ClaimedJob, DeadFilter, Lookup, Settlement};

/// A job that is unique by its payload, which is this number.
fn unique(n: i64) -> NewJob {
    new_job(&json!({ "n": n })).unique(Unique::DEFAULT)
}

async fn enqueue(bed: &Bed, job: NewJob) -> Enqueued {
    job.enqueue(&bed.client).await.expect("enqueues")
}

/// Enqueues a job that is new.
async fn insert(bed: &Bed, job: NewJob) -> JobId {
    match enqueue(bed, job).await {
        Enqueued::Inserted(id) => id,
        existing => panic!("its key was free, and now: {existing:?}"),
    }
}

fn existing(id: JobId) -> Enqueued {
    Enqueued::Existing { id, replaced: false }
}

async fn claim(bed: &Bed) -> ClaimedJob {
    bed.session(LEASE, &["k"]).await.claim_one().await
}

/// Forgets every key that keeps nobody out; returns in how many steps.
async fn prune_keys(bed: &Bed) -> u32 {
    let (mut steps, mut after) = (0, None);
    loop {
        steps += 1;
        after = bed.store.prune_keys(after, 4).await.expect("prunes");
        if after.is_none() {
            return steps;
        }
    }
}

/// What no statement of the store says, once keys were pruned: keys whose job keeps nobody out, unfinished jobs that hold a
/// key until they are finished and have none, and two jobs with one key.
async fn assert_keys_are_right(bed: &Bed) {
    prune_keys(bed).await;
    let stale = "select count(*) from jobq.uniques as held
         where scope = 'until_finished' and job_id not in (select id from jobq.jobs)
            or scope = 'until_started'
               and job_id not in (select id from jobq.jobs where token = 0)";
    assert_eq!(bed.number(stale).await, 0, "a key outlives its job");
    let without = "select count(*) from jobq.jobs as job
         where unique_scope = 'until_finished'
           and not exists (
               select 1 from jobq.uniques as held
               where held.unique_key = job.unique_key and held.job_id = job.id
           )";
    assert_eq!(bed.number(without).await, 0, "a job has lost its key");
}

pub(super) async fn e5_until_finished_a_job_keeps_its_twins_out(bed: Bed) {
    let first = insert(&bed, unique(1)).await;
    let out = async |when: &str| {
        assert_eq!(enqueue(&bed, unique(1)).await, existing(first), "{when}");
        assert_keys_are_right(&bed).await;
    };
    out("pending").await;
    insert(&bed, unique(2).delay(Duration::from_secs(3600))).await;
    let job = claim(&bed).await;
    out("running").await;
    bed.settle(job.lease, failed(job.counters, Duration::ZERO)).await;
    out("to be retried").await;
    let job = claim(&bed).await;
    bed.settle(job.lease, snoozed(job.counters)).await;
    out("snoozed").await;
    let worker = bed.session(LEASE, &["k"]).await;
    worker.claim_one().await;
    bed.expire(worker.id).await;
    assert_eq!(crate::sweep::rescue(&*bed.store, false).await.expect("rescues"), 1);
    out("rescued").await;
    let job = claim(&bed).await;
    assert_eq!(job.lease.job, first);
    bed.settle(job.lease, completed()).await;
    let second = insert(&bed, unique(1)).await;
    assert_ne!(second, first);
    assert_eq!(enqueue(&bed, unique(1)).await, existing(second));
    assert_keys_are_right(&bed).await;
}

pub(super) async fn e5_however_a_job_ends_its_key_is_free(bed: Bed) {
    let ends: [(&str, fn(&ClaimedJob) -> Settlement); 4] = [
        ("completed", |job| super::worker::settlement(job.lease, completed())),
        ("without history", |job| Settlement {
            retention: Duration::ZERO,
            ..super::worker::settlement(job.lease, completed())
        }),
        ("dead", |job| super::worker::settlement(job.lease, buried(job.counters))),
        ("cancelled", |job| super::worker::settlement(job.lease, cancelled())),
    ];
    for prunes in [false, true] {
        for (how, end) in &ends {
            insert(&bed, unique(1)).await;
            let job = claim(&bed).await;
            bed.settle_all(&[end(&job)]).await;
            if prunes {
                prune_keys(&bed).await;
                assert_eq!(bed.count("uniques").await, 0, "{how}");
            }
        }
        let id = insert(&bed, unique(1)).await;
        bed.client.cancel(id).await.expect("cancels");
        insert(&bed, unique(1)).await;
        let job = claim(&bed).await;
        let context = bed.context(job.lease, Duration::ZERO);
        on_pool!(bed, pool => {
            let mut tx = pool.begin_with(bed.begin()).await.expect("begins");
            context.complete_in(&mut tx).await.expect("completes");
            // In the transaction it has ended, and for others it runs.
            if !bed.is_sqlite() {
                assert_eq!(enqueue(&bed, unique(1)).await, existing(job.lease.job));
            }
            tx.commit().await.expect("commits");
        });
        let id = insert(&bed, unique(1)).await;
        bed.client.cancel(id).await.expect("cancels");
    }
}

pub(super) async fn e5_until_started_a_retry_does_not_take_its_key_again(bed: Bed) {
    let unique = || unique(1).unique(Unique::DEFAULT.until_started());
    let first = insert(&bed, unique()).await;
    assert_eq!(enqueue(&bed, unique()).await, existing(first));
    let running = claim(&bed).await;
    let second = insert(&bed, unique()).await;
    assert_eq!(enqueue(&bed, unique()).await, existing(second));
    bed.settle(running.lease, failed(running.counters, Duration::ZERO)).await;
    prune_keys(&bed).await;
    assert_eq!(enqueue(&bed, unique()).await, existing(second), "both are pending");
    let worker = bed.session(LEASE, &["k"]).await;
    let mut both: Vec<JobId> = worker.claim(9).await.iter().map(|job| job.lease.job).collect();
    both.sort_unstable();
    assert_eq!(both, [first, second], "neither is in the other's way");
    prune_keys(&bed).await;
    assert_eq!(bed.count("uniques").await, 0);
    insert(&bed, unique()).await;
    assert_keys_are_right(&bed).await;
}

pub(super) async fn e5_for_a_time_a_key_is_held_whatever_becomes_of_the_job(bed: Bed) {
    let hour = Unique::DEFAULT.lasting(Duration::from_secs(3600));
    for (n, scope) in [(1, hour), (2, Unique::DEFAULT.forever())] {
        let first = insert(&bed, unique(n).unique(scope)).await;
        let job = claim(&bed).await;
        bed.settle(job.lease, completed()).await;
        prune_keys(&bed).await;
        assert_eq!(enqueue(&bed, unique(n).unique(scope)).await, existing(first));
        // The first one decides for how long, and the second one's scope does not matter.
        assert_eq!(enqueue(&bed, unique(n)).await, existing(first));
    }
    let past = bed.seconds_away(-1);
    let over = format!("update jobq.uniques set expires_at = {past} where scope = 'for'");
    assert_eq!(bed.execute(&over).await, 1);
    assert_eq!(bed.count("uniques").await, 2);
    let second = insert(&bed, unique(1).unique(hour)).await;
    assert_eq!(enqueue(&bed, unique(1).unique(hour)).await, existing(second), "for another hour");
    let left = bed.micros("expires_at");
    let left = format!("select {left} from jobq.uniques where scope = 'for'");
    let left = bed.number(&left).await - bed.now().await;
    assert!((3_500_000_000..=3_600_000_000).contains(&left), "{left}");
    assert_eq!(bed.execute(&over).await, 1);
    prune_keys(&bed).await;
    assert_eq!(bed.count("uniques").await, 1, "one is for ever");
}

pub(super) async fn e5_a_key_is_of_its_kind_and_of_what_was_chosen(bed: Bed) {
    let image = |id: i64, width: i64| new_job(&json!({ "image_id": id, "width": width }));
    let by_image = |id, width| image(id, width).unique(Unique::by(&["image_id"]));
    let first = insert(&bed, by_image(1, 640)).await;
    assert_eq!(enqueue(&bed, by_image(1, 320)).await, existing(first));
    insert(&bed, by_image(2, 640)).await;
    insert(&bed, image(1, 640).unique(Unique::DEFAULT)).await;
    insert(&bed, image(1, 320).unique(Unique::DEFAULT)).await;
    let given = insert(&bed, image(1, 640).unique_key("order-7")).await;
    assert_eq!(enqueue(&bed, image(9, 9).unique_key("order-7")).await, existing(given));
    insert(&bed, image(9, 9).unique_key("order-8")).await;
    // A job that is not unique neither meets nor makes a conflict.
    insert(&bed, by_image(1, 640).not_unique()).await;
    insert(&bed, image(1, 640)).await;
    // Nor does one of another kind.
    let mut other = image(1, 640).unique_key("order-7");
    other.kind = "other".into();
    insert(&bed, other).await;
    let misspelt = image(1, 640).unique(Unique::by(&["image"])).enqueue(&bed.client).await;
    let Err(Error::BadOption { problem, .. }) = misspelt else { panic!("{misspelt:?}") };
    assert!(problem.contains("\"image\""), "{problem}");
    let empty = plain().unique_key("").enqueue(&bed.client).await;
    assert!(matches!(empty, Err(Error::BadOption { option: "unique", .. })), "{empty:?}");
    let never = plain().unique(Unique::DEFAULT.lasting(Duration::ZERO)).enqueue(&bed.client).await;
    assert!(matches!(never, Err(Error::BadOption { option: "unique", .. })), "{never:?}");
}

pub(super) async fn e5_a_duplicate_that_is_an_error_writes_nothing(bed: Bed) {
    let strict = |n| unique(n).unique(Unique::DEFAULT.on_conflict(OnConflict::Error));
    let first = insert(&bed, strict(1)).await;
    let is_duplicate = |result: Result<(), Error>, of: Option<JobId>| match result {
        Err(Error::Duplicate { kind, existing }) => {
            assert_eq!((kind.as_str(), existing), ("k", of));
        }
        other => panic!("{other:?}"),
    };
    is_duplicate(strict(1).enqueue(&bed.client).await.map(drop), Some(first));
    let rest = || vec![plain(), unique(2), strict(3), strict(1)];
    is_duplicate(enqueue_many(&bed.client, rest()).await.map(drop), Some(first));
    let twice = vec![unique(4), strict(4)];
    is_duplicate(enqueue_many(&bed.client, twice).await.map(drop), None);
    assert_eq!((bed.count("jobs").await, bed.count("uniques").await), (1, 1));
    on_pool!(bed, pool => {
        let mut tx = pool.begin_with(bed.begin()).await.expect("begins");
        let before = plain().enqueue(bed.client.within(&mut tx)).await.expect("enqueues").id();
        is_duplicate(enqueue_many(bed.client.within(&mut tx), rest()).await.map(drop), Some(first));
        let after = strict(5).enqueue(bed.client.within(&mut tx)).await.expect("goes on").id();
        tx.commit().await.expect("commits");
        for id in [first, before, after] {
            assert!(bed.row("jobs", id).await.is_some(), "{id}");
        }
        // And without a transaction.
        let mut bare = pool.acquire().await.expect("connects");
        is_duplicate(enqueue_many(bed.client.within(&mut bare), rest()).await.map(drop), Some(first));
        insert(&bed, strict(2)).await;
    });
    assert_eq!((bed.count("jobs").await, bed.count("uniques").await), (4, 3));
}

/// What a job says of itself that can be replaced.
async fn says(bed: &Bed, id: JobId) -> (String, i64, i64) {
    let row = bed.job_row(id).await;
    (row.text("payload").to_owned(), row.number("priority"), row.number("band"))
}

pub(super) async fn e5_a_pending_twin_is_replaced_and_a_running_one_is_not(bed: Bed) {
    let replacing = |width: i64| {
        new_job(&json!({ "id": 1, "width": width }))
            .unique(Unique::by(&["id"]).on_conflict(OnConflict::Replace))
    };
    let hour = Duration::from_secs(3600);
    let first = insert(&bed, replacing(1).delay(hour)).await;
    let before = bed.job_row(first).await;
    let replaced = Enqueued::Existing { id: first, replaced: true };
    assert_eq!(enqueue(&bed, replacing(2).priority(3)).await, replaced);
    let after = bed.job_row(first).await;
    assert_eq!(before.changed(&after), ["band", "payload", "priority", "run_after"]);
    assert_eq!(says(&bed, first).await, (r#"{"id":1,"width":2}"#.to_owned(), 3, 3));
    let job = claim(&bed).await;
    assert_eq!(job.payload, r#"{"id":1,"width":2}"#, "it is due now");
    assert_eq!(enqueue(&bed, replacing(3)).await, existing(first), "it runs");
    assert_eq!(bed.job_row(first).await.text("payload"), job.payload);
    bed.settle(job.lease, failed(job.counters, hour)).await;
    assert_eq!(enqueue(&bed, replacing(4)).await, replaced, "it is to be retried");
    let job = claim(&bed).await;
    assert_eq!((job.payload.as_str(), job.counters.attempt), (r#"{"id":1,"width":4}"#, 2));
    assert_eq!(bed.count("jobs").await, 1);
}

pub(super) async fn e5_what_has_started_is_not_replaced_but_followed(bed: Bed) {
    let latest = |width: i64| {
        let unique = Unique::by(&["id"]).until_started().on_conflict(OnConflict::Replace);
        new_job(&json!({ "id": 1, "width": width })).unique(unique)
    };
    let first = insert(&bed, latest(1)).await;
    let job = claim(&bed).await;
    let second = insert(&bed, latest(2)).await;
    bed.settle(job.lease, failed(job.counters, Duration::ZERO)).await;
    let replaced = Enqueued::Existing { id: second, replaced: true };
    assert_eq!(enqueue(&bed, latest(3)).await, replaced);
    assert_eq!(says(&bed, first).await.0, r#"{"id":1,"width":1}"#, "a retry keeps its payload");
    assert_eq!(says(&bed, second).await.0, r#"{"id":1,"width":3}"#);
}

pub(super) async fn e5_a_waiting_twin_is_replaced_and_goes_on_waiting(bed: Bed) {
    let unique = |n: i64| {
        new_job(&json!({ "n": n }))
            .unique_key("one")
            .unique(Unique::DEFAULT.on_conflict(OnConflict::Replace))
    };
    let id = insert(&bed, unique(1)).await;
    let for_ever = bed.for_ever();
    let wait = format!("update jobq.jobs set run_after = {for_ever}, wait_reason = 'kind'");
    assert_eq!(bed.execute(&wait).await, 1);
    let replaced = Enqueued::Existing { id, replaced: true };
    assert_eq!(enqueue(&bed, unique(2)).await, replaced);
    let Lookup::Found(info) = bed.client.job(id).await.expect("looks") else { panic!("gone") };
    assert_eq!((info.run_after, info.payload.as_str()), (None, r#"{"n":2}"#));
}

pub(super) async fn e5_a_debounced_job_is_put_off_but_not_for_ever(bed: Bed) {
    let seconds = Duration::from_secs;
    let debounced = |n: i64, delay| {
        let on_conflict = OnConflict::Debounce { max_wait: seconds(60) };
        let unique = Unique::DEFAULT.on_conflict(on_conflict);
        new_job(&json!({ "n": n })).unique_key("one").unique(unique).delay(seconds(delay))
    };
    let id = insert(&bed, debounced(1, 20)).await;
    let wait = async || {
        let row = bed.job_row(id).await;
        (row.number("run_after") - row.number("created_at")) / 1_000_000
    };
    assert!((19..=21).contains(&wait().await), "{}", wait().await);
    let earlier = bed.seconds_away(-30);
    bed.execute(&format!("update jobq.jobs set created_at = {earlier}")).await;
    let replaced = Enqueued::Existing { id, replaced: true };
    assert_eq!(enqueue(&bed, debounced(2, 20)).await, replaced);
    assert!((49..=51).contains(&wait().await), "put off: {}", wait().await);
    assert_eq!(enqueue(&bed, debounced(3, 50)).await, replaced);
    assert_eq!(wait().await, 60, "no longer than it may");
    let earlier = bed.seconds_away(-90);
    bed.execute(&format!("update jobq.jobs set created_at = {earlier}")).await;
    assert_eq!(enqueue(&bed, debounced(4, 50)).await, replaced);
    let row = bed.job_row(id).await;
    assert!(row.number("run_after") <= bed.now().await, "due now, but not before");
    assert!(row.number("run_after") >= row.number("created_at") + 89_000_000);
    assert_eq!(claim(&bed).await.payload, r#"{"n":4}"#);
    let tomorrow = std::time::SystemTime::now() + seconds(86_400);
    let id = insert(&bed, debounced(5, 0).unique_key("other").run_at(tomorrow)).await;
    let row = bed.job_row(id).await;
    let wait = (row.number("run_after") - row.number("created_at")) / 1_000_000;
    assert_eq!(wait, 60, "nor by the first of them");
}

pub(super) async fn e5_in_bulk_each_job_is_told_what_became_of_it(bed: Bed) {
    let there = insert(&bed, unique(5)).await;
    let jobs = (0..20).map(|n| if n % 7 == 3 { plain() } else { unique(n % 10) });
    let told = enqueue_many(&bed.client, jobs).await.expect("enqueues");
    let mut ids = std::collections::HashMap::from([(5, there)]);
    let mut inserted = Vec::new();
    for (n, one) in told.iter().enumerate() {
        match (*one, ids.get(&(n % 10)).copied()) {
            (Enqueued::Inserted(id), _) if n % 7 == 3 => inserted.push(id),
            (Enqueued::Inserted(id), None) => {
                ids.insert(n % 10, id);
                inserted.push(id);
            }
            (one, Some(id)) => assert_eq!(one, existing(id), "{n}"),
            (one, None) => panic!("{n}: {one:?}"),
        }
    }
    assert!(inserted.is_sorted(), "ids ascend in the order of the jobs");
    assert_eq!(bed.count("jobs").await, inserted.len() as i64 + 1);
    assert_keys_are_right(&bed).await;
    // More than one statement takes.
    let many = || (0..1_300).map(|n| unique(1_000 + n % 650));
    let first = enqueue_many(&bed.client, many()).await.expect("enqueues");
    assert_eq!(first.iter().filter(|one| one.is_new()).count(), 650);
    assert_eq!(first[0].id(), first[650].id());
    let again = enqueue_many(&bed.client, many()).await.expect("enqueues");
    assert!(again.iter().zip(&first).all(|(again, first)| *again == existing(first.id())));
    assert_keys_are_right(&bed).await;
}

pub(super) async fn e5_of_many_who_enqueue_twins_at_once_one_writes_it(bed: Bed) {
    let rounds = std::env::var("JOBQ_TEST_UNIQUE_ROUNDS")
        .map_or(60, |text| text.parse().expect("a number of rounds"));
    for round in 0..rounds {
        let calls = (0..16).map(|n| {
            let bed = &bed;
            async move {
                if n % 4 == 0 {
                    let jobs = [unique(round + 1_000), unique(round), plain()];
                    enqueue_many(&bed.client, jobs).await.expect("enqueues")[1]
                } else {
                    enqueue(bed, unique(round)).await
                }
            }
        });
        let told = join_all(calls.collect()).await;
        assert_eq!(told.iter().filter(|one| one.is_new()).count(), 1, "{told:?}");
        assert!(told.iter().all(|one| one.id() == told[0].id()), "{told:?}");
        if round % 2 == 0 {
            // The next ones find a key that is nobody's.
            bed.execute("delete from jobq.jobs").await;
        }
    }
    assert_keys_are_right(&bed).await;
}

#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) async fn e5_the_second_of_two_transactions_waits_for_the_first(bed: Bed) {
    for commits in [true, false] {
        let n = i64::from(commits);
        on_pool!(bed, pool => {
            let mut tx = pool.begin_with(bed.begin()).await.expect("begins");
            let first = unique(n).enqueue(bed.client.within(&mut tx)).await.expect("enqueues");
            assert!(first.is_new());
            let own = unique(n).enqueue(bed.client.within(&mut tx)).await.expect("enqueues");
            assert_eq!(own, existing(first.id()), "it sees its own");
            let second = tokio::spawn({
                let client = bed.client.clone();
                async move { unique(n).enqueue(&client).await }
            });
            bed.until_one_waits_for_a_lock().await;
            assert!(!second.is_finished());
            if commits {
                tx.commit().await.expect("commits");
            } else {
                tx.rollback().await.expect("rolls back");
            }
            let second = second.await.expect("does not panic").expect("enqueues");
            assert_eq!(second.is_new(), !commits, "{second:?}");
            if commits {
                assert_eq!(second, existing(first.id()));
            }
            assert_eq!(bed.count("jobs").await, 1);
        });
        bed.execute("delete from jobq.jobs").await;
    }
}

pub(super) async fn e5_in_a_transaction_at_any_level_a_twin_is_seen(bed: Bed) {
    on_pool!(bed, pool => {
        let levels: &[&str] =
            if bed.is_sqlite() { &[""] } else { &["read committed", "repeatable read", "serializable"] };
        for (n, level) in levels.iter().enumerate() {
            let n = n as i64 * 10;
            let there = insert(&bed, unique(n)).await;
            let mut connection = pool.acquire().await.expect("connects");
            // Begun by a statement, which the driver does not know of.
            let begin = if bed.is_sqlite() {
                "begin".to_owned()
            } else if bed.is_mysql() {
                format!("set session transaction isolation level {level}; start transaction")
            } else {
                format!("begin isolation level {level}")
            };
            (&mut *connection).execute(sqlx::AssertSqlSafe(begin)).await.expect("begins");
            let seen = unique(n).enqueue(bed.client.within(&mut connection)).await;
            assert_eq!(seen.expect("enqueues"), existing(there), "{level}");
            let new = unique(n + 1).enqueue(bed.client.within(&mut connection)).await;
            let new = new.expect("enqueues");
            assert!(new.is_new(), "{level}");
            let own = unique(n + 1).enqueue(bed.client.within(&mut connection)).await;
            assert_eq!(own.expect("enqueues"), existing(new.id()), "{level}");
            (&mut *connection).execute("commit").await.expect("commits");
            drop(connection.detach());
            assert_eq!(enqueue(&bed, unique(n + 1)).await, existing(new.id()), "{level}");
        }
    });
    assert_keys_are_right(&bed).await;
}

/// Neither the twin nor anybody else waits for a transaction that has met a twin.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) async fn e5_an_open_transaction_holds_up_neither_a_twin_nor_others(bed: Bed) {
    on_pool!(bed, pool => {
        for (n, level) in ["read committed", "repeatable read"].into_iter().enumerate() {
            let n = n as i64 * 10;
            let twin = |n: i64, on_conflict| unique(n).unique(Unique::DEFAULT.on_conflict(on_conflict));
            let there = insert(&bed, unique(n)).await;
            let ended = insert(&bed, unique(n + 1)).await;
            bed.client.cancel(ended).await.expect("cancels");
            let mut tx = pool.begin_with(bed.begin_at(level)).await.expect("begins");
            let told = twin(n, OnConflict::Skip).enqueue(bed.client.within(&mut tx)).await;
            assert_eq!(told.expect("enqueues"), existing(there), "{level}");
            // It takes a key over, and one that nobody had.
            for n in [n + 1, n + 2] {
                let new = twin(n, OnConflict::Replace).enqueue(bed.client.within(&mut tx)).await;
                assert!(new.expect("enqueues").is_new(), "{level}");
            }
            let job = claim(&bed).await;
            assert_eq!(job.lease.job, there, "{level}");
            let settled = bed.settle(job.lease, completed()).await;
            assert_eq!(settled, crate::store::Settled::Written, "{level}");
            let other = insert(&bed, unique(n + 3)).await;
            let plain = plain().enqueue(&bed.client).await.expect("enqueues").id();
            prune_keys(&bed).await;
            for id in [other, plain] {
                bed.client.cancel(id).await.expect("cancels");
            }
            tx.commit().await.expect("commits");
            bed.execute("delete from jobq.jobs").await;
        }
    });
}

/// Above READ COMMITTED a twin may change after the snapshot: it is replaced as it is now, or the
/// transaction fails as a whole. No change is lost.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) async fn e5_a_twin_that_changed_after_the_snapshot_is_not_replaced_in_vain(bed: Bed) {
    let replacing = |width: i64| {
        new_job(&json!({ "id": 1, "width": width }))
            .unique(Unique::by(&["id"]).on_conflict(OnConflict::Replace))
    };
    on_pool!(bed, pool => {
        for ends in [false, true] {
            insert(&bed, replacing(1)).await;
            let begin = bed.begin_at("repeatable read");
            let mut tx = pool.begin_with(begin).await.expect("begins");
            let look = bed.statement("select count(*) from jobq.jobs");
            sqlx::query(look).execute(&mut *tx).await.expect("reads");
            let job = claim(&bed).await;
            if ends {
                bed.settle(job.lease, completed()).await;
            }
            let told = replacing(2).enqueue(bed.client.within(&mut tx)).await;
            assert!(matches!(told, Err(Error::Serialization(_))), "{ends}: {told:?}");
            tx.rollback().await.expect("rolls back");
            let told = enqueue(&bed, replacing(3)).await;
            assert_eq!(told.is_new(), ends, "{told:?}");
            bed.execute("delete from jobq.jobs").await;
        }
    });
}

/// Above READ COMMITTED: what was enqueued after the snapshot is a twin, or the transaction fails; it
/// is never overlooked.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) async fn e5_a_twin_that_came_after_the_snapshot_is_not_overlooked(bed: Bed) {
    on_pool!(bed, pool => {
        for (n, level) in ["repeatable read", "serializable"].into_iter().enumerate() {
            let n = n as i64;
            let mut tx = pool.begin_with(bed.begin_at(level)).await.expect("begins");
            let look = bed.statement("select count(*) from jobq.attempts");
            sqlx::query(look).execute(&mut *tx).await.expect("reads");
            let there = insert(&bed, unique(n)).await;
            match unique(n).enqueue(bed.client.within(&mut tx)).await {
                Ok(told) => assert_eq!(told, existing(there), "{level}"),
                Err(Error::Serialization(_)) => {}
                Err(other) => panic!("{level}: {other:?}"),
            }
            tx.rollback().await.expect("rolls back");
        }
    });
    assert_eq!(bed.count("jobs").await, 2);
}

pub(super) async fn r4_a_redriven_job_finds_its_key_held_and_stays_dead(bed: Bed) {
    let bury = async |n| {
        let id = insert(&bed, unique(n)).await;
        let job = claim(&bed).await;
        bed.settle(job.lease, buried(job.counters)).await;
        id
    };
    let first = bury(1).await;
    let second = bury(1).await;
    let other = bury(2).await;
    let third = insert(&bed, unique(1)).await;
    let redriven = bed.client.redrive(&DeadFilter::all()).await.expect("redrives");
    assert_eq!(redriven, [other]);
    let dead = bed.client.dead(&DeadFilter::all(), 9).await.expect("lists");
    let why: Vec<_> = dead.iter().map(|job| (job.id, job.duplicate_of)).collect();
    assert_eq!(why, [(second, Some(third)), (first, Some(third))]);
    assert_eq!(enqueue(&bed, unique(2)).await, existing(other), "it has its key again");
    assert_keys_are_right(&bed).await;
    // Of two the first one takes the key that is free.
    bed.client.cancel(third).await.expect("cancels");
    let redriven = bed.client.redrive(&DeadFilter::all()).await.expect("redrives");
    assert_eq!(redriven, [first]);
    let dead = bed.client.dead(&DeadFilter::all(), 9).await.expect("lists");
    assert_eq!((dead[0].id, dead[0].duplicate_of), (second, Some(first)));
    assert_eq!(bed.client.redrive(&DeadFilter::id(second)).await.expect("redrives"), []);
    assert_eq!(
        bed.client.redrive(&DeadFilter::id(third)).await.expect("redrives"),
        [],
        "cancelled"
    );
    assert_eq!(bed.count("finished").await, 1);
    assert_eq!(enqueue(&bed, unique(1)).await, existing(first));
    assert_keys_are_right(&bed).await;
}

pub(super) async fn r4_what_holds_a_key_until_it_starts_is_redriven_by_whether_it_has(bed: Bed) {
    let unique = |n| unique(n).unique(Unique::DEFAULT.until_started());
    // It never started, so it takes its key again, unless another has it.
    let first = insert(&bed, unique(1)).await;
    bed.client.cancel(first).await.expect("cancels");
    let second = insert(&bed, unique(1)).await;
    assert_eq!(bed.client.redrive(&DeadFilter::id(first)).await.expect("redrives"), []);
    bed.client.cancel(second).await.expect("cancels");
    assert_eq!(bed.client.redrive(&DeadFilter::id(first)).await.expect("redrives"), [first]);
    assert_eq!(enqueue(&bed, unique(1)).await, existing(first));
    // It has started, so it is nobody's twin.
    let job = claim(&bed).await;
    bed.settle(job.lease, buried(job.counters)).await;
    let third = insert(&bed, unique(1)).await;
    assert_eq!(bed.client.redrive(&DeadFilter::all()).await.expect("redrives"), [first]);
    assert_eq!(enqueue(&bed, unique(1)).await, existing(third));
    prune_keys(&bed).await;
    assert_eq!(bed.count("uniques").await, 1);
}

pub(super) async fn r4_a_key_for_a_time_is_not_held_again_by_a_redrive(bed: Bed) {
    let hour = |n| unique(n).unique(Unique::DEFAULT.lasting(Duration::from_secs(3600)));
    let first = insert(&bed, hour(1)).await;
    let job = claim(&bed).await;
    bed.settle(job.lease, buried(job.counters)).await;
    assert_eq!(bed.client.redrive(&DeadFilter::all()).await.expect("redrives"), [first], "its own");
    let job = claim(&bed).await;
    bed.settle(job.lease, buried(job.counters)).await;
    let past = bed.seconds_away(-1);
    bed.execute(&format!("update jobq.uniques set expires_at = {past}")).await;
    let second = insert(&bed, hour(1)).await;
    assert_eq!(bed.client.redrive(&DeadFilter::all()).await.expect("redrives"), []);
    bed.execute(&format!("update jobq.uniques set expires_at = {past}")).await;
    assert_eq!(bed.client.redrive(&DeadFilter::all()).await.expect("redrives"), [first]);
    prune_keys(&bed).await;
    assert_eq!(bed.count("uniques").await, 0);
    assert!(bed.row("jobs", second).await.is_some());
    insert(&bed, hour(1)).await;
}

/// Whoever redrives, prunes and enqueues at once: there are never two unfinished twins.
pub(super) async fn e5_redrives_prunes_and_enqueues_at_once_make_no_twins(bed: Bed) {
    for n in 0..5 {
        insert(&bed, unique(n)).await;
    }
    let worker = bed.session(LEASE, &["k"]).await;
    for _ in 0..40 {
        for job in worker.claim(5).await {
            bed.settle(job.lease, buried(job.counters)).await;
        }
        let mut calls: Vec<crate::handler::BoxFuture<'_, ()>> = Vec::new();
        for turn in 0..4 {
            let bed = &bed;
            calls.push(Box::pin(async move {
                for n in 0..5 {
                    enqueue(bed, unique((n + turn) % 5)).await;
                }
            }));
            calls.push(Box::pin(async move {
                prune_keys(bed).await;
            }));
            calls.push(Box::pin(async move {
                bed.client.redrive(&DeadFilter::all()).await.expect("redrives");
            }));
        }
        join_all(calls).await;
        let twins = "select count(*) from (
                select unique_key from jobq.jobs group by unique_key having count(*) > 1
            ) as twins";
        assert_eq!(bed.number(twins).await, 0);
        assert_eq!(bed.count("jobs").await, 5);
        assert_keys_are_right(&bed).await;
    }
}

/// A call that is dropped half-way, in a transaction that is committed all the same, keeps nobody out
/// by a job that was never written.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) async fn e5_half_an_enqueue_keeps_nobody_out(bed: Bed) {
    let forever = |n| unique(n).unique(Unique::DEFAULT.forever());
    for steps in 0_usize.. {
        let n = i64::try_from(steps).unwrap_or_default();
        let stopped = on_pool!(bed, pool => {
            let mut mine = pool.acquire().await.expect("connects").detach();
            mine.execute("begin").await.expect("begins");
            let mut step = 0;
            let mut call = Box::pin(forever(n).enqueue(bed.client.within(&mut mine)));
            let stopped = std::future::poll_fn(|context| {
                step += 1;
                match call.as_mut().poll(context) {
                    std::task::Poll::Ready(_) => std::task::Poll::Ready(false),
                    std::task::Poll::Pending if step > steps => std::task::Poll::Ready(true),
                    std::task::Poll::Pending => std::task::Poll::Pending,
                }
            })
            .await;
            drop(call);
            // The MySQL driver may have lost its place in the server's replies, and wait for one that
            // does not come. Then the connection is closed: committed or not.
            let committed = tokio::time::timeout(Duration::from_secs(5), mine.execute("commit")).await;
            assert!(committed.is_ok_and(|done| done.is_ok()) || (stopped && bed.is_mysql()));
            stopped
        });
        let jobs = bed.count("jobs").await;
        let told = enqueue(&bed, forever(n)).await;
        match told {
            Enqueued::Inserted(_) => {}
            Enqueued::Existing { id, .. } => {
                assert!(bed.row("jobs", id).await.is_some(), "{id} was never written");
            }
        }
        assert!(jobs <= 1, "it is written once");
        bed.execute("delete from jobq.jobs").await;
        if !stopped {
            break;
        }
    }
}

pub(super) async fn e5_the_sweep_forgets_keys(bed: Bed) {
    enqueue_many(&bed.client, (0..30).map(unique)).await.expect("enqueues");
    assert_eq!(bed.count("uniques").await, 30);
    let kept = 11;
    bed.execute(&format!("delete from jobq.jobs where payload <> '{{\"n\":{kept}}}'")).await;
    assert_eq!(prune_keys(&bed).await, 8, "each step goes on where the last one was");
    assert_eq!(bed.count("uniques").await, 1);
    assert!(!enqueue(&bed, unique(kept)).await.is_new());
    assert_keys_are_right(&bed).await;
    // And a process that sweeps does so by itself.
    bed.execute("delete from jobq.jobs").await;
    let runtime = crate::runtime::Runtime::new(bed.client.clone());
    let runtime = runtime.jobs(super::sample::JOBS).run_until(async {
        until("the key is forgotten", async || bed.count("uniques").await == 0).await;
    });
    runtime.await.expect("runs");
}
