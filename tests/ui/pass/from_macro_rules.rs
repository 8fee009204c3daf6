//! A job whose parts come from a `macro_rules!` macro.
#![deny(warnings)]

use jobq::Job;

macro_rules! make_job {
    (
        $(#[$meta:meta])*
        $vis:vis $name:ident($($param:ident: $ty:ty),*; $state:ty) queue = $queue:literal,
        lease = $lease:expr, attempts = $attempts:expr, old = $old:literal
    ) => {
        $(#[$meta])*
        #[jobq::job(queue = $queue, lease = $lease, max_attempts = $attempts, aliases($old))]
        $vis async fn $name($($param: $ty,)* extra: Option<$state>, #[inject] state: jobq::State<$state>, ctx: &jobq::JobContext) -> Result<(), String> {
            let local = ($($param,)* extra, state.0, ctx.attempt());
            drop(local);
            Ok(())
        }
    };
}

make_job! {
    /// Documented.
    pub resize(image_id: i64, size: (u32, u32); String)
    queue = "images", lease = "10s", attempts = 1 + 2, old = "shrink"
}

#[test]
fn it_works() {
    let _ = resize::new(1, (2, 3), None);
    assert_eq!(resize::DEF.options.max_attempts, 3);
    assert_eq!(resize::DEF.aliases, ["shrink"]);
    assert_eq!((resize::DEF.needs)().len(), 1);
}
