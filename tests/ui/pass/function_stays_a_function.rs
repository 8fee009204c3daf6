//! The function is called and tested like any other; its twin type has the rest.
use jobq::{Job, JobContext, NewJob, State, job};

#[derive(Clone)]
struct Store(u32);

#[job]
async fn resize(
    image_id: i64,
    mut width: u32,
    State(store): State<Store>,
    ctx: &JobContext,
) -> Result<i64, String> {
    width += store.0;
    Ok(image_id * i64::from(width) * i64::from(ctx.attempt()))
}

#[tokio::test]
async fn it_works() {
    let done = resize(2, 3, State(Store(1)), &JobContext::detached()).await;
    assert_eq!(done, Ok(8));

    let as_value = resize;
    assert_eq!(as_value(1, 0, State(Store(1)), &JobContext::detached()).await, Ok(1));

    let job: NewJob = resize::new(7, 640).priority(2).tag("thumbnail");
    assert!(format!("{job:?}").contains("resize"));
    assert_eq!(resize::NAME, "resize");
    assert_eq!(<resize as Job>::NAME, "resize");
    assert_eq!(resize::DEF.kind, "resize");
}
