//! Every option, written out and as `const` expressions.
#![deny(warnings)]

use std::time::Duration;

use jobq::{Job, JobOptions, OnBlock, OnConflict, Unique, UniqueScope, job};

#[job(
    queue = "images/eu-1",
    name = "resize.v2",
    aliases("resize", "shrink"),
    lease = "1m30s",
    timeout = "5m",
    max_attempts = 5,
    max_crashes = 2,
    priority = -4,
    backoff(base = "2s", factor = 3, cap = "10m"),
    retention = "0s",
    crate = "::jobq",
    register = true,
)]
fn resize() {}

mod limits {
    pub const ATTEMPTS: u32 = 7;
    pub const PRIORITY: i16 = 4;
    pub const fn half(seconds: u64) -> std::time::Duration {
        std::time::Duration::from_secs(seconds / 2)
    }
}

const HOUR: Duration = Duration::from_secs(3600);

#[job(
    lease = limits::half(60),
    timeout = HOUR,
    max_attempts = limits::ATTEMPTS,
    max_crashes = 1 + 1,
    priority = limits::PRIORITY,
    backoff(base = limits::half(2), factor = 1.0 + 0.5, cap = HOUR),
    retention = Duration::ZERO,
    register = false
)]
fn constants() {}

#[job(unique)]
fn one_for_each_payload(image_id: i64) {
    drop(image_id.to_string());
}

#[job(unique(by(image_id, r#type), scope = "1h", on_conflict = "debounce", max_wait = "5m",))]
fn by_some(image_id: i64, width: u32, #[serde(rename = "kind")] r#type: String) {
    drop((image_id.to_string(), width.to_string(), r#type));
}

#[job(unique(scope = "until_started", on_conflict = "replace"))]
fn latest() {}

#[job(unique(scope = "forever", on_conflict = "error"))]
fn once() {}

#[job(key = image_id)]
fn in_line(image_id: i64) {
    drop(image_id.to_string());
}

#[job(key(user, r#type), on_block = "skip")]
fn in_line_by_two(user: i64, #[serde(rename = "kind")] r#type: String) {
    drop((user.to_string(), r#type));
}

#[job()]
fn plain() {}

#[test]
fn it_works() {
    assert_eq!(resize::NAME, "resize.v2");
    assert_eq!(resize::DEF.aliases, ["resize", "shrink"]);
    let options = resize::DEF.options;
    assert_eq!(options.queue, "images/eu-1");
    assert_eq!(options.lease, Duration::from_secs(90));
    assert_eq!(options.timeout, Some(Duration::from_secs(300)));
    assert_eq!((options.max_attempts, options.max_crashes, options.priority), (5, 2, -4));
    assert_eq!(options.backoff.base, Duration::from_secs(2));
    assert!((options.backoff.factor - 3.0).abs() < f64::EPSILON);
    assert_eq!(options.backoff.cap, Duration::from_secs(600));
    assert_eq!(options.retention, Some(Duration::ZERO));

    let options = constants::DEF.options;
    assert_eq!(options.lease, Duration::from_secs(30));
    assert_eq!(options.timeout, Some(HOUR));
    assert_eq!((options.max_attempts, options.max_crashes, options.priority), (7, 2, 4));
    assert_eq!(options.backoff.base, Duration::from_secs(1));
    assert_eq!(options.retention, Some(Duration::ZERO));

    assert_eq!(one_for_each_payload::DEF.options.unique, Some(Unique::DEFAULT));
    let max_wait = Duration::from_secs(300);
    assert_eq!(
        by_some::DEF.options.unique,
        Some(
            Unique::by(&["image_id", "kind"])
                .lasting(HOUR)
                .on_conflict(OnConflict::Debounce { max_wait })
        )
    );
    let latest = latest::DEF.options.unique.expect("it was given");
    assert_eq!(latest.scope, UniqueScope::UntilStarted);
    assert_eq!(latest.on_conflict, OnConflict::Replace);
    let once = once::DEF.options.unique.expect("it was given");
    assert_eq!((once.scope, once.on_conflict), (UniqueScope::Forever, OnConflict::Error));

    assert_eq!(in_line::DEF.options.key, Some(&["image_id"][..]));
    assert_eq!(in_line::DEF.options.on_block, OnBlock::Block);
    assert_eq!(in_line_by_two::DEF.options.key, Some(&["user", "kind"][..]));
    assert_eq!(in_line_by_two::DEF.options.on_block, OnBlock::Skip);

    assert_eq!(plain::DEF.options, JobOptions::DEFAULT);
}
