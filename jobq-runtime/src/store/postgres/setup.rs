//! Tables and start checks.

use jobq_migrations::{Dialect, all, needed};
use sqlx::AssertSqlSafe;
use sqlx::{Executor, Row};

use super::{Checkout, Error, PostgresStore, Result, is_connection_loss};

impl PostgresStore {
    pub(super) async fn migrate(&self) -> Result<()> {
        let action = "create or upgrade jobq's tables";
        let mut connection = self.shared().await.map_err(Error::database(action))?;
        check_encoding(&mut connection).await?;
        self.migrate_on(&mut connection).await.map_err(Error::database(action))?;
        connection.hand_back();
        Ok(())
    }

    /// Applies the missing steps in one transaction; processes that migrate at once take turns.
    async fn migrate_on(&self, connection: &mut Checkout) -> sqlx::Result<()> {
        let schema = self.schema.as_str();
        connection.execute("begin isolation level read committed").await?;
        sqlx::query("select pg_advisory_xact_lock(hashtextextended('jobq migrations: ' || $1, 0))")
            .bind(schema)
            .execute(&mut **connection)
            .await?;
        let found = self.version_on(connection).await?;
        for step in all(Dialect::Postgres).iter().filter(|step| step.version > found) {
            connection.execute(AssertSqlSafe(step.sql(schema))).await?;
        }
        connection.execute("commit").await?;
        Ok(())
    }

    /// The version of the tables; 0 when there are none.
    async fn version_on(&self, connection: &mut Checkout) -> sqlx::Result<i64> {
        let exists: bool = sqlx::query_scalar("select to_regclass($1) is not null")
            .bind(format!("{}.migrations", self.schema.as_str()))
            .fetch_one(&mut **connection)
            .await?;
        if !exists {
            return Ok(0);
        }
        sqlx::query_scalar(self.sql("select coalesce(max(version), 0) from jobq.migrations"))
            .fetch_one(&mut **connection)
            .await
    }

    pub(super) async fn check(&self) -> Result<()> {
        let action = "check the server";
        let mut connection = match self.own().await {
            Ok(connection) => connection,
            Err(error) if refuses_start_up_options(&error) => {
                return Err(Error::Unsupported {
                    problem: "the server refuses start-up options, as PgBouncer does; the runtime \
                              needs a direct connection to PostgreSQL for its few connections"
                        .to_owned(),
                });
            }
            Err(source)
                if is_connection_loss(&source) || matches!(source, sqlx::Error::Database(_)) =>
            {
                return Err(Error::Connect { url: self.address(), source });
            }
            Err(source) => return Err(Error::Database { action, source }),
        };
        let row = sqlx::query(
            "select current_setting('server_version_num')::int4,
                    current_setting('server_version'),
                    pg_is_in_recovery(),
                    current_setting('enable_seqscan')",
        )
        .fetch_one(&mut *connection)
        .await
        .map_err(Error::database(action))?;
        let number: i32 = row.get(0);
        let version: String = row.get(1);
        if number < 150_000 {
            return Err(Error::Unsupported {
                problem: format!("it is PostgreSQL {version}; jobq needs PostgreSQL 15 or newer"),
            });
        }
        if row.get::<bool, _>(2) {
            return Err(Error::Unsupported {
                problem: "it is a read-only replica; connect to the primary".to_owned(),
            });
        }
        if row.get::<String, _>(3) != "off" {
            return Err(Error::Unsupported {
                problem: "it drops start-up options, as PgBouncer does with \
                          `ignore_startup_parameters = options`; the runtime needs a direct \
                          connection to PostgreSQL"
                    .to_owned(),
            });
        }
        check_encoding(&mut connection).await?;
        let found = self.version_on(&mut connection).await.map_err(Error::database(action))?;
        if found < needed(Dialect::Postgres) {
            return Err(Error::Schema { found, needed: needed(Dialect::Postgres) });
        }
        connection.hand_back();
        Ok(())
    }

    /// Where the server is, for messages: never the password.
    fn address(&self) -> String {
        let options = self.pool.connect_options();
        format!(
            "postgres://{}@{}:{}/{}",
            options.get_username(),
            options.get_host(),
            options.get_port(),
            options.get_database().unwrap_or_default()
        )
    }
}

/// Fails for a database that cannot hold every text that a payload or an error may be.
async fn check_encoding(connection: &mut Checkout) -> Result<()> {
    let encoding: String = sqlx::query_scalar("select current_setting('server_encoding')")
        .fetch_one(&mut **connection)
        .await
        .map_err(Error::database("check the server"))?;
    if encoding == "UTF8" {
        return Ok(());
    }
    Err(Error::Unsupported {
        problem: format!(
            "its encoding is {encoding}, which cannot hold every text; use one made with \
             `create database … encoding 'UTF8' template template0`"
        ),
    })
}

/// Whether a connection was refused because of our start-up options.
fn refuses_start_up_options(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(error) => {
            error.code().as_deref() == Some("08P01")
                && error.message().contains("startup parameter")
        }
        _ => false,
    }
}
