//! What has been done, and is still to be seen by somebody, costs those who go on nothing.

use jobq::{ClientOptions, Runtime, State, enqueue_many, job, jobs};
use sqlx::{AssertSqlSafe, Executor, MySqlPool, Row};

use crate::bed::Db;
use crate::server::Server;

/// Notes what the server had read at every hundredth job.
#[job(queue = "history", retention = "0s")]
async fn step(schema: String, n: u64, State(db): State<Db>) -> Result<(), sqlx::Error> {
    if n.is_multiple_of(100) {
        let Db::Mysql(pool) = &db else { unreachable!("MySQL and MariaDB only") };
        let read = pages_read(pool).await;
        db.execute(&format!("insert into {schema}_read values ({n}, {read})")).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_that_an_old_read_view_still_sees_cost_claims_nothing_on_mysql() {
    dead_entries_cost_nothing(Server::mysql().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_that_an_old_read_view_still_sees_cost_claims_nothing_on_mariadb() {
    dead_entries_cost_nothing(Server::mariadb().await).await;
}

async fn dead_entries_cost_nothing(server: Server) {
    let pool = MySqlPool::connect(&server.url()).await.expect("the server can be reached");
    let mut reader =
        pool.begin_with("start transaction with consistent snapshot").await.expect("a read view");
    reader.execute("select count(*) from information_schema.tables").await.expect("reads");
    let without = pages_of_100_claims(&server, &pool, "without", 0).await;
    let with = pages_of_100_claims(&server, &pool, "with", 100_000).await;
    drop(reader);
    println!("pages read for 100 claims: {without}, with 100000 dead entries {with}");
    assert!(with < without * 3, "{without}, then {with}");
}

/// Puts so many jobs into the queue and takes them out again; then runs others, one by one.
async fn pages_of_100_claims(server: &Server, pool: &MySqlPool, schema: &str, dead: u32) -> i64 {
    let client = ClientOptions::new().schema(schema).connect(&server.url()).await;
    let client = client.expect("the server can be reached");
    client.migrate().await.expect("the tables can be made");
    let digits = "(select 0 as n union all select 1 union all select 2 union all select 3
         union all select 4 union all select 5 union all select 6 union all select 7
         union all select 8 union all select 9)";
    let insert = format!(
        "insert into {schema}_jobs (kind, queue)
         select 'gone', 'history'
         from {digits} as a, {digits} as b, {digits} as c, {digits} as d, {digits} as e
         limit {dead}"
    );
    pool.execute(AssertSqlSafe(insert)).await.expect("writes");
    pool.execute(AssertSqlSafe(format!("delete from {schema}_jobs"))).await.expect("deletes");

    let table = format!("create table {schema}_read (n bigint primary key, pages bigint)");
    pool.execute(AssertSqlSafe(table)).await.expect("a table can be made");
    enqueue_many(&client, (0..601).map(|n| step::new(schema.to_owned(), n)))
        .await
        .expect("enqueued");
    let ended = Runtime::new(client)
        .only_listed_jobs()
        .jobs(jobs![step])
        .queue("history", 1)
        .state(Db::Mysql(pool.clone()))
        .run_until_idle()
        .await
        .expect("a good runtime runs");
    assert!(ended.is_clean(), "{ended:?}");
    // The first claims begin at the beginning, and so do the sweep's first looks, now and then: nothing
    // is proved yet.
    let read = format!("select pages from {schema}_read order by n");
    let read: Vec<i64> =
        sqlx::query_scalar(AssertSqlSafe(read)).fetch_all(pool).await.expect("reads");
    read.windows(2).map(|two| two[1] - two[0]).min().expect("there are six")
}

async fn pages_read(pool: &MySqlPool) -> i64 {
    let text = "show global status like 'Innodb_buffer_pool_read_requests'";
    let row = sqlx::raw_sql(text).fetch_one(pool).await.expect("the server tells");
    row.get::<String, _>(1).parse().expect("a number")
}
