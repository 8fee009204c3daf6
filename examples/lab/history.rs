//! h. History: what finished rows cost that stay in the table.
//!
//! What does a claim have to read before it finds the pending ones? The second part, of rows that are
//! deleted and still not gone, is in `bloat`.

use crate::Result;
use crate::bloat::held_open;
use crate::cost::cost;
use crate::report::{Report, ms};
use crate::server::{Product, Server};
use crate::session::{Refused, Session};

/// How many rows are pending.
const PENDING: u64 = 100;

/// How many rows a claim takes.
const LIMIT: u64 = 10;

pub(crate) async fn run(server: &Server, rows: u64, report: &Report) -> Result<()> {
    kept_or_moved(server, rows, report).await?;
    held_open(server, (rows / 20).max(1_000), report).await
}

/// A table with its index, and whether finished rows stay in it.
struct Table {
    name: &'static str,
    what: &'static str,
    index: &'static str,
    keeps: bool,
}

const TABLES: [Table; 3] = [
    Table { name: "kept", what: "kept, index by time", index: "run_after, id", keeps: true },
    Table {
        name: "kept_state",
        what: "kept, index by state and time",
        index: "state, run_after, id",
        keeps: true,
    },
    Table { name: "moved", what: "moved out, index by time", index: "run_after, id", keeps: false },
];

async fn kept_or_moved(server: &Server, rows: u64, report: &Report) -> Result<()> {
    let mut session = server.session("claim").await?;
    // What is not wanted is unlocked again; at InnoDB's default level all of it would stay locked.
    session.isolate("read committed").await?;
    numbers(&mut session, rows).await?;
    report.say(format!(
        "{rows} finished rows, {PENDING} pending ones that are due after them, claims of {LIMIT}:"
    ));
    let mut measured = Vec::new();
    let mut shown = Vec::new();
    for Table { name, what, index, keeps } in TABLES {
        let before = size(&mut session, name).await?;
        session
            .run(&format!(
                "create table {name} (
                     id integer primary key,
                     state varchar(10) not null,
                     run_after bigint not null,
                     payload varchar(200) not null
                 )"
            ))
            .await?;
        let payload = "x".repeat(100);
        let finished = if keeps { rows } else { 0 };
        session
            .run(&format!(
                "insert into {name}
                 select n, case when n > {rows} then 'pending' else 'completed' end, n, '{payload}'
                 from numbers
                 where n <= {finished} or n > {rows}"
            ))
            .await?;
        session.run(&format!("create index {name}_due on {name} ({index})")).await?;
        session.analyze(name).await?;
        let cost = cost(&mut session, &claim(name, rows, server.product)).await?;
        let megabytes = (size(&mut session, name).await? - before) as f64 / 1e6;
        let read = cost.read.map_or("—".to_owned(), |read| read.to_string());
        let megabytes = format!("{megabytes:.1}");
        shown.push([what.to_owned(), cost.plan.clone(), read, ms(cost.took), megabytes]);
        measured.push(cost);
    }
    let unit = match server.product {
        Product::Postgres => "pages read",
        Product::Mysql | Product::Mariadb => "rows read",
        Product::Sqlite => "read",
    };
    report.table(["finished rows", "plan of a claim", unit, "a claim", "MB"], &shown);

    let [kept, by_state, moved] =
        measured.try_into().unwrap_or_else(|_| unreachable!("there are three"));
    if let (Some(kept), Some(by_state), Some(moved)) = (kept.read, by_state.read, moved.read) {
        let measured = format!("{kept} against {moved}");
        report.expect("kept, by time: a claim reads 20 times as much", measured, kept > 20 * moved);
        let measured = format!("{by_state} against {moved}");
        let what = "kept, by state: it reads about as much as if they were moved out";
        report.expect(what, measured, by_state <= 2 * moved + 20);
    } else {
        let measured = format!("{} against {}", ms(kept.took), ms(moved.took));
        report.expect(
            "kept, by time: a claim takes 5 times as long",
            measured,
            kept.took > 5 * moved.took,
        );
        let measured = format!("{} against {}", ms(by_state.took), ms(kept.took));
        report.expect("kept, by state: it does not", measured, by_state.took < kept.took);
    }
    report.say(
        "An index that begins with the state finds the pending rows at once. Its price is that each \
         change of a state is a change of the index, and that table and index keep growing. jobq's \
         table has unfinished jobs only, and no index of it contains what a claim changes.",
    );
    Ok(())
}

/// A table of the numbers from 1 on, to make rows of.
async fn numbers(session: &mut Session, rows: u64) -> Result<(), Refused> {
    session.run("create table numbers (n integer primary key)").await?;
    let digits: Vec<String> = (0..10).map(|digit| format!("select {digit} as d")).collect();
    let digits = digits.join(" union all ");
    let places = (rows + PENDING).to_string().len();
    let sum: Vec<String> =
        (0..places).map(|place| format!("d{place}.d * {}", 10_u64.pow(place as u32))).collect();
    let tables: Vec<String> = (0..places).map(|place| format!("digits d{place}")).collect();
    let (sum, tables) = (sum.join(" + "), tables.join(", "));
    let last = rows + PENDING;
    session
        .run(&format!(
            "insert into numbers
             with digits as ({digits})
             select {sum} from {tables} where {sum} between 1 and {last}"
        ))
        .await?;
    session.analyze("numbers").await
}

fn claim(table: &str, rows: u64, product: Product) -> String {
    let (now, skip_locked) = (rows + PENDING, product.skip_locked());
    format!(
        "select id from {table}
         where state = 'pending' and run_after <= {now}
         order by run_after, id
         limit {LIMIT}
         {skip_locked}"
    )
}

/// How large a table is, with its indexes; on SQLite, which does not tell, how large the file is.
async fn size(session: &mut Session, table: &str) -> Result<i64, Refused> {
    let size = match session.product {
        Product::Postgres => format!("select pg_total_relation_size(to_regclass('{table}'))"),
        Product::Mysql | Product::Mariadb => format!(
            "select data_length + index_length from information_schema.tables
             where table_schema = database() and table_name = '{table}'"
        ),
        Product::Sqlite => {
            "select page_count * page_size from pragma_page_count(), pragma_page_size()".to_owned()
        }
    };
    session.number(&size).await
}
