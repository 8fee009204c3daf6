//! Attributes stay on the function, above and below `#[job]`; documentation is on the twin too.
#![deny(warnings, missing_docs)]

use jobq::job;

/// Above.
#[allow(clippy::unused_async)]
#[job(queue = "images")]
/// Below, with an example that is not tested twice:
///
/// ```
/// assert!(true);
/// ```
#[must_use]
#[inline]
#[doc(alias = "shrink")]
#[doc = concat!("made ", "up")]
#[cfg_attr(all(), cold)]
#[cfg(not(doctest))]
pub async fn resize(image_id: i64) {
    println!("{image_id}");
}

/// Old.
#[job]
#[deprecated = "use `resize`"]
pub fn scale(image_id: i64) {
    println!("{image_id}");
}

/// An attribute on a parameter that is none of ours stays there.
#[job]
pub fn crop(image_id: i64, #[allow(unused_mut)] mut width: u32) {
    println!("{image_id} {width}");
}

#[cfg(any())]
#[job]
fn not_here(image_id: DoesNotExist) {}

#[test]
fn it_works() {
    let _ = resize::new(1);
    let _ = crop::new(1, 2);
    #[allow(deprecated)]
    let _ = scale::new(1);
}
