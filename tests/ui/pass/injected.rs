//! Everything that the runtime injects, in every form it may be written.
#![deny(warnings)]

use std::sync::Arc;

use jobq::{CancellationToken, Inject, Job, JobContext, State, job};

#[derive(Clone)]
struct Store {
    name: String,
}

struct TraceId;

impl Inject for TraceId {
    fn inject(_: &jobq::Call) -> Self {
        Self
    }
}

type Shared = State<Arc<Store>>;
use jobq::JobContext as Ctx;

#[job]
async fn patterns(
    State(Store { name }): State<Store>,
    _: State<u8>,
    State(mut count): jobq::State<u16>,
    _ignored: ::jobq::State<u32>,
    State(text): State<&'static str>,
    State(callback): State<Arc<dyn Fn(&str) -> bool + Send + Sync>>,
    cancelled: CancellationToken,
    ctx: JobContext,
    by_ref: &JobContext,
    by_path: &jobq::JobContext,
    #[inject] TraceId: TraceId,
    #[inject] shared: Shared,
    #[inject] renamed: Ctx,
    id: i64,
) -> Result<(), String> {
    count += 1;
    let all = (ctx.id(), by_ref.id(), by_path.id(), renamed.id());
    println!("{name} {count} {text} {} {} {id} {all:?}", callback(""), cancelled.is_cancelled());
    println!("{}", shared.0.name);
    Ok(())
}

#[job]
fn only_injected(State((a, b)): State<(u8, u16)>) {
    println!("{a} {b}");
}

#[test]
fn it_works() {
    let _ = patterns::new(1);
    let _ = only_injected::new();
    let names: Vec<&str> = (patterns::DEF.needs)().iter().map(|need| need.name).collect();
    assert_eq!(names.len(), 7, "{names:?}");
}
