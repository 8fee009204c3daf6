//! The macro as users meet it: what it accepts, and the words and places of every compile error.
//!
//! The messages pinned are those of the newest stable compiler. After a deliberate change run
//! `TRYBUILD=overwrite cargo test --test ui` and read the difference.

// Each file is written as users write; our own style is not the subject.
#[allow(unreachable_pub, clippy::all, clippy::pedantic)]
#[path = "ui/pass/mod.rs"]
mod pass;

#[test]
fn mistakes_are_compile_errors_with_a_cure() {
    trybuild::TestCases::new().compile_fail("tests/ui/fail/*.rs");
}

#[test]
fn every_file_of_what_is_accepted_is_compiled() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/ui/pass");
    let list = std::fs::read_to_string(format!("{folder}/mod.rs")).expect("the list of modules");
    for entry in std::fs::read_dir(folder).expect("the folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        assert!(name == "mod" || list.contains(&format!("mod {name};")), "{name} is not in mod.rs");
    }
}

/// The macro checks literals, `JobOptions::checked` checks what the compiler evaluates.
#[test]
fn a_literal_and_a_const_are_refused_in_the_same_words() {
    let words = |name: &str| {
        let file = format!("{}/tests/ui/fail/{name}.stderr", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(file).expect(name);
        let first = text.lines().next().expect("a message").to_owned();
        first.replace("error[E0080]: evaluation panicked", "error")
    };
    for (literal, constant) in [
        ("lease_too_short", "lease_const_too_short"),
        ("timeout_zero", "timeout_const_zero"),
        ("max_attempts_zero", "max_attempts_const_zero"),
        ("priority_out_of_range", "priority_const_out_of_range"),
        ("lease_too_long", "lease_const_too_long"),
        ("max_crashes_too_large", "max_crashes_const_too_large"),
        ("backoff_shrinks", "backoff_const_shrinks"),
    ] {
        assert_eq!(words(literal), words(constant));
    }
}
