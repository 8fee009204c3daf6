//! a. Three ways to ask for a row that somebody has locked.
//!
//! A locks the first row and keeps its transaction open. B asks for the first row, in three ways:
//! it waits, it fails, or it takes the next one.

use std::time::{Duration, Instant};

use crate::Result;
use crate::queue::{Locked, Queue};
use crate::report::{self, Report, ms};
use crate::server::{Product, Server};
use crate::session::{Refused, Session};

/// How long B waits at most, in seconds.
const PATIENCE: u32 = 1;

const QUEUE: Queue = Queue { table: "rows_a" };

/// What B was told, and after how long.
struct Answer<T> {
    told: Result<T, Refused>,
    after: Duration,
}

impl<T> Answer<T> {
    /// Waits for an answer.
    async fn to(question: impl Future<Output = Result<T, Refused>>) -> Self {
        let asked = Instant::now();
        Self { told: question.await, after: asked.elapsed() }
    }

    fn was_refused_with(&self, code: &str) -> bool {
        self.told.as_ref().is_err_and(|refused| refused.code == code)
    }

    fn waited(&self) -> bool {
        self.after.as_secs_f64() > 0.9 * f64::from(PATIENCE)
    }

    fn came_at_once(&self) -> bool {
        self.after.as_secs_f64() < 0.5 * f64::from(PATIENCE)
    }

    /// The error, if it is one.
    fn error(&self) -> String {
        self.told.as_ref().err().map_or_else(String::new, Refused::to_string)
    }
}

impl Answer<Vec<i64>> {
    fn got(&self) -> String {
        self.told.as_ref().map_or_else(|_| "nothing".to_owned(), |ids| rows(ids))
    }
}

pub(crate) async fn run(server: &Server, report: &Report) -> Result<()> {
    let [mut a, mut b] = server.sessions(["A", "B"]).await?;
    QUEUE.create(&mut a, 3).await?;
    b.wait_at_most(PATIENCE).await?;
    if server.product == Product::Sqlite {
        return one_lock(&mut a, &mut b, report).await;
    }

    a.begin().await?;
    let first = QUEUE.lock(&mut a, Locked::Skip, 1).await?;
    report.did("A", format!("begins, asks with skip locked, and gets {}", rows(&first)));
    let mut answers = Vec::new();
    for locked in [Locked::Skip, Locked::Wait, Locked::Fail] {
        b.begin().await?;
        let answer = Answer::to(QUEUE.lock(&mut b, locked, 1)).await;
        b.rollback().await?;
        let (got, after, error) = (answer.got(), ms(answer.after), answer.error());
        report.did("B", format!("asks with {}: {got} after {after} {error}", locked.sql()));
        answers.push((locked, answer));
    }
    a.commit().await?;
    report.did("A", "commits: the lock is gone, and nothing in the row says that it was there");
    let after = QUEUE.lock(&mut b, Locked::Wait, 1).await?;
    report.did("B", format!("asks with for update: {}", rows(&after)));

    let table: Vec<_> = answers
        .iter()
        .map(|(locked, answer)| {
            [locked.sql().to_owned(), answer.got(), ms(answer.after), answer.error()]
        })
        .collect();
    report.table(["B asks with", "gets", "after", "error"], &table);

    let (timeout, nowait) = match server.product {
        Product::Postgres => ("55P03", "55P03"),
        Product::Mariadb => ("1205", "1205"),
        _ => ("1205", "3572"),
    };
    report.expect("skip locked gives A row 1", rows(&first), first == [1]);
    for (locked, answer) in &answers {
        let (what, holds) = match locked {
            Locked::Skip => (
                "skip locked gives B row 2 at once".to_owned(),
                matches!(answer.told.as_deref(), Ok([2])) && answer.came_at_once(),
            ),
            Locked::Wait => (
                format!("for update waits {PATIENCE} s, then fails with {timeout}"),
                answer.was_refused_with(timeout) && answer.waited(),
            ),
            Locked::Fail => (
                format!("nowait fails at once with {nowait}"),
                answer.was_refused_with(nowait) && answer.came_at_once(),
            ),
        };
        let measured = match &answer.told {
            Ok(ids) => rows(ids),
            Err(refused) => refused.code.clone(),
        };
        report.expect(&what, format!("{measured} after {}", ms(answer.after)), holds);
    }
    report.expect("after A's commit B gets row 1", rows(&after), after == [1]);
    Ok(())
}

/// SQLite has one lock, for the whole file: there is no row to skip.
async fn one_lock(a: &mut Session, b: &mut Session, report: &Report) -> Result<()> {
    report.say(
        "SQLite locks no rows. There is one lock for the file, of whoever writes: `begin immediate` \
         takes it. So there is nothing to skip, and the language has no words for it.",
    );
    let skip = b.ids("select id from rows_a order by id limit 1 for update skip locked").await;
    let skip = Answer { told: skip, after: Duration::ZERO };
    report.did("B", format!("asks with skip locked: {}", skip.error()));
    a.begin().await?;
    let first = QUEUE.lock(a, Locked::Wait, 1).await?;
    report.did("A", format!("begins immediately, and reads {}", rows(&first)));
    let read = QUEUE.lock(b, Locked::Wait, 1).await?;
    report.did("B", format!("reads {} all the same: readers wait for nobody", rows(&read)));

    let wait = Answer::to(b.begin()).await;
    report.did("B", format!("begins immediately: {} after {}", wait.error(), ms(wait.after)));
    b.wait_at_most(0).await?;
    let fail = Answer::to(b.begin()).await;
    report.did("B", format!("does so without waiting: {} after {}", fail.error(), ms(fail.after)));
    a.commit().await?;
    report.did("A", "commits");
    let after = Answer::to(b.begin()).await;
    report.did("B", "begins immediately, and is the writer");

    let row = |way: &str, answer: &Answer<()>| [way.to_owned(), ms(answer.after), answer.error()];
    report.table(
        ["B", "after", "error"],
        &[
            row("begin immediate", &wait),
            row("begin immediate, without waiting", &fail),
            row("begin immediate, after A's commit", &after),
        ],
    );
    report.expect("skip locked is not understood", skip.error(), skip.was_refused_with("1"));
    report.expect("B can read what A works on", rows(&read), read == first);
    let measured = |answer: &Answer<()>| format!("{} after {}", answer.error(), ms(answer.after));
    let what = format!("a second writer waits {PATIENCE} s, then is busy (5)");
    report.expect(&what, measured(&wait), wait.was_refused_with("5") && wait.waited());
    let holds = fail.was_refused_with("5") && fail.came_at_once();
    report.expect("without waiting it is busy at once", measured(&fail), holds);
    let what = "after A's commit B is the writer";
    report.expect(what, format!("after {}", ms(after.after)), after.told.is_ok());
    Ok(())
}

fn rows(ids: &[i64]) -> String {
    if ids.is_empty() { "nothing".to_owned() } else { format!("row {}", report::ids(ids)) }
}
