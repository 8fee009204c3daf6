//! Jobs beside each other do not meet, not even with all these lints.
#![forbid(unsafe_code)]
#![deny(unused_qualifications, non_camel_case_types, non_snake_case, non_upper_case_globals)]
#![deny(warnings, missing_docs, unreachable_pub, single_use_lifetimes)]
#![deny(missing_debug_implementations, missing_copy_implementations, unused_results)]
#![deny(let_underscore_drop, elided_lifetimes_in_paths, unit_bindings, trivial_casts)]

use jobq::{JobContext, job};

/// One.
#[job]
pub(crate) async fn one(id: i64, ctx: &JobContext) {
    println!("{id} {}", ctx.id());
}

/// Two.
#[job(register = false)]
pub(crate) async fn two(id: i64) {
    println!("{id}");
}

/// Three, which is never used.
#[job]
fn three(id: i64, jobq::State(step): jobq::State<i64>) -> Result<(), String> {
    println!("{}", id + step);
    Ok(())
}

/// Many parameters.
#[job]
#[allow(clippy::too_many_arguments, clippy::fn_params_excessive_bools)]
pub(crate) fn many(a: bool, b: bool, c: bool, d: bool, e: u8, f: u8, g: u8, h: u8, i: u8) {
    println!("{a} {b} {c} {d} {e} {f} {g} {h} {i}");
}

#[test]
fn it_works() {
    drop(one::new(1));
    drop(two::new(1));
    drop(many::new(true, true, true, true, 0, 0, 0, 0, 0));
}
