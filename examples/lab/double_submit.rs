//! g. Double submit: one key, one job.
//!
//! Somebody clicks twice, or a client repeats a request that it never heard of again. Both requests
//! carry one key, and a table of the application's has it as its primary key. The row of the request
//! and the job are written in one transaction, so that there is a job exactly when there is a request.

use jobq::{BoxError, job};

use crate::Result;
use crate::report::Report;
use crate::server::Server;
use crate::session::{Session, Why};

/// What the request asks for.
#[job(queue = "orders")]
async fn place_order(article: String) {
    let _ = article;
}

pub(crate) async fn run(server: &Server, report: &Report) -> Result<()> {
    // Under its default name, which enqueueing on a plain connection writes to.
    let client = server.jobq("jobq").await?;
    let [mut a, mut b] = server.sessions(["A", "B"]).await?;
    a.run("create table requests (request_key varchar(100) not null primary key, job bigint)")
        .await?;
    for session in [&mut a, &mut b] {
        session.wait_at_most(10).await?;
    }
    let jobs = async || -> Result<u64> {
        Ok(client.counts().await?.iter().map(|count| count.count).sum())
    };

    report.say("Without a key:");
    let mut without = Vec::new();
    for session in [&mut a, &mut b] {
        let job = session.enqueue(place_order::new("a lamp".to_owned())).await?;
        report.did(session.name, format!("enqueues job {job}"));
        without.push(job);
    }
    let jobs_without = jobs().await?;

    report.say("With a key:");
    let (of_a, of_b) = tokio::join!(submit(&mut a, report), submit(&mut b, report));
    let (of_a, of_b) = (of_a?, of_b?);
    let jobs_with = jobs().await? - jobs_without;

    let text = |id: &dyn ToString| id.to_string();
    report.table(
        ["", "A is told", "B is told", "jobs"],
        &[
            ["without a key".to_owned(), text(&without[0]), text(&without[1]), text(&jobs_without)],
            ["with a key".to_owned(), text(&of_a), text(&of_b), text(&jobs_with)],
        ],
    );
    report.expect("without a key there are two jobs", jobs_without, jobs_without == 2);
    report.expect("with a key there is one", jobs_with, jobs_with == 1);
    report.expect("and both are told its id", format!("{of_a} and {of_b}"), of_a == of_b);
    Ok(())
}

/// Handles a request: returns the id of its job, whoever enqueued it.
async fn submit(session: &mut Session, report: &Report) -> Result<i64> {
    let name = session.name;
    session.begin().await?;
    // The second one waits here until the first has committed, and is then refused.
    match session.run("insert into requests (request_key) values ('order-7')").await {
        Ok(_) => {
            report.did(name, "inserts the key");
            // So that the other request comes meanwhile.
            tokio::time::sleep(std::time::Duration::from_millis(200)).await;
            let job = session.enqueue(place_order::new("a lamp".to_owned())).await?.0;
            session
                .run(&format!("update requests set job = {job} where request_key = 'order-7'"))
                .await?;
            session.commit().await?;
            report.did(name, format!("enqueues job {job} in the same transaction, and commits"));
            Ok(job)
        }
        Err(refused) if refused.why == Why::Duplicate => {
            session.rollback().await?;
            let job =
                session.number("select job from requests where request_key = 'order-7'").await?;
            report.did(name, format!("is told that the key is there: {}", refused.code));
            report.did(name, format!("reads which job it has: {job}"));
            Ok(job)
        }
        Err(refused) => Err(BoxError::from(refused)),
    }
}
