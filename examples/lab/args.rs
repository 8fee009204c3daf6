//! The command line.

use std::ffi::OsString;
use std::time::Duration;

use lexopt::{Arg, Parser, ValueExt};

use crate::EXPERIMENTS;
use crate::server::Product;

const HELP: &str = "\
Replays the experiments that explain jobq's design, on a real server, and checks what comes of them.

usage: cargo run --release --example lab -- [DATABASE] [EXPERIMENT...] [OPTIONS]

  DATABASE      postgres, mysql, mariadb or sqlite; without it, sqlite
  EXPERIMENT    letters; without them, all:
";

const OPTIONS: &str = "
  --seconds N   how long each way of claiming is measured in c; 30 by default
  --rows N      how many finished rows there are in h; 1000000 by default
  --markdown    write Markdown
  --help        show this

The server is the one of the environment variable DATABASE_URL, or of JOBQ_TEST_POSTGRES_URL,
JOBQ_TEST_MYSQL_URL or JOBQ_TEST_MARIADB_URL, which `scripts/test --env` sets:

  scripts/test --env cargo run --release --example lab -- mysql

SQLite needs none. Everything happens in a new database, which is dropped at the end. The user must
be allowed to make databases and, on MySQL and MariaDB, have the privilege PROCESS. Nothing else
should use the server meanwhile: some of its counters count for all.";

/// What is asked for.
pub(crate) struct Args {
    pub(crate) product: Product,
    /// Letters of experiments.
    pub(crate) experiments: Vec<char>,
    pub(crate) sizes: Sizes,
    pub(crate) markdown: bool,
}

/// How large experiments are.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    /// How long each way of claiming is measured.
    pub(crate) time: Duration,
    /// How many finished rows there are.
    pub(crate) rows: u64,
}

impl Args {
    /// Reads the command line; `None` when it only asked for help, which is shown.
    ///
    /// # Errors
    ///
    /// What is wrong, fit to be shown.
    pub(crate) fn parse() -> Result<Option<Self>, lexopt::Error> {
        let mut product = None;
        let mut experiments = Vec::new();
        let mut sizes = Sizes { time: Duration::from_secs(30), rows: 1_000_000 };
        let mut markdown = false;
        let mut parser = Parser::from_env();
        while let Some(arg) = parser.next()? {
            match arg {
                Arg::Short('h') | Arg::Long("help") => {
                    print!("{HELP}");
                    for experiment in EXPERIMENTS {
                        println!("    {}  {}", experiment.letter, experiment.title);
                    }
                    println!("{OPTIONS}");
                    return Ok(None);
                }
                Arg::Long("seconds") => sizes.time = parser.value()?.parse_with(seconds)?,
                Arg::Long("rows") => sizes.rows = parser.value()?.parse_with(rows)?,
                Arg::Long("markdown") => markdown = true,
                Arg::Value(word) => match letter(&word) {
                    Some(letter) => experiments.push(letter),
                    None if product.is_none() => product = Some(word.parse_with(Product::named)?),
                    None => return Err(unknown_experiment(&word).into()),
                },
                _ => return Err(arg.unexpected()),
            }
        }
        if experiments.is_empty() {
            experiments = EXPERIMENTS.iter().map(|experiment| experiment.letter).collect();
        }
        let product = product.unwrap_or(Product::Sqlite);
        Ok(Some(Self { product, experiments, sizes, markdown }))
    }
}

fn letter(word: &OsString) -> Option<char> {
    let letters = EXPERIMENTS.iter().map(|experiment| experiment.letter);
    letters.into_iter().find(|letter| *word == *letter.to_string())
}

fn unknown_experiment(word: &OsString) -> String {
    format!("there is no experiment {}; see --help", word.display())
}

fn seconds(text: &str) -> Result<Duration, &'static str> {
    let seconds = text.parse().ok().filter(|seconds| (0.1..=3600.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or("give 0.1 to 3600 seconds")
}

fn rows(text: &str) -> Result<u64, &'static str> {
    let rows = text.parse().ok().filter(|rows| (10_000..=10_000_000).contains(rows));
    rows.ok_or("give 10000 to 10000000 rows")
}
