//! Parameters take serde's field attributes.
#![deny(warnings)]

use jobq::job;

fn ten() -> u32 {
    10
}

fn is_ten(value: &u32) -> bool {
    *value == 10
}

mod as_text {
    pub fn serialize<S: serde::Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }

    pub fn deserialize<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
        let text: String = serde::Deserialize::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[derive(serde::Serialize, serde::Deserialize)]
struct Extra {
    note: String,
}

#[job]
fn resize(
    #[serde(rename = "imageId", alias = "id")] image_id: u64,
    #[serde(default)] width: u32,
    #[serde(default = "ten", skip_serializing_if = "is_ten")] height: u32,
    #[serde(with = "as_text")] big: u64,
    #[serde(flatten)] extra: Extra,
    #[serde(default)]
    #[serde(rename = "q")]
    quality: Option<u8>,
) {
    println!("{image_id} {width} {height} {big} {} {quality:?}", extra.note);
}

#[test]
fn it_works() {
    let job = resize::new(1, 2, 10, u64::MAX, Extra { note: "x".to_owned() }, None);
    let text = format!("{job:?}");
    assert!(text.contains(r#"{\"imageId\":1,\"width\":2,\"big\":\"18446744073709551615\",\"note\":\"x\",\"q\":null}"#), "{text}");
}
