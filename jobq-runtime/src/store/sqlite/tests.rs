use super::*;
use crate::job::CheckedDue;
use crate::store::*;
use jobq_core::job::*;
use jobq_core::lifecycle::Transition;
use sqlx::sqlite::*;
use std::collections::HashSet;
use std::time::{Duration, Instant};

fn job(n: usize) -> CheckedJob {
    CheckedJob {
        kind: "resize".into(),
        queue: "default".into(),
        payload: format!("{{\"n\":{n},\"text\":\"{}\"}}", "x".repeat(100)),
        due: CheckedDue::After(Duration::ZERO),
        priority: 0,
        max_attempts: 20,
        max_crashes: 3,
        tags: vec![],
        metadata: None,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore]
async fn bench() {
    for sync in [SqliteSynchronous::Normal, SqliteSynchronous::Full] {
        for batch in [1u32, 10, 100, 200] {
            let dir = tempfile::tempdir().unwrap();
            let options = SqliteConnectOptions::new()
                .filename(dir.path().join("jobs.db"))
                .create_if_missing(true)
                .synchronous(sync);
            let pool = SqlitePoolOptions::new().connect_lazy_with(options);
            let store = SqliteStore::new(&pool, Schema::default()).unwrap();
            store.migrate().await.unwrap();
            store.check().await.unwrap();
            let total = match batch {
                1 => 2000,
                10 => 10_000,
                _ => 50_000,
            };
            let t = Instant::now();
            for chunk in 0..total / 1000 {
                store.insert((0..1000).map(|n| job(chunk * 1000 + n)).collect()).await.unwrap();
            }
            let ins = t.elapsed();
            let session = SessionId(7);
            store
                .open_session(&NewSession {
                    id: session,
                    worker: "w".into(),
                    lease: Duration::from_secs(600),
                    kinds: vec!["resize".into()],
                    queues: vec!["default".into()],
                })
                .await
                .unwrap();
            let t = Instant::now();
            let (mut c, mut s) = (Duration::ZERO, Duration::ZERO);
            let mut done = 0;
            loop {
                let a = Instant::now();
                let claimed = store
                    .claim(&Claim {
                        kinds: (0..20)
                            .map(|n| {
                                (
                                    if n == 19 { "resize".to_owned() } else { format!("kind{n}") },
                                    session,
                                )
                            })
                            .collect(),
                        queues: vec![QueueClaim {
                            queue: "default".into(),
                            limit: batch,
                            floors: jobq_core::queue::bands().map(|b| (b, Floor::START)).collect(),
                        }],
                    })
                    .await
                    .unwrap();
                c += a.elapsed();
                if claimed.jobs.is_empty() {
                    break;
                }
                done += claimed.jobs.len();
                let settlements: Vec<_> = claimed
                    .jobs
                    .iter()
                    .map(|j| Settlement {
                        lease: j.lease,
                        transition: Transition::Complete { result: None },
                        retention: DEFAULT_RETENTION,
                        doubtful: false,
                    })
                    .collect();
                let a = Instant::now();
                let settled = store.settle(&settlements).await.unwrap();
                s += a.elapsed();
                assert!(settled.iter().all(|s| *s == Settled::Written));
            }
            let e = t.elapsed();
            let n = (done as u32).div_ceil(batch);
            println!(
                "{sync:?} batch {batch}: insert {:.0}/s, claim+settle {:.0} jobs/s; claim {:?} settle {:?} per op",
                total as f64 / ins.as_secs_f64(),
                done as f64 / e.as_secs_f64(),
                c / n,
                s / n
            );
        }
    }
}
