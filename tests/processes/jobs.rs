//! The jobs that worker processes run, and the worker process itself.

use std::time::Duration;

use jobq::{JobContext, Runtime, State, job};

use crate::bed::{Db, on_pool};

type Fallible = Result<(), Box<dyn std::error::Error + Send + Sync>>;

/// Writes an effect exactly once: in the transaction that completes the job.
#[job(lease = "2s", max_attempts = 50)]
pub(crate) async fn effect(pause_ms: u64, State(db): State<Db>, ctx: &JobContext) -> Fallible {
    db.log(ctx, "start").await?;
    tokio::time::sleep(Duration::from_millis(pause_ms)).await;
    write_effect(&db, ctx).await
}

/// Writes an effect after its gate was opened; a plain function, which nothing can drop.
#[job(lease = "2s", max_attempts = 50)]
pub(crate) fn late_effect(gate: String, State(db): State<Db>, ctx: &JobContext) -> Fallible {
    let runtime = tokio::runtime::Handle::current();
    runtime.block_on(db.log(ctx, "start"))?;
    runtime.block_on(wait_for_gate(&db, &gate));
    let written = runtime.block_on(write_effect(&db, ctx));
    let word = match &written {
        Ok(()) => "written",
        Err(error) if error.to_string().contains("lease was lost") => "refused",
        Err(_) => "failed",
    };
    runtime.block_on(db.log(ctx, word))?;
    written
}

/// Keeps the transaction that completes it open until there is a file; makes another when it is.
#[job(lease = "2s", max_attempts = 50)]
pub(crate) async fn held_open(
    gate: String,
    isolation: String,
    State(db): State<Db>,
    ctx: &JobContext,
) -> Fallible {
    // Outside the transaction, and before it: while it is open nobody else can write to SQLite.
    db.log(ctx, "start").await?;
    let insert = format!("insert into effects values ({}, 'held open')", ctx.id());
    on_pool!(&db, pool => {
        let mut tx = pool.begin_with(db.begin_at(&isolation)).await?;
        sqlx::query(sqlx::AssertSqlSafe(insert)).execute(&mut *tx).await?;
        ctx.complete_in(&mut tx).await?;
        std::fs::write(format!("{gate}.open"), "")?;
        while !std::path::Path::new(&gate).exists() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        tx.commit().await?;
    });
    Ok(())
}

/// One of a chain: its completion, its effect and the next job are one transaction.
#[job(lease = "2s", max_attempts = 50, backoff(base = "1ms", cap = "50ms"))]
pub(crate) async fn link(
    left: u32,
    isolation: String,
    State(db): State<Db>,
    ctx: &JobContext,
) -> Fallible {
    db.log(ctx, "start").await?;
    let insert = format!("insert into effects values ({}, 'link')", ctx.id());
    on_pool!(&db, pool => {
        let mut tx = pool.begin_with(db.begin_at(&isolation)).await?;
        ctx.complete_in(&mut tx).await?;
        sqlx::query(sqlx::AssertSqlSafe(insert)).execute(&mut *tx).await?;
        if left > 1 {
            link::enqueue(&mut tx, left - 1, isolation).await?;
        }
        tx.commit().await?;
    });
    Ok(())
}

/// Blocks a thread of the runtime, as no async function should.
#[job(lease = "2s", max_attempts = 50)]
pub(crate) async fn hog(seconds: u64, State(db): State<Db>, ctx: &JobContext) -> Fallible {
    db.log(ctx, "start").await?;
    std::thread::sleep(Duration::from_secs(seconds));
    write_effect(&db, ctx).await
}

/// Waits until it is told to stop, or for ever.
#[job(lease = "10s", max_attempts = 5)]
pub(crate) async fn patient(obedient: bool, State(db): State<Db>, ctx: &JobContext) -> Fallible {
    db.log(ctx, "start").await?;
    if obedient {
        ctx.cancelled().await;
        db.log(ctx, "told").await?;
        return Err("told to stop".into());
    }
    std::future::pending().await
}

/// Does nothing, in order.
#[job(lease = "2s")]
pub(crate) async fn quick(n: i64, State(db): State<Db>, ctx: &JobContext) -> Fallible {
    let _ = n;
    db.log(ctx, "start").await?;
    Ok(())
}

/// Does nothing, with a lease that a busy machine does not outlast.
#[job(lease = "30s")]
pub(crate) async fn counted(State(db): State<Db>, ctx: &JobContext) -> Fallible {
    db.log(ctx, "start").await?;
    Ok(())
}

/// One of a line: jobs of one line run one at a time. Some attempts fail, and some snooze.
#[job(lease = crate::keys::LEASE, max_attempts = 1_000, key = line, backoff(base = "1ms", cap = "20ms"))]
pub(crate) async fn in_line(line: i64, State(db): State<Db>, ctx: &JobContext) -> Fallible {
    let log = async |is_start: u8| {
        let (id, token) = (ctx.id(), ctx.token());
        let insert = format!(
            "insert into line_log (line, job_id, token, is_start)
             values ({line}, {id}, {token}, {is_start})"
        );
        db.execute(&insert).await
    };
    log(1).await?;
    let dice = (ctx.id().0 * 31 + ctx.token().0 * 17) % 10;
    tokio::time::sleep(Duration::from_millis(dice.unsigned_abs())).await;
    log(0).await?;
    match dice {
        0 | 1 => Err("it is to fail".into()),
        2 => Err(jobq::snooze(Duration::from_millis(20)).into()),
        _ => Ok(()),
    }
}

/// Runs for a moment.
#[job(lease = "2s", max_crashes = 100, max_attempts = 100)]
pub(crate) async fn brief(n: i64) {
    tokio::time::sleep(Duration::from_millis(20 + n.unsigned_abs() % 40)).await;
}

/// Does nothing at all.
#[job]
pub(crate) async fn instant(n: i64) {
    let _ = n;
}

/// Kills its own process.
#[job(lease = "1s", max_attempts = 50, max_crashes = 3)]
pub(crate) async fn poison(State(db): State<Db>, ctx: &JobContext) -> Fallible {
    db.log(ctx, "start").await?;
    std::process::abort();
}

/// Completes first: a worker that lost its lease is told so, and not that the effect is there.
async fn write_effect(db: &Db, ctx: &JobContext) -> Fallible {
    let worker = std::env::var("JOBQ_WORKER_NAME").unwrap_or_default();
    let insert = format!("insert into effects values ({}, '{worker}')", ctx.id());
    on_pool!(db, pool => {
        let mut tx = pool.begin_with(db.begin()).await?;
        ctx.complete_in(&mut tx).await?;
        sqlx::query(sqlx::AssertSqlSafe(insert)).execute(&mut *tx).await?;
        tx.commit().await?;
    });
    Ok(())
}

async fn wait_for_gate(db: &Db, gate: &str) {
    let sql = format!("select count(*) from gates where name = '{gate}'");
    while db.number(&sql).await == 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The `main` of a worker process; as a test of its own it does nothing.
#[test]
fn worker_process() {
    let Ok(url) = std::env::var("JOBQ_WORKER_URL") else { return };
    let setting = |name: &str, default: u64| {
        std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
    };
    let threads = setting("JOBQ_WORKER_THREADS", 2) as usize;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .enable_all()
        .build()
        .expect("a runtime");
    let code = runtime.block_on(async {
        let client = jobq::Client::connect(&url).await.expect("the database can be reached");
        let db = Db::connect(&url, setting("JOBQ_WORKER_POOL", 8) as u32).await;
        let worker = Runtime::new(client)
            .name(std::env::var("JOBQ_WORKER_NAME").unwrap_or_default())
            .state(db)
            .queue("default", setting("JOBQ_WORKER_SLOTS", 20) as usize)
            .queue("elsewhere", 1)
            .only_queues([std::env::var("JOBQ_WORKER_QUEUE").unwrap_or("default".to_owned())])
            .shutdown_timeout(Duration::from_millis(setting("JOBQ_WORKER_SHUTDOWN_MS", 5_000)));
        let ended = worker.run().await.expect("a worker that started does not fail");
        println!("{ended:?}");
        i32::from(!ended.is_clean())
    });
    runtime.shutdown_background();
    // The harness would report success whatever happened.
    std::process::exit(code);
}
