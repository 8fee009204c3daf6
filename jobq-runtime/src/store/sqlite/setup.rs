//! Tables and start checks.

use jobq_migrations::{Dialect, all, needed};
use sqlx::sqlite::SqliteConnection;
use sqlx::{AssertSqlSafe, Executor};

use super::{Error, Result, Schema, SqliteStore, code, is_busy, sql};

/// The first SQLite whose clock has milliseconds.
const OLDEST: [u32; 2] = [3, 42];

impl SqliteStore {
    /// Applies the missing steps in one transaction; processes that migrate at once take turns.
    pub(super) async fn migrate(&self) -> Result<()> {
        let schema = self.schema.clone();
        self.write(async move |locked| {
            let found = version_on(locked, &schema).await?;
            for step in all(Dialect::Sqlite).iter().filter(|step| step.version > found) {
                locked.execute(AssertSqlSafe(step.sql(schema.as_str()))).await?;
            }
            Ok(())
        })
        .await
        .map_err(self.explain("create or upgrade jobq's tables"))
    }

    pub(super) async fn check(&self) -> Result<()> {
        let schema = self.schema.clone();
        let facts = self.write(async move |locked| {
            let (version, journal, file): (String, String, String) = sqlx::query_as(
                "select sqlite_version(), (select journal_mode from pragma_journal_mode),
                        (select coalesce(file, '') from pragma_database_list where name = 'main')",
            )
            .fetch_one(&mut **locked)
            .await?;
            let found = version_on(locked, &schema).await?;
            if found > 0 {
                // A file that can only be read refuses this; it takes the lock all the same.
                let nothing = "update jobq_migrations set name = name where version < 0";
                locked.execute(sql(&schema, nothing)).await?;
            }
            Ok((version, journal, file, found))
        });
        let (version, journal, file, found) =
            facts.await.map_err(self.explain("check the database"))?;
        if is_older(&version, OLDEST) {
            return Err(Error::Unsupported {
                problem: format!("it is SQLite {version}; jobq needs SQLite 3.42 or newer"),
            });
        }
        if file.is_empty() {
            return Err(Error::Unsupported {
                problem: "it is not in a file, so that every connection has its own; use a file, \
                          as in \"sqlite:jobs.db\""
                    .to_owned(),
            });
        }
        if journal != "wal" {
            return Err(Error::Unsupported {
                problem: format!(
                    "its journal mode is {journal} and cannot be made WAL, as on network file \
                     systems; keep the file on a local disk"
                ),
            });
        }
        self.check_pool().await?;
        if found < needed(Dialect::Sqlite) {
            return Err(Error::Schema { found, needed: needed(Dialect::Sqlite) });
        }
        Ok(())
    }

    /// Fails if the application's connections leave WAL, each for all of them.
    async fn check_pool(&self) -> Result<()> {
        let mode = sqlx::query_scalar("select journal_mode from pragma_journal_mode");
        match mode.fetch_one(&self.pool).await {
            Ok(mode) if String::as_str(&mode) == "wal" => Ok(()),
            Err(error) if !is_busy(&error) => {
                Err(self.explain("use the application's pool")(error))
            }
            // Busy: it tried to set another mode, and our connections kept it from that.
            Ok(_) | Err(_) => Err(Error::Unsupported {
                problem: "the application's pool sets another journal mode; leave \
                          `journal_mode` out of its options, or set it to WAL"
                    .to_owned(),
            }),
        }
    }

    /// Names what failed, and the cure where the error has one.
    fn explain(&self, action: &'static str) -> impl FnOnce(sqlx::Error) -> Error {
        let url = format!("sqlite:{}", self.options.get_filename().display());
        move |source| match code(&source) {
            // Read-only.
            Some(8) => Error::Unsupported {
                problem: "it can only be read; leave out `mode=ro` and `read_only(true)`, and let \
                          this user write the file and its directory"
                    .to_owned(),
            },
            // Cannot be opened.
            Some(14) => Error::BadUrl {
                url,
                problem:
                    "the file cannot be opened: it must not be a directory, its directory must \
                          exist and be writable, and for a pool of your own a missing file is made \
                          only with `mode=rwc` or `create_if_missing(true)`"
                        .to_owned(),
            },
            // Not a database.
            Some(26) => Error::BadUrl {
                url,
                problem: "the file is not an SQLite database, or it is encrypted".to_owned(),
            },
            _ => Error::Database { action, source },
        }
    }
}

/// The version of the tables; 0 when there are none.
async fn version_on(connection: &mut SqliteConnection, schema: &Schema) -> sqlx::Result<i64> {
    let exists: bool = sqlx::query_scalar(sql(
        schema,
        "select exists (select 1 from sqlite_master where type = 'table' and name = 'jobq_migrations')",
    ))
    .fetch_one(&mut *connection)
    .await?;
    if !exists {
        return Ok(0);
    }
    sqlx::query_scalar(sql(schema, "select coalesce(max(version), 0) from jobq_migrations"))
        .fetch_one(connection)
        .await
}

fn is_older(version: &str, than: [u32; 2]) -> bool {
    let mut parts = version.split('.').map(|part| part.parse().unwrap_or(0));
    [parts.next().unwrap_or(0), parts.next().unwrap_or(0)] < than
}
