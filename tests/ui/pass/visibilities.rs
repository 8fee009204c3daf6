//! The twin and its methods are as visible as the function, and may use types that are not.
#![deny(warnings, unreachable_pub, private_interfaces, private_bounds)]
#![allow(dead_code)]

use jobq::job;

#[derive(Clone, serde::Serialize, serde::Deserialize)]
struct Private(u32);

#[job]
fn private(value: Private) {
    let _ = value;
}

mod a {
    use jobq::{State, job};

    use super::Private;

    #[derive(serde::Serialize, serde::Deserialize)]
    pub(super) struct Restricted(pub(super) u32);

    #[job]
    pub(crate) fn in_crate(value: u32) {
        let _ = value;
    }

    #[job]
    pub(super) fn in_super(value: Restricted, State(_state): State<Private>) {
        let _ = value;
    }

    pub(super) mod b {
        #[jobq::job]
        pub(in crate::pass::visibilities::a) fn in_path(value: u32) {
            let _ = value;
        }

        #[jobq::job]
        pub(self) fn in_self(value: u32) {
            let _ = value;
        }

        pub(crate) fn from_inside() -> jobq::NewJob {
            in_self::new(1)
        }
    }

    pub(crate) fn from_parent() -> jobq::NewJob {
        b::in_path::new(1)
    }
}

#[test]
fn it_works() {
    let _ = private::new(Private(1));
    let _ = a::in_crate::new(1);
    let _ = a::in_super::new(a::Restricted(1));
    let _ = a::from_parent();
    let _ = a::b::from_inside();
}
