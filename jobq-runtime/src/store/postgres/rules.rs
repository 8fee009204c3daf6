//! What claims go by: what is paused, and which queues are limited.
//!
//! It seldom changes, so it is remembered, and a claim only asks whether it is as it was: one number,
//! which triggers raise, whoever makes the change.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use jobq_core::pause::PauseScope;
use sqlx::Row;
use sqlx::postgres::PgConnection;

use super::{Claim, Paused, PostgresStore};

#[derive(Clone, Debug, Default)]
pub(crate) struct Rules {
    pub(crate) version: i64,
    paused: Paused,
    /// The queues that are limited.
    pub(super) limited: HashSet<String>,
}

impl Rules {
    /// What of a claim's queues and kinds is paused.
    pub(super) fn paused_of(&self, claim: &Claim) -> Paused {
        let Paused { mut queues, mut kinds } = self.paused.clone();
        queues.retain(|name| claim.queues.iter().any(|asked| asked.queue == *name));
        kinds.retain(|name| claim.kinds.iter().any(|(kind, _)| kind == name));
        Paused { queues, kinds }
    }

    /// The queues to ask for in one statement: those that are not limited, or else all.
    pub(super) fn next_part(&self, claim: &Claim) -> Claim {
        let mut part = claim.clone();
        part.queues.retain(|asked| !self.limited.contains(&asked.queue));
        if part.queues.is_empty() { claim.clone() } else { part }
    }
}

/// The rules as they were read last; none before they are needed, and once they have changed.
pub(super) type Remembered = Mutex<Option<Arc<Rules>>>;

impl PostgresStore {
    pub(super) async fn rules(&self, connection: &mut PgConnection) -> sqlx::Result<Arc<Rules>> {
        if let Some(rules) = &*self.remembered() {
            return Ok(Arc::clone(rules));
        }
        let rows = sqlx::query(self.sql(RULES)).fetch_all(connection).await?;
        let mut rules = Rules::default();
        for row in &rows {
            rules.version = row.try_get("version")?;
            let Some(name) = row.try_get("name")? else { continue };
            match row.try_get::<Option<&str>, _>("scope")?.map(str::parse) {
                None => drop(rules.limited.insert(name)),
                Some(Ok(PauseScope::Queue)) => rules.paused.queues.push(name),
                Some(Ok(PauseScope::Kind)) => rules.paused.kinds.push(name),
                Some(Err(error)) => return Err(sqlx::Error::Decode(Box::new(error))),
            }
        }
        let rules = Arc::new(rules);
        *self.remembered() = Some(Arc::clone(&rules));
        Ok(rules)
    }

    /// Notes that these are not the rules any more.
    pub(super) fn forget_rules(&self, old: &Rules) {
        self.remembered().take_if(|rules| rules.version == old.version);
    }

    fn remembered(&self) -> MutexGuard<'_, Option<Arc<Rules>>> {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// In one statement, so with one snapshot. What has no scope is a queue that is limited.
pub(crate) const RULES: &str = "
    select rules.version, rule.scope, rule.name
    from jobq.rules
    left join (
        select scope, name from jobq.pauses
        union all
        select null, queue from jobq.queue_limits
    ) as rule on true";
