//! What is paused.

use jobq_core::pause::PauseScope;
use sqlx::Row;
use sqlx::mysql::MySqlRow;

use super::{MysqlStore, again, execute, get, killed, literal, literal_or_null, number};
use crate::store::{Paused, StoredPause};

/// There is a row with this key.
const DUPLICATE: u16 = 1062;

/// Asks for the names of all that is paused: a few rows at most, or none.
pub(crate) const PAUSED: &str = "select scope, name from jobq_pauses";

/// Whether a row is an answer to [`PAUSED`].
pub(super) fn is_pause(row: &MySqlRow) -> bool {
    row.try_column("scope").is_ok()
}

/// Reads the answer to [`PAUSED`].
pub(super) fn read_paused<'r>(
    rows: impl IntoIterator<Item = &'r MySqlRow>,
) -> sqlx::Result<Paused> {
    let mut paused = Paused::default();
    for row in rows {
        let names = match get::<String>(row, "scope")?.parse() {
            Ok(PauseScope::Queue) => &mut paused.queues,
            Ok(PauseScope::Kind) => &mut paused.kinds,
            Err(error) => return Err(sqlx::Error::Decode(Box::new(error))),
        };
        names.push(get(row, "name")?);
    }
    Ok(paused)
}

impl MysqlStore {
    pub(super) async fn pause(
        &self,
        scope: PauseScope,
        name: &str,
        reason: Option<&str>,
    ) -> sqlx::Result<bool> {
        let (scope, name) = (literal(scope.as_str()), literal(name));
        let reason = literal_or_null(reason);
        let insert = format!(
            "insert into jobq_pauses (scope, name, reason) values ({scope}, {name}, {reason})"
        );
        match again(|| self.write(&insert)).await {
            Ok(1) => Ok(true),
            Ok(_) => Err(killed()),
            Err(error) if number(&error) == Some(DUPLICATE) => Ok(false),
            Err(error) => Err(error),
        }
    }

    pub(super) async fn resume(&self, scope: PauseScope, name: &str) -> sqlx::Result<bool> {
        let pause = format!("scope = {} and name = {}", literal(scope.as_str()), literal(name));
        let delete = format!("delete from jobq_pauses where {pause}");
        let done = again(|| self.write(&delete)).await?;
        if done == 0 {
            let look = format!("select 1 from jobq_pauses where {pause}");
            if !self.rows(&look).await?.is_empty() {
                return Err(killed());
            }
        }
        Ok(done == 1)
    }

    async fn write(&self, text: &str) -> sqlx::Result<u64> {
        let mut connection = self.own().await?;
        let written = execute(&mut connection, &self.schema, text).await?;
        connection.hand_back();
        Ok(written)
    }

    pub(super) async fn paused(&self) -> sqlx::Result<Paused> {
        read_paused(&self.rows(PAUSED).await?)
    }

    pub(super) async fn pauses(&self) -> sqlx::Result<Vec<StoredPause>> {
        let read = |row: &MySqlRow| {
            Ok((get(row, "scope")?, get(row, "name")?, get(row, "since")?, get(row, "reason")?))
        };
        self.rows("select scope, name, since, reason from jobq_pauses order by scope, name")
            .await?
            .iter()
            .map(read)
            .collect()
    }
}
