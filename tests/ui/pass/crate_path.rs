//! jobq under other paths.
mod my {
    pub mod deep {
        pub use ::jobq;
    }
    pub use ::jobq as queue;
}

use my::queue::job;

#[job(crate = "my::queue")]
async fn relative(id: i64, #[serde(default)] width: u32) -> Result<(), std::fmt::Error> {
    println!("{id} {width}");
    Ok(())
}

#[job(crate = "crate::pass::crate_path::my::deep::jobq")]
fn absolute(id: Option<i64>) {
    println!("{id:?}");
}

mod inside {
    #[super::job(crate = "super::my::queue")]
    pub fn from_super(id: i64) {
        println!("{id}");
    }

    use ::jobq as q;

    #[q::job(crate = "q")]
    pub fn renamed() {}

    #[q::job(crate = "::jobq")]
    pub fn explicit() {}
}

#[test]
fn it_works() {
    let _ = relative::new(1, 2);
    let _ = absolute::new(None);
    let _ = inside::from_super::new(1);
    let _ = inside::renamed::new();
    let _ = inside::explicit::new();
}
