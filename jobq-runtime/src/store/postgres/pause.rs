//! What is paused.

use jobq_core::pause::PauseScope;

use super::{PostgresStore, Time};
use crate::store::StoredPause;

impl PostgresStore {
    pub(super) async fn pause(
        &self,
        scope: PauseScope,
        name: &str,
        reason: Option<&str>,
    ) -> sqlx::Result<bool> {
        let mut connection = self.own().await?;
        let done = sqlx::query(self.sql(
            "insert into jobq.pauses (scope, name, reason) values ($1, $2, $3)
             on conflict do nothing",
        ))
        .bind(scope.as_str())
        .bind(name)
        .bind(reason)
        .execute(&mut *connection)
        .await?;
        connection.hand_back();
        Ok(done.rows_affected() == 1)
    }

    pub(super) async fn resume(&self, scope: PauseScope, name: &str) -> sqlx::Result<bool> {
        let mut connection = self.own().await?;
        let done = sqlx::query(self.sql("delete from jobq.pauses where scope = $1 and name = $2"))
            .bind(scope.as_str())
            .bind(name)
            .execute(&mut *connection)
            .await?;
        connection.hand_back();
        Ok(done.rows_affected() == 1)
    }

    pub(super) async fn pauses(&self) -> sqlx::Result<Vec<StoredPause>> {
        let mut connection = self.own().await?;
        let pauses: Vec<(String, String, Time, Option<String>)> = sqlx::query_as(
            self.sql("select scope, name, since, reason from jobq.pauses order by scope, name"),
        )
        .fetch_all(&mut *connection)
        .await?;
        connection.hand_back();
        Ok(pauses
            .into_iter()
            .map(|(scope, name, since, reason)| (scope, name, since.0.0, reason))
            .collect())
    }
}
