//! Payloads: a job's arguments as the bytes that serde writes and reads, kept as text.
//!
//! What [`encode`] accepts, [`decode`] reads back bit for bit, on every database. JSON cannot
//! hold some values (`NaN` becomes `null`, nesting past 128 levels cannot be read back); these
//! are refused when the job is enqueued, not discovered when it runs.

use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde::ser;

/// The largest payload taken unless the client says otherwise, metadata and tags included, in bytes:
/// 2 MiB.
pub const DEFAULT_LIMIT: usize = 2 * 1024 * 1024;

/// `serde_json` refuses to read more than 128 nested arrays and objects.
const MAX_DEPTH: usize = 127;

/// Why a payload was refused when its job was enqueued.
#[derive(Debug, thiserror::Error)]
pub enum PayloadError {
    /// A number that JSON cannot hold.
    #[error("{path} is {value}, which JSON cannot hold; send an Option, or a string")]
    NotFinite {
        /// Where in the payload it is, beginning with the parameter's name.
        path: String,
        /// `NaN`, `inf` or `-inf`.
        value: f64,
    },
    /// Deeper nesting than can be read back.
    #[error("{path} is nested more than {MAX_DEPTH} levels deep and could not be read back")]
    TooDeep {
        /// Where in the payload it begins.
        path: String,
    },
    /// More bytes than the limit.
    #[error(
        "payload, metadata and tags have {size} bytes, more than the limit of {limit}; store the \
         data elsewhere and enqueue where it is, or raise the client's payload limit"
    )]
    TooLarge {
        /// The size of all three together, as JSON, in bytes.
        size: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// A job function's value with more bytes than are kept.
    #[error(
        "the result has {size} bytes, more than the limit of {limit}; store the data elsewhere \
         and return where it is"
    )]
    ResultTooLarge {
        /// Its size in bytes.
        size: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// Not an object: plain payloads must be structs or maps.
    #[error("the payload must be a JSON object, not {found}")]
    NotAnObject {
        /// The beginning of what it is.
        found: String,
    },
    /// The value's own `Serialize` failed, or it has a map whose keys are not strings.
    #[error("the payload cannot be written as JSON")]
    Serialize(#[source] serde_json::Error),
}

/// Why a stored payload could not be read.
#[derive(Debug, thiserror::Error)]
#[error("payload does not match the job's parameters{}", place(.path))]
pub struct DecodeError {
    path: String,
    source: serde_json::Error,
}

fn place(path: &str) -> String {
    if path == "." { String::new() } else { format!(" at {path}") }
}

/// Writes a payload as JSON.
///
/// # Errors
///
/// [`PayloadError`] for values that could not be read back as they are.
///
/// # Examples
///
/// ```
/// use jobq_core::payload::{PayloadError, decode, encode};
///
/// assert_eq!(encode(&(u128::MAX,)).is_err(), true); // a tuple is no object
/// let text = encode(&std::collections::BTreeMap::from([("n", u64::MAX)]))?;
/// let back: std::collections::BTreeMap<String, u64> = decode(&text).unwrap();
/// assert_eq!(back["n"], u64::MAX);
/// # Ok::<(), PayloadError>(())
/// ```
pub fn encode<T: Serialize>(value: &T) -> Result<String, PayloadError> {
    value.serialize(Check { depth: 0 }).map_err(Problem::into_payload_error)?;
    let text = serde_json::to_string(value).map_err(PayloadError::Serialize)?;
    if text.starts_with('{') {
        Ok(text)
    } else {
        Err(PayloadError::NotAnObject { found: text.chars().take(40).collect() })
    }
}

/// Writes a job function's value as JSON; unlike a payload it need not be an object.
///
/// # Errors
///
/// [`PayloadError`] as for [`encode`], and for more than [`DEFAULT_LIMIT`] bytes.
pub fn encode_result<T: Serialize>(value: &T) -> Result<String, PayloadError> {
    value.serialize(Check { depth: 0 }).map_err(Problem::into_payload_error)?;
    let text = serde_json::to_string(value).map_err(PayloadError::Serialize)?;
    if text.len() > DEFAULT_LIMIT {
        return Err(PayloadError::ResultTooLarge { size: text.len(), limit: DEFAULT_LIMIT });
    }
    Ok(text)
}

/// Reads a payload.
///
/// # Errors
///
/// [`DecodeError`] names the place that does not fit.
pub fn decode<T: DeserializeOwned>(text: &str) -> Result<T, DecodeError> {
    let mut reader = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| DecodeError {
        path: error.path().to_string(),
        source: error.into_inner(),
    })?;
    reader.end().map_err(|source| DecodeError { path: ".".to_owned(), source })?;
    Ok(value)
}

/// A serializer that writes nothing and only looks for what JSON cannot hold.
#[derive(Clone, Copy)]
struct Check {
    depth: usize,
}

#[derive(Debug)]
struct Problem {
    path: Vec<String>,
    kind: ProblemKind,
}

#[derive(Debug)]
enum ProblemKind {
    NotFinite(f64),
    TooDeep,
    Custom(String),
}

impl Problem {
    fn new(kind: ProblemKind) -> Self {
        Self { path: Vec::new(), kind }
    }

    fn inside(mut self, step: impl fmt::Display) -> Self {
        self.path.push(step.to_string());
        self
    }

    fn into_payload_error(mut self) -> PayloadError {
        self.path.reverse();
        // The nesting of something too deep is not worth printing whole.
        self.path.truncate(8);
        let path = if self.path.is_empty() { "the value".to_owned() } else { self.path.join(".") };
        match self.kind {
            ProblemKind::NotFinite(value) => PayloadError::NotFinite { path, value },
            ProblemKind::TooDeep => PayloadError::TooDeep { path },
            ProblemKind::Custom(words) => {
                PayloadError::Serialize(<serde_json::Error as ser::Error>::custom(words))
            }
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.kind)
    }
}

impl std::error::Error for Problem {}

impl ser::Error for Problem {
    fn custom<T: fmt::Display>(words: T) -> Self {
        Self::new(ProblemKind::Custom(words.to_string()))
    }
}

impl Check {
    fn deeper(self) -> Result<Nested, Problem> {
        if self.depth >= MAX_DEPTH {
            return Err(Problem::new(ProblemKind::TooDeep));
        }
        Ok(Nested { check: Self { depth: self.depth + 1 }, index: 0, key: None })
    }
}

macro_rules! nothing_to_check {
    ($($name:ident($type:ty))*) => {
        $(fn $name(self, _: $type) -> Result<(), Problem> { Ok(()) })*
    };
}

impl ser::Serializer for Check {
    type Ok = ();
    type Error = Problem;
    type SerializeSeq = Nested;
    type SerializeTuple = Nested;
    type SerializeTupleStruct = Nested;
    type SerializeTupleVariant = Nested;
    type SerializeMap = Nested;
    type SerializeStruct = Nested;
    type SerializeStructVariant = Nested;

    nothing_to_check! {
        serialize_bool(bool)
        serialize_i8(i8) serialize_i16(i16) serialize_i32(i32) serialize_i64(i64) serialize_i128(i128)
        serialize_u8(u8) serialize_u16(u16) serialize_u32(u32) serialize_u64(u64) serialize_u128(u128)
        serialize_char(char) serialize_str(&str) serialize_bytes(&[u8]) serialize_unit_struct(&'static str)
    }

    fn serialize_f32(self, value: f32) -> Result<(), Problem> {
        self.serialize_f64(f64::from(value))
    }

    fn serialize_f64(self, value: f64) -> Result<(), Problem> {
        if value.is_finite() { Ok(()) } else { Err(Problem::new(ProblemKind::NotFinite(value))) }
    }

    fn serialize_none(self) -> Result<(), Problem> {
        Ok(())
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<(), Problem> {
        value.serialize(self)
    }

    fn serialize_unit(self) -> Result<(), Problem> {
        Ok(())
    }

    fn serialize_unit_variant(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
    ) -> Result<(), Problem> {
        Ok(())
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        value: &T,
    ) -> Result<(), Problem> {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<(), Problem> {
        value.serialize(self.deeper()?.check).map_err(|problem| problem.inside(variant))
    }

    fn serialize_seq(self, _: Option<usize>) -> Result<Nested, Problem> {
        self.deeper()
    }

    fn serialize_tuple(self, _: usize) -> Result<Nested, Problem> {
        self.deeper()
    }

    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<Nested, Problem> {
        self.deeper()
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Nested, Problem> {
        // A variant with contents is an object around an array or object.
        self.deeper()?.check.deeper()
    }

    fn serialize_map(self, _: Option<usize>) -> Result<Nested, Problem> {
        self.deeper()
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> Result<Nested, Problem> {
        self.deeper()
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Nested, Problem> {
        self.deeper()?.check.deeper()
    }
}

/// The inside of an array or object.
struct Nested {
    check: Check,
    index: usize,
    key: Option<String>,
}

impl Nested {
    fn element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Problem> {
        let index = self.index;
        self.index += 1;
        value.serialize(self.check).map_err(|problem| problem.inside(index))
    }
}

macro_rules! elements {
    ($($trait:ident::$method:ident)*) => {
        $(impl ser::$trait for Nested {
            type Ok = ();
            type Error = Problem;

            fn $method<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Problem> {
                self.element(value)
            }

            fn end(self) -> Result<(), Problem> {
                Ok(())
            }
        })*
    };
}
elements! {
    SerializeSeq::serialize_element
    SerializeTuple::serialize_element
    SerializeTupleStruct::serialize_field
    SerializeTupleVariant::serialize_field
}

macro_rules! fields {
    ($($trait:ident)*) => {
        $(impl ser::$trait for Nested {
            type Ok = ();
            type Error = Problem;

            fn serialize_field<T: Serialize + ?Sized>(
                &mut self,
                name: &'static str,
                value: &T,
            ) -> Result<(), Problem> {
                value.serialize(self.check).map_err(|problem| problem.inside(name))
            }

            fn end(self) -> Result<(), Problem> {
                Ok(())
            }
        })*
    };
}
fields! { SerializeStruct SerializeStructVariant }

impl ser::SerializeMap for Nested {
    type Ok = ();
    type Error = Problem;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), Problem> {
        key.serialize(self.check)?;
        self.key = serde_json::to_string(key).ok();
        Ok(())
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Problem> {
        let key = self.key.take();
        value.serialize(self.check).map_err(|problem| problem.inside(key.as_deref().unwrap_or("?")))
    }

    fn end(self) -> Result<(), Problem> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Serialize, Deserialize, PartialEq, Debug)]
    enum Shape {
        Point,
        Circle(f64),
        Box { width: i64, tags: Vec<Option<Shape>> },
    }

    #[derive(Serialize, Deserialize, PartialEq, Debug)]
    #[allow(clippy::option_option, reason = "it is an edge case of payloads")]
    struct Matrix {
        unit: (),
        none: Option<u8>,
        some: Option<Option<u8>>,
        shape: Shape,
        i64s: [i64; 2],
        u64_: u64,
        u128_: u128,
        i128_: i128,
        floats: Vec<f64>,
        single: f32,
        text: String,
        letter: char,
    }

    #[test]
    fn edge_values_read_back_as_they_were() {
        let value = Matrix {
            unit: (),
            none: None,
            some: Some(Some(7)),
            shape: Shape::Box {
                width: i64::MIN,
                tags: vec![None, Some(Shape::Circle(-0.0)), Some(Shape::Point)],
            },
            i64s: [i64::MIN, i64::MAX],
            u64_: u64::MAX,
            u128_: u128::MAX,
            i128_: i128::MIN,
            floats: vec![
                f64::MAX,
                f64::MIN_POSITIVE,
                5e-324,
                0.1 + 0.2,
                1.797_693_134_862_315_5e308,
            ],
            single: 0.1,
            text: "\0 \u{1f980} \" \\ \u{202e} é".to_owned(),
            letter: '\u{10ffff}',
        };
        let text = encode(&value).expect("every value has a JSON form");
        assert!(!text.contains('\0'), "NUL is escaped, so that PostgreSQL can store it");
        let back: Matrix = decode(&text).expect("what encode accepts, decode reads");
        assert_eq!(back, value);
        for (back, value) in back.floats.iter().zip(&value.floats) {
            assert_eq!(back.to_bits(), value.to_bits());
        }
    }

    #[derive(Serialize)]
    struct Numbers {
        list: Vec<Option<f64>>,
    }

    #[test]
    fn numbers_that_json_cannot_hold_are_refused_with_their_place() {
        for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let error =
                encode(&Numbers { list: vec![None, Some(value)] }).expect_err("no JSON form");
            assert!(matches!(error, PayloadError::NotFinite { .. }));
            assert!(error.to_string().starts_with("list.1 is"), "{error}");
        }
    }

    #[derive(Serialize, Deserialize, Debug)]
    struct Deep {
        inner: Option<Box<Deep>>,
    }

    fn nested(levels: usize) -> Deep {
        let mut value = Deep { inner: None };
        for _ in 1..levels {
            value = Deep { inner: Some(Box::new(value)) };
        }
        value
    }

    #[test]
    fn what_is_nested_too_deep_to_be_read_is_refused() {
        let text = encode(&nested(MAX_DEPTH)).expect("the deepest that can be read");
        decode::<Deep>(&text).expect("it can be read");
        assert!(matches!(encode(&nested(MAX_DEPTH + 1)), Err(PayloadError::TooDeep { .. })));
    }

    #[test]
    fn a_payload_that_does_not_fit_names_the_place() {
        let error = decode::<Matrix>(r#"{"unit":null,"none":"x"}"#).expect_err("a string is no u8");
        assert!(error.to_string().contains("none"), "{error}");
        let error = decode::<Deep>("{} trailing").expect_err("something follows");
        let text = crate::text::error_chain(&error);
        assert!(text.contains("trailing") && !text.contains(" at .:"), "{text}");
    }

    #[test]
    fn a_payload_is_an_object() {
        assert!(matches!(encode(&[1, 2]), Err(PayloadError::NotAnObject { .. })));
    }
}
