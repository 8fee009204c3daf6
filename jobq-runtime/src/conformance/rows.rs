//! Rows as they are stored, whole: to compare them, and to look at a column by name.

use serde_json::{Map, Value};

use super::bed::{Bed, Database};

/// A row: times in microseconds, truth as 0 or 1, on every database.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Row(Map<String, Value>);

impl Row {
    /// A number, time or truth value.
    pub(crate) fn number(&self, column: &str) -> i64 {
        self.value(column).as_i64().unwrap_or_else(|| panic!("{column} is no number: {self:?}"))
    }

    pub(crate) fn text(&self, column: &str) -> &str {
        self.value(column).as_str().unwrap_or_else(|| panic!("{column} is no text: {self:?}"))
    }

    pub(crate) fn is_null(&self, column: &str) -> bool {
        self.value(column).is_null()
    }

    fn value(&self, column: &str) -> &Value {
        self.0.get(column).unwrap_or_else(|| panic!("no column {column} in {self:?}"))
    }

    /// The columns in which two rows differ, in alphabetical order.
    pub(crate) fn changed(&self, after: &Self) -> Vec<String> {
        let mut changed: Vec<String> = self
            .0
            .iter()
            .filter(|(column, value)| after.0.get(*column) != Some(value))
            .map(|(column, _)| column.clone())
            .collect();
        changed.sort_unstable();
        changed
    }

    /// Whether every column that both rows have is equal, these aside.
    pub(crate) fn agrees(&self, other: &Self, except: &[&str]) {
        for (column, value) in &self.0 {
            if let Some(theirs) = other.0.get(column) {
                assert!(
                    theirs == value || except.contains(&column.as_str()),
                    "{column} was {value} and became {theirs}"
                );
            }
        }
    }
}

impl Bed {
    /// The row of a table with this id.
    pub(crate) async fn row(&self, table: &str, id: impl std::fmt::Display) -> Option<Row> {
        self.rows(table, &format!("where id = {id}")).await.pop()
    }

    /// The row of an unfinished job.
    pub(crate) async fn job_row(&self, id: impl std::fmt::Display) -> Row {
        self.row("jobs", id).await.expect("the job is unfinished")
    }

    /// The kept attempts of a job, oldest first.
    pub(crate) async fn attempts(&self, id: impl std::fmt::Display) -> Vec<Row> {
        self.rows("attempts", &format!("where job_id = {id} order by token")).await
    }

    /// Everything a database holds about a job, to see that nothing changed.
    pub(crate) async fn everything(&self, id: impl std::fmt::Display) -> Vec<Vec<Row>> {
        let mut all = Vec::new();
        for table in ["jobs", "finished", "dead"] {
            all.push(self.rows(table, &format!("where id = {id}")).await);
        }
        all.push(self.attempts(&id).await);
        all
    }

    /// Rows of a table.
    pub(crate) async fn rows(&self, table: &str, rest: &str) -> Vec<Row> {
        let columns = self.columns(table).await;
        let columns = columns.join(", ");
        let row = if self.is_sqlite() {
            format!("json_object({columns})")
        } else if self.is_mysql() {
            format!("cast(json_object({columns}) as char)")
        } else {
            format!("json_build_object({columns})::text")
        };
        let text = format!("select {row} from jobq.{table} {rest}");
        self.texts(&text)
            .await
            .iter()
            .map(|text| Row(serde_json::from_str(text).expect("the database writes JSON")))
            .collect()
    }

    /// A table's columns as arguments of a function that makes a JSON object.
    async fn columns(&self, table: &str) -> Vec<String> {
        let columns: Vec<(String, String)> = match &self.database {
            #[cfg(feature = "postgres")]
            Database::Postgres(pool) => sqlx::query_as(
                "select column_name::text, data_type::text from information_schema.columns
                 where table_schema = $1 and table_name = $2 order by ordinal_position",
            )
            .bind(&self.schema)
            .bind(table)
            .fetch_all(pool)
            .await
            .expect("columns can be listed"),
            #[cfg(feature = "mysql")]
            Database::Mysql(pool) => sqlx::query_as(
                "select cast(column_name as char), '' from information_schema.columns
                 where table_schema = database() and table_name = ? order by ordinal_position",
            )
            .bind(format!("{}_{table}", self.schema))
            .fetch_all(pool)
            .await
            .expect("columns can be listed"),
            #[cfg(feature = "sqlite")]
            Database::Sqlite(pool) => sqlx::query_as(sqlx::AssertSqlSafe(format!(
                "select name, '' from pragma_table_info('{}_{table}')",
                self.schema
            )))
            .fetch_all(pool)
            .await
            .expect("columns can be listed"),
        };
        columns
            .into_iter()
            .map(|(name, kind)| match &*kind {
                "bytea" => format!("'{name}', encode({name}, 'hex')"),
                _ if name == "unique_key" && !self.is_postgres() => {
                    format!("'{name}', case when {name} is not null then hex({name}) end")
                }
                _ if name == "job_key" && self.is_mysql() => {
                    format!("'{name}', convert({name} using utf8mb4)")
                }
                "timestamp with time zone" => format!(
                    "'{name}', case when {name} is null then null
                         when isfinite({name})
                         then (extract(epoch from {name}) * 1000000)::int8
                         when {name} = 'infinity' then 9223372036854775807
                         else -9223372036854775808 end"
                ),
                "interval" => format!("'{name}', (extract(epoch from {name}) * 1000000)::int8"),
                "boolean" => format!("'{name}', {name}::int"),
                _ => format!("'{name}', {name}"),
            })
            .collect()
    }
}
