//! The macro as users meet it: what it accepts, and the words and places of every compile error.
//!
//! The messages are those of one compiler; see `rust-toolchain` in the CI. After a deliberate
//! change run `TRYBUILD=overwrite cargo test --test ui` and read the diff.

#[test]
fn mistakes_are_compile_errors_with_a_cure() {
    trybuild::TestCases::new().compile_fail("tests/ui/fail/*.rs");
}

#[test]
fn what_should_compile_does() {
    trybuild::TestCases::new().pass("tests/ui/pass/*.rs");
}
