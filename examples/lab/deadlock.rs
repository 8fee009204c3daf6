//! f. Deadlock: what has to be tried again.
//!
//! Two transfers at once, A from account 1 to 2, B from 2 to 1. Each first gives, then takes: the
//! accounts in opposite order. Each waits for the other's lock; the server ends one of them. What the
//! victim has to repeat is the transaction, not the statement.

use std::time::Duration;

use crate::Result;
use crate::report::Report;
use crate::server::{Product, Server};
use crate::session::{Refused, Session, Why, pause};

/// Of an account at the beginning.
const BALANCE: i64 = 100;

/// The longest pause before a transaction is tried again.
const JITTER: Duration = Duration::from_millis(50);

/// A transfer between the two accounts.
#[derive(Clone, Copy)]
struct Transfer {
    amount: i64,
    from: i64,
    to: i64,
}

const OF_A: Transfer = Transfer { amount: 10, from: 1, to: 2 };
const OF_B: Transfer = Transfer { amount: 30, from: 2, to: 1 };

impl Transfer {
    fn give(self) -> String {
        let Self { amount, to, .. } = self;
        format!("update accounts set balance = balance + {amount} where id = {to}")
    }

    fn take(self) -> String {
        let Self { amount, from, .. } = self;
        format!("update accounts set balance = balance - {amount} where id = {from}")
    }
}

/// What was left when both were done.
struct Left {
    repeated: &'static str,
    victim: &'static str,
    refused: Refused,
    again: String,
    balances: Vec<i64>,
}

pub(crate) async fn run(server: &Server, report: &Report) -> Result<()> {
    let [mut a, mut b] = server.sessions(["A", "B"]).await?;
    if server.product == Product::Sqlite {
        report.say(
            "SQLite has one lock, and two transactions cannot wait for each other's. What comes nearest: \
             both read first (`begin`, not `begin immediate`) and write later.",
        );
    }
    a.run("create table accounts (id integer primary key, balance bigint not null)").await?;

    let mut left = Vec::new();
    for repeat in [Repeat::Transaction, Repeat::Statement] {
        report.say(match repeat {
            Repeat::Transaction => "The victim repeats its transaction:",
            Repeat::Statement => "The victim repeats only the statement that failed, and commits:",
        });
        left.push(both(&mut a, &mut b, repeat, report).await?);
    }
    let rows: Vec<_> = left
        .iter()
        .map(|left| {
            let [one, two] = [0, 1].map(|n| left.balances.get(n).copied().unwrap_or_default());
            [
                left.repeated.to_owned(),
                left.victim.to_owned(),
                left.refused.code.clone(),
                left.again.clone(),
                format!("{one} + {two}"),
                (one + two).to_string(),
            ]
        })
        .collect();
    report.table(["repeated", "victim", "error", "then", "balances", "sum"], &rows);

    let code = match server.product {
        Product::Postgres => "40P01",
        Product::Mysql | Product::Mariadb => "1213",
        Product::Sqlite => "517",
    };
    let [whole, last] = left.try_into().unwrap_or_else(|_| unreachable!("there are two"));
    let victims = [&whole, &last].map(|left| format!("{}: {}", left.victim, left.refused.code));
    let holds = whole.refused.code == code && last.refused.code == code;
    let what = format!("each time one of the two is the victim, with {code}");
    report.expect(&what, victims.join(", "), holds);
    let expected = vec![BALANCE - OF_A.amount + OF_B.amount, BALANCE + OF_A.amount - OF_B.amount];
    let sum = |balances: &[i64]| balances.iter().sum::<i64>();
    let measured = format!("balances {:?}", whole.balances);
    let what = "the transaction repeated: both transfers are made";
    report.expect(what, measured, whole.balances == expected);
    let left = sum(&last.balances);
    let measured = format!("{}, sum {left}", last.again);
    let unmade = left == 2 * BALANCE && last.balances != expected;
    match server.product {
        Product::Mysql | Product::Mariadb => {
            let what = "the statement repeated: it succeeds, and money is lost: what came before it \
                        in the transaction had been rolled back";
            report.expect(what, measured, last.again == "done" && left < 2 * BALANCE);
        }
        Product::Postgres => {
            let what = "the statement repeated: refused with 25P02, and the transfer is not made";
            report.expect(what, measured, last.again.starts_with("25P02") && unmade);
        }
        Product::Sqlite => {
            let what =
                "the statement repeated: refused with 517 again, and the transfer is not made";
            report.expect(what, measured, last.again.starts_with("517") && unmade);
        }
    }
    Ok(())
}

/// What the victim repeats.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Repeat {
    Transaction,
    Statement,
}

/// Makes both transfers at once.
async fn both(a: &mut Session, b: &mut Session, repeat: Repeat, report: &Report) -> Result<Left> {
    a.run("delete from accounts").await?;
    a.run(&format!("insert into accounts values (1, {BALANCE}), (2, {BALANCE})")).await?;
    if a.product == Product::Sqlite {
        // Both have read what the other is about to change.
        for session in [&mut *a, &mut *b] {
            session.run("begin").await?;
            session.ids("select balance from accounts").await?;
            report.did(session.name, "begins, and reads both balances");
        }
        a.run(&OF_A.give()).await?;
        a.run(&OF_A.take()).await?;
        a.commit().await?;
        report.did("A", "writes and commits");
    } else {
        for (session, transfer) in [(&mut *a, OF_A), (&mut *b, OF_B)] {
            session.begin().await?;
            session.run(&transfer.give()).await?;
            let Transfer { amount, to, .. } = transfer;
            report.did(session.name, format!("begins, and gives {amount} to account {to}"));
        }
    }

    // Each now needs what the other has.
    let mut take_of_a = Ok(0);
    let take_of_b;
    let (of_a, of_b) = (OF_A.take(), OF_B.take());
    if a.product == Product::Sqlite {
        take_of_b = b.run(&OF_B.give()).await;
    } else {
        report.did("A", format!("takes {} from account {}: waits for B", OF_A.amount, OF_A.from));
        report.did("B", format!("takes {} from account {}: waits for A", OF_B.amount, OF_B.from));
        // Whoever is not the victim goes on when the victim's transaction is gone.
        let first = async { finish(a.run(&of_a).await, a).await };
        let second = async { finish(b.run(&of_b).await, b).await };
        (take_of_a, take_of_b) = tokio::join!(first, second);
    }
    let (victim, transfer, refused) = match (take_of_a, take_of_b) {
        (Err(refused), Ok(_)) => (&mut *a, OF_A, refused),
        (Ok(_), Err(refused)) => (&mut *b, OF_B, refused),
        (a, b) => return Err(format!("not one of the two is the victim: {a:?}, {b:?}").into()),
    };
    let name = victim.name;
    report.did(name, format!("is the victim: {refused}"));

    let again = match repeat {
        Repeat::Transaction => {
            drop(victim.rollback().await);
            let tries = transaction(victim, transfer).await?;
            report.did(name, format!("pauses, and repeats the transaction: done with try {tries}"));
            "done".to_owned()
        }
        Repeat::Statement => {
            let sqlite = victim.product == Product::Sqlite;
            let failed = if sqlite { transfer.give() } else { transfer.take() };
            let again = match victim.run(&failed).await {
                Ok(_) => "done".to_owned(),
                Err(refused) => refused.to_string(),
            };
            drop(victim.commit().await);
            report.did(name, format!("repeats the statement and commits: {again}"));
            again
        }
    };
    let balances = a.ids("select balance from accounts order by id").await?;
    let repeated = match repeat {
        Repeat::Transaction => "the transaction",
        Repeat::Statement => "the statement",
    };
    Ok(Left { repeated, victim: name, refused, again, balances })
}

/// Commits if the last statement was not refused.
async fn finish(last: Result<u64, Refused>, session: &mut Session) -> Result<u64, Refused> {
    let changed = last?;
    session.commit().await?;
    Ok(changed)
}

/// A whole transfer, repeated until it is made; returns the number of tries.
async fn transaction(session: &mut Session, transfer: Transfer) -> Result<u32, Refused> {
    let mut tries = 1;
    loop {
        pause(JITTER).await;
        let made = async {
            session.begin().await?;
            session.run(&transfer.give()).await?;
            session.run(&transfer.take()).await?;
            session.commit().await
        };
        match made.await {
            Ok(()) => return Ok(tries),
            Err(Refused { why: Why::Locked | Why::Deadlock, .. }) => {
                drop(session.rollback().await);
                tries += 1;
            }
            Err(refused) => return Err(refused),
        }
    }
}
