//! Somebody who asks the server, again and again, who waits for a lock and who is in a transaction.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::sleep;

use crate::Result;
use crate::server::{Product, Server};
use crate::session::{Refused, Session};

/// What the server says about locks and transactions.
#[derive(Clone, Copy, Default)]
pub(crate) struct Waits {
    /// How often a row lock was waited for, where it is counted.
    pub(crate) counted: Option<i64>,
    /// The mean number of sessions that wait for a row lock, and that are in a transaction.
    pub(crate) waiting: Option<f64>,
    pub(crate) open: Option<f64>,
    /// The age of the oldest transaction seen; InnoDB counts in whole seconds.
    pub(crate) oldest: Duration,
}

/// Looks at the server from a connection of its own.
pub(crate) struct Observer {
    stop: Arc<AtomicBool>,
    looks: tokio::task::JoinHandle<Result<Waits>>,
}

impl Observer {
    pub(crate) async fn start(server: &Server) -> Result<Self> {
        let mut session = server.session("observer").await?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let looks = tokio::spawn(async move { look(&mut session, &stopped).await });
        Ok(Self { stop, looks })
    }

    pub(crate) async fn stop(self) -> Result<Waits> {
        self.stop.store(true, Ordering::Relaxed);
        self.looks.await?
    }
}

async fn look(session: &mut Session, stopped: &AtomicBool) -> Result<Waits> {
    // PostgreSQL shows each session; whoever waits for a row waits for the transaction that has it, or
    // for a turn to do so. InnoDB shows each transaction, from a copy that is renewed ten times a second.
    let (sessions, every) = match session.product {
        Product::Postgres => (
            "select count(*),
                    count(*) filter (where wait_event_type = 'Lock'
                                       and wait_event in ('transactionid', 'tuple')),
                    cast(coalesce(max(extract(epoch from clock_timestamp() - xact_start)), 0) * 1000
                         as bigint)
             from pg_stat_activity
             where datname = current_database()
               and pid <> pg_backend_pid()
               and xact_start is not null
               and backend_type = 'client backend'",
            Duration::from_millis(10),
        ),
        Product::Mysql | Product::Mariadb => (
            "select count(*),
                    coalesce(sum(trx_state = 'LOCK WAIT'), 0),
                    coalesce(max(timestampdiff(second, trx_started, now())), 0) * 1000
             from information_schema.innodb_trx
             join information_schema.processlist on id = trx_mysql_thread_id
             where db = database()",
            Duration::from_millis(100),
        ),
        Product::Sqlite => return Ok(Waits::default()),
    };
    let before = lock_waits(session).await?;
    let (mut looks, mut open, mut waiting) = (0, 0, 0);
    let mut seen = Waits::default();
    while !stopped.load(Ordering::Relaxed) {
        let row = session.rows(sessions).await?.into_iter().next().unwrap_or_default();
        let number = |n: usize| row.get(n).and_then(|word| word.parse::<i64>().ok()).unwrap_or(0);
        looks += 1;
        open += number(0);
        waiting += number(1);
        seen.oldest = seen.oldest.max(Duration::from_millis(number(2).max(0).unsigned_abs()));
        sleep(every).await;
    }
    let mean = |sum: i64| Some(sum as f64 / f64::from(looks.max(1)));
    seen.open = mean(open);
    seen.waiting = mean(waiting);
    if let (Some(before), Some(after)) = (before, lock_waits(session).await?) {
        seen.counted = Some(after - before);
    }
    Ok(seen)
}

/// How often a row lock has been waited for since the server was started, where it counts.
async fn lock_waits(session: &mut Session) -> Result<Option<i64>, Refused> {
    if !session.product.is_innodb() {
        return Ok(None);
    }
    let row = session.rows("show global status like 'Innodb_row_lock_waits'").await?;
    Ok(row.first().and_then(|row| row.get(1)?.parse().ok()))
}
