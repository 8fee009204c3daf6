//! What PostgreSQL did for a statement, as it explains it.

use serde_json::Value;
use sqlx::postgres::PgConnection;
use sqlx::{ConnectOptions, Row};

use super::bed::Bed;
use crate::store::postgres::statements::own_options;

/// A statement with the types of its parameters.
#[derive(Clone, Copy)]
pub(crate) struct Statement {
    name: &'static str,
    pub(crate) types: &'static str,
    text: &'static str,
}

pub(crate) const fn statement(
    name: &'static str,
    types: &'static str,
    text: &'static str,
) -> Statement {
    Statement { name, types, text }
}

/// A connection like the runtime's own.
pub(crate) struct Server {
    pub(crate) connection: PgConnection,
    schema: String,
}

impl Server {
    pub(crate) async fn connect(bed: &Bed) -> Self {
        let options = own_options(&bed.postgres_pool().connect_options());
        let options = options.options([("statement_timeout", "120s")]);
        let connection = options.connect().await.expect("connects");
        Self { connection, schema: bed.schema.clone() }
    }

    pub(crate) async fn prepare(&mut self, statement: Statement) {
        let text = statement.text.replace("jobq.", &format!("{}.", self.schema));
        let prepare =
            format!("prepare {}{} as {text}", statement.name, in_brackets(statement.types));
        self.run(&prepare).await;
    }

    pub(crate) async fn run(&mut self, text: &str) {
        let text = text.replace("jobq.", &format!("{}.", self.schema));
        sqlx::raw_sql(sqlx::AssertSqlSafe(text)).execute(&mut self.connection).await.expect("runs");
    }

    /// Runs a prepared statement and says what it did.
    pub(crate) async fn explain(&mut self, name: &str, arguments: &str) -> Plan {
        let arguments = in_brackets(arguments);
        let text = format!("explain (analyze, buffers, format json) execute {name}{arguments}");
        let row = sqlx::query(sqlx::AssertSqlSafe(text)).fetch_one(&mut self.connection).await;
        let row = row.unwrap_or_else(|error| panic!("{name}: {error}"));
        let text: String = row.try_get_unchecked(0).expect("JSON is text");
        let plan: Value = serde_json::from_str(&text).expect("PostgreSQL writes JSON");
        Plan(plan[0]["Plan"].clone())
    }
}

/// Nothing if there are none.
fn in_brackets(list: &str) -> String {
    if list.is_empty() { String::new() } else { format!("({list})") }
}

/// What a statement did.
pub(crate) struct Plan(pub(crate) Value);

impl Plan {
    /// About how many rows were read from a table, those thrown away included: PostgreSQL gives
    /// averages of all loops, rounded before version 18.
    pub(crate) fn rows_read(&self, table: &str) -> f64 {
        let mut rows = 0.0;
        visit(&self.0, &mut |node| {
            let scans = node["Node Type"].as_str().is_some_and(|kind| kind.ends_with("Scan"));
            if scans && node["Relation Name"] == table {
                let number = |key: &str| node[key].as_f64().unwrap_or(0.0);
                rows += number("Actual Loops")
                    * (number("Actual Rows")
                        + number("Rows Removed by Filter")
                        + number("Rows Removed by Index Recheck"));
            }
        });
        rows
    }

    /// How many rows it gave back.
    pub(crate) fn rows_given(&self) -> f64 {
        self.0["Actual Rows"].as_f64().unwrap_or(0.0)
    }

    /// Every page that was looked at, of tables and indexes; the same one may count many times.
    fn pages(&self) -> f64 {
        ["Shared Hit Blocks", "Shared Read Blocks"]
            .iter()
            .map(|key| self.0[*key].as_f64().unwrap_or(0.0))
            .sum()
    }

    pub(crate) fn assert_reads_at_most(&self, what: &str, tables: &[(&str, f64)], pages: f64) {
        self.assert_leads_straight(what);
        for (table, rows) in tables {
            let read = self.rows_read(table);
            assert!(read <= *rows, "{what} read {read} rows of {table}, not {rows}: {:#}", self.0);
        }
        let looked_at = self.pages();
        assert!(
            looked_at <= pages,
            "{what} looked at {looked_at} pages, not {pages}: {:#}",
            self.0
        );
    }

    /// The due index has every column that jobs are asked for by, so while the table is empty it
    /// seems as good as any other. It is so only for what begins with its first columns.
    ///
    /// Looked at by itself: whatever others do on the server may make PostgreSQL plan anew, and
    /// then a bad plan is not there any more when the tables are full.
    fn assert_leads_straight(&self, what: &str) {
        visit(&self.0, &mut |node| {
            if node["Relation Name"] == "jobs" && node["Node Type"] == "Index Scan" {
                let condition = node["Index Cond"].as_str().unwrap_or("nothing");
                let begins = condition.contains("(queue = ") && condition.contains("(band = ");
                let straight = node["Index Name"] != "jobs_due" || begins;
                let somewhere = condition != "nothing";
                assert!(
                    straight && somewhere,
                    "{what} reads {} by {condition}",
                    node["Index Name"]
                );
            }
        });
    }
}

fn visit(node: &Value, seen: &mut impl FnMut(&Value)) {
    seen(node);
    for child in node["Plans"].as_array().into_iter().flatten() {
        visit(child, seen);
    }
}
