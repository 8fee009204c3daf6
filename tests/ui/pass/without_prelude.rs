//! A module without the prelude of the standard library.
#![no_implicit_prelude]
#![deny(warnings)]

use ::jobq::{JobContext, State, job};
use ::std::string::String;

#[job(timeout = "5s", backoff(base = "1s"), aliases("old"))]
async fn resize(
    width: u32,
    #[serde(default)] height: ::std::option::Option<u32>,
    State(name): State<String>,
    ctx: &JobContext,
) -> ::std::result::Result<u32, String> {
    let _ = (height, name, ctx);
    ::std::result::Result::Ok(width)
}

#[job]
fn nothing() {}

#[test]
fn it_works() {
    let _ = resize::new(1, ::std::option::Option::None);
    let _ = nothing::new();
}
