//! What is paused.

use jobq_core::pause::PauseScope;

use super::{SqliteStore, sql};
use crate::store::StoredPause;

impl SqliteStore {
    pub(super) async fn pause(
        &self,
        scope: PauseScope,
        name: &str,
        reason: Option<&str>,
    ) -> sqlx::Result<bool> {
        let schema = self.schema.clone();
        let (name, reason) = (name.to_owned(), reason.map(str::to_owned));
        self.write(async move |locked| {
            let done = sqlx::query(sql(
                &schema,
                "insert into jobq_pauses (scope, name, reason) values (?1, ?2, ?3)
                 on conflict do nothing",
            ))
            .bind(scope.as_str())
            .bind(name)
            .bind(reason)
            .execute(&mut **locked)
            .await?;
            Ok(done.rows_affected() == 1)
        })
        .await
    }

    pub(super) async fn resume(&self, scope: PauseScope, name: &str) -> sqlx::Result<bool> {
        let (schema, name) = (self.schema.clone(), name.to_owned());
        self.write(async move |locked| {
            let done =
                sqlx::query(sql(&schema, "delete from jobq_pauses where scope = ?1 and name = ?2"))
                    .bind(scope.as_str())
                    .bind(name)
                    .execute(&mut **locked)
                    .await?;
            Ok(done.rows_affected() == 1)
        })
        .await
    }

    pub(super) async fn pauses(&self) -> sqlx::Result<Vec<StoredPause>> {
        let mut reader = self.reader().await?;
        sqlx::query_as(
            self.sql("select scope, name, since, reason from jobq_pauses order by scope, name"),
        )
        .fetch_all(&mut *reader)
        .await
    }
}
