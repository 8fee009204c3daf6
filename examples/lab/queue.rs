//! A queue with nothing but a lock, as one writes it first: a table, and `select … for update`.

use crate::server::Product;
use crate::session::{Refused, Session};

/// What a claim does about rows that somebody else has locked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Locked {
    Wait,
    Fail,
    Skip,
}

impl Locked {
    pub(crate) const ALL: [Self; 3] = [Self::Wait, Self::Fail, Self::Skip];

    pub(crate) fn sql(self) -> &'static str {
        match self {
            Self::Wait => "for update",
            Self::Fail => "for update nowait",
            Self::Skip => "for update skip locked",
        }
    }
}

/// A table of rows with a state.
#[derive(Clone, Copy)]
pub(crate) struct Queue {
    pub(crate) table: &'static str,
}

impl Queue {
    /// Makes the table, with pending rows 1 to `rows`.
    pub(crate) async fn create(self, session: &mut Session, rows: u64) -> Result<(), Refused> {
        let table = self.table;
        session
            .run(&format!(
                "create table {table} (
                     id integer primary key,
                     state varchar(10) not null default 'pending'
                 )"
            ))
            .await?;
        session.run(&format!("create index {table}_state on {table} (state, id)")).await?;
        let ids: Vec<u64> = (1..=rows).collect();
        for ids in ids.chunks(5_000) {
            let values: Vec<String> = ids.iter().map(|id| format!("({id})")).collect();
            let values = values.join(", ");
            session.run(&format!("insert into {table} (id) values {values}")).await?;
        }
        session.analyze(table).await
    }

    /// Locks the first pending rows: no row is marked, the lock is all there is.
    ///
    /// SQLite locks no rows. There, whoever has begun a transaction has the file.
    pub(crate) async fn lock(
        self,
        session: &mut Session,
        locked: Locked,
        limit: u32,
    ) -> Result<Vec<i64>, Refused> {
        let table = self.table;
        let for_update = if session.product == Product::Sqlite { "" } else { locked.sql() };
        session
            .ids(&format!(
                "select id from {table}
                 where state = 'pending'
                 order by id
                 limit {limit}
                 {for_update}"
            ))
            .await
    }

    /// Takes the first pending rows, in a transaction of its own that marks them as running.
    pub(crate) async fn claim(
        self,
        session: &mut Session,
        locked: Locked,
        limit: u32,
    ) -> Result<Vec<i64>, Refused> {
        session.begin().await?;
        let claimed = async {
            let ids = self.lock(session, locked, limit).await?;
            for id in &ids {
                self.set(session, *id, "running").await?;
            }
            session.commit().await?;
            Ok(ids)
        }
        .await;
        if claimed.is_err() {
            // The server may have rolled back by itself; then this does nothing.
            drop(session.rollback().await);
        }
        claimed
    }

    /// Marks a row.
    pub(crate) async fn set(
        self,
        session: &mut Session,
        id: i64,
        state: &str,
    ) -> Result<(), Refused> {
        let table = self.table;
        session.run(&format!("update {table} set state = '{state}' where id = {id}")).await?;
        Ok(())
    }
}
