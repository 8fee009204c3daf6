//! Bad input and bad settings: each has one clear typed error that says what to do.

use std::time::{Duration, SystemTime};

use jobq::{Client, ClientOptions, Error, Runtime, StartProblem, State, job, jobs};

use crate::bed::{Bed, on_every_database};

on_every_database! {
    s5_every_start_problem_is_listed_at_once
    s5_a_runtime_without_jobs_says_how_to_link_them
    s5_missing_tables_name_the_cure
    s5_jobs_of_one_macro_call_are_told_apart
    s5_a_runtime_without_queues_does_not_start
    s3_an_endless_patience_is_no_panic
    e3_values_out_of_range_are_typed_errors_and_write_nothing
    e4_payloads_that_cannot_be_kept_are_typed_errors_and_write_nothing
    a_schema_name_that_is_no_name_is_refused
}

struct Missing;

#[job(register = false)]
async fn needy(State(a): State<std::sync::Arc<Missing>>, State(b): State<u128>) {
    let _ = (a, b);
}

mod twins {
    #[jobq::job(name = "twin", register = false)]
    pub(super) async fn first() {}
    #[jobq::job(name = "twin", register = false)]
    pub(super) async fn second() {}
}

#[job(register = false)]
async fn absent() {}

async fn s5_every_start_problem_is_listed_at_once(bed: Bed) {
    let error = bed
        .runtime(jobs![needy, twins::first, twins::second])
        .queue("a queue", 1)
        .queue("q", 0)
        .queue("q", 1)
        .only_queues(["nowhere"])
        .expect::<absent>()
        .run_until_idle()
        .await
        .expect_err("nothing of this can run");
    let Error::Start(problems) = &error else { panic!("{error}") };
    let has = |wanted: fn(&StartProblem) -> bool| problems.iter().filter(|p| wanted(p)).count();
    assert_eq!(has(|p| matches!(p, StartProblem::MissingState { .. })), 2, "{error}");
    assert_eq!(has(|p| matches!(p, StartProblem::DuplicateJob { .. })), 1, "{error}");
    assert_eq!(has(|p| matches!(p, StartProblem::BadQueue { .. })), 4, "{error}");
    assert_eq!(has(|p| matches!(p, StartProblem::NotRegistered { .. })), 1, "{error}");
    let text = error.to_string();
    for part in ["u128", ".state(value)", "start.rs", "rename one", "twin", "is set up twice"] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}

async fn s5_a_runtime_without_jobs_says_how_to_link_them(bed: Bed) {
    let error = bed.runtime(&[]).run_until_idle().await.expect_err("there is nothing to run");
    assert!(matches!(&error, Error::Start(problems) if problems == &[StartProblem::NoJobs]));
    assert!(error.to_string().contains("use my_jobs as _;"), "{error}");
}

async fn s5_missing_tables_name_the_cure(bed: Bed) {
    let client =
        ClientOptions::new().schema("never_made").connect(&bed.url).await.expect("reachable");
    let runtime = Runtime::new(client).only_listed_jobs().jobs(jobs![absent]);
    let error = runtime.run_until_idle().await.expect_err("there are no tables");
    assert!(matches!(error, Error::Schema { found: 0, .. }), "{error}");
    assert!(error.to_string().contains("client.migrate()"), "{error}");
    let client =
        ClientOptions::new().schema("never_made").connect(&bed.url).await.expect("reachable");
    let error = new().enqueue(&client).await.expect_err("there are no tables");
    assert!(matches!(error, Error::Schema { found: 0, .. }), "{error}");
    // What a `main` that returns it prints.
    assert!(format!("{error:?}").contains("client.migrate()"), "{error:?}");
}

#[job(register = false)]
async fn plain(text: String, number: f64) {
    let _ = (text, number);
}

fn new() -> jobq::NewJob {
    plain::new("x".to_owned(), 1.0)
}

async fn e3_values_out_of_range_are_typed_errors_and_write_nothing(bed: Bed) {
    let far = SystemTime::UNIX_EPOCH + Duration::from_secs(400_000_000_000);
    let bad: Vec<(jobq::NewJob, &str)> = vec![
        (new().priority(5), "use -4 (last) to 4 (first)"),
        (new().priority(i64::MIN), "out of range"),
        (new().queue("no spaces"), "use 1 to 100"),
        (new().queue(""), "is empty"),
        (new().max_attempts(0), "max_attempts"),
        (new().max_attempts(u32::MAX), "max_attempts"),
        (new().delay(Duration::MAX), "100 years"),
        (new().run_at(far), "9999"),
        (new().tag(""), "tag"),
        (new().tag("a\0b"), "NUL"),
    ];
    for (job, words) in bad {
        let error = job.enqueue(&bed.client).await.expect_err(words);
        assert!(error.to_string().contains(words), "{error} does not say {words:?}");
        assert!(!error.is_transient(), "trying again would not help: {error}");
    }
    assert_eq!(bed.client.counts().await.expect("asked"), []);
}

async fn e4_payloads_that_cannot_be_kept_are_typed_errors_and_write_nothing(bed: Bed) {
    let nan = plain::new("x".to_owned(), f64::NAN).enqueue(&bed.client).await;
    let error = nan.expect_err("NaN has no JSON form");
    assert!(matches!(error, Error::Payload { .. }));
    assert!(error.to_string().contains("number is NaN"), "{error}");
    let large = plain::new("x".repeat(3 << 20), 1.0).enqueue(&bed.client).await;
    let error = large.expect_err("three megabytes are too much");
    assert!(error.to_string().contains("limit of 2097152"), "{error}");
    let many = [new(), plain::new("x".to_owned(), f64::INFINITY)];
    jobq::enqueue_many(&bed.client, many).await.expect_err("one of them cannot be kept");
    assert_eq!(bed.client.counts().await.expect("asked"), [], "and so none was written");
}

async fn a_schema_name_that_is_no_name_is_refused(_bed: Bed) {
    for name in ["", "Jobs", "a.b", "x; drop table y", "1st", "ü"] {
        let error = ClientOptions::new().schema(name).connect("sqlite:unused.db").await;
        let error = error.expect_err(name);
        assert!(matches!(error, Error::BadOption { option: "schema", .. }), "{error}");
    }
}

#[tokio::test]
async fn urls_that_name_no_database_are_refused_with_an_example() {
    let nowhere = ["", "jobs.db", "redis://host", "postgres//host", "mysql//host", "http://x"];
    for url in nowhere.into_iter().chain(["mysql://host", "mariadb://host/"]) {
        let error = Client::connect(url).await.expect_err(url);
        assert!(matches!(error, Error::BadUrl { .. }), "{url}: {error}");
        assert!(error.to_string().contains("://user:password@host/database"), "{error}");
    }
    for scheme in ["postgres", "mysql", "mariadb"] {
        let url = format!("{scheme}://user:geheim@host:notaport/x");
        let error = Client::connect(&url).await.expect_err("no port");
        assert!(matches!(error, Error::BadUrl { .. }), "{error}");
        assert!(!format!("{error} {error:?}").contains("geheim"), "{error:?}");
    }
}

#[tokio::test]
async fn a_server_that_is_not_there_is_named_without_its_password() {
    for scheme in ["postgres", "mysql", "mariadb"] {
        let url = format!("{scheme}://me:geheim@127.0.0.1:1/db");
        let error = Client::connect(&url).await.expect_err("closed port");
        assert!(matches!(error, Error::Connect { .. }), "{error}");
        let text = format!("{error} {error:?}");
        assert!(text.contains("127.0.0.1:1/db") && !text.contains("geheim"), "{text}");
        assert!(error.is_transient(), "a server may come back");
    }
}

#[tokio::test]
async fn an_in_memory_database_is_refused_with_the_cure() {
    for url in ["sqlite::memory:", "sqlite:", "sqlite:?mode=memory", "sqlite:file:x?mode=memory"] {
        let error = Client::connect(url).await.expect_err(url);
        assert!(error.to_string().contains("file"), "{url}: {error}");
    }
}

#[tokio::test]
async fn a_file_in_a_folder_that_is_not_there_is_an_error() {
    let error = Client::connect("sqlite:/nonexistent/folder/jobs.db").await.expect_err("no folder");
    assert!(matches!(error, Error::BadUrl { .. }), "{error}");
    assert!(error.to_string().contains("directory must exist"), "{error}");
}

macro_rules! two_at_once {
    ($($module:ident)+) => {
        $(mod $module {
            #[jobq::job(register = false)]
            pub(super) async fn of_a_macro() {}
        })+
    };
}
two_at_once!(here there);

async fn s5_jobs_of_one_macro_call_are_told_apart(bed: Bed) {
    let runtime = bed.runtime(jobs![here::of_a_macro, there::of_a_macro]);
    let error = runtime.run_until_idle().await.expect_err("they have one name");
    let Error::Start(problems) = &error else { panic!("{error}") };
    assert!(matches!(&problems[..], [StartProblem::DuplicateJob { .. }]), "{error}");
}

async fn s5_a_runtime_without_queues_does_not_start(bed: Bed) {
    let runtime = bed.runtime(jobs![absent]).only_queues(Vec::<String>::new());
    let error = runtime.run_until_idle().await.expect_err("there is nothing to serve");
    assert!(matches!(&error, Error::Start(problems) if problems == &[StartProblem::NoQueues]));
    assert!(error.to_string().contains("only_queues"), "{error}");
}

async fn s3_an_endless_patience_is_no_panic(bed: Bed) {
    let runtime = bed.runtime(jobs![absent]).shutdown_timeout(Duration::MAX);
    let ended = runtime.run_until(async {}).await.expect("it starts and stops");
    assert!(ended.is_clean());
}
