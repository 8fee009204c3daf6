//! h, second part. Bloat: a queue while a transaction elsewhere is open.
//!
//! Rows are deleted when they are done. As long as somebody may still see them they are not gone: they
//! stay at the head of the index, and a claim that starts there passes by all of them. jobq's claims
//! carry a cursor: each goes on where the last one was.

use jobq::{JobContext, Runtime, State, job};

use crate::Result;
use crate::cost::pages;
use crate::effects::Effects;
use crate::report::{Report, ms};
use crate::server::{Product, Server};
use crate::session::Session;

/// How many rows a claim takes.
const LIMIT: u64 = 10;

/// How much longer a claim has to take before the time says anything.
const NOTICEABLE: f64 = 5.0;

/// The length of a payload.
const BYTES: usize = 1_000;

/// How a queue fared.
struct Drained {
    what: &'static str,
    held: bool,
    effects: Effects,
    /// Pages that a claim reads at first and at last.
    pages: Option<[i64; 2]>,
    /// SQLite's write-ahead log when half is done, and at the end.
    wal: [Option<u64>; 2],
}

impl Drained {
    fn meanwhile(&self) -> &'static str {
        if self.held { "a transaction held open" } else { "nothing" }
    }
}

pub(crate) async fn held_open(server: &Server, rows: u64, report: &Report) -> Result<()> {
    report.say(format!(
        "{rows} pending rows, each deleted when it is done, {LIMIT} at a time. Once without and once \
         with a transaction elsewhere that has read something and is still open:"
    ));
    let mut drained = Vec::new();
    for held in [false, true] {
        drained.push(drain_from_the_start(server, rows, held).await?);
    }
    for held in [false, true] {
        drained.push(drain_with_jobq(server, rows, held).await?);
    }
    show(server.product, &drained, report);

    let [free, held, _, jobq_held] = &drained[..] else { unreachable!("there are four") };
    for drained in &drained {
        let (done, twice) = (drained.effects.ids().len() as u64, drained.effects.twice());
        let what =
            format!("{}, meanwhile {}: all is done, once", drained.what, drained.meanwhile());
        report.expect(&what, format!("{done} rows, {twice} twice"), done == rows && twice == 0);
    }
    if let (Some([first, last]), Some([_, of_free])) = (held.pages, free.pages) {
        let what =
            "from the start: the more rows are done, the more a claim reads while they are held";
        let measured = format!("{first} pages, then {last}; {of_free} when nobody holds them");
        report.expect(what, measured, last > 2 * first);
    }
    if let [Some(half), Some(end)] = held.wal {
        let what = "SQLite keeps no dead rows in a table; while somebody reads, its log grows";
        report.expect(what, format!("{half} bytes, then {end}"), end > half);
    }
    let slowed = |drained: &Drained| {
        let [first, last] = drained.effects.first_and_last(LIMIT as usize);
        last.as_secs_f64() / first.as_secs_f64()
    };
    let (start, cursor) = (slowed(held), slowed(jobq_held));
    let measured = format!("from the start {start:.1} times as long, jobq {cursor:.1} times");
    if start >= NOTICEABLE {
        let what = "held open, a claim from the start takes longer and longer; jobq's, which go on where \
                    the last one was, do not";
        report.expect(what, measured, cursor < start / 2.0);
    } else {
        report.say(format!(
            "At last, held open: {measured}. From the start it has to be {NOTICEABLE} times at least to \
             be told from chance, so the times are not compared."
        ));
    }
    Ok(())
}

/// Writes the table.
fn show(product: Product, drained: &[Drained], report: &Report) {
    let cells = |drained: &Drained| {
        let [first, last] = drained.effects.first_and_last(LIMIT as usize).map(ms);
        [drained.what.to_owned(), drained.meanwhile().to_owned(), first, last]
    };
    if product == Product::Sqlite {
        let row = |drained: &Drained| {
            let [what, meanwhile, first, last] = cells(drained);
            let log = drained.wal[1].unwrap_or_default() as f64 / 1e6;
            [what, meanwhile, first, last, format!("{log:.1}")]
        };
        let rows: Vec<_> = drained.iter().map(row).collect();
        report.table(["claims", "meanwhile", "10 rows at first", "at last", "log, MB"], &rows);
    } else {
        let row = |drained: &Drained| {
            let [what, meanwhile, first, last] = cells(drained);
            let pages = drained.pages.map(|pages| pages.map(|pages| pages.to_string()));
            let [before, after] = pages.unwrap_or_else(|| ["—", "—"].map(str::to_owned));
            [what, meanwhile, first, last, before, after]
        };
        let rows: Vec<_> = drained.iter().map(row).collect();
        let headings =
            ["claims", "meanwhile", "10 rows at first", "at last", "pages of a claim", "at last"];
        report.table(headings, &rows);
    }
    report.say(
        "At first, at last: the median in the first tenth of the rows and in the last. Pages: what one \
         claim reads before the first row is done, and when nine tenths are. jobq's claims cannot be \
         told apart from its other statements, so their pages are not counted.",
    );
}

/// Holds a snapshot until it is dropped.
async fn hold(server: &Server) -> Result<Session> {
    let mut session = server.session("reader").await?;
    if server.product == Product::Sqlite {
        // So that what is in the log afterwards has been written afterwards.
        session.rows("pragma wal_checkpoint(truncate)").await?;
    }
    let begin = match server.product {
        Product::Postgres => "begin isolation level repeatable read",
        Product::Mysql | Product::Mariadb => "start transaction with consistent snapshot",
        Product::Sqlite => "begin",
    };
    session.run(begin).await?;
    session.number("select count(*) from numbers").await?;
    Ok(session)
}

/// A worker whose claims always start at the head of the index.
async fn drain_from_the_start(server: &Server, rows: u64, held: bool) -> Result<Drained> {
    let table = if held { "backlog_held" } else { "backlog" };
    let mut session = server.session("worker").await?;
    session.isolate("read committed").await?;
    session
        .run(&format!("create table {table} (id integer primary key, payload text not null)"))
        .await?;
    let payload = "x".repeat(BYTES);
    session
        .run(&format!("insert into {table} select n, '{payload}' from numbers where n <= {rows}"))
        .await?;
    session.analyze(table).await?;
    let reader = if held { Some(hold(server).await?) } else { None };

    let skip_locked = server.product.skip_locked();
    let claim = format!("select id from {table} order by id limit {LIMIT} {skip_locked}");
    let first = pages(&mut session, &claim).await?;
    let (mut last, mut half) = (None, None);
    let effects = Effects::default();
    for done in (0..rows).step_by(LIMIT as usize) {
        if done == rows / 2 / LIMIT * LIMIT {
            half = server.wal_bytes();
        }
        if done == rows / 10 * 9 / LIMIT * LIMIT {
            last = pages(&mut session, &claim).await?;
        }
        session.begin().await?;
        let ids = session.ids(&claim).await?;
        let list: Vec<String> = ids.iter().map(ToString::to_string).collect();
        session.run(&format!("delete from {table} where id in ({})", list.join(", "))).await?;
        session.commit().await?;
        for id in ids {
            effects.note(id);
        }
    }
    let wal = [half, server.wal_bytes()];
    drop(reader);
    let pages = first.zip(last).map(|(first, last)| [first, last]);
    Ok(Drained { what: "from the start", held, effects, pages, wal })
}

/// The same under jobq.
#[job(queue = "history", retention = "0s")]
async fn finish(payload: String, State(effects): State<Effects>, ctx: &JobContext) {
    let _ = payload;
    effects.note(ctx.id().0);
}

async fn drain_with_jobq(server: &Server, rows: u64, held: bool) -> Result<Drained> {
    let client = server.jobq(if held { "lab_h_held" } else { "lab_h" }).await?;
    let ids: Vec<u64> = (0..rows).collect();
    for ids in ids.chunks(5_000) {
        jobq::enqueue_many(&client, ids.iter().map(|_| finish::new("x".repeat(BYTES)))).await?;
    }
    let reader = if held { Some(hold(server).await?) } else { None };
    let effects = Effects::default();
    Runtime::new(client)
        .jobs(jobq::jobs![finish])
        .only_listed_jobs()
        .queue("history", LIMIT as usize)
        .state(effects.clone())
        .run_until_idle()
        .await?;
    let wal = [None, server.wal_bytes()];
    drop(reader);
    Ok(Drained { what: "jobq", held, effects, pages: None, wal })
}
