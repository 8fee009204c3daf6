//! A public function with private types is a lint of rustc's about the function, and no error of
//! ours.
#![allow(private_interfaces)]

#[derive(serde::Serialize, serde::Deserialize)]
struct Private(u32);

#[derive(Clone)]
struct Store;

#[derive(Debug, thiserror::Error)]
#[error("broken")]
struct Broken;

#[jobq::job]
pub fn resize(value: Private, store: jobq::State<Store>) -> Result<Private, Broken> {
    drop(store);
    if value.0 == 0 { Err(Broken) } else { Ok(value) }
}

#[test]
fn it_works() {
    let _ = resize::new(Private(1));
}
