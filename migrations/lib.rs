//! The tables of jobq, as SQL for each database.
//!
//! The client's `migrate` applies these; print them to apply them yourself, each step in one
//! transaction. A step is complete: it makes what it needs, and notes that it was applied, so that
//! `migrate` finds nothing left to do. Steps are only ever added, and each keeps the previous
//! version's programs working.
//!
//! ```
//! use jobq_migrations::{Dialect, all};
//!
//! for step in all(Dialect::Postgres) {
//!     println!("{}", step.sql("jobq"));
//! }
//! ```
//!
//! The texts use jobq's default names: the schema `jobq` on PostgreSQL, the prefix `jobq_` on
//! MySQL, MariaDB and SQLite, where `now_us()` stands for the clock. [`Migration::sql`] puts in
//! other names.

/// A database that jobq has tables for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Dialect {
    /// PostgreSQL 15 or newer.
    Postgres,
    /// MySQL 8.0.16 or newer, and MariaDB 10.6 or newer.
    Mysql,
    /// SQLite 3.42 or newer.
    Sqlite,
}

/// One step from one version of the tables to the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Migration {
    /// The version of the tables after this step; the first is 1.
    pub version: i64,
    /// What the step is about.
    pub name: &'static str,
    dialect: Dialect,
    text: &'static str,
}

/// SQLite's clock in microseconds; it has milliseconds only.
pub const SQLITE_NOW: &str =
    "(cast(round((julianday('now') - 2440587.5) * 86400000) as integer) * 1000)";

/// The clock of MySQL and MariaDB in microseconds, whatever the time zone of server and session.
pub const MYSQL_NOW: &str = "(timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)))";

/// The same as of now and not of the statement's beginning: an insert may have waited for a lock on the
/// table, or for what it selects from. Both times are local. An hour that was left out in between is in
/// the first difference only; one that comes twice is, if at all, in the second.
pub const MYSQL_INSERT_NOW: &str = "(timestampdiff(microsecond, '1970-01-01', utc_timestamp(6)) \
     + greatest(least(timestampdiff(microsecond, now(6), sysdate(6)), \
         cast((unix_timestamp(sysdate(6)) - unix_timestamp(now(6))) * 1000000 as signed)), 0))";

impl Migration {
    /// The whole step with `schema` as the name of the schema or prefix, to be run in one
    /// transaction: its tables, and the row of the migrations table that says so. The first step
    /// makes the schema and the migrations table as well.
    pub fn sql(&self, schema: &str) -> String {
        match self.dialect {
            // The name may be a word of SQL.
            Dialect::Postgres => self.text.replace("jobq", &format!("\"{schema}\"")),
            Dialect::Mysql => self
                .text
                .replace("(now_us())", MYSQL_INSERT_NOW)
                .replace("jobq_", &format!("{schema}_")),
            Dialect::Sqlite => {
                self.text.replace("(now_us())", SQLITE_NOW).replace("jobq_", &format!("{schema}_"))
            }
        }
    }
}

/// Every step for a database, in order.
pub fn all(dialect: Dialect) -> &'static [Migration] {
    match dialect {
        Dialect::Postgres => &[
            Migration {
                version: 1,
                name: "jobs",
                dialect: Dialect::Postgres,
                text: include_str!("postgres/0001_jobs.sql"),
            },
            Migration {
                version: 2,
                name: "unique",
                dialect: Dialect::Postgres,
                text: include_str!("postgres/0002_unique.sql"),
            },
            Migration {
                version: 3,
                name: "keys",
                dialect: Dialect::Postgres,
                text: include_str!("postgres/0003_keys.sql"),
            },
            Migration {
                version: 4,
                name: "pauses",
                dialect: Dialect::Postgres,
                text: include_str!("postgres/0004_pauses.sql"),
            },
            Migration {
                version: 5,
                name: "limits",
                dialect: Dialect::Postgres,
                text: include_str!("postgres/0005_limits.sql"),
            },
            Migration {
                version: 6,
                name: "rules",
                dialect: Dialect::Postgres,
                text: include_str!("postgres/0006_rules.sql"),
            },
            Migration {
                version: 7,
                name: "expiry",
                dialect: Dialect::Postgres,
                text: include_str!("postgres/0007_expiry.sql"),
            },
        ],
        Dialect::Mysql => &[
            Migration {
                version: 1,
                name: "jobs",
                dialect: Dialect::Mysql,
                text: include_str!("mysql/0001_jobs.sql"),
            },
            Migration {
                version: 2,
                name: "unique",
                dialect: Dialect::Mysql,
                text: include_str!("mysql/0002_unique.sql"),
            },
            Migration {
                version: 3,
                name: "keys",
                dialect: Dialect::Mysql,
                text: include_str!("mysql/0003_keys.sql"),
            },
            Migration {
                version: 4,
                name: "pauses",
                dialect: Dialect::Mysql,
                text: include_str!("mysql/0004_pauses.sql"),
            },
            Migration {
                version: 5,
                name: "limits",
                dialect: Dialect::Mysql,
                text: include_str!("mysql/0005_limits.sql"),
            },
            Migration {
                version: 6,
                name: "expiry",
                dialect: Dialect::Mysql,
                text: include_str!("mysql/0006_expiry.sql"),
            },
        ],
        Dialect::Sqlite => &[
            Migration {
                version: 1,
                name: "jobs",
                dialect: Dialect::Sqlite,
                text: include_str!("sqlite/0001_jobs.sql"),
            },
            Migration {
                version: 2,
                name: "unique",
                dialect: Dialect::Sqlite,
                text: include_str!("sqlite/0002_unique.sql"),
            },
            Migration {
                version: 3,
                name: "keys",
                dialect: Dialect::Sqlite,
                text: include_str!("sqlite/0003_keys.sql"),
            },
            Migration {
                version: 4,
                name: "pauses",
                dialect: Dialect::Sqlite,
                text: include_str!("sqlite/0004_pauses.sql"),
            },
            Migration {
                version: 5,
                name: "limits",
                dialect: Dialect::Sqlite,
                text: include_str!("sqlite/0005_limits.sql"),
            },
            Migration {
                version: 6,
                name: "expiry",
                dialect: Dialect::Sqlite,
                text: include_str!("sqlite/0006_expiry.sql"),
            },
        ],
    }
}

/// The version of the tables that this version of jobq needs.
pub fn needed(dialect: Dialect) -> i64 {
    all(dialect).last().map_or(0, |migration| migration.version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_count_from_one_without_gaps() {
        for dialect in [Dialect::Postgres, Dialect::Mysql, Dialect::Sqlite] {
            let versions: Vec<i64> = all(dialect).iter().map(|step| step.version).collect();
            assert_eq!(versions, (1..=needed(dialect)).collect::<Vec<i64>>());
        }
    }

    #[test]
    fn a_step_ends_with_the_note_that_it_was_applied() {
        for (dialect, table) in [
            (Dialect::Postgres, "\"jobq\".migrations"),
            (Dialect::Mysql, "jobq_migrations"),
            (Dialect::Sqlite, "jobq_migrations"),
        ] {
            for step in all(dialect) {
                let note = format!(
                    "insert into {table} (version, name) values ({}, '{}');\n",
                    step.version, step.name
                );
                assert!(step.sql("jobq").ends_with(&note), "step {}", step.version);
            }
        }
    }

    #[test]
    fn another_name_leaves_nothing_of_the_default() {
        for dialect in [Dialect::Postgres, Dialect::Mysql, Dialect::Sqlite] {
            for step in all(dialect) {
                let sql = step.sql("billing");
                assert!(!sql.contains("jobq"), "{sql}");
                assert!(!sql.contains("now_us()") || sql.contains("-- now_us()"), "{sql}");
            }
        }
    }
}
