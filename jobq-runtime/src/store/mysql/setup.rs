//! Tables and start checks.

use std::collections::HashMap;

use jobq_migrations::{Dialect, all, needed};
use sqlx::Row;
use sqlx::mysql::MySqlConnection;

use super::{
    Checkout, Error, MysqlStore, Result, Schema, execute, get, is_set, literal, number, rows,
};
use crate::error::is_connection_loss;

/// The first versions with SKIP LOCKED, expressions as defaults, and checks that are not ignored.
const OLDEST_MYSQL: [u32; 3] = [8, 0, 16];
const OLDEST_MARIADB: [u32; 3] = [10, 6, 0];

/// What a server must take at once, in bytes: the largest payload, metadata and error text as
/// hexadecimal digits, with room to spare.
const PACKET: u64 = 8 * 1024 * 1024;

/// Every table that the runtime reads and writes.
const TABLES: [&str; 13] = [
    "jobq_jobs",
    "jobq_sessions",
    "jobq_closed_sessions",
    "jobq_attempts",
    "jobq_finished",
    "jobq_dead",
    "jobq_duties",
    "jobq_uniques",
    "jobq_key_grants",
    "jobq_pauses",
    "jobq_queue_limits",
    "jobq_queue_slots",
    "jobq_expiring",
];

impl MysqlStore {
    /// Applies the missing steps; processes that migrate at once take turns.
    ///
    /// Every statement commits by itself here, so a step can be begun anew.
    pub(super) async fn migrate(&self) -> Result<()> {
        let mut connection = self.connect("create or upgrade jobq's tables").await?;
        let server = server(&mut connection, &self.schema).await?;
        server.check_version()?;
        server.check_settings()?;
        self.migrate_on(&mut connection)
            .await
            .map_err(self.explain("create or upgrade jobq's tables"))?;
        connection.hand_back();
        Ok(())
    }

    async fn migrate_on(&self, connection: &mut Checkout) -> sqlx::Result<()> {
        // The name is the whole server's, and has at most 64 characters.
        let turn = format!(
            "sha2(concat(database(), ' jobq migrations ', {}), 224)",
            literal(self.schema.as_str())
        );
        let ask = format!("select coalesce(get_lock({turn}, 10), 0) as ours");
        let asked = rows(connection, &self.schema, &ask).await?;
        if !is_set(asked.first().ok_or(sqlx::Error::RowNotFound)?, "ours")? {
            let problem = "another process has been migrating for more than 10 s";
            return Err(sqlx::Error::Io(std::io::Error::new(
                std::io::ErrorKind::TimedOut,
                problem,
            )));
        }
        let found = version_on(connection, &self.schema).await?;
        for step in all(Dialect::Mysql).iter().filter(|step| step.version > found) {
            let apply = sqlx::AssertSqlSafe(step.sql(self.schema.as_str()));
            sqlx::raw_sql(apply).execute(&mut **connection).await?;
        }
        rows(connection, &self.schema, &format!("select release_lock({turn})")).await?;
        Ok(())
    }

    pub(super) async fn check(&self) -> Result<()> {
        let action = "check the server";
        let mut connection = self.connect(action).await?;
        let server = server(&mut connection, &self.schema).await?;
        server.check_version()?;
        server.check_settings()?;
        let found =
            version_on(&mut connection, &self.schema).await.map_err(self.explain(action))?;
        if found < needed(Dialect::Mysql) {
            return Err(Error::Schema { found, needed: needed(Dialect::Mysql) });
        }
        // Statements that write nothing, but need the rights of those that do.
        for table in TABLES {
            let probe = format!(
                "insert into {table} select * from {table} where 1 = 0;
                 delete from {table} where 1 = 0"
            );
            execute(&mut connection, &self.schema, &probe).await.map_err(self.explain(action))?;
        }
        for probe in [
            "update jobq_jobs set token = token where 1 = 0",
            "update jobq_sessions set lease = lease where 1 = 0",
            "update jobq_duties set notes = notes where 1 = 0",
            "update jobq_uniques set taken = taken where 1 = 0",
        ] {
            execute(&mut connection, &self.schema, probe).await.map_err(self.explain(action))?;
        }
        connection.hand_back();
        Ok(())
    }

    /// A connection of our own, or an error that names the server.
    async fn connect(&self, action: &'static str) -> Result<Checkout> {
        match self.own().await {
            Ok(connection) => Ok(connection),
            // A setting that a server older than any we know does not have.
            Err(source) if number(&source) == Some(UNKNOWN_VARIABLE) => {
                Err(Error::Unsupported { problem: format!("{source}; {CURE}") })
            }
            Err(source)
                if is_connection_loss(&source) || matches!(source, sqlx::Error::Database(_)) =>
            {
                Err(Error::Connect { url: self.address(), source })
            }
            Err(source) => Err(Error::Database { action, source }),
        }
    }

    /// Names what failed, and the cure where the error has one.
    fn explain(&self, action: &'static str) -> impl FnOnce(sqlx::Error) -> Error {
        let schema = self.schema.clone();
        move |source| match number(&source) {
            // To a database, a table, a column; to do this at all.
            Some(1044 | 1142 | 1143 | 1227 | 1370) => Error::Unsupported {
                problem: format!(
                    "{source}; grant the user select, insert, update and delete on the tables \
                     `{0}_…`, and to create them also create, drop, index, alter and create view",
                    schema.as_str()
                ),
            },
            // No database selected.
            Some(1046) => Error::Unsupported {
                problem: "the connection names no database; write \
                          \"mysql://user:password@host/database\""
                    .to_owned(),
            },
            _ => Error::Database { action, source },
        }
    }

    /// Where the server is, for messages: never the password.
    fn address(&self) -> String {
        let options = self.pool.connect_options();
        format!(
            "mysql://{}@{}:{}/{}",
            options.get_username(),
            options.get_host(),
            options.get_port(),
            options.get_database().unwrap_or_default()
        )
    }
}

const UNKNOWN_VARIABLE: u16 = 1193;

const CURE: &str = "jobq needs MySQL 8.0.16 or MariaDB 10.6, or newer";

/// What the start checks ask of the server.
struct Server {
    variables: HashMap<String, String>,
}

async fn server(connection: &mut MySqlConnection, schema: &Schema) -> Result<Server> {
    // Variables that a server does not have are simply not in the answer.
    let ask = "show global variables
         where variable_name in
             ('version', 'log_bin', 'binlog_format', 'read_only', 'innodb_read_only',
              'max_allowed_packet')";
    let action = Error::database("read the server's settings");
    let read = async {
        rows(connection, schema, ask)
            .await?
            .iter()
            .map(|row| Ok((row.try_get::<String, _>(0)?, row.try_get::<String, _>(1)?)))
            .collect::<sqlx::Result<_>>()
    };
    Ok(Server { variables: read.await.map_err(action)? })
}

impl Server {
    fn variable(&self, name: &str) -> &str {
        self.variables.get(name).map_or("", String::as_str)
    }

    fn check_version(&self) -> Result<()> {
        let version = self.variable("version");
        let (name, oldest) = if version.contains("MariaDB") {
            ("MariaDB", OLDEST_MARIADB)
        } else {
            ("MySQL", OLDEST_MYSQL)
        };
        if is_older(version, oldest) {
            return Err(Error::Unsupported { problem: format!("it is {name} {version}; {CURE}") });
        }
        Ok(())
    }

    fn check_settings(&self) -> Result<()> {
        let (log, format) = (self.variable("log_bin"), self.variable("binlog_format"));
        let problem = if log == "ON" && format == "STATEMENT" {
            "its binary log is written as statements, which takes no READ COMMITTED transactions \
             (error 1665); set `binlog_format = ROW` or `MIXED`"
        } else if !matches!(self.variable("read_only"), "" | "OFF" | "0")
            || self.variable("innodb_read_only") == "ON"
        {
            "it is read-only, as a replica is; connect to the primary"
        } else if self.variable("max_allowed_packet").parse().is_ok_and(|most: u64| most < PACKET) {
            "it takes no statement as large as a job can be; set `max_allowed_packet = 16M` or more"
        } else {
            return Ok(());
        };
        Err(Error::Unsupported { problem: problem.to_owned() })
    }
}

fn is_older(version: &str, than: [u32; 3]) -> bool {
    let mut parts = version
        .split(|c: char| !c.is_ascii_digit())
        .map(|part| part.parse().unwrap_or(0))
        .chain([0; 3]);
    [(); 3].map(|()| parts.next().unwrap_or(0)) < than
}

/// The version of the tables; 0 when there are none.
async fn version_on(connection: &mut MySqlConnection, schema: &Schema) -> sqlx::Result<i64> {
    let exists = rows(
        connection,
        schema,
        "select 1
         from information_schema.tables
         where table_schema = database() and table_name = 'jobq_migrations'",
    )
    .await?;
    if exists.is_empty() {
        return Ok(0);
    }
    let newest = "select coalesce(max(version), 0) as version from jobq_migrations";
    let found = rows(connection, schema, newest).await?;
    get(found.first().ok_or(sqlx::Error::RowNotFound)?, "version")
}

#[cfg(test)]
mod tests {
    use super::{OLDEST_MARIADB, OLDEST_MYSQL, Server, is_older};

    #[test]
    fn too_old_servers_are_told_by_their_version() {
        for (version, oldest, older) in [
            ("5.7.44-log", OLDEST_MYSQL, true),
            ("8.0.15", OLDEST_MYSQL, true),
            ("8.0.16", OLDEST_MYSQL, false),
            ("9.7.4-2", OLDEST_MYSQL, false),
            ("10.5.29-MariaDB-0+deb11u1", OLDEST_MARIADB, true),
            ("10.6.0-MariaDB", OLDEST_MARIADB, false),
            ("11.8.9-MariaDB", OLDEST_MARIADB, false),
            ("nonsense", OLDEST_MYSQL, true),
        ] {
            assert_eq!(is_older(version, oldest), older, "{version}");
        }
    }

    fn server(variables: &[(&str, &str)]) -> Server {
        let variables =
            variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Server { variables: variables.collect() }
    }

    #[test]
    fn what_cannot_work_names_the_cure() {
        for (variables, cure) in [
            (&[("version", "5.7.44")][..], "jobq needs MySQL 8.0.16"),
            (&[("version", "10.5.29-MariaDB")], "MariaDB 10.6"),
            (
                &[("version", "8.4.0"), ("log_bin", "ON"), ("binlog_format", "STATEMENT")],
                "binlog_format = ROW",
            ),
            (&[("version", "8.4.0"), ("read_only", "ON")], "connect to the primary"),
            (
                &[("version", "8.4.0"), ("max_allowed_packet", "4194304")],
                "max_allowed_packet = 16M",
            ),
        ] {
            let server = server(variables);
            let checked = server.check_version().and_then(|()| server.check_settings());
            let text = checked.expect_err("it cannot work").to_string();
            assert!(text.contains(cure), "{text}");
        }
    }

    #[test]
    fn a_statement_log_that_is_not_written_does_not_matter() {
        let server =
            server(&[("version", "8.4.0"), ("log_bin", "OFF"), ("binlog_format", "STATEMENT")]);
        server.check_version().and_then(|()| server.check_settings()).expect("it works");
    }
}
