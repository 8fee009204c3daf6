//! What a claim costs, as the server tells.

use std::time::{Duration, Instant};

use crate::Result;
use crate::server::Product;
use crate::session::{Refused, Session};

/// What a claim costs.
pub(crate) struct Cost {
    pub(crate) plan: String,
    /// Rows, or on PostgreSQL pages, where the server counts them.
    pub(crate) read: Option<i64>,
    /// The median of a few.
    pub(crate) took: Duration,
}

/// Asks the server for a claim's plan and cost.
pub(crate) async fn cost(session: &mut Session, claim: &str) -> Result<Cost> {
    let mut times = Vec::new();
    for _ in 0..5 {
        session.begin().await?;
        let started = Instant::now();
        session.ids(claim).await?;
        times.push(started.elapsed());
        session.rollback().await?;
    }
    times.sort();
    let took = times[times.len() / 2];
    let (plan, read) = match session.product {
        Product::Postgres => {
            let (plan, pages) = explained(session, claim).await?;
            (plan, Some(pages))
        }
        Product::Mysql | Product::Mariadb => {
            let before = handler_reads(session).await?;
            session.begin().await?;
            session.ids(claim).await?;
            session.rollback().await?;
            let read = handler_reads(session).await? - before;
            (innodb_plan(session, claim).await?, Some(read))
        }
        Product::Sqlite => {
            let plan = session.rows(&format!("explain query plan {claim}")).await?;
            let details: Vec<_> = plan.into_iter().filter_map(|mut row| row.pop()).collect();
            (details.join("; "), None)
        }
    };
    Ok(Cost { plan, read, took })
}

/// PostgreSQL: what a claim does, and how many pages it reads for that.
async fn explained(session: &mut Session, claim: &str) -> Result<(String, i64)> {
    session.begin().await?;
    let json = session
        .rows(&format!("explain (analyze, buffers, format json) {claim}"))
        .await?
        .concat()
        .concat();
    session.rollback().await?;
    let json: serde_json::Value = serde_json::from_str(&json)?;
    let top = &json[0]["Plan"];
    let pages = ["Shared Hit Blocks", "Shared Read Blocks"].map(|name| top[name].as_i64());
    let mut nodes = Vec::new();
    let mut node = top;
    while let Some(kind) = node["Node Type"].as_str() {
        let on = node["Index Name"].as_str().or(node["Relation Name"].as_str());
        nodes.push(on.map_or(kind.to_owned(), |on| format!("{kind} on {on}")));
        if let Some(removed) = node["Rows Removed by Filter"].as_i64() {
            nodes.push(format!("{removed} rows filtered out"));
        }
        node = &node["Plans"][0];
    }
    Ok((nodes.join(", "), pages.into_iter().flatten().sum()))
}

/// MySQL, MariaDB: the plan of a query about one table.
async fn innodb_plan(session: &mut Session, claim: &str) -> Result<String, Refused> {
    // MySQL's has a column for partitions and one for the share that is left.
    let (explain, [access, key, extra]) = match session.product {
        Product::Mysql => ("explain format = traditional", [4, 6, 11]),
        _ => ("explain", [3, 5, 9]),
    };
    let row = session.rows(&format!("{explain} {claim}")).await?.concat();
    let word = |n: usize| row.get(n).cloned().unwrap_or_default();
    Ok(format!("{} on {}; {}", word(access), word(key), word(extra)))
}

/// MySQL, MariaDB: how many rows this connection has read.
async fn handler_reads(session: &mut Session) -> Result<i64, Refused> {
    let rows = session.rows("show session status like 'Handler_read_%'").await?;
    Ok(rows.iter().filter_map(|row| row.get(1)?.parse::<i64>().ok()).sum())
}

/// How many pages a claim reads, where the server counts them.
pub(crate) async fn pages(session: &mut Session, claim: &str) -> Result<Option<i64>> {
    match session.product {
        Product::Postgres => Ok(Some(explained(session, claim).await?.1)),
        Product::Mysql | Product::Mariadb => {
            // For the whole server: others may read too, so the least of a few counts.
            let mut least = i64::MAX;
            for _ in 0..5 {
                let before = read_requests(session).await?;
                session.begin().await?;
                session.ids(claim).await?;
                session.rollback().await?;
                least = least.min(read_requests(session).await? - before);
            }
            Ok(Some(least))
        }
        Product::Sqlite => Ok(None),
    }
}

/// MySQL, MariaDB: how many pages have been asked for.
async fn read_requests(session: &mut Session) -> Result<i64, Refused> {
    let rows = session.rows("show global status like 'Innodb_buffer_pool_read_requests'").await?;
    Ok(rows.first().and_then(|row| row.get(1)?.parse().ok()).unwrap_or_default())
}
