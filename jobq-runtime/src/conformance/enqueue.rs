//! Enqueueing: through what, whole or not at all, in which order.

use std::borrow::Cow;

use jobq_core::job::JobId;
use sqlx::Executor;

use super::bed::{Bed, LEASE, on_pool};
use super::sample::{ids_of, plain};
use super::wait::join_all;
use super::worker::job;
use crate::enqueue::{EnqueueTarget, enqueue_many};
use crate::error::Error;
use crate::job::CheckedJob;

pub(super) async fn e1_a_job_exists_once_its_transaction_commits(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    on_pool!(bed, pool => {
        let mut tx = pool.begin_with(bed.begin()).await.expect("begins");
        let id = plain().enqueue(bed.client.within(&mut tx)).await.expect("enqueues").id();
        assert_eq!(bed.count("jobs").await, 0, "nobody sees it before the commit");
        tx.commit().await.expect("commits");
        assert_eq!(worker.claim_one().await.lease.job, id);
    });
}

pub(super) async fn e1_a_job_is_gone_when_its_transaction_rolls_back(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    on_pool!(bed, pool => {
        let mut tx = pool.begin_with(bed.begin()).await.expect("begins");
        plain().enqueue(bed.client.within(&mut tx)).await.expect("enqueues");
        tx.rollback().await.expect("rolls back");
    });
    assert!(worker.claim(1).await.is_empty());
    assert_eq!(bed.count("jobs").await, 0);
}

pub(super) async fn e1_every_target_writes_the_job(bed: Bed) {
    let bed = bed.with_default_names().await;
    plain().enqueue(&bed.client).await.expect("through the client");
    on_pool!(bed, pool => {
        plain().enqueue(pool).await.expect("through the pool");
        let mut pooled = pool.acquire().await.expect("connects");
        plain().enqueue(&mut pooled).await.expect("through a pool's connection");
        plain().enqueue(&mut *pooled).await.expect("through a connection");
        drop(pooled);
        let mut tx = pool.begin_with(bed.begin()).await.expect("begins");
        plain().enqueue(&mut tx).await.expect("through a transaction");
        tx.commit().await.expect("commits");
    });
    let worker = bed.session(LEASE, &["k"]).await;
    assert_eq!(worker.claim(10).await.len(), 5);
}

pub(super) async fn e1_within_writes_to_its_clients_tables_in_one_transaction(bed: Bed) {
    let bed = bed.with_default_names().await;
    let other = bed.another_client("second");
    other.migrate().await.expect("the tables can be made");
    for commit in [false, true] {
        on_pool!(bed, pool => {
            let mut tx = pool.begin_with(bed.begin()).await.expect("begins");
            plain().enqueue(bed.client.within(&mut tx)).await.expect("enqueues");
            plain().enqueue(other.within(&mut tx)).await.expect("enqueues");
            plain().enqueue(other.within(&mut tx)).await.expect("enqueues");
            if commit {
                tx.commit().await.expect("commits");
            } else {
                tx.rollback().await.expect("rolls back");
            }
        });
        let expected = i64::from(commit);
        assert_eq!(bed.count("jobs").await, expected);
        let separator = if bed.is_postgres() { '.' } else { '_' };
        let second = bed.number(&format!("select count(*) from second{separator}jobs")).await;
        assert_eq!(second, 2 * expected);
    }
}

#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) async fn e1_higher_isolation_levels_commit_and_roll_back_alike(bed: Bed) {
    on_pool!(bed, pool => {
        for level in ["repeatable read", "serializable"] {
            let mut tx = pool.begin_with(bed.begin_at(level)).await.expect("begins");
            let gone = plain().enqueue(bed.client.within(&mut tx)).await.expect("enqueues").id();
            tx.rollback().await.expect("rolls back");
            let mut tx = pool.begin_with(bed.begin_at(level)).await.expect("begins");
            let there = plain().enqueue(bed.client.within(&mut tx)).await.expect("enqueues").id();
            assert!(bed.row("jobs", there).await.is_none(), "{level}");
            tx.commit().await.expect("commits");
            assert!(bed.row("jobs", there).await.is_some(), "{level}");
            assert!(bed.row("jobs", gone).await.is_none(), "{level}");
        }
    });
}

/// Two transactions that each read what the other writes: one of them cannot commit.
#[cfg(feature = "postgres")]
pub(super) async fn e1_a_serialization_failure_is_a_typed_error(bed: Bed) {
    bed.execute("create table jobq.seats (id int primary key, taken bool not null)").await;
    bed.execute("insert into jobq.seats values (1, false), (2, false)").await;
    on_pool!(bed, pool => {
        let read = || {
            let text = "select count(*) from jobq.seats where taken";
            sqlx::query_scalar::<_, i64>(bed.statement(text))
        };
        let take = |id: i32| {
            let text = format!("update jobq.seats set taken = true where id = {id}");
            sqlx::query(bed.statement(&text))
        };
        let begin = "begin isolation level serializable";
        let mut first = pool.begin_with(begin).await.expect("begins");
        let mut second = pool.begin_with(begin).await.expect("begins");
        for tx in [&mut first, &mut second] {
            read().fetch_one(&mut **tx).await.expect("reads");
        }
        take(1).execute(&mut *first).await.expect("writes");
        take(2).execute(&mut *second).await.expect("writes");
        first.commit().await.expect("the first one commits");
        let error = plain().enqueue(bed.client.within(&mut second)).await;
        let error = error.expect_err("the second one is doomed");
        assert!(matches!(error, Error::Serialization(_)), "{error:?}");
        assert!(error.is_transient() && error.to_string().contains("run it again"), "{error}");
        drop(second);
    });
    assert_eq!(bed.count("jobs").await, 0);
}

/// Cancel safety: a dropped call writes everything or nothing.
pub(super) async fn e1_a_dropped_call_writes_all_or_none(bed: Bed) {
    let jobs: Vec<CheckedJob> = (0..12_000).map(|_| job("k")).collect();
    let call = bed.client.write(jobs, bed.store.schema().clone());
    let dropped = tokio::time::timeout(std::time::Duration::from_millis(1), call).await;
    assert!(dropped.is_err(), "12,000 jobs take longer");
    for _ in 0..300 {
        let written = bed.count("jobs").await;
        assert!([0, 12_000].contains(&written), "{written} of 12,000 were written");
        if written > 0 {
            return;
        }
    }
}

/// More than one statement can hold, with one that the database refuses at the end.
pub(super) async fn e1_many_jobs_are_written_all_or_none_on_any_connection(bed: Bed) {
    let bed = bed.with_default_names().await;
    bed.execute(if bed.is_sqlite() {
        "create trigger refuse before insert on jobq_jobs when new.kind = 'refused'
         begin select raise(abort, 'refused'); end"
    } else {
        "alter table jobq.jobs add check (kind <> 'refused')"
    })
    .await;
    let good: Vec<CheckedJob> = (0..12_000).map(|_| job("k")).collect();
    let mut bad = good.clone();
    bad[11_999].kind = Cow::Borrowed("refused");
    let schema = || bed.store.schema().clone();
    on_pool!(bed, pool => {
        let mut plain = pool.acquire().await.expect("connects");
        (&mut *plain).write(bad.clone(), schema()).await.expect_err("one is refused");
        assert_eq!(bed.count("jobs").await, 0, "none was written");
        (&mut *plain).write(good.clone(), schema()).await.expect("writes");
        assert_eq!(bed.count("jobs").await, 12_000, "the transaction was our own");

        // A transaction that the driver knows nothing of.
        plain.execute("begin").await.expect("begins");
        (&mut *plain).write(good.clone(), schema()).await.expect("writes");
        plain.execute("rollback").await.expect("rolls back");
        assert_eq!(bed.count("jobs").await, 12_000, "the transaction was the caller's");

        let mut tx = pool.begin_with(bed.begin()).await.expect("begins");
        (&mut tx).write(good, schema()).await.expect("writes");
        tx.rollback().await.expect("rolls back");
        assert_eq!(bed.count("jobs").await, 12_000, "the transaction was the caller's");
    });
    (&bed.client).write(bad, schema()).await.expect_err("one is refused");
    assert_eq!(bed.count("jobs").await, 12_000, "none was written");
}

pub(super) fn of_mixed_kinds(jobs: usize) -> Vec<CheckedJob> {
    (0..jobs)
        .map(|n| {
            let mut job = job("k");
            job.kind = Cow::Owned(format!("kind-{}", n * 7 % 11));
            job.payload = format!(r#"{{"n":{n}}}"#);
            job
        })
        .collect()
}

/// Whether ids are those of the jobs of [`of_mixed_kinds`], in their order.
pub(super) async fn assert_in_order(bed: &Bed, ids: &[JobId], jobs: usize) {
    assert_eq!(ids.len(), jobs);
    let mut sorted = ids.to_vec();
    sorted.sort_unstable();
    let list: Vec<String> = sorted.iter().map(ToString::to_string).collect();
    let text =
        format!("select payload from jobq.jobs where id in ({}) order by id", list.join(","));
    let stored = bed.texts(&text).await;
    let of_id: std::collections::HashMap<JobId, String> = sorted.into_iter().zip(stored).collect();
    for (n, id) in ids.iter().enumerate() {
        assert_eq!(of_id[id], format!(r#"{{"n":{n}}}"#), "job {n} of {jobs}");
    }
}

pub(super) async fn e2_ids_come_in_the_order_of_the_jobs(bed: Bed) {
    for jobs in [1, 2, 4_999, 5_001, 12_000] {
        let ids = bed.enqueue(of_mixed_kinds(jobs)).await;
        assert_in_order(&bed, &ids, jobs).await;
        on_pool!(bed, pool => {
            let mut tx = pool.begin_with(bed.begin()).await.expect("begins");
            let within = bed.client.within(&mut tx);
            let schema = bed.store.schema().clone();
            let written = within.write(of_mixed_kinds(jobs), schema).await.expect("enqueues");
            tx.commit().await.expect("commits");
            assert_in_order(&bed, &ids_of(written), jobs).await;
        });
    }
}

pub(super) async fn e2_ids_come_in_order_also_when_many_enqueue_at_once(bed: Bed) {
    let calls: Vec<_> = (0..4)
        .map(|_| async {
            for _ in 0..10 {
                let ids = bed.enqueue(of_mixed_kinds(300)).await;
                assert_in_order(&bed, &ids, 300).await;
            }
        })
        .collect();
    join_all(calls).await;
    assert_eq!(bed.count("jobs").await, 4 * 10 * 300);
}

pub(super) async fn e2_no_jobs_are_no_work(bed: Bed) {
    let written = enqueue_many(&bed.client, Vec::new()).await.expect("nothing can be written");
    assert!(written.is_empty());
    on_pool!(bed, pool => {
        let mut tx = pool.begin_with(bed.begin()).await.expect("begins");
        let written = enqueue_many(bed.client.within(&mut tx), Vec::new()).await;
        assert!(written.expect("nothing can be written").is_empty());
    });
}

/// 12,000 jobs of which the database refuses the last.
fn with_a_bad_end() -> Vec<CheckedJob> {
    let mut jobs = of_mixed_kinds(12_000);
    jobs[11_999].priority = 9;
    jobs
}

pub(super) async fn e2_one_that_is_refused_leaves_none(bed: Bed) {
    let error = bed.store.insert(with_a_bad_end()).await.expect_err("no such priority");
    assert!(matches!(error, Error::Database { action: "enqueue jobs", .. }), "{error:?}");
    assert_eq!(bed.count("jobs").await, 0);
    bed.one().await;
}

pub(super) async fn e2_one_that_is_refused_leaves_none_in_a_callers_transaction(bed: Bed) {
    on_pool!(bed, pool => {
        let mut tx = pool.begin_with(bed.begin()).await.expect("begins");
        let within = bed.client.within(&mut tx);
        let refused = within.write(with_a_bad_end(), bed.store.schema().clone()).await;
        refused.expect_err("no such priority");
        // PostgreSQL makes this a rollback; SQLite does not.
        tx.commit().await.expect("the connection lives");
    });
    assert_eq!(bed.count("jobs").await, 0);
}

pub(super) async fn e2_one_that_cannot_be_checked_leaves_none(bed: Bed) {
    let jobs = vec![plain(), plain().priority(5), plain()];
    let error = enqueue_many(&bed.client, jobs).await.expect_err("no such priority");
    assert!(matches!(error, Error::BadName(_)), "{error:?}");
    assert_eq!(bed.count("jobs").await, 0);
}

/// R6: what the caller is told when a connection breaks while the jobs are on their way.
#[cfg(feature = "postgres")]
pub(super) async fn r6_a_broken_connection_names_the_ids_to_look_up(bed: Bed) {
    // The server ends the connection while the insert waits for the table.
    on_pool!(bed, pool => {
        let mut blocker = pool.begin().await.expect("begins");
        let lock = bed.statement("lock table jobq.jobs in share mode");
        sqlx::query(lock).execute(&mut *blocker).await.expect("locks");
        let call = tokio::spawn({
            let client = bed.client.clone();
            async move { enqueue_many(&client, vec![plain(), plain()]).await }
        });
        let kill = "select count(pg_terminate_backend(pid)) from pg_stat_activity
                    where datname = current_database() and wait_event_type = 'Lock'
                      and query like '%insert into jobq.jobs%'";
        super::wait::until("the insert waits", || async { bed.number(kill).await > 0 }).await;
        let error = call.await.expect("no panic").expect_err("its connection is gone");
        let Error::CommitUnknown { ids, .. } = &error else { panic!("{error:?}") };
        assert_eq!(ids.len(), 2);
        assert!(error.to_string().contains(&format!("{:?}", ids[0])), "{error}");
        blocker.rollback().await.expect("rolls back");
        // It says to look the ids up: they were not written, and never will be.
        for id in ids {
            let found = bed.client.job(*id).await.expect("can be looked up");
            assert_eq!(found, crate::store::Lookup::Gone, "the id is used up");
        }
    });
    assert_eq!(bed.count("jobs").await, 0);
}
