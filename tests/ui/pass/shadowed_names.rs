//! Nothing the macro writes depends on what is in scope.
#![allow(dead_code, non_camel_case_types, non_upper_case_globals, unused_macros)]

use ::jobq::job as annotate;

type Result<T> = ::std::result::Result<T, ::std::string::String>;

struct Option;
struct Some;
struct None;
struct Ok;
struct Err;
struct Box;
struct Vec;
struct Send;
struct Default;
struct Payload;

mod jobq {}
mod std {}
mod core {}
mod alloc {}
mod serde {}

const payload: u8 = 0;
const value: u8 = 0;
static needs: u8 = 0;
static outcome: u8 = 0;

macro_rules! vec {
    () => {};
}
macro_rules! file {
    () => {};
}
macro_rules! line {
    () => {};
}

const LEASE: ::core::time::Duration = ::core::time::Duration::from_secs(10);

#[annotate(lease = LEASE, timeout = "5s", max_attempts = 2, backoff(base = "1s", factor = 2))]
async fn resize(
    width: u32,
    #[serde(default)] height: u32,
    ctx: &::jobq::JobContext,
) -> Result<u32> {
    Result::Ok(width + height + ctx.attempt())
}

#[annotate(register = false)]
fn blocking(width: u32, _state: ::jobq::State<u32>) {
    println!("{width}");
}

#[test]
fn it_works() {
    let _ = resize::new(1, 2);
    let _ = blocking::new(1);
}
