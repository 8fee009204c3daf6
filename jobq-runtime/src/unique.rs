//! What makes two jobs twins, as a key.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::Value;
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};

/// What twins have in common: a digest (SHA-256) of their kind and of the parameters, or the text,
/// that makes them twins.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct UniqueKey(pub(crate) [u8; 32]);

impl UniqueKey {
    /// The key of a kind and a text that the application gave.
    pub(crate) fn given(kind: &str, text: &str) -> Self {
        let mut digest = Digester::new(kind);
        digest.part(b"given");
        digest.part(text.as_bytes());
        digest.key()
    }

    /// The key of a kind and a payload, or of some of its parameters.
    ///
    /// Objects are the same in whatever order their keys were written, as of a `HashMap`. A parameter
    /// that the payload does not have is told apart from one that is `null`.
    pub(crate) fn of_payload(kind: &str, payload: &str, by: Option<&[&str]>) -> Self {
        let mut digest = Digester::new(kind);
        digest.part(b"payload");
        // What was just written as an object can be read as one.
        let fields: BTreeMap<String, &RawValue> = serde_json::from_str(payload).unwrap_or_default();
        for (name, value) in &fields {
            if by.is_none_or(|by| by.contains(&name.as_str())) {
                digest.part(name.as_bytes());
                digest.part(canonical(value.get()).as_bytes());
            }
        }
        digest.key()
    }
}

/// Whether a payload has a parameter.
pub(crate) fn has(payload: &str, parameter: &str) -> bool {
    let fields: BTreeMap<String, &RawValue> = serde_json::from_str(payload).unwrap_or_default();
    fields.contains_key(parameter)
}

impl fmt::Debug for UniqueKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UniqueKey({self})")
    }
}

/// In hexadecimal digits.
impl fmt::Display for UniqueKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

struct Digester(Sha256);

impl Digester {
    fn new(kind: &str) -> Self {
        let mut digester = Self(Sha256::new());
        digester.part(kind.as_bytes());
        digester
    }

    /// Each part is preceded by its length, so that no two lists of parts are the same bytes.
    fn part(&mut self, bytes: &[u8]) {
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    fn key(self) -> UniqueKey {
        UniqueKey(self.0.finalize().into())
    }
}

/// JSON text with the keys of every object in order, and everything else as it was written: numbers
/// keep all their digits.
pub(crate) fn canonical(text: &str) -> String {
    if text.starts_with('{') {
        let fields: BTreeMap<String, &RawValue> = serde_json::from_str(text).unwrap_or_default();
        let fields = fields
            .into_iter()
            .map(|(name, value)| format!("{}:{}", Value::from(name), canonical(value.get())));
        format!("{{{}}}", fields.collect::<Vec<_>>().join(","))
    } else if text.starts_with('[') {
        let items: Vec<&RawValue> = serde_json::from_str(text).unwrap_or_default();
        let items = items.into_iter().map(|item| canonical(item.get()));
        format!("[{}]", items.collect::<Vec<_>>().join(","))
    } else {
        text.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(payload: &str) -> UniqueKey {
        UniqueKey::of_payload("k", payload, None)
    }

    #[test]
    fn the_order_of_keys_does_not_matter_at_any_depth() {
        assert_eq!(
            key(r#"{"a":1,"b":{"x":[{"p":1,"q":2}],"y":2}}"#),
            key(r#"{"b":{"y":2,"x":[{"q":2,"p":1}]},"a":1}"#)
        );
    }

    #[test]
    fn everything_else_matters() {
        let different = [
            r#"{}"#,
            r#"{"a":null}"#,
            r#"{"a":1}"#,
            r#"{"a":"1"}"#,
            r#"{"a":1.0}"#,
            r#"{"a":[1]}"#,
            r#"{"a":[1,2]}"#,
            r#"{"a":[2,1]}"#,
            r#"{"a":[12]}"#,
            r#"{"a":{"b":1}}"#,
            r#"{"a":{"b":2}}"#,
            r#"{"a":{"b\":1,\"c":2}}"#,
            r#"{"a":{"b":1,"c":2}}"#,
            r#"{"b":1}"#,
            r#"{"a":340282366920938463463374607431768211455}"#,
            r#"{"a":340282366920938463463374607431768211454}"#,
            r#"{"a":"x","b":"y"}"#,
            r#"{"a":"x\",\"b\":\"y"}"#,
        ];
        for (n, one) in different.iter().enumerate() {
            for other in &different[n + 1..] {
                assert_ne!(key(one), key(other), "{one} {other}");
            }
            assert_ne!(key(one), UniqueKey::of_payload("l", one, None), "{one}");
            assert_ne!(key(one), UniqueKey::given("k", one), "{one}");
        }
    }

    #[test]
    fn by_some_parameters_the_others_do_not_matter() {
        let by = |payload| UniqueKey::of_payload("k", payload, Some(&["a", "c"]));
        assert_eq!(by(r#"{"a":1,"b":2}"#), by(r#"{"b":3,"a":1}"#));
        assert_ne!(by(r#"{"a":1,"b":2}"#), by(r#"{"a":2,"b":2}"#));
        assert_ne!(by(r#"{"a":1}"#), by(r#"{"a":1,"c":null}"#), "absent is not null");
        assert_ne!(by(r#"{"a":1}"#), by(r#"{"c":1}"#));
    }

    /// Keys are in databases: a change would make no job the twin of one that is there.
    #[test]
    fn keys_stay_what_they_are() {
        assert_eq!(
            UniqueKey::of_payload("resize", r#"{"image_id":7,"width":640}"#, None).to_string(),
            "7ee01d52d458ec9b0338ae3bdc8210cf8b739027053a44173992a868db9ab6ac"
        );
        assert_eq!(
            UniqueKey::given("resize", "order-7").to_string(),
            "fabd2020f300eff580bc69a9f79f6ccf61da1037304fc39a946c607bde4836ef"
        );
    }
}
