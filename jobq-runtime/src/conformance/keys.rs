//! Keys: who runs, who waits, and that nobody waits for nothing.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use jobq_core::job::{JobId, JobState};
#[cfg(feature = "postgres")]
use jobq_core::job::{Lease, Token};
use jobq_core::key::OnBlock;
use jobq_core::lifecycle::Transition;
use jobq_core::queue::{ASIDE, front};
use serde_json::json;

use super::bed::{Bed, LEASE};
use super::sample::{ids_of, new_job, plain};
use super::settle::{buried, cancelled, completed, failed, snoozed};
use super::wait::{join_all, until};
use super::worker::Worker;
use crate::enqueue::enqueue_many;
use crate::error::Error;
use crate::job::NewJob;
use crate::key;
use crate::store::{CancelReply, ClaimedJob, DeadFilter, Lookup, Settled, Settlement, Turn};
use crate::sweep::{pass_on_all_grants, rescue};

const HOUR: Duration = Duration::from_secs(3_600);

/// How the jobs behind one are treated, in words.
const POLICIES: [OnBlock; 2] = [OnBlock::Block, OnBlock::Skip];

fn keyed(key: &'static str) -> NewJob {
    plain().key(key)
}

async fn insert(bed: &Bed, job: NewJob) -> JobId {
    job.enqueue(&bed.client).await.expect("enqueues").id()
}

/// Enqueues as many jobs with one key.
async fn line(bed: &Bed, key: &'static str, jobs: usize) -> Vec<JobId> {
    let jobs = (0..jobs).map(|_| keyed(key));
    ids_of(enqueue_many(&bed.client, jobs).await.expect("enqueues"))
}

/// What a claim has met.
struct Met {
    run: Vec<ClaimedJob>,
    wait: Vec<ClaimedJob>,
    undecided: Vec<ClaimedJob>,
}

fn met(jobs: Vec<ClaimedJob>) -> Met {
    let (run, rest): (Vec<ClaimedJob>, Vec<ClaimedJob>) =
        jobs.into_iter().partition(|job| job.turn == Turn::Runs);
    let (wait, undecided) = rest.into_iter().partition(|job| job.turn == Turn::Waits);
    Met { run, wait, undecided }
}

async fn take(worker: &Worker<'_>, limit: u32) -> Met {
    met(worker.claim(limit).await)
}

/// What may run of what is claimable, until nothing is.
async fn run(worker: &Worker<'_>) -> Vec<ClaimedJob> {
    let mut run = Vec::new();
    loop {
        let taken = take(worker, 20).await;
        assert!(taken.undecided.is_empty(), "nobody else is here");
        if taken.run.is_empty() && taken.wait.is_empty() {
            return run;
        }
        run.extend(taken.run);
    }
}

fn ids(jobs: &[ClaimedJob]) -> Vec<JobId> {
    let mut ids: Vec<JobId> = jobs.iter().map(|job| job.lease.job).collect();
    ids.sort_unstable();
    ids
}

fn settlement(job: &ClaimedJob, transition: Transition) -> Settlement {
    Settlement { key: job.key.clone(), ..super::worker::settlement(job.lease, transition) }
}

/// Settles as a worker does.
async fn settle(bed: &Bed, job: &ClaimedJob, transition: Transition) {
    let settled = key::settle(&*bed.store, &[settlement(job, transition)]).await;
    assert_eq!(settled.expect("settles"), [Settled::Written]);
}

async fn state(bed: &Bed, id: JobId) -> JobState {
    match bed.client.job(id).await.expect("looks") {
        Lookup::Found(job) => job.state,
        other => panic!("{other:?}"),
    }
}

/// What no statement of the store says: grants of jobs that are gone, and of jobs that have another
/// key; jobs that wait for a key that nobody has; and jobs that wait although they have the grant.
async fn assert_grants_are_right(bed: &Bed) {
    let stale = "select count(*) from jobq.key_grants as held
         where not exists (
                   select 1 from jobq.jobs as job
                   where job.id = held.job_id and job.job_key = held.job_key
               )
           and not exists (
                   select 1 from jobq.dead as dead
                   where dead.id = held.job_id and dead.job_key = held.job_key
                     and dead.on_block = 'block'
               )";
    assert_eq!(bed.number(stale).await, 0, "a grant outlives its job");
    let forgotten = "select count(*) from jobq.jobs as job
         where wait_reason = 'key'
           and not exists (
                   select 1 from jobq.key_grants as held where held.job_key = job.job_key
               )";
    assert_eq!(bed.number(forgotten).await, 0, "a job waits for nobody");
    let asleep = "select count(*) from jobq.jobs as job
         where wait_reason = 'key'
           and exists (select 1 from jobq.key_grants as held where held.job_id = job.id)";
    assert_eq!(bed.number(asleep).await, 0, "a job waits for itself");
}

pub(super) async fn o2_jobs_with_one_key_run_one_at_a_time_in_their_order(bed: Bed) {
    let mut left = line(&bed, "a", 5).await;
    let other = insert(&bed, plain()).await;
    let worker = bed.session(LEASE, &["k"]).await;
    let mut running = run(&worker).await;
    assert_eq!(ids(&running), [left[0], other], "the first of the key, and what has none");
    for id in &left[1..] {
        assert_eq!(state(&bed, *id).await, JobState::Waiting);
        let row = bed.job_row(id).await;
        assert_eq!((row.text("wait_reason"), row.number("attempt")), ("key", 0), "it did not run");
        assert_eq!((row.number("band"), row.number("leased_by")), (i64::from(ASIDE), 0));
    }
    running.retain(|job| job.lease.job != other);
    while !left.is_empty() {
        assert_eq!(ids(&running), [left.remove(0)]);
        assert_grants_are_right(&bed).await;
        assert!(run(&worker).await.is_empty(), "while it runs nobody else does");
        settle(&bed, &running[0], completed()).await;
        running = run(&worker).await;
    }
    assert!(running.is_empty());
    assert_eq!(bed.count("key_grants").await, 0);
}

pub(super) async fn o2_a_key_is_of_all_kinds_and_queues_and_holds_up_no_other(bed: Bed) {
    let first = insert(&bed, keyed("a").queue("other")).await;
    let second = insert(&bed, keyed("a")).await;
    let others: Vec<JobId> = [
        insert(&bed, keyed("b")).await,
        insert(&bed, keyed("A")).await,
        insert(&bed, keyed("a ")).await,
        insert(&bed, keyed("ä")).await,
        insert(&bed, keyed("'; drop table jobq_jobs; --\\")).await,
    ]
    .into();
    let worker = bed.session(LEASE, &["k"]).await;
    assert_eq!(ids(&run(&worker).await), others, "{second} is behind {first}");
    let claim = worker.asking("other", 5, crate::store::Floor::START);
    let claimed = met(worker.claim_as(&claim).await.jobs);
    assert_eq!(ids(&claimed.run), [first]);
    settle(&bed, &claimed.run[0], completed()).await;
    assert_eq!(ids(&run(&worker).await), [second]);
    assert_grants_are_right(&bed).await;
}

pub(super) async fn o2_one_that_cannot_run_blocks_its_key_or_is_skipped(bed: Bed) {
    let ends: [(&str, fn(&ClaimedJob) -> Transition); 3] = [
        ("retried", |job| failed(job.counters, HOUR)),
        ("snoozed", |job| match snoozed(job.counters) {
            Transition::Requeue { counters, record, .. } => Transition::Requeue {
                when: jobq_core::lifecycle::When::After(HOUR),
                counters,
                record,
            },
            other => other,
        }),
        ("dead", |job| buried(job.counters)),
    ];
    for on_block in POLICIES {
        for (what, end) in ends {
            let first = insert(&bed, keyed("a").on_block(on_block)).await;
            let second = insert(&bed, keyed("a")).await;
            let worker = bed.session(LEASE, &["k"]).await;
            let running = run(&worker).await;
            assert_eq!(ids(&running), [first]);
            settle(&bed, &running[0], end(&running[0])).await;
            let next = run(&worker).await;
            assert_grants_are_right(&bed).await;
            if on_block == OnBlock::Skip {
                assert_eq!(ids(&next), [second], "{what}");
                settle(&bed, &next[0], completed()).await;
            } else {
                assert!(next.is_empty(), "{what}: it blocks");
            }
            if what == "dead" {
                let redriven = bed.client.redrive(&DeadFilter::id(first)).await;
                assert_eq!(redriven.expect("redrives"), [first]);
            } else {
                bed.make_due(first).await;
            }
            let again = run(&worker).await;
            assert_eq!(ids(&again), [first], "{what}: it goes on");
            settle(&bed, &again[0], completed()).await;
            for job in run(&worker).await {
                settle(&bed, &job, completed()).await;
            }
            assert_eq!(bed.count("jobs").await, 0, "{what}");
            assert_eq!(bed.count("key_grants").await, 0, "{what}");
        }
    }
}

pub(super) async fn o2_one_that_is_scheduled_blocks_those_enqueued_after_it_or_is_skipped(
    bed: Bed,
) {
    for on_block in POLICIES {
        let first = insert(&bed, keyed("a").delay(HOUR).on_block(on_block)).await;
        let second = insert(&bed, keyed("a")).await;
        let worker = bed.session(LEASE, &["k"]).await;
        let now = run(&worker).await;
        if on_block == OnBlock::Skip {
            assert_eq!(ids(&now), [second]);
        } else {
            assert!(now.is_empty());
            assert_eq!(state(&bed, second).await, JobState::Waiting);
        }
        bed.make_due(first).await;
        let then = run(&worker).await;
        if on_block == OnBlock::Skip {
            assert!(then.is_empty(), "it waits for the one that runs");
            settle(&bed, &now[0], completed()).await;
            assert_eq!(ids(&run(&worker).await), [first]);
        } else {
            assert_eq!(ids(&then), [first]);
            settle(&bed, &then[0], completed()).await;
            assert_eq!(ids(&run(&worker).await), [second]);
        }
        assert_grants_are_right(&bed).await;
        bed.execute("delete from jobq.jobs").await;
        pass_on_all_grants(&*bed.store).await.expect("looks");
        assert_eq!(bed.count("key_grants").await, 0);
    }
}

pub(super) async fn o2_a_dead_worker_frees_its_key_with_its_lease(bed: Bed) {
    let line = line(&bed, "a", 3).await;
    let gone = bed.session(LEASE, &["k"]).await;
    assert_eq!(ids(&run(&gone).await), [line[0]]);
    bed.expire(gone.id).await;
    assert_eq!(rescue(&*bed.store, false).await.expect("rescues"), 1);
    let worker = bed.session(LEASE, &["k"]).await;
    let running = run(&worker).await;
    assert_eq!(ids(&running), [line[0]], "the first is still the first");
    settle(&bed, &running[0], completed()).await;
    assert_eq!(ids(&run(&worker).await), [line[1]]);
    assert_grants_are_right(&bed).await;
}

/// As a claim leaves them that did not come to decide, or one of a version that knows nothing of keys.
async fn claim_undecided(bed: &Bed, worker: &Worker<'_>) {
    bed.execute(&format!(
        "update jobq.jobs set token = token + 1, attempt = attempt + 1, leased_by = {}",
        worker.id
    ))
    .await;
}

pub(super) async fn o2_a_worker_that_dies_before_a_turn_is_decided_holds_up_nobody(bed: Bed) {
    let line = line(&bed, "a", 2).await;
    let gone = bed.session(LEASE, &["k"]).await;
    claim_undecided(&bed, &gone).await;
    let third = insert(&bed, keyed("a")).await;
    let worker = bed.session(LEASE, &["k"]).await;
    assert!(run(&worker).await.is_empty(), "the first may still come to run");
    bed.expire(gone.id).await;
    assert_eq!(rescue(&*bed.store, false).await.expect("rescues"), 2);
    let running = run(&worker).await;
    assert_eq!(ids(&running), [line[0]]);
    assert_eq!(state(&bed, third).await, JobState::Waiting);
    assert_grants_are_right(&bed).await;
}

pub(super) async fn o2_what_a_worker_could_not_pass_on_the_sweep_does(bed: Bed) {
    let line = line(&bed, "a", 3).await;
    let worker = bed.session(LEASE, &["k"]).await;
    let running = run(&worker).await;
    assert_eq!(bed.settle(running[0].lease, completed()).await, Settled::Written);
    assert!(run(&worker).await.is_empty(), "it died before it passed the key on");
    assert_eq!(pass_on_all_grants(&*bed.store).await.expect("looks"), 1);
    assert_eq!(ids(&run(&worker).await), [line[1]]);
    assert_eq!(pass_on_all_grants(&*bed.store).await.expect("looks"), 0, "all is well");
    assert_grants_are_right(&bed).await;
}

pub(super) async fn o2_the_sweep_looks_through_all_grants_in_steps(bed: Bed) {
    let jobs = (0..25).map(|n| plain().key(format!("key-{n:02}")));
    enqueue_many(&bed.client, jobs).await.expect("enqueues");
    let worker = bed.session(LEASE, &["k"]).await;
    assert_eq!(run(&worker).await.len(), 25);
    bed.execute("delete from jobq.jobs where job_key in ('key-03', 'key-24')").await;
    let (mut stale, mut after, mut steps) = (Vec::new(), None, 0);
    loop {
        let step = bed.store.stale_grants(after.as_deref(), 4).await.expect("looks");
        stale.extend(step.keys);
        steps += 1;
        match step.next {
            Some(next) => after = Some(next),
            None => break,
        }
    }
    assert_eq!((stale, steps), (vec!["key-03".to_owned(), "key-24".to_owned()], 7));
}

pub(super) async fn o2_a_cancelled_job_passes_its_key_on(bed: Bed) {
    let line = line(&bed, "a", 5).await;
    let worker = bed.session(LEASE, &["k"]).await;
    let running = run(&worker).await;
    // One that waits.
    assert_eq!(bed.client.cancel(line[1]).await.expect("cancels"), CancelReply::Cancelled);
    assert!(run(&worker).await.is_empty());
    // The one that runs.
    settle(&bed, &running[0], cancelled()).await;
    // The one that is to run, before anybody claims it.
    assert_eq!(bed.job_row(line[2]).await.number("band"), i64::from(front(0)));
    assert_eq!(bed.client.cancel(line[2]).await.expect("cancels"), CancelReply::Cancelled);
    assert_eq!(ids(&run(&worker).await), [line[3]]);
    assert_grants_are_right(&bed).await;
    // And one that was never claimed, whose key nobody has.
    let lone = insert(&bed, keyed("lone")).await;
    assert_eq!(bed.client.cancel(lone).await.expect("cancels"), CancelReply::Cancelled);
    assert_eq!(bed.count("key_grants").await, 1);
}

/// On the other databases a job is not leased before its turn is decided.
#[cfg(feature = "postgres")]
async fn decide(bed: &Bed, claimed: &[Lease]) -> HashMap<i64, Turn> {
    use crate::store::postgres::statements::{Claimant, own_options, turns_on};
    use sqlx::Connection;
    let options = own_options(&bed.postgres_pool().connect_options());
    let mut own = sqlx::PgConnection::connect_with(&options).await.expect("connects");
    let claimed: Vec<Claimant> =
        claimed.iter().map(|lease| Claimant { lease: *lease, key: "a".to_owned() }).collect();
    turns_on(&mut own, bed.store.schema(), &claimed).await.expect("decides")
}

#[cfg(feature = "postgres")]
pub(super) async fn o2_only_what_is_still_leased_and_not_to_be_cancelled_is_put_to_wait(bed: Bed) {
    let line = line(&bed, "a", 4).await;
    let worker = bed.session(LEASE, &["k"]).await;
    claim_undecided(&bed, &worker).await;
    assert_eq!(bed.client.cancel(line[1]).await.expect("asks"), CancelReply::Requested);
    let lease = |n: usize, token| Lease { job: line[n], token: Token(token), session: worker.id };
    let turns = decide(&bed, &[lease(0, 1), lease(1, 1), lease(2, 7), lease(3, 1)]).await;
    let turn = |n: usize| turns.get(&line[n].0).copied();
    assert_eq!((turn(0), turn(3)), (Some(Turn::Runs), Some(Turn::Waits)));
    assert_eq!((turn(1), turn(2)), (None, None), "to be cancelled; of another lease");
    for n in [1, 2] {
        assert_eq!(bed.job_row(line[n]).await.number("leased_by"), worker.id.0);
    }
    let row = bed.job_row(line[3]).await;
    assert_eq!((row.number("leased_by"), row.number("attempt")), (0, 0));
    assert_grants_are_right(&bed).await;
}

pub(super) async fn o2_a_completion_in_a_transaction_passes_the_key_on(bed: Bed) {
    let line = line(&bed, "a", 2).await;
    let worker = bed.session(LEASE, &["k"]).await;
    let running = run(&worker).await;
    bed.execute(&format!("delete from jobq.jobs where id = {}", line[0])).await;
    // What the runtime does after the function has returned.
    let settlement = Settlement {
        doubtful: true,
        retention: Duration::ZERO,
        ..settlement(&running[0], completed())
    };
    let settled = key::settle(&*bed.store, &[settlement]).await.expect("settles");
    assert_eq!(settled, [Settled::Found]);
    assert_eq!(ids(&run(&worker).await), [line[1]]);
    assert_grants_are_right(&bed).await;
}

pub(super) async fn o2_what_has_waited_goes_before_its_priority_and_after_higher_ones(bed: Bed) {
    let line = line(&bed, "a", 2).await;
    let worker = bed.session(LEASE, &["k"]).await;
    let running = run(&worker).await;
    let same = insert(&bed, plain()).await;
    let higher = insert(&bed, plain().priority(1)).await;
    settle(&bed, &running[0], completed()).await;
    let mut order = Vec::new();
    for _ in 0..3 {
        let taken = take(&worker, 1).await;
        order.extend(ids(&taken.run));
    }
    assert_eq!(order, [higher, line[1], same]);
}

pub(super) async fn o2_thousands_behind_one_key_do_not_hold_up_another(bed: Bed) {
    line(&bed, "a", 3_000).await;
    let other = insert(&bed, keyed("b")).await;
    let worker = bed.session(LEASE, &["k"]).await;
    let mut claims = 0;
    loop {
        claims += 1;
        let taken = take(&worker, 10).await;
        if ids(&taken.run).contains(&other) {
            break;
        }
    }
    assert!(claims <= 10, "{claims} claims of 10 jobs to pass 3,000");
    let seen = bed.number("select count(*) from jobq.jobs where wait_reason = 'key'").await;
    assert_eq!(seen, 2_999);
    assert!(worker.claim(10).await.is_empty(), "what waits is not looked at");
    assert_grants_are_right(&bed).await;
}

pub(super) async fn o2_keys_for_which_jobs_wait_are_listed_with_why(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    let (running, retried, dead) = (
        line(&bed, "running", 3).await,
        line(&bed, "retried", 2).await,
        line(&bed, "dead", 4).await,
    );
    insert(&bed, keyed("nobody waits")).await;
    for job in run(&worker).await {
        if job.lease.job == retried[0] {
            settle(&bed, &job, failed(job.counters, HOUR)).await;
        } else if job.lease.job == dead[0] {
            settle(&bed, &job, buried(job.counters)).await;
        }
    }
    let listed = bed.client.blocked_keys(None, 10).await.expect("lists");
    let seen: Vec<(&str, JobId, Option<JobState>, bool, u64)> = listed
        .iter()
        .map(|it| (&*it.key, it.holder, it.holder_state, it.run_after.is_some(), it.waiting))
        .collect();
    assert_eq!(
        seen,
        [
            ("dead", dead[0], Some(JobState::Dead), false, 3),
            ("retried", retried[0], Some(JobState::Pending), true, 1),
            ("running", running[0], Some(JobState::Running), false, 2),
        ]
    );
    let rest = bed.client.blocked_keys(Some("dead"), 1).await.expect("lists");
    assert_eq!(rest, listed[1..2]);

    assert!(!bed.client.unblock_key("running").await.expect("looks"), "nobody is dead");
    assert!(!bed.client.unblock_key("no such key").await.expect("looks"));
    assert!(bed.client.unblock_key("dead").await.expect("unblocks"));
    assert!(!bed.client.unblock_key("dead").await.expect("looks"), "once is enough");
    assert_eq!(ids(&run(&worker).await), [dead[1]]);
    assert_eq!(state(&bed, dead[0]).await, JobState::Dead, "it is kept");
    assert_grants_are_right(&bed).await;
}

pub(super) async fn o2_a_key_stays_with_its_job_in_every_table(bed: Bed) {
    let line = line(&bed, "a", 3).await;
    let worker = bed.session(LEASE, &["k"]).await;
    let key_of = async |id| match bed.client.job(id).await.expect("looks") {
        Lookup::Found(job) => job.key,
        other => panic!("{other:?}"),
    };
    let running = run(&worker).await;
    settle(&bed, &running[0], completed()).await;
    let running = run(&worker).await;
    settle(&bed, &running[0], buried(running[0].counters)).await;
    bed.client.cancel(line[2]).await.expect("cancels");
    for (id, table) in line.iter().zip(["finished", "dead", "finished"]) {
        let row = bed.row(table, id).await.expect(table);
        assert_eq!((row.text("job_key"), row.text("on_block")), ("a", "block"));
        assert_eq!(key_of(*id).await.as_deref(), Some("a"));
    }
    bed.client.redrive(&DeadFilter::id(line[2])).await.expect("redrives");
    assert!(run(&worker).await.is_empty(), "it is still behind the dead one");
    bed.client.redrive(&DeadFilter::id(line[1])).await.expect("redrives");
    let running = run(&worker).await;
    assert_eq!(ids(&running), [line[1]]);
    let plain = insert(&bed, plain()).await;
    assert_eq!(key_of(plain).await, None);
}

pub(super) async fn o2_what_cannot_be_a_key_is_a_typed_error(bed: Bed) {
    for key in [String::new(), "x".repeat(201), "a\0b".to_owned()] {
        let error = plain().key(key).enqueue(&bed.client).await.expect_err("no key");
        assert!(matches!(error, Error::BadOption { option: "key", .. }), "{error}");
    }
    for key in ["x".repeat(200), "é".repeat(100), " ".to_owned()] {
        let id = insert(&bed, plain().key(key.clone())).await;
        match bed.client.job(id).await.expect("looks") {
            Lookup::Found(job) => assert_eq!(job.key, Some(key)),
            other => panic!("{other:?}"),
        }
    }
    plain().key("a").without_key().enqueue(&bed.client).await.expect("enqueues");
    assert_eq!(bed.number("select count(*) from jobq.jobs where job_key is null").await, 1);
}

pub(super) async fn o2_passing_on_what_is_used_changes_nothing(bed: Bed) {
    line(&bed, "a", 3).await;
    let worker = bed.session(LEASE, &["k"]).await;
    run(&worker).await;
    let before = bed.rows("jobs", "order by id").await;
    let keys = ["a".to_owned(), "of nobody".to_owned(), "a".to_owned()];
    assert_eq!(bed.store.pass_on(&keys).await.expect("passes on"), 0);
    assert_eq!(bed.store.pass_on(&[]).await.expect("passes on"), 0);
    assert_eq!(bed.rows("jobs", "order by id").await, before);
    assert_eq!(bed.count("key_grants").await, 1);
}

/// The first of a key is found whoever brings its successors first.
pub(super) async fn o2_the_second_of_a_key_never_runs_before_the_first(bed: Bed) {
    let line = line(&bed, "a", 2).await;
    bed.execute(&format!("update jobq.jobs set priority = 1, band = 1 where id = {}", line[1]))
        .await;
    let worker = bed.session(LEASE, &["k"]).await;
    let one = take(&worker, 1).await;
    assert_eq!((ids(&one.run), ids(&one.wait)), (vec![], vec![line[1]]), "it is met first");
    assert_eq!(ids(&run(&worker).await), [line[0]]);
    assert_grants_are_right(&bed).await;
}

/// Stopped as a process is that is paused, or cut off, with whatever it has locked. Each time in a queue
/// and with a key of its own; they are waited for all together.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) async fn o2_a_process_that_stops_anywhere_does_not_keep_its_keys(bed: Bed) {
    use super::wait::stopped_after;
    use crate::store::Floor;
    let gone = bed.session(LEASE, &["k"]).await;
    let mut queues: Vec<&'static str> = Vec::new();
    for operation in ["claim", "settle", "retry", "pass on"] {
        for steps in 1.. {
            let queue: &'static str = format!("{}-{steps}", operation.replace(' ', "-")).leak();
            queues.push(queue);
            let jobs = (0..3).map(|_| keyed(queue).queue(queue));
            let line = ids_of(enqueue_many(&bed.client, jobs).await.expect("enqueues"));
            let store = bed.another_client(&bed.schema).store();
            // So that it has a connection.
            store.live_sessions().await.expect("reads");
            let claim = gone.asking(queue, 2, Floor::START);
            let stopped = match operation {
                "claim" => stopped_after(steps, store.claim(&claim)).await,
                "pass on" => {
                    gone.claim_as(&claim).await;
                    bed.execute(&format!("delete from jobq.jobs where id = {}", line[0])).await;
                    stopped_after(steps, store.pass_on(&[queue.to_owned()])).await
                }
                _ => {
                    let job = met(gone.claim_as(&claim).await.jobs).run.remove(0);
                    let transition = if operation == "settle" {
                        completed()
                    } else {
                        failed(job.counters, Duration::ZERO)
                    };
                    let mut settlement = settlement(&job, transition);
                    if let Some(key) = &mut settlement.key {
                        key.on_block = OnBlock::Skip;
                    }
                    stopped_after(steps, store.settle(&[settlement])).await
                }
            };
            std::mem::forget(store);
            if !stopped {
                break;
            }
        }
    }
    bed.expire(gone.id).await;
    let worker = bed.session(LEASE * 60, &["k"]).await;
    until("another has done them all", async || {
        // What is locked may be an error once, as to any claimer.
        let _ = rescue(&*bed.store, false).await;
        let _ = pass_on_all_grants(&*bed.store).await;
        for queue in &queues {
            let claim = worker.asking(queue, 5, Floor::START);
            let Ok(claimed) = bed.store.claim(&claim).await else { continue };
            for job in met(claimed.jobs).run {
                settle(&bed, &job, completed()).await;
            }
        }
        bed.count("jobs").await + bed.count("key_grants").await == 0
    })
    .await;
}

/// Per key never two at once and in order, and all done, whoever claims and settles meanwhile.
pub(super) async fn o2_many_workers_at_once_keep_every_key_in_order(bed: Bed) {
    const KEYS: u64 = 7;
    const JOBS: u64 = 210;
    let jobs = (0..JOBS).map(|n| new_job(&json!({ "n": n })).key(format!("key-{}", n % KEYS)));
    enqueue_many(&bed.client, jobs).await.expect("enqueues");
    let running: Mutex<HashSet<String>> = Mutex::default();
    let done: Mutex<HashMap<String, Vec<JobId>>> = Mutex::default();
    let count = AtomicU64::new(0);
    let work = async |seed: u64| {
        let mut round = seed;
        let worker = bed.session(LEASE * 60, &["k"]).await;
        while count.load(Ordering::Relaxed) < JOBS {
            round += 1;
            let taken = take(&worker, 5).await;
            let mut settlements = Vec::new();
            for job in &taken.run {
                let key = job.key.clone().expect("all have one").text;
                assert!(running.lock().expect("no panic").insert(key), "two at once");
            }
            tokio::task::yield_now().await;
            for job in taken.run {
                let key = job.key.clone().expect("all have one").text;
                assert!(running.lock().expect("no panic").remove(&key));
                if (job.lease.job.0 as u64 + round).is_multiple_of(5) {
                    settlements.push(settlement(&job, failed(job.counters, Duration::ZERO)));
                    continue;
                }
                done.lock().expect("no panic").entry(key).or_default().push(job.lease.job);
                count.fetch_add(1, Ordering::Relaxed);
                settlements.push(settlement(&job, completed()));
            }
            for job in taken.undecided {
                let release = jobq_core::lifecycle::release(job.counters);
                settlements.push(settlement(&job, release));
            }
            while !settlements.is_empty() {
                let settled = key::settle(&*bed.store, &settlements).await.expect("settles");
                let mut kept = settled.iter().map(|settled| *settled == Settled::Busy);
                settlements.retain(|_| kept.next().expect("one for each"));
            }
            pass_on_all_grants(&*bed.store).await.expect("looks");
        }
    };
    let everybody = join_all((0..6).map(work).collect());
    tokio::time::timeout(Duration::from_secs(90), everybody).await.expect("nobody is stuck");
    for (key, ids) in done.lock().expect("no panic").iter() {
        assert!(ids.is_sorted(), "{key}: {ids:?}");
    }
    until("nothing is left", async || bed.count("jobs").await == 0).await;
    assert_grants_are_right(&bed).await;
    assert_eq!(bed.count("key_grants").await, 0);
}
