//! Payloads: stored as the bytes they were given as, and given back so.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::bed::{Bed, LEASE};
use super::sample::{new_job, plain};
use super::worker::job;
use crate::client::ClientOptions;
use crate::error::Error;

#[derive(Serialize, Deserialize, PartialEq, Debug)]
enum Shape {
    Point,
    Circle(f64),
    Box { width: i64, inside: Vec<Option<Shape>> },
}

#[derive(Serialize, Deserialize, PartialEq, Debug)]
struct Matrix {
    unit: (),
    none: Option<u8>,
    #[allow(clippy::option_option, reason = "somebody will")]
    some: Option<Option<u8>>,
    shape: Shape,
    i64s: [i64; 2],
    u64_: u64,
    u128_: u128,
    i128_: i128,
    floats: Vec<f64>,
    text: String,
    letter: char,
}

fn matrix() -> Matrix {
    Matrix {
        unit: (),
        none: None,
        some: Some(Some(7)),
        shape: Shape::Box {
            width: i64::MIN,
            inside: vec![None, Some(Shape::Circle(-0.0)), Some(Shape::Point)],
        },
        i64s: [i64::MIN, i64::MAX],
        u64_: u64::MAX,
        u128_: u128::MAX,
        i128_: i128::MIN,
        floats: vec![f64::MAX, f64::MIN_POSITIVE, 5e-324, 0.1 + 0.2],
        text: "\0 \u{1f980} \" \\ \u{202e} é \r\n\t ' ; -- $1 ?1 jobq.jobs now_us()".to_owned(),
        letter: '\u{10ffff}',
    }
}

/// Sends a payload through the database and reads it as its job function would.
async fn round_trip<P: Serialize + DeserializeOwned + Send + 'static>(bed: &Bed, payload: &P) -> P {
    let text = jobq_core::payload::encode(payload).expect("it has a JSON form");
    let id = new_job(payload).enqueue(&bed.client).await.expect("enqueues").id();
    let worker = bed.session(LEASE, &["k"]).await;
    let claimed = worker.claim_one().await;
    assert_eq!(claimed.lease.job, id);
    assert!(claimed.payload == text, "not the bytes that were enqueued");
    jobq_core::payload::decode(&claimed.payload).expect("what is stored can be read")
}

pub(super) async fn e4_edge_values_come_back_as_they_were(bed: Bed) {
    let back = round_trip(&bed, &matrix()).await;
    assert_eq!(back, matrix());
    for (back, value) in back.floats.iter().zip(matrix().floats) {
        assert_eq!(back.to_bits(), value.to_bits());
    }
}

#[derive(Serialize, Deserialize, PartialEq, Debug)]
struct Text {
    text: String,
}

pub(super) async fn e4_a_megabyte_comes_back_as_it_was(bed: Bed) {
    let text: String =
        ('a'..='z').chain(['é', '\u{1f980}', '\0', '"']).cycle().take(1 << 20).collect();
    let sent = Text { text };
    assert!(round_trip(&bed, &sent).await == sent);
}

#[derive(Serialize, Deserialize, Debug)]
struct Deep {
    inner: Option<Box<Deep>>,
}

fn nested(levels: usize) -> Deep {
    (1..levels).fold(Deep { inner: None }, |deep, _| Deep { inner: Some(Box::new(deep)) })
}

pub(super) async fn e4_the_deepest_nesting_comes_back_and_a_deeper_one_is_refused(bed: Bed) {
    round_trip(&bed, &nested(127)).await;
    let error = new_job(&nested(128)).enqueue(&bed.client).await.expect_err("cannot be read back");
    assert!(matches!(error, Error::Payload { .. }), "{error:?}");
    assert_eq!(bed.count("jobs").await, 1);
}

pub(super) async fn e4_what_json_cannot_hold_is_a_typed_error(bed: Bed) {
    for value in [f64::NAN, f64::INFINITY] {
        let payload = Matrix { floats: vec![0.0, value], ..matrix() };
        let error = new_job(&payload).enqueue(&bed.client).await.expect_err("no JSON form");
        assert!(matches!(error, Error::Payload { .. }), "{error:?}");
        assert!(error.to_string().contains("cannot enqueue k: floats.1 is"), "{error}");
    }
    let error = new_job(&vec![1, 2]).enqueue(&bed.client).await.expect_err("no object");
    assert!(error.to_string().contains("must be a JSON object"), "{error}");
    assert_eq!(bed.count("jobs").await, 0);
}

pub(super) async fn e4_the_payload_limit_is_the_clients(bed: Bed) {
    let fits = Text { text: "x".repeat(100) };
    let size = jobq_core::payload::encode(&fits).expect("JSON").len();
    let options = ClientOptions::new().schema(&bed.schema).payload_limit(size);
    let client = bed.client_with(options);
    new_job(&fits).enqueue(&client).await.expect("exactly the limit");
    let error =
        new_job(&Text { text: "x".repeat(101) }).enqueue(&client).await.expect_err("larger");
    assert!(matches!(error, Error::Payload { .. }), "{error:?}");
    assert!(error.to_string().contains(&format!("more than the limit of {size}")), "{error}");
    super::bed::on_pool!(bed, pool => {
        let mut tx = pool.begin_with(bed.begin()).await.expect("begins");
        let larger = new_job(&Text { text: "x".repeat(101) });
        larger.enqueue(client.within(&mut tx)).await.expect_err("the client's limit holds here too");
        drop(tx);
    });
    assert_eq!(bed.count("jobs").await, 1);
}

pub(super) async fn e4_metadata_and_tags_count_towards_the_payload_limit(bed: Bed) {
    let client = bed.client_with(ClientOptions::new().schema(&bed.schema).payload_limit(100));
    // {} and {"m":"…"}; {} and ["…"]; all three.
    let fits = [
        plain().metadata("m", "x".repeat(90)),
        plain().tag("x".repeat(94)),
        plain().metadata("m", "x".repeat(43)).tag("x".repeat(43)),
    ];
    let larger = [
        plain().metadata("m", "x".repeat(91)),
        plain().tag("x".repeat(95)),
        plain().tag("\u{1}".repeat(16)),
        plain().metadata("m", "x".repeat(43)).tag("x".repeat(44)),
    ];
    for job in fits {
        job.enqueue(&client).await.expect("exactly the limit");
    }
    for job in larger {
        let error = job.enqueue(&client).await.expect_err("larger");
        assert!(matches!(error, Error::Payload { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("payload, metadata and tags have 10"), "{text}");
        assert!(text.contains("more than the limit of 100"), "{text}");
    }
    let error = plain().tag("x".repeat(30_000_000)).enqueue(&bed.client).await;
    assert!(matches!(error, Err(Error::Payload { .. })), "{error:?}");
    assert_eq!(bed.count("jobs").await, 3);
}

/// Other programs write payloads too: not a byte is normalised.
pub(super) async fn e4_any_text_is_kept_byte_for_byte(bed: Bed) {
    let texts = [
        r#"{ "b" : 1e400, "a":1, "a":2 }"#,
        "{\n\t\"n\": 123456789012345678901234567890.10\r\n}",
        r#"{"escaped":"\u00e9\u0000\ud83e\udd80\/"}"#,
        "not json at all",
        "",
    ];
    for text in texts {
        let mut job = job("k");
        job.payload = text.to_owned();
        let id = bed.enqueue(vec![job]).await[0];
        assert_eq!(bed.job_row(id).await.text("payload"), text);
    }
    let worker = bed.session(LEASE, &["k"]).await;
    let claimed: Vec<String> = worker.claim(9).await.into_iter().map(|job| job.payload).collect();
    assert_eq!(claimed, texts);
}
