//! b. A lock is not ownership.
//!
//! A job takes longer than a transaction should be open, so a claim commits before the work begins,
//! and with the commit the lock is gone. What says then whose the job is? First nothing; then three
//! columns: an owner, an end of the lease, and a token that only rises.

use std::time::{Duration, Instant};

use crate::Result;
use crate::queue::{Locked, Queue};
use crate::report::{self, Report, ms};
use crate::server::Server;
use crate::session::{Refused, Session};

const LEASE: Duration = Duration::from_millis(600);

const BARE: Queue = Queue { table: "rows_b" };

pub(crate) async fn run(server: &Server, report: &Report) -> Result<()> {
    let [mut a, mut b] = server.sessions(["A", "B"]).await?;

    report.say("With nothing but the lock:");
    BARE.create(&mut a, 1).await?;
    let mut took = Vec::new();
    for session in [&mut a, &mut b] {
        session.begin().await?;
        let ids = BARE.lock(session, Locked::Skip, 1).await?;
        session.commit().await?;
        let got = report::ids(&ids);
        report.did(session.name, format!("locks row {got}, commits, and begins to work on it"));
        took.push(ids);
    }
    report.did("A", "is still at work: the row is handled twice");
    report.expect(
        "without a lease B is given the row that A works on",
        format!("A has {}, B has {}", report::ids(&took[0]), report::ids(&took[1])),
        took[0] == [1] && took[1] == took[0],
    );

    report.say(format!("With owner, leased_until ({LEASE:?} from the claim) and token:"));
    a.run(
        "create table leased (
             id integer primary key,
             state varchar(10) not null default 'pending',
             owner varchar(10),
             leased_until bigint not null default 0,
             token bigint not null default 0
         )",
    )
    .await?;
    a.run("insert into leased (id) values (1)").await?;

    let of_a = claim(&mut a).await?;
    let leased = Instant::now();
    report.did("A", format!("claims {}, and begins to work on it", shown(of_a)));
    let early = claim(&mut b).await?;
    report.did("B", format!("asks: {}", shown(early)));
    report.did("A", "is paused (a long garbage collection, a suspended machine, a lost network)");
    let (of_b, waited) = loop {
        if let Some(claimed) = claim(&mut b).await? {
            break (claimed, leased.elapsed());
        }
        if leased.elapsed() > 20 * LEASE {
            return Err("B is not given the row, although the lease has ended".into());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    report.did("B", format!("asks again and again, and claims {}", shown(Some(of_b))));
    let late = complete(&mut a, of_a.unwrap_or_default()).await?;
    report.did("A", format!("wakes up, and completes under its own token: {late} rows changed"));
    let done = complete(&mut b, of_b).await?;
    report.did("B", format!("completes under its own token: {done} row changed"));

    report.table(
        ["", "without", "with a lease"],
        &[
            ["B, while A works".to_owned(), report::ids(&took[1]), shown(early)],
            ["B, after A's lease".to_owned(), "—".to_owned(), shown(Some(of_b))],
            ["that is, after".to_owned(), "—".to_owned(), ms(waited)],
            ["rows A's late completion changes".to_owned(), "—".to_owned(), late.to_string()],
            ["rows B's completion changes".to_owned(), "—".to_owned(), done.to_string()],
        ],
    );
    report.expect("A claims row 1 under token 1", shown(of_a), of_a == Some((1, 1)));
    report.expect("while the lease lasts B is given nothing", shown(early), early.is_none());
    report.expect("B takes over under token 2", shown(Some(of_b)), of_b == (1, 2));
    // The lease began a little before A heard of it.
    let lasted = waited + Duration::from_millis(50) > LEASE;
    report.expect("not before the lease ends", ms(waited), lasted);
    report.expect("A's late completion changes 0 rows", late, late == 0);
    report.expect("B's completion changes 1 row", done, done == 1);
    Ok(())
}

/// Claims the first row that nobody has leased: its id and token.
///
/// The lock is still there, for the moment between looking and writing. What lasts is data.
async fn claim(session: &mut Session) -> Result<Option<(i64, i64)>, Refused> {
    let now = session.product.now();
    let skip_locked = session.product.skip_locked();
    session.begin().await?;
    let id = session
        .ids(&format!(
            "select id from leased
             where state = 'pending' and leased_until < {now}
             order by id
             limit 1
             {skip_locked}"
        ))
        .await?
        .first()
        .copied();
    let claimed = match id {
        None => None,
        Some(id) => {
            let (owner, lease) = (session.name, LEASE.as_millis());
            session
                .run(&format!(
                    "update leased
                     set owner = '{owner}', leased_until = {now} + {lease}, token = token + 1
                     where id = {id}"
                ))
                .await?;
            Some((id, session.number(&format!("select token from leased where id = {id}")).await?))
        }
    };
    session.commit().await?;
    Ok(claimed)
}

/// Completes a row for whoever holds its token; returns how many rows that changed.
async fn complete(session: &mut Session, (id, token): (i64, i64)) -> Result<u64, Refused> {
    let owner = session.name;
    session
        .run(&format!(
            "update leased set state = 'completed'
             where id = {id} and owner = '{owner}' and token = {token}"
        ))
        .await
}

fn shown(claimed: Option<(i64, i64)>) -> String {
    claimed.map_or("nothing".to_owned(), |(id, token)| format!("row {id} under token {token}"))
}
