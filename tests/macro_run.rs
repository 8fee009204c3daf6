//! What `#[job]` makes of a function, at run time: payloads, options, needs, registration.

use std::time::Duration;

use jobq::{Job, JobContext, JobOptions, NewJob, State, job};
use serde_json::{from_str, to_string};

#[derive(Clone)]
struct ImageStore(u32);

#[derive(Debug, PartialEq, serde::Serialize, serde::Deserialize)]
enum Shape {
    Square,
    Box { width: u32, height: u32 },
}

/// Makes a small copy of an image.
#[job(queue = "images", aliases("shrink", "images/shrink"), timeout = "5m", max_attempts = 5)]
async fn resize(
    image_id: i64,
    width: Option<u32>,
    State(store): State<ImageStore>,
    shape: Shape,
    #[serde(default)] tags: Vec<String>,
    ctx: &JobContext,
    r#type: String,
) -> Result<String, String> {
    std::future::ready(()).await;
    let width = width.ok_or("no width")?;
    Ok(format!("{image_id} {width} {} {shape:?} {tags:?} {} {type}", store.0, ctx.attempt()))
}

#[job(register = false)]
fn cleanup() {}

#[job(name = "mail/greet.v2")]
fn greet(#[payload] letter: Letter, State(from): State<String>, _again: State<String>) {
    println!("{from} {}", letter.to);
}

#[derive(serde::Serialize, serde::Deserialize)]
struct Letter {
    to: String,
}

type Payload<J> = <J as Job>::Payload;

/// The JSON that a new job is stored with.
fn json(job: &NewJob) -> String {
    let text = format!("{job:?}").replace("\\\"", "\"");
    let begin = text.find("Ok(\"").expect("the payload is fine") + 4;
    let end = text[begin..].find("\")").expect("it ends") + begin;
    text[begin..end].to_owned()
}

#[test]
fn a_payload_is_an_object_with_the_parameters_as_keys() {
    let shape = Shape::Box { width: 1, height: 2 };
    let job = resize::new(i64::MAX, None, shape, vec!["a".to_owned()], "jpeg".to_owned());
    assert_eq!(
        json(&job),
        r#"{"image_id":9223372036854775807,"width":null,"shape":{"Box":{"width":1,"height":2}},"tags":["a"],"type":"jpeg"}"#
    );
    assert_eq!(json(&cleanup::new()), "{}");
    assert_eq!(json(&greet::new(Letter { to: "Ada".to_owned() })), r#"{"to":"Ada"}"#);
}

#[test]
fn a_payload_reads_back_as_it_was_written() {
    let job = resize::new(-1, Some(640), Shape::Square, Vec::new(), String::new());
    let written = json(&job);
    let payload: Payload<resize> = from_str(&written).expect("what is written can be read");
    assert_eq!(to_string(&payload).expect("what is read can be written"), written);

    let payload: Payload<greet> = from_str(r#"{"to":"Ada"}"#).expect("it is a letter");
    assert_eq!(to_string(&payload).expect("it is an object"), r#"{"to":"Ada"}"#);
    from_str::<Payload<cleanup>>("{}").expect("no parameters, no keys");
}

#[test]
fn optional_and_defaulted_parameters_may_be_missing_and_unknown_keys_are_skipped() {
    let text = r#"{"shape":"Square","image_id":7,"new_in_v2":[1],"type":"png"}"#;
    let payload: Payload<resize> = from_str(text).expect("the rest is there");
    let written = to_string(&payload).expect("it is an object");
    assert_eq!(written, r#"{"image_id":7,"width":null,"shape":"Square","tags":[],"type":"png"}"#);
}

#[test]
fn a_payload_that_does_not_fit_says_where_and_what_was_expected() {
    let refused = |text: &str| {
        from_str::<Payload<resize>>(text).err().map(|error| error.to_string()).expect(text)
    };
    let missing = refused(r#"{"shape":"Square","type":"png"}"#);
    assert!(missing.contains("missing field `image_id`"), "{missing}");
    let wrong = refused(r#"{"image_id":"7","shape":"Square","type":"png"}"#);
    assert!(wrong.contains("invalid type: string \"7\", expected i64"), "{wrong}");
    let no_object = refused("7");
    assert!(
        no_object.contains("expected an object with the parameters of `resize`"),
        "{no_object}"
    );
}

#[tokio::test]
async fn the_function_is_an_ordinary_function() {
    let ctx = JobContext::detached();
    let state = State(ImageStore(3));
    let done = resize(1, Some(2), state.clone(), Shape::Square, Vec::new(), &ctx, String::new());
    assert_eq!(done.await, Ok("1 2 3 Square [] 1 ".to_owned()));
    let failed = resize(1, None, state, Shape::Square, Vec::new(), &ctx, String::new()).await;
    assert_eq!(failed, Err("no width".to_owned()));
    cleanup();
    greet(Letter { to: "Ada".to_owned() }, State("Bob".to_owned()), State(String::new()));
}

#[test]
fn the_definition_says_what_was_annotated() {
    let def = resize::DEF;
    assert_eq!((def.kind, resize::NAME, <resize as Job>::NAME), ("resize", "resize", "resize"));
    assert_eq!(def.aliases, ["shrink", "images/shrink"]);
    assert_eq!(
        def.options,
        JobOptions {
            queue: "images",
            timeout: Some(Duration::from_mins(5)),
            max_attempts: 5,
            ..JobOptions::DEFAULT
        }
    );
    assert_eq!(def.file, file!());
    assert_eq!(format!("{:?}", def.handler), "async");

    assert_eq!(cleanup::DEF.options, JobOptions::DEFAULT);
    assert_eq!(format!("{:?}", cleanup::DEF.handler), "blocking");
    assert_eq!((greet::NAME, greet::DEF.kind), ("mail/greet.v2", "mail/greet.v2"));
    assert!(greet::DEF.line > resize::DEF.line);
}

#[test]
fn the_state_that_a_job_needs_is_listed() {
    let needs =
        |def: &jobq::JobDef| -> Vec<&str> { (def.needs)().iter().map(|need| need.name).collect() };
    assert_eq!(needs(resize::DEF), [std::any::type_name::<ImageStore>()]);
    assert_eq!(needs(cleanup::DEF), [""; 0]);
    assert_eq!(needs(greet::DEF), [std::any::type_name::<String>(); 2]);
}

#[cfg(feature = "runtime")]
#[test]
fn jobs_are_registered_unless_they_say_otherwise() {
    use jobq::__private::{Registration, inventory};

    let mut kinds: Vec<&str> =
        inventory::iter::<Registration>().map(|registration| registration.0.kind).collect();
    kinds.sort_unstable();
    assert_eq!(kinds, ["mail/greet.v2", "resize"]);
}
