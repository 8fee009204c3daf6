//! What tests of examples share.

use std::path::PathBuf;
use std::process::Command;

/// An example's program. Cargo builds it with the tests, unless it was told to build this one only.
pub(crate) fn example(name: &str) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let profile = tests.ancestors().nth(2).expect("tests are in target/PROFILE/deps");
    let example = profile.join("examples").join(format!("{name}{}", std::env::consts::EXE_SUFFIX));
    if !example.exists() {
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--example", name]).current_dir(env!("CARGO_MANIFEST_DIR"));
        build.env("CARGO_TARGET_DIR", profile.parent().expect("target/PROFILE"));
        if !cfg!(debug_assertions) {
            build.arg("--release");
        }
        assert!(build.status().unwrap().success(), "the example cannot be built");
    }
    example
}
