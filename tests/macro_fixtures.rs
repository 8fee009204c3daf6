//! The macro in crates as users have them: other editions, other names, fewer dependencies, more
//! lints. The crates are in `tests/fixtures`, a workspace of its own.

use std::path::{Path, PathBuf};
use std::process::{self, Command, Output};
use std::thread;

#[test]
fn jobs_compile_without_serde_under_another_name_and_in_edition_2021() {
    cargo(&["build", "-p", "no-serde", "-p", "renamed", "-p", "edition-2021"]);
    for name in ["no-serde", "renamed", "edition-2021"] {
        run(name);
    }
}

#[test]
fn the_expansion_is_clean_under_every_lint() {
    cargo(&["clippy", "-p", "pedantic", "--no-deps"]);
}

#[test]
fn an_application_that_only_enqueues_needs_no_runtime() {
    cargo(&["check", "-p", "enqueue-only"]);
    let tree = cargo(&["tree", "-p", "enqueue-only", "-e", "normal", "--prefix", "none"]);
    let tree = String::from_utf8_lossy(&tree.stdout);
    assert!(tree.contains("jobq-runtime"), "{tree}");
    assert!(!tree.contains("inventory"), "{tree}");
}

#[test]
fn jobs_of_a_library_are_registered_if_and_only_if_it_is_mentioned() {
    cargo(&["build", "-p", "worker-that-mentions", "-p", "worker-that-forgets"]);
    let mut kinds: Vec<String> = run("worker-that-mentions").lines().map(str::to_owned).collect();
    kinds.sort();
    assert_eq!(kinds, ["greet", "mail.bounce"]);
    assert_eq!(run("worker-that-forgets"), "");
}

/// Runs cargo in the fixtures' workspace; what it builds is kept beside what the tests are.
fn cargo(args: &[&str]) -> Output {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    let fixtures = manifest.join("tests/fixtures");
    let lock = fixtures.join("Cargo.lock");
    // Tests run side by side, so nobody may see half a file.
    let copy = fixtures.join(format!("Cargo.lock.{}.{:?}", process::id(), thread::current().id()));
    std::fs::copy(manifest.join("Cargo.lock"), &copy).expect("the main Cargo.lock is there");
    std::fs::rename(&copy, &lock).expect("it is on the same disk");
    let mut command = Command::new(env!("CARGO"));
    command.args(args).arg("--offline").current_dir(fixtures).env("CARGO_TARGET_DIR", target());
    output(&mut command)
}

fn run(name: &str) -> String {
    let program = target().join("debug").join(format!("{name}{}", std::env::consts::EXE_SUFFIX));
    String::from_utf8(output(&mut Command::new(program)).stdout).expect("text")
}

fn target() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("fixtures")
}

fn output(command: &mut Command) -> Output {
    let output = command.output().expect("it can be started");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?} failed:\n{errors}");
    output
}
