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
