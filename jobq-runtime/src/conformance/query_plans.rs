//! How SQLite finds the jobs of a claim.

use super::bed::{Bed, Database};

/// The statements, as they stand in the store.
const STORE: &str = include_str!("../store/sqlite/claim.rs");

/// The text between two others, read as the string literal that it is part of.
fn literal(from: &str, to: &str) -> String {
    let start = STORE.find(from).unwrap_or_else(|| panic!("no {from:?} in the store"));
    let text = &STORE[start..];
    let end = text.find(to).unwrap_or_else(|| panic!("no {to:?} after {from:?}"));
    let text = text[..end].replace("\\\"", "\"");
    text.replace("now_us()", jobq_migrations::SQLITE_NOW)
}

/// Whatever SQLite knows about the tables, a claim goes straight to its rows, in their order.
pub(super) async fn d3_a_claim_uses_the_due_index_and_sorts_nothing(bed: Bed) {
    let look = literal("with floor (n, queue", "\",\n");
    let take = literal("update jobq_jobs\n    set token = token + 1", "\";\n");
    let fill = "with recursive n (n) as (select 1 union all select n + 1 from n where n < 2000)
                insert into jobq.jobs (kind, band) select 'k', n % 9 - 4 from n";
    let one = "insert into jobq.jobs (kind) values ('k')";
    let steps = [
        ("with no statistics", ""),
        ("analyzed when empty", "analyze"),
        ("analyzed with one job", one),
        ("analyzed with 2,000 jobs", fill),
    ];
    for (step, change) in steps {
        if !change.is_empty() {
            bed.execute(change).await;
            bed.execute("analyze").await;
        }
        let from = take.find("select id from (").unwrap();
        let to = take.find("    )\n    returning").unwrap();
        let sub = &take[from..to];
        let alts = [
            format!("update jobq_jobs set token = token + 1 from ({sub}) as due where jobq_jobs.id = due.id returning jobq_jobs.id"),
            format!("with due (id) as materialized ({sub}) update jobq_jobs set token = token + 1 from due where jobq_jobs.id = due.id returning jobq_jobs.id"),
            format!("with due (id) as materialized ({sub}) update jobq_jobs set token = token + 1 where id in (select job.id from due cross join jobq_jobs as job on job.id = due.id) returning id"),
            format!("update jobq_jobs not indexed set token = token + 1 where id in ({sub}) returning id"),
            format!("update jobq_jobs set token = token + 1 where id in (select value from json_each('[1,2]')) returning id"),
            format!("update jobq_jobs set token = token + 1 where id = ?1 returning id"),
            format!("insert into jobq_jobs (id, kind) select id, kind from jobq_jobs where id in ({sub}) on conflict (id) do update set token = token + 1 returning id"),
            format!("with due (id) as materialized ({sub}) insert into jobq_jobs (id, kind) select job.id, job.kind from due cross join jobq_jobs as job on job.id = due.id where true on conflict (id) do update set token = token + 1 returning id"),
        ];
        for alt in alts { eprintln!("--- {step}\n{}\n{}", alt.lines().next().unwrap(), plan(&bed, &alt).await.join("\n")); }
        for (what, statement) in [("look", &look), ("take", &take)] {
            let plan = plan(&bed, statement).await;
            let text = plan.join("\n");
            assert!(!text.contains("TEMP B-TREE"), "{what} sorts {step}:\n{text}");
            let reads: Vec<&String> =
                plan.iter().filter(|line| line.contains("jobq_jobs")).collect();
            let by_floor = "jobq_jobs_due (queue=? AND band=? AND run_after=? AND id>?)";
            let by_time = "jobq_jobs_due (queue=? AND band=? AND run_after>? AND run_after<?)";
            let by_id = "USING INTEGER PRIMARY KEY (rowid=?)";
            for line in &reads {
                let straight = [by_floor, by_time, by_id].iter().any(|way| line.contains(way));
                assert!(straight, "{what} reads {line:?} {step}:\n{text}");
            }
            for way in [by_floor, by_time] {
                let used = reads.iter().any(|line| line.contains(way));
                assert!(used, "{what} does not use {way} {step}:\n{text}");
            }
        }
    }
}

async fn plan(bed: &Bed, statement: &str) -> Vec<String> {
    let text = format!("explain query plan {statement}");
    // With PostgreSQL built in as well, there is another database that this is not for.
    #[allow(irrefutable_let_patterns)]
    let Database::Sqlite(pool) = &bed.database else { panic!("only for SQLite") };
    let rows: Vec<(i64, i64, i64, String)> =
        sqlx::query_as(sqlx::AssertSqlSafe(text)).fetch_all(pool).await.expect("explains");
    rows.into_iter().map(|(_, _, _, detail)| detail).collect()
}
