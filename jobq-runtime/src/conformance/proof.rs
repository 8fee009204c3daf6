//! What the sweep has proved, its duty, and pruning.

use jobq_core::time::Timestamp;

use super::bed::{Bed, LEASE, RETENTION, on_pool};
use super::late::{at, pass, publish};
use super::settle::{buried, completed, failed};
use super::wait::join_all;
use super::worker::{Worker, job, settlement};
use crate::store::{CancelReply, DeadFilter, Settled, Settlement};
use crate::sweep::{DUTY, Notes, proven_floors};

const SPAN: std::time::Duration = std::time::Duration::from_secs(9);

/// Lets the time pass that a proof needs: the mark is three seconds old, and nothing else changes.
async fn let_time_pass(bed: &Bed, notes: &mut Notes) {
    let now = bed.now().await;
    if let Some((time, _)) = &mut notes.mark {
        *time = (*time).min(now - 3_000_000);
    }
}

/// Passes until something is proved: that waits for every transaction of the server to end, those
/// of other cases included.
async fn pass_until_proved(bed: &Bed, workers: &[&Worker<'_>], notes: &mut Notes) {
    let before = notes.proven;
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while notes.proven == before {
        assert!(std::time::Instant::now() < end, "nothing was ever proved: {notes:?}");
        let_time_pass(bed, notes).await;
        for worker in workers {
            publish(bed, worker, at(bed, 0).await).await;
        }
        pass(bed, notes).await;
    }
}

/// No proven floor may have a pending job at or before it.
async fn assert_sound(bed: &Bed, notes: &Notes) {
    let pending = bed.rows("jobs", "where leased_by = 0").await;
    for known in &notes.floors {
        for row in &pending {
            let same = row.number("band") == i64::from(known.band);
            let place = (Timestamp(row.number("run_after")), row.number("id"));
            let floor = (known.floor.run_after, known.floor.id);
            assert!(!same || place > floor, "{row:?} is below the proven {floor:?}");
        }
    }
}

pub(super) async fn e1_a_proven_floor_has_no_pending_job_below_it(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    let slow = bed.session(LEASE, &["slow"]).await;
    let mut notes = Notes::default();
    for round in 0..12 {
        let mut jobs = Vec::new();
        for kind in ["k", "slow", "stranger"] {
            for priority in [0, 2] {
                let mut job = job(kind);
                job.priority = priority;
                jobs.push(job);
            }
        }
        bed.enqueue(jobs).await;
        if round % 3 == 0 {
            let past = bed.seconds_away(-3);
            bed.execute(&format!("update jobq.jobs set run_after = {past} where kind = 'k'")).await;
        }
        publish(&bed, &worker, at(&bed, 0).await).await;
        publish(&bed, &slow, at(&bed, -6).await).await;
        let before = notes.floors.clone();
        pass(&bed, &mut notes).await;
        assert_sound(&bed, &notes).await;
        for known in &before {
            let now = notes
                .floors
                .iter()
                .find(|floor| (&floor.queue, floor.band) == (&known.queue, known.band));
            let now = now.expect("no band is forgotten");
            assert!(now.floor >= known.floor, "a floor never goes back by itself");
        }
        let_time_pass(&bed, &mut notes).await;
        for job in worker.claim(2).await {
            bed.settle(job.lease, failed(job.counters, std::time::Duration::ZERO)).await;
        }
        assert_sound(&bed, &notes).await;
    }
    let before = notes.floors.clone();
    pass_until_proved(&bed, &[&worker, &slow], &mut notes).await;
    assert!(notes.floors.iter().zip(&before).any(|(now, before)| now.floor > before.floor));
    assert_sound(&bed, &notes).await;
}

pub(super) async fn e1_a_worker_begins_where_nothing_is_left_behind(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    assert!(proven_floors(&*bed.store).await.expect("reads").is_empty());
    let mut notes = Notes::default();
    pass_until_proved(&bed, &[&worker], &mut notes).await;
    assert!(bed.store.take_duty(DUTY, worker.id, SPAN).await.expect("takes").is_some());
    let text = serde_json::to_string(&notes).expect("JSON");
    bed.store.note_duty(DUTY, worker.id, &text).await.expect("notes");
    let floors = proven_floors(&*bed.store).await.expect("reads");
    assert_eq!(floors, notes.floors);
    assert!(floors.iter().any(|known| known.floor.run_after > Timestamp(0)));
    bed.execute("update jobq.duties set notes = '{not json'").await;
    assert!(
        proven_floors(&*bed.store).await.expect("reads").is_empty(),
        "that is no reason to stop"
    );
}

/// Restored or failed over, the database may have another clock and other transactions.
pub(super) async fn e1_when_the_clock_steps_back_everything_is_looked_through(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    let mut before = Notes::default();
    pass_until_proved(&bed, &[&worker], &mut before).await;
    let hour = bed.now().await + 3_600_000_000;
    let far = at(&bed, 3_600).await;
    let mut ahead = before.clone();
    ahead.floors.iter_mut().for_each(|known| known.floor = far);
    let stepped = [
        Notes { proven: Some(hour), ..ahead.clone() },
        Notes { mark: Some((hour, 0)), ..ahead.clone() },
        Notes { mark: Some((0, i64::MAX)), ..ahead.clone() },
        Notes { whole_at: hour, ..ahead.clone() },
        Notes { whole_at: 0, ..ahead },
    ];
    for mut notes in stepped {
        let id = bed.one().await;
        let past = bed.seconds_away(-600);
        bed.execute(&format!("update jobq.jobs set run_after = {past} where id = {id}")).await;
        pass(&bed, &mut notes).await;
        assert!(notes.floors.iter().all(|known| known.floor < far), "{notes:?}");
        assert_sound(&bed, &notes).await;
        assert!(notes.whole_at <= bed.now().await);
        assert_eq!(worker.claim_one().await.lease.job, id);
    }
}

pub(super) async fn f6_now_and_then_the_sweep_looks_for_orphans(bed: Bed) {
    bed.one().await;
    bed.session(LEASE, &["k"]).await.claim_one().await;
    bed.execute("delete from jobq.sessions").await;
    let mut notes = Notes { whole_at: bed.now().await, ..Notes::default() };
    pass(&bed, &mut notes).await;
    let running = "select count(*) from jobq.jobs where leased_by <> 0";
    assert_eq!(bed.number(running).await, 1, "not with every pass");
    notes.whole_at -= 601_000_000;
    pass(&bed, &mut notes).await;
    assert_eq!(bed.number(running).await, 0);
}

/// A transaction that is still open may yet show jobs of its own time.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) async fn e1_nothing_is_proved_while_an_older_transaction_is_open(bed: Bed) {
    use super::sample::plain;

    let worker = bed.session(LEASE, &["k"]).await;
    let mut notes = Notes::default();
    publish(&bed, &worker, at(&bed, 0).await).await;
    pass(&bed, &mut notes).await;
    super::bed::on_pool!(bed, pool => {
        let mut slow = pool.begin().await.expect("begins");
        let id = plain().enqueue(bed.client.within(&mut slow)).await.expect("enqueues").id();
        // It has been open for a minute.
        let minute_ago = bed.seconds_away(-60);
        let late = format!("update jobq.jobs set run_after = {minute_ago} where id = {id}");
        sqlx::query(bed.statement(&late)).execute(&mut *slow).await.expect("writes");
        let begun = bed.now().await - 60_000_000;
        // A mark from after the insert cannot be proved, however old it becomes.
        notes.mark = None;
        for _ in 0..4 {
            publish(&bed, &worker, at(&bed, 0).await).await;
            pass(&bed, &mut notes).await;
            let_time_pass(&bed, &mut notes).await;
            assert!(notes.proven.is_none_or(|proven| proven < begun));
        }
        slow.commit().await.expect("commits");
        assert_sound(&bed, &notes).await;
        pass_until_proved(&bed, &[&worker], &mut notes).await;
        assert_sound(&bed, &notes).await;
        assert_eq!(worker.claim_one().await.lease.job, id);
    });
}

pub(super) async fn d2_one_of_many_has_a_duty_and_keeps_it(bed: Bed) {
    let mut workers = Vec::new();
    for _ in 0..8 {
        workers.push(bed.session(LEASE, &["k"]).await.id);
    }
    let mut holder = workers[0];
    // Each time nobody has had it before.
    for name in ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "test"] {
        let asked: Vec<_> = workers
            .iter()
            .map(|id| async { bed.store.take_duty(name, *id, SPAN).await.expect("asks") })
            .collect();
        let notes = join_all(asked).await;
        let holders: Vec<_> = workers
            .iter()
            .zip(&notes)
            .filter(|(_, notes)| notes.is_some())
            .map(|(id, _)| *id)
            .collect();
        let [one] = holders[..] else { panic!("{} have it", holders.len()) };
        holder = one;
    }
    let other = workers.iter().copied().find(|id| *id != holder).expect("there are eight");

    bed.store.note_duty("test", holder, "mine").await.expect("notes");
    bed.store.note_duty("test", other, "not mine").await.expect("notes");
    assert_eq!(bed.store.duty_notes("test").await.expect("reads"), "mine");
    let take = |id| bed.store.take_duty("test", id, SPAN);
    assert_eq!(take(holder).await.expect("asks").as_deref(), Some("mine"));
    assert_eq!(take(other).await.expect("asks"), None);

    let past = bed.seconds_away(-1);
    bed.execute(&format!("update jobq.duties set held_until = {past}")).await;
    assert_eq!(take(other).await.expect("asks").as_deref(), Some("mine"), "its notes go with it");
    assert_eq!(take(holder).await.expect("asks"), None);
    bed.store.note_duty("test", holder, "too late").await.expect("notes");
    assert_eq!(bed.store.duty_notes("test").await.expect("reads"), "mine");
    assert_eq!(bed.store.duty_notes("unheard of").await.expect("reads"), "");
}

/// The duty is free when it is asked for and somebody else's once the lock on it is had.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(super) async fn d2_a_duty_that_was_waited_for_is_whose_it_has_become(bed: Bed) {
    let (first, second) =
        (bed.session(LEASE, &["k"]).await.id, bed.session(LEASE, &["k"]).await.id);
    bed.store.take_duty("test", first, SPAN).await.expect("asks").expect("it is free");
    let past = bed.seconds_away(-1);
    bed.execute(&format!("update jobq.duties set held_until = {past}")).await;
    let away = bed.seconds_away(SPAN.as_secs() as i64);
    let take_again = bed.statement(&format!("update jobq.duties set held_until = {away}"));
    on_pool!(bed, pool => {
        let mut tx = pool.begin_with(bed.begin()).await.expect("begins");
        let lock = bed.statement("select name from jobq.duties for update");
        sqlx::query(lock).fetch_all(&mut *tx).await.expect("locks");
        let store = bed.store.clone();
        let asks = tokio::spawn(async move { store.take_duty("test", second, SPAN).await });
        bed.until_one_waits_for_a_lock().await;
        sqlx::query(take_again).execute(&mut *tx).await.expect("writes");
        tx.commit().await.expect("commits");
        assert_eq!(asks.await.expect("no panic").expect("asks"), None);
    });
}

/// Makes finished jobs look as if their time were over.
async fn let_expire(bed: &Bed, up_to: i64) {
    let past = bed.seconds_away(-1);
    bed.execute(&format!("update jobq.finished set expires_at = {past} where id <= {up_to}")).await;
}

pub(super) async fn d2_only_what_has_expired_is_pruned_and_only_so_much(bed: Bed) {
    let ids = bed.enqueue((0..30).map(|_| job("k")).collect()).await;
    let worker = bed.session(LEASE, &["k"]).await;
    let jobs = worker.claim(30).await;
    let batch: Vec<Settlement> =
        jobs.iter().map(|job| settlement(job.lease, completed())).collect();
    bed.settle_all(&batch).await;
    assert_eq!(bed.store.prune(100).await.expect("prunes"), 0);
    let_expire(&bed, ids[24].0).await;
    let prune = || async { bed.store.prune(10).await.expect("prunes") };
    assert_eq!((prune().await, prune().await, prune().await, prune().await), (10, 10, 5, 0));
    assert_eq!(bed.count("finished").await, 5);
    assert!(bed.row("finished", ids[25]).await.is_some());
}

/// Attempts go with their job, by whatever way it came to its end; those of others stay.
pub(super) async fn d2_a_pruned_jobs_attempts_are_pruned_with_it(bed: Bed) {
    let worker = bed.session(LEASE, &["k"]).await;
    let claim = || worker.claim_one();
    let no_delay = std::time::Duration::ZERO;
    // Failed once and then completed.
    bed.one().await;
    let job = claim().await;
    bed.settle(job.lease, failed(job.counters, no_delay)).await;
    let job = claim().await;
    assert_eq!(bed.settle(job.lease, completed()).await, Settled::Written);
    // Died, was redriven, and completed at the first attempt.
    let id = bed.one().await;
    let job = claim().await;
    bed.settle(job.lease, buried(job.counters)).await;
    bed.client.redrive(&DeadFilter::id(id)).await.expect("redrives");
    let job = claim().await;
    assert_eq!(bed.settle(job.lease, completed()).await, Settled::Written);
    // Failed once and was cancelled while it waited.
    let id = bed.one().await;
    let job = claim().await;
    bed.settle(job.lease, failed(job.counters, RETENTION)).await;
    assert_eq!(bed.client.cancel(id).await.expect("cancels"), CancelReply::Cancelled);
    // Died: dead letters are kept until somebody deals with them.
    let dead = bed.one().await;
    let job = claim().await;
    bed.settle(job.lease, buried(job.counters)).await;

    assert_eq!((bed.count("finished").await, bed.count("attempts").await), (3, 4));
    let_expire(&bed, i64::MAX).await;
    assert_eq!(bed.store.prune(100).await.expect("prunes"), 3);
    let left = bed.number("select min(job_id) from jobq.attempts").await;
    assert_eq!((bed.count("attempts").await, left), (1, dead.0));
    assert_eq!(bed.count("dead").await, 1);
}
