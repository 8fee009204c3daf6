//! Every sort of parameter and name.
#![deny(warnings)]

use std::borrow::Cow;
use std::collections::BTreeMap;

use jobq::job;

#[job]
async fn none() {}

#[job]
fn optional(id: Option<i64>, tags: Option<Vec<String>>) {
    println!("{id:?} {tags:?}");
}

#[job]
fn r#type(r#fn: u32, r#match: u32) {
    println!("{}", r#fn + r#match);
}

#[job]
fn many(
    payload: u8,
    call: i8,
    ctx: u16,
    self_: i16,
    target: u32,
    target_: i32,
    name: u64,
    value: i64,
    needs: u128,
    job: f64,
    outcome: char,
) {
    println!(
        "{payload} {call} {ctx} {self_} {target} {target_} {name} {value} {needs} {job} {outcome}"
    );
}

#[job]
fn new(new: u32, enqueue: u32) {
    println!("{new} {enqueue}");
}

#[job]
fn same(same: u32) {
    println!("{same}");
}

#[job]
#[allow(non_snake_case)]
fn CamelCase(imageId: u32) {
    println!("{imageId}");
}

#[job]
fn shapes(
    pair: (u32, String),
    array: [u8; 4],
    map: BTreeMap<String, Vec<Option<u32>>>,
    text: Cow<'static, str>,
    boxed: Box<[u8]>,
    nested: std::vec::Vec<::std::string::String>,
    projected: <u32 as std::ops::Add>::Output,
) {
    println!("{pair:?} {array:?} {map:?} {text} {boxed:?} {nested:?} {projected}");
}

#[test]
fn it_works() {
    let _ = none::new();
    let _ = optional::new(Some(1), None);
    let _ = r#type::new(1, 2);
    assert_eq!(r#type::NAME, "type");
    let _ = many::new(1, 2, 3, 4, 5, 6, 7, 8, 9, 1.0, 'x');
    let _ = new::new(1, 2);
    let _ = same::new(1);
    let _ = CamelCase::new(1);
    let _ = shapes::new(
        (1, String::new()),
        [0; 4],
        BTreeMap::new(),
        "x".into(),
        Box::new([]),
        vec![],
        1,
    );
}
