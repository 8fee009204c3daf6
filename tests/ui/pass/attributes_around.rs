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
#[cfg(all())]
pub async fn resize(image_id: i64) {
    println!("{image_id}");
}

/// Old.
#[job]
#[deprecated = "use `resize`"]
pub fn scale(image_id: i64) {
    println!("{image_id}");
}

/// Traced.
#[job]
#[tracing::instrument(skip_all, fields(image_id))]
pub async fn traced(image_id: i64, #[allow(unused_mut)] mut width: u32) -> Result<(), String> {
    println!("{image_id} {width}");
    Ok(())
}

/// Traced from above.
#[tracing::instrument]
#[job]
pub async fn traced_above(image_id: i64) -> Result<(), String> {
    println!("{image_id}");
    Ok(())
}

#[cfg(any())]
#[job]
fn not_here(image_id: DoesNotExist) {}

fn main() {
    let _ = resize::new(1);
    let _ = traced::new(1, 2);
    let _ = traced_above::new(1);
    #[allow(deprecated)]
    let _ = scale::new(1);
}
