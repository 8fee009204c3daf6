//! e. Gap locks: a claim that keeps producers waiting.
//!
//! A claims the pending rows. At REPEATABLE READ, InnoDB's default, what A has read must not change
//! until A ends, not even by rows that appear: so A locks the gaps between the rows too, up to the end
//! of the index. A producer that inserts a row, which no claim has ever seen, lands in such a gap, and
//! waits. At READ COMMITTED only the rows are locked.

use std::time::{Duration, Instant};

use crate::Result;
use crate::queue::{Locked, Queue};
use crate::report::{self, Report, ms};
use crate::server::{Product, Server};
use crate::session::{Refused, Session, Why};

/// How long the producer waits at most, in seconds.
const PATIENCE: u32 = 1;

/// When the server is asked who waits: in the middle of it.
const MEANWHILE: Duration = Duration::from_millis(500);

const QUEUE: Queue = Queue { table: "rows_e" };

const LEVELS: [&str; 2] = ["repeatable read", "read committed"];

/// How the producer fared.
struct Insert {
    inserted: Result<u64, Refused>,
    after: Duration,
}

impl Insert {
    fn was_done_at_once(&self) -> bool {
        self.inserted.is_ok() && self.after.as_secs_f64() < 0.5 * f64::from(PATIENCE)
    }

    fn waited_in_vain(&self) -> bool {
        let locked = matches!(self.inserted, Err(Refused { why: Why::Locked, .. }));
        locked && self.after.as_secs_f64() > 0.9 * f64::from(PATIENCE)
    }

    fn outcome(&self) -> String {
        match &self.inserted {
            Ok(_) => format!("done after {}", ms(self.after)),
            Err(refused) => format!("refused after {}: {refused}", ms(self.after)),
        }
    }
}

pub(crate) async fn run(server: &Server, report: &Report) -> Result<()> {
    let [mut a, mut b, mut c] = server.sessions(["A", "B", "C"]).await?;
    QUEUE.create(&mut a, 5).await?;
    b.wait_at_most(PATIENCE).await?;
    if server.product == Product::Sqlite {
        return one_writer(&mut a, &mut b, report).await;
    }

    let mut rows = Vec::new();
    let mut inserts = Vec::new();
    for (level, new) in LEVELS.into_iter().zip(6..) {
        a.isolate(level).await?;
        a.begin().await?;
        let claimed = QUEUE.lock(&mut a, Locked::Skip, 10).await?;
        report.did("A", format!("begins at {level} and claims rows {}", report::ids(&claimed)));

        let (insert, seen) = tokio::join!(insert(&mut b, new), locks(&mut c));
        let (outcome, seen) = (insert.outcome(), seen?);
        report.did("B", format!("inserts row {new}: {outcome}"));
        report.did("C", format!("asked the server meanwhile: {seen}"));
        a.commit().await?;
        report.did("A", "commits");

        rows.push([level.to_owned(), report::ids(&claimed), outcome, seen]);
        inserts.push(insert);
    }
    report.table(["A's level", "A claims", "B's insert", "locks, says the server"], &rows);

    for (level, insert) in LEVELS.iter().zip(&inserts) {
        if server.product.is_innodb() && *level == "repeatable read" {
            let what = format!("at {level} the producer waits {PATIENCE} s and fails with 1205");
            let refused = insert.inserted.as_ref().err();
            let holds = insert.waited_in_vain() && refused.is_some_and(|it| it.code == "1205");
            report.expect(&what, insert.outcome(), holds);
        } else {
            let what = format!("at {level} the producer does not wait");
            report.expect(&what, insert.outcome(), insert.was_done_at_once());
        }
    }
    if server.product == Product::Postgres {
        report.say(
            "PostgreSQL locks no gaps: it has other means to keep a transaction from seeing new rows.",
        );
    }
    Ok(())
}

/// The producer adds a row.
async fn insert(session: &mut Session, id: u64) -> Insert {
    let began = Instant::now();
    let inserted = session.run(&format!("insert into rows_e (id) values ({id})")).await;
    Insert { inserted, after: began.elapsed() }
}

/// What the server says about locks while a producer may be waiting.
async fn locks(session: &mut Session) -> Result<String, Refused> {
    tokio::time::sleep(MEANWHILE).await;
    let waiting = session
        .number(match session.product {
            Product::Postgres => "select count(*) from pg_locks where not granted",
            _ => "select count(*) from information_schema.innodb_trx where trx_state = 'LOCK WAIT'",
        })
        .await?;
    // MySQL shows each lock that is held, and whether on the record alone.
    let gaps = match session.product {
        Product::Mysql => {
            let gaps = session
                .number(
                    "select count(*)
                     from performance_schema.data_locks
                     where object_schema = database()
                       and object_name = 'rows_e'
                       and lock_type = 'RECORD'
                       and lock_status = 'GRANTED'
                       and lock_mode not like '%REC_NOT_GAP%'",
                )
                .await?;
            format!("{gaps} on gaps, ")
        }
        _ => String::new(),
    };
    Ok(format!("{gaps}{waiting} waited for"))
}

/// SQLite has one lock for the file.
async fn one_writer(a: &mut Session, b: &mut Session, report: &Report) -> Result<()> {
    report.say(
        "SQLite has neither levels nor gaps to lock: while A is in a writing transaction, nobody else \
         writes anything.",
    );
    a.begin().await?;
    let claimed = QUEUE.lock(a, Locked::Wait, 10).await?;
    report.did("A", format!("begins immediately and claims rows {}", report::ids(&claimed)));
    let during = insert(b, 6).await;
    report.did("B", format!("inserts row 6: {}", during.outcome()));
    a.commit().await?;
    report.did("A", "commits");
    let after = insert(b, 6).await;
    report.did("B", format!("inserts row 6: {}", after.outcome()));

    let row = |when: &str, insert: &Insert| [when.to_owned(), insert.outcome()];
    let rows = [row("while A is in its transaction", &during), row("after A's commit", &after)];
    report.table(["", "B's insert"], &rows);
    let what = format!("the producer waits {PATIENCE} s for the one writer, then is busy (5)");
    report.expect(&what, during.outcome(), during.waited_in_vain());
    report.expect("after A's commit it does not wait", after.outcome(), after.was_done_at_once());
    Ok(())
}
