//! The server, and the lab's own database on it.

use std::str::FromStr;
use std::time::Duration;

use jobq::{BoxError, Client, ClientOptions};
use sqlx::ConnectOptions;
use sqlx::mysql::{MySqlConnectOptions, MySqlPoolOptions};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};

use crate::session::{Connection, Session};

/// How long connecting may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Which database it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Product {
    Postgres,
    Mysql,
    Mariadb,
    Sqlite,
}

impl Product {
    /// Reads the word of the command line.
    pub(crate) fn named(word: &str) -> Result<Self, &'static str> {
        match word {
            "postgres" => Ok(Self::Postgres),
            "mysql" => Ok(Self::Mysql),
            "mariadb" => Ok(Self::Mariadb),
            "sqlite" => Ok(Self::Sqlite),
            _ => Err("neither a database (postgres, mysql, mariadb, sqlite) nor an experiment"),
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Postgres => "PostgreSQL",
            Self::Mysql => "MySQL",
            Self::Mariadb => "MariaDB",
            Self::Sqlite => "SQLite",
        }
    }

    fn word(self) -> &'static str {
        match self {
            Self::Postgres => "postgres",
            Self::Mysql => "mysql",
            Self::Mariadb => "mariadb",
            Self::Sqlite => "sqlite",
        }
    }

    /// Whether it is MySQL or MariaDB: tables in InnoDB.
    pub(crate) fn is_innodb(self) -> bool {
        matches!(self, Self::Mysql | Self::Mariadb)
    }

    /// The database's clock, in milliseconds, as an expression.
    pub(crate) fn now(self) -> &'static str {
        match self {
            Self::Postgres => "cast(extract(epoch from clock_timestamp()) * 1000 as bigint)",
            Self::Mysql | Self::Mariadb => "cast(unix_timestamp(now(3)) * 1000 as signed)",
            Self::Sqlite => "cast(unixepoch('subsec') * 1000 as integer)",
        }
    }

    /// What takes the rows that are free and leaves the others. On SQLite whoever is in a transaction
    /// has all of them.
    pub(crate) fn skip_locked(self) -> &'static str {
        if self == Self::Sqlite { "" } else { "for update skip locked" }
    }

    /// The URL of the server: of `DATABASE_URL`, or of what `scripts/test --env` sets.
    fn url(self) -> Result<String, BoxError> {
        let variable = match self {
            Self::Postgres => "JOBQ_TEST_POSTGRES_URL",
            Self::Mysql => "JOBQ_TEST_MYSQL_URL",
            Self::Mariadb => "JOBQ_TEST_MARIADB_URL",
            Self::Sqlite => return Ok(String::new()),
        };
        let word = self.word();
        let scheme = if self == Self::Postgres { "postgres" } else { "mysql" };
        let set = |variable| std::env::var(variable).ok().filter(|url| !url.is_empty());
        let Some(url) = set("DATABASE_URL").or_else(|| set(variable)) else {
            return Err(format!(
                "no {} server is given. Name one:\n\
                 \x20 DATABASE_URL={scheme}://user:password@host/database cargo run --release --example lab -- {word}\n\
                 or have one started for this run:\n\
                 \x20 scripts/test --env cargo run --release --example lab -- {word}",
                self.name()
            )
            .into());
        };
        let fits = match self {
            Self::Postgres => url.starts_with("postgres:") || url.starts_with("postgresql:"),
            _ => url.starts_with("mysql:") || url.starts_with("mariadb:"),
        };
        if fits {
            Ok(url)
        } else {
            Err(format!(
                "the lab was asked for {word}, and DATABASE_URL does not begin with {scheme}://"
            )
            .into())
        }
    }
}

/// A database of the lab's own. To be dropped with [`drop_database`](Self::drop_database).
pub(crate) struct Server {
    pub(crate) product: Product,
    pub(crate) version: String,
    place: Place,
}

/// How to connect to the new database, and to the one that was given.
enum Place {
    Postgres { own: PgConnectOptions, given: PgConnectOptions },
    Mysql { own: MySqlConnectOptions, given: MySqlConnectOptions },
    Sqlite { own: SqliteConnectOptions, folder: tempfile::TempDir },
}

impl Server {
    /// Connects, checks that the server is what it was called, and makes a database on it.
    pub(crate) async fn open(product: Product) -> Result<Self, BoxError> {
        let url = product.url()?;
        let place = match product {
            Product::Postgres => {
                let given = PgConnectOptions::from_str(&url)?;
                Place::Postgres { own: given.clone().database(&database()), given }
            }
            Product::Mysql | Product::Mariadb => {
                let given = MySqlConnectOptions::from_str(&url)?;
                Place::Mysql { own: given.clone().database(&database()), given }
            }
            Product::Sqlite => {
                let folder = tempfile::tempdir()?;
                let own = SqliteConnectOptions::new()
                    .filename(folder.path().join("lab.db"))
                    .create_if_missing(true)
                    .journal_mode(SqliteJournalMode::Wal);
                Place::Sqlite { own, folder }
            }
        };
        let mut server = Self { product, version: String::new(), place };
        let mut given = server.given().await?;
        let version = match product {
            Product::Sqlite => given.word("select sqlite_version()").await?,
            _ => given.word("select version()").await?,
        };
        let is = match &*version {
            _ if product == Product::Sqlite => Product::Sqlite,
            version if version.starts_with("PostgreSQL") => Product::Postgres,
            version if version.contains("MariaDB") => Product::Mariadb,
            _ => Product::Mysql,
        };
        if is != product {
            return Err(format!(
                "the lab was asked for {}, but the server is {} {version}; for it say `{}`",
                product.name(),
                is.name(),
                is.word()
            )
            .into());
        }
        // PostgreSQL adds what it was compiled with, and where.
        let version = version.strip_prefix("PostgreSQL ").unwrap_or(&version);
        server.version = version.split(" on ").next().unwrap_or_default().to_owned();
        if product != Product::Sqlite {
            given.run(&format!("create database {}", database())).await?;
        }
        Ok(server)
    }

    /// A new connection to the lab's database, under a name for the timeline.
    pub(crate) async fn session(&self, name: &'static str) -> Result<Session, BoxError> {
        let connection = match &self.place {
            Place::Postgres { own, .. } => Connection::Postgres(within(own.connect()).await?),
            Place::Mysql { own, .. } => Connection::Mysql(within(own.connect()).await?),
            Place::Sqlite { own, .. } => Connection::Sqlite(within(own.connect()).await?),
        };
        Ok(Session::new(name, self.product, connection))
    }

    /// Several connections.
    pub(crate) async fn sessions<const N: usize>(
        &self,
        names: [&'static str; N],
    ) -> Result<[Session; N], BoxError> {
        let mut sessions = Vec::new();
        for name in names {
            sessions.push(self.session(name).await?);
        }
        Ok(sessions.try_into().unwrap_or_else(|_| unreachable!("there is one for each name")))
    }

    /// jobq in the lab's database; each schema is a jobq of its own.
    pub(crate) async fn jobq(&self, schema: &str) -> Result<Client, BoxError> {
        let options = ClientOptions::new().schema(schema);
        let client = match &self.place {
            Place::Postgres { own, .. } => {
                options.postgres(PgPoolOptions::new().connect_lazy_with(own.clone()))?
            }
            Place::Mysql { own, .. } => {
                options.mysql(MySqlPoolOptions::new().connect_lazy_with(own.clone()))?
            }
            Place::Sqlite { own, .. } => {
                options.sqlite(SqlitePoolOptions::new().connect_lazy_with(own.clone()))?
            }
        };
        client.migrate().await?;
        Ok(client)
    }

    /// How large the write-ahead log is, of an SQLite file.
    pub(crate) fn wal_bytes(&self) -> Option<u64> {
        let Place::Sqlite { folder, .. } = &self.place else { return None };
        Some(std::fs::metadata(folder.path().join("lab.db-wal")).map_or(0, |file| file.len()))
    }

    /// What the server is set to, as far as it matters here.
    pub(crate) async fn settings(&self) -> Result<String, BoxError> {
        let mut session = self.session("settings").await?;
        let wanted: &[&str] = match self.product {
            Product::Postgres => {
                &["fsync", "synchronous_commit", "default_transaction_isolation", "shared_buffers"]
            }
            Product::Mysql | Product::Mariadb => &[
                "innodb_flush_log_at_trx_commit",
                "sync_binlog",
                "log_bin",
                "transaction_isolation",
                "innodb_buffer_pool_size",
            ],
            Product::Sqlite => &["journal_mode", "synchronous"],
        };
        let mut settings = Vec::new();
        for name in wanted {
            let value = match self.product {
                Product::Postgres => session.word(&format!("show {name}")).await?,
                Product::Sqlite => session.word(&format!("pragma {name}")).await?,
                // MariaDB calls one of them otherwise.
                Product::Mariadb if *name == "transaction_isolation" => {
                    session.word("select @@tx_isolation").await?
                }
                _ => session.word(&format!("select @@{name}")).await?,
            };
            settings.push(format!("{name} = {value}"));
        }
        Ok(settings.join(", "))
    }

    /// Drops the lab's database, whoever is still connected.
    pub(crate) async fn drop_database(&self) -> Result<(), BoxError> {
        let mut given = self.given().await?;
        match self.product {
            Product::Postgres => {
                given.run(&format!("drop database if exists {} with (force)", database())).await?;
            }
            Product::Mysql | Product::Mariadb => {
                given.run("set session lock_wait_timeout = 20").await?;
                given.run(&format!("drop database if exists {}", database())).await?;
            }
            // The folder goes with its value.
            Product::Sqlite => {}
        }
        Ok(())
    }

    /// A connection to the database that was given.
    async fn given(&self) -> Result<Session, BoxError> {
        let connection = match &self.place {
            Place::Postgres { given, .. } => Connection::Postgres(within(given.connect()).await?),
            Place::Mysql { given, .. } => Connection::Mysql(within(given.connect()).await?),
            Place::Sqlite { own, .. } => Connection::Sqlite(within(own.connect()).await?),
        };
        Ok(Session::new("given", self.product, connection))
    }
}

/// What the lab's database is called: no two labs at once share one.
fn database() -> String {
    format!("jobq_lab_{}", std::process::id())
}

/// Connects, but not for ever.
async fn within<T>(connects: impl Future<Output = sqlx::Result<T>>) -> Result<T, BoxError> {
    match tokio::time::timeout(PATIENCE, connects).await {
        Ok(connected) => Ok(connected?),
        Err(_) => Err(format!("the server did not answer within {PATIENCE:?}").into()),
    }
}
