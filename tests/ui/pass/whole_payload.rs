//! A sole `#[payload]` parameter is stored as it is.
#![deny(warnings)]

use std::collections::BTreeMap;

use jobq::{JobContext, job};

#[derive(serde::Serialize, serde::Deserialize)]
#[serde(tag = "kind")]
enum Event {
    Created { id: i64 },
    Deleted,
}

#[job]
async fn publish(#[payload] event: Event, ctx: &JobContext) -> Result<(), String> {
    match event {
        Event::Created { id } => println!("{id} {}", ctx.id()),
        Event::Deleted => {}
    }
    Ok(())
}

#[job]
fn store(#[payload] mut values: BTreeMap<String, u32>) {
    values.clear();
}

/// `#[payload]` also says that a type only looks as if it were injected.
#[derive(serde::Serialize, serde::Deserialize)]
struct State<T> {
    value: T,
}

#[job]
fn keep(#[payload] state: State<u32>) {
    println!("{}", state.value);
}

#[test]
fn it_works() {
    let text = format!("{:?}", publish::new(Event::Created { id: 1 }));
    assert!(text.contains(r#"{\"kind\":\"Created\",\"id\":1}"#), "{text}");
    let _ = publish::new(Event::Deleted);
    let _ = store::new(BTreeMap::new());
    let text = format!("{:?}", keep::new(State { value: 1 }));
    assert!(text.contains(r#"{\"value\":1}"#), "{text}");
}
