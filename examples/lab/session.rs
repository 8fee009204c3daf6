//! One connection to the server, spoken to in plain SQL.
//!
//! Everything is text, on every database: statements go as they are written, rows come back as
//! words, and a refusal carries the code that the server gave.

use std::fmt;
use std::time::Duration;

use sqlx::mysql::{MySqlConnection, MySqlDatabaseError};
use sqlx::{
    AssertSqlSafe, ColumnIndex, Decode, Executor, PgConnection, Row, SqliteConnection, Type,
};

use crate::server::Product;

/// A connection, named as in the timeline.
pub(crate) struct Session {
    pub(crate) name: &'static str,
    pub(crate) product: Product,
    connection: Connection,
}

pub(crate) enum Connection {
    Postgres(PgConnection),
    Mysql(MySqlConnection),
    Sqlite(SqliteConnection),
}

/// A statement that the server refused.
#[derive(Debug, Clone)]
pub(crate) struct Refused {
    /// The server's own code for it: an SQLSTATE on PostgreSQL, an error number elsewhere.
    pub(crate) code: String,
    pub(crate) message: String,
    pub(crate) why: Why,
}

/// What a refusal means for whoever is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
    /// Somebody else holds a lock; the transaction goes on.
    Locked,
    /// The transaction was chosen to end a deadlock, or cannot go on for a reason like it.
    Deadlock,
    /// A unique key has this value already.
    Duplicate,
    /// An earlier statement of the transaction failed.
    Aborted,
    Other,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.code, self.message)
    }
}

impl std::error::Error for Refused {}

impl Refused {
    fn new(error: &sqlx::Error) -> Self {
        let Some(database) = error.as_database_error() else {
            return Self { code: "-".to_owned(), message: error.to_string(), why: Why::Other };
        };
        let code = match database.try_downcast_ref::<MySqlDatabaseError>() {
            Some(error) => error.number().to_string(),
            None => database.code().unwrap_or_default().into_owned(),
        };
        let why = match &*code {
            // MySQL, MariaDB: a wait that took too long, NOWAIT. PostgreSQL: both. SQLite: busy.
            "1205" | "3572" | "55P03" | "5" => Why::Locked,
            // The last is SQLite's: somebody has written since this transaction began to read.
            "1213" | "40P01" | "517" => Why::Deadlock,
            "25P02" => Why::Aborted,
            _ if database.is_unique_violation() => Why::Duplicate,
            _ => Why::Other,
        };
        Self { code, message: database.message().to_owned(), why }
    }
}

/// Does the same on the connection, whichever it is.
macro_rules! on {
    ($session:expr, $connection:ident => $does:expr) => {
        match &mut $session.connection {
            Connection::Postgres($connection) => $does,
            Connection::Mysql($connection) => $does,
            Connection::Sqlite($connection) => $does,
        }
    };
}

impl Session {
    pub(crate) fn new(name: &'static str, product: Product, connection: Connection) -> Self {
        Self { name, product, connection }
    }

    /// Runs a statement; returns how many rows it changed.
    pub(crate) async fn run(&mut self, sql: &str) -> Result<u64, Refused> {
        let statement = sqlx::raw_sql(AssertSqlSafe(sql.to_owned()));
        let done = on!(self, connection => {
            connection.execute(statement).await.map(|done| done.rows_affected())
        });
        done.map_err(|error| Refused::new(&error))
    }

    /// Runs a query; returns its rows, each a list of words.
    pub(crate) async fn rows(&mut self, sql: &str) -> Result<Vec<Vec<String>>, Refused> {
        let statement = sqlx::raw_sql(AssertSqlSafe(sql.to_owned()));
        let rows = on!(self, connection => {
            connection.fetch_all(statement).await.and_then(|rows| rows.iter().map(words).collect())
        });
        rows.map_err(|error| Refused::new(&error))
    }

    /// The numbers in the first column of a query.
    pub(crate) async fn ids(&mut self, sql: &str) -> Result<Vec<i64>, Refused> {
        let rows = self.rows(sql).await?;
        Ok(rows.iter().filter_map(|row| row.first()?.parse().ok()).collect())
    }

    /// The one number that a query answers with; 0 if it has no answer.
    pub(crate) async fn number(&mut self, sql: &str) -> Result<i64, Refused> {
        Ok(self.ids(sql).await?.first().copied().unwrap_or_default())
    }

    /// The one word that a query answers with.
    pub(crate) async fn word(&mut self, sql: &str) -> Result<String, Refused> {
        let row = self.rows(sql).await?.into_iter().next();
        Ok(row.and_then(|row| row.into_iter().next()).unwrap_or_default())
    }

    /// Begins a transaction that is going to write. SQLite has one lock, for all of the file, and
    /// whoever is going to need it should take it at once.
    pub(crate) async fn begin(&mut self) -> Result<(), Refused> {
        let begin = if self.product == Product::Sqlite { "begin immediate" } else { "begin" };
        self.run(begin).await.map(drop)
    }

    pub(crate) async fn commit(&mut self) -> Result<(), Refused> {
        self.run("commit").await.map(drop)
    }

    pub(crate) async fn rollback(&mut self) -> Result<(), Refused> {
        self.run("rollback").await.map(drop)
    }

    /// How long statements wait for a lock: whole seconds, as MySQL counts, and from one second on,
    /// but for SQLite, where 0 is not to wait.
    pub(crate) async fn wait_at_most(&mut self, seconds: u32) -> Result<(), Refused> {
        let sql = match self.product {
            Product::Postgres => format!("set lock_timeout = '{seconds}s'"),
            Product::Mysql | Product::Mariadb => {
                format!("set session innodb_lock_wait_timeout = {seconds}")
            }
            Product::Sqlite => format!("pragma busy_timeout = {seconds}000"),
        };
        self.run(&sql).await.map(drop)
    }

    /// The isolation level of the transactions to come. SQLite has one only.
    pub(crate) async fn isolate(&mut self, level: &str) -> Result<(), Refused> {
        let sql = match self.product {
            Product::Postgres => {
                format!("set session characteristics as transaction isolation level {level}")
            }
            Product::Mysql | Product::Mariadb => {
                format!("set session transaction isolation level {level}")
            }
            Product::Sqlite => return Ok(()),
        };
        self.run(&sql).await.map(drop)
    }

    /// Refreshes what the planner knows about a table.
    pub(crate) async fn analyze(&mut self, table: &str) -> Result<(), Refused> {
        let sql = if self.product.is_innodb() { "analyze table" } else { "analyze" };
        self.rows(&format!("{sql} {table}")).await.map(drop)
    }

    /// Enqueues a job of jobq on this connection: in its open transaction, if there is one.
    pub(crate) async fn enqueue(&mut self, job: jobq::NewJob) -> jobq::Result<jobq::JobId> {
        let enqueued = on!(self, connection => job.enqueue(connection).await?);
        Ok(enqueued.id())
    }
}

/// Waits a random time below `most`: the jitter of whoever tries again.
pub(crate) async fn pause(most: Duration) {
    use std::hash::{BuildHasher, RandomState};
    // Each is made with keys of its own.
    let random = RandomState::new().hash_one(0) as f64 / u64::MAX as f64;
    tokio::time::sleep(most.mul_f64(random)).await;
}

/// A row's values as words, "" for null.
fn words<R: Row>(row: &R) -> sqlx::Result<Vec<String>>
where
    usize: ColumnIndex<R>,
    for<'r> Option<String>: Decode<'r, R::Database> + Type<R::Database>,
{
    let value = |n| row.try_get_unchecked::<Option<String>, _>(n).map(Option::unwrap_or_default);
    (0..row.len()).map(value).collect()
}
