//! c, second part. What it means to keep a transaction open for as long as a job takes.

use std::time::{Duration, Instant};

use tokio::time::sleep;

use crate::Result;
use crate::observer::{Observer, Waits};
use crate::queue::{Locked, Queue};
use crate::report::{Report, ms};
use crate::server::{Product, Server};
use crate::session::{Refused, Why};
use crate::throughput::WORKERS;

/// How long the jobs take.
const JOB: Duration = Duration::from_millis(1_200);

/// What was seen while the jobs ran.
struct Seen {
    at_work: usize,
    waits: Waits,
    /// Somebody else changes a row that nobody has claimed.
    write: Result<(), Refused>,
    after: Duration,
}

impl Seen {
    fn write(&self) -> String {
        match &self.write {
            Ok(()) => format!("done after {}", ms(self.after)),
            Err(refused) => format!("refused after {}: {refused}", ms(self.after)),
        }
    }
}

pub(crate) async fn long_jobs(server: &Server, report: &Report) -> Result<()> {
    report.say(format!(
        "{WORKERS} jobs of {}, inside the claiming transaction and outside of it:",
        ms(JOB)
    ));
    let inside = jobs(server, Queue { table: "rows_long_inside" }, true).await?;
    let outside = jobs(server, Queue { table: "rows_long_outside" }, false).await?;

    let row = |way: &str, seen: &Seen| {
        let waits = &seen.waits;
        let oldest = waits.open.map_or("—".to_owned(), |_| ms(waits.oldest));
        let open = waits.open.map_or("—".to_owned(), |open| format!("{open:.2}"));
        [way.to_owned(), seen.at_work.to_string(), open, oldest, seen.write()]
    };
    let headings =
        ["jobs run", "at work", "in a transaction", "oldest transaction", "another's write"];
    report.table(headings, &[row("inside", &inside), row("outside", &outside)]);

    if server.product == Product::Sqlite {
        let what = "inside, one job is at work, and every other writer is kept out";
        let measured = format!("{}; a write is {}", inside.at_work, inside.write());
        report.expect(what, measured, inside.at_work == 1 && inside.write.is_err());
        let what = "outside, all are at work, and others write";
        let measured = format!("{}; a write is {}", outside.at_work, outside.write());
        report.expect(what, measured, outside.at_work == WORKERS && outside.write.is_ok());
    } else {
        let open = |seen: &Seen| seen.waits.open.unwrap_or_default();
        let what = "inside, each job keeps a connection in a transaction all the time";
        let measured = format!("{:.2} on average", open(&inside));
        report.expect(what, measured, open(&inside) > WORKERS as f64 - 1.0);
        let measured = format!("{:.2} on average", open(&outside));
        report.expect("outside, hardly ever one does", measured, open(&outside) < 1.0);
        let what = "inside, the oldest transaction is as old as the job";
        let oldest = inside.waits.oldest;
        report.expect(what, ms(oldest), oldest + Duration::from_millis(300) > JOB);
    }
    Ok(())
}

/// Lets as many jobs run at once as can be claimed.
async fn jobs(server: &Server, queue: Queue, inside: bool) -> Result<Seen> {
    let mut other = server.session("other").await?;
    let rows = 2 * WORKERS as u64;
    queue.create(&mut other, rows).await?;
    other.wait_at_most(1).await?;
    let mut working = Vec::new();
    for _ in 0..WORKERS {
        let mut session = server.session("worker").await?;
        session.isolate("read committed").await?;
        if server.product == Product::Sqlite {
            session.wait_at_most(0).await?;
        }
        let claimed = if inside {
            match session.begin().await {
                Ok(()) => queue.lock(&mut session, Locked::Skip, 1).await?,
                // On SQLite the first one has it all.
                Err(Refused { why: Why::Locked, .. }) => Vec::new(),
                Err(refused) => return Err(refused.into()),
            }
        } else {
            queue.claim(&mut session, Locked::Skip, 1).await?
        };
        if !claimed.is_empty() {
            working.push(session);
        }
    }
    let observer = Observer::start(server).await?;
    let began = Instant::now();
    let write = queue.set(&mut other, rows as i64, "completed").await;
    let after = began.elapsed();
    sleep(JOB.saturating_sub(after)).await;
    let waits = observer.stop().await?;
    let at_work = working.len();
    if inside {
        for mut session in working {
            session.commit().await?;
        }
    }
    Ok(Seen { at_work, waits, write, after })
}
