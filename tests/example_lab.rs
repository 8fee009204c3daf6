//! The lab, with small sizes: on each database every experiment ends as expected and nothing is left
//! behind; and who asks for what cannot be is told what to do.

use std::process::{Child, Command, Output, Stdio};

use sqlx::{Connection, MySqlConnection, PgConnection};

use common::example;

mod common;

const POSTGRES: &str = "JOBQ_TEST_POSTGRES_URL";
const MYSQL: &str = "JOBQ_TEST_MYSQL_URL";
const MARIADB: &str = "JOBQ_TEST_MARIADB_URL";

const DATABASES: [(&str, Option<&str>); 4] = [
    ("postgres", Some(POSTGRES)),
    ("mysql", Some(MYSQL)),
    ("mariadb", Some(MARIADB)),
    ("sqlite", None),
];

#[tokio::test]
async fn on_each_database_everything_is_as_expected_and_nothing_is_left() {
    let sizes = ["--seconds", "0.5", "--rows", "20000"];
    // All at once: mostly they wait.
    let labs = DATABASES.map(|(database, variable)| {
        let url = variable.map(url);
        (database, start(&[&[database], &sizes[..]].concat(), url.as_deref()))
    });
    let [postgres, mysql, mariadb, _] = labs.map(|(database, lab)| {
        let pid = lab.id();
        let text = succeeded(&lab.wait_with_output().unwrap());
        for letter in 'a'..='h' {
            let verdict = format!("verdict {letter}: as expected");
            assert!(text.contains(&verdict), "{database}: no verdict on {letter}:\n{text}");
        }
        format!("jobq_lab_{pid}")
    });

    let mut connection = PgConnection::connect(&url(POSTGRES)).await.unwrap();
    let left = sqlx::query_scalar("select count(*) from pg_database where datname = $1");
    let left: i64 = left.bind(postgres).fetch_one(&mut connection).await.unwrap();
    assert_eq!(left, 0, "its database is left on PostgreSQL");
    for (variable, database) in [(MYSQL, mysql), (MARIADB, mariadb)] {
        let mut connection = MySqlConnection::connect(&url(variable)).await.unwrap();
        let schemas = "select count(*) from information_schema.schemata where schema_name = ?";
        let left = sqlx::query_scalar(schemas).bind(database);
        let left: i64 = left.fetch_one(&mut connection).await.unwrap();
        assert_eq!(left, 0, "its database is left: {variable}");
    }
}

#[test]
fn as_markdown_there_are_tables_and_fenced_timelines() {
    let text = succeeded(&finished(&["sqlite", "b", "--markdown"], None));
    assert!(text.contains("### b. ") && text.contains("```text\n  0.000 s  A  "), "{text}");
    assert!(
        text.contains("| with a lease ") && text.contains("**verdict b: as expected"),
        "{text}"
    );
    assert_eq!(text.matches("```").count() % 2, 0, "{text}");
}

#[test]
fn help_names_every_experiment() {
    let text = succeeded(&finished(&["--help"], None));
    for letter in 'a'..='h' {
        assert!(text.contains(&format!("\n    {letter}  ")), "{letter} is missing:\n{text}");
    }
}

#[test]
fn what_is_wrong_on_the_command_line_is_named() {
    for (args, expected) in [
        (["oracle"], "oracle"),
        (["z"], "neither a database (postgres, mysql, mariadb, sqlite) nor an experiment"),
        (["--fast"], "--fast"),
        (["--rows=1"], "give 10000 to 10000000 rows"),
        (["--seconds=0"], "give 0.1 to 3600 seconds"),
    ] {
        let error = failed(&finished(&args, None));
        assert!(error.contains(expected), "{args:?}: {error}");
    }
    let error = failed(&finished(&["sqlite", "nothing"], None));
    assert!(error.contains("there is no experiment nothing"), "{error}");
}

#[test]
fn without_a_server_it_says_how_to_name_one() {
    let error = failed(&finished(&["mysql"], None));
    assert!(error.contains("no MySQL server is given"), "{error}");
    assert!(error.contains("DATABASE_URL=mysql://"), "{error}");
    let command = "scripts/test --env cargo run --release --example lab -- mysql";
    assert!(error.contains(command), "{error}");
}

#[test]
fn a_server_that_is_another_product_is_refused() {
    let error = failed(&finished(&["mariadb"], Some(&url(MYSQL))));
    assert!(error.contains("asked for MariaDB, but the server is MySQL"), "{error}");
    let error = failed(&finished(&["mysql"], Some(&url(MARIADB))));
    assert!(error.contains("asked for MySQL, but the server is MariaDB"), "{error}");
    let error = failed(&finished(&["postgres"], Some(&url(MYSQL))));
    assert!(error.contains("DATABASE_URL does not begin with postgres://"), "{error}");
}

fn url(variable: &str) -> String {
    let url = std::env::var(variable);
    url.unwrap_or_else(|_| panic!("{variable} is not set; scripts/test starts servers and sets it"))
}

/// Runs the lab to its end; see [`start`].
fn finished(args: &[&str], url: Option<&str>) -> Output {
    start(args, url).wait_with_output().unwrap()
}

/// Starts the lab, which is given this server and no other.
fn start(args: &[&str], url: Option<&str>) -> Child {
    let mut command = Command::new(example("lab"));
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    for variable in ["DATABASE_URL", POSTGRES, MYSQL, MARIADB] {
        command.env_remove(variable);
    }
    if let Some(url) = url {
        command.env("DATABASE_URL", url);
    }
    command.spawn().unwrap()
}

/// What a successful run wrote.
fn succeeded(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{text}\n{errors}", output.status);
    text
}

/// What a run that failed complained about.
fn failed(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "it should have failed");
    String::from_utf8_lossy(&output.stderr).into_owned()
}
