//! Waiting for what other tasks and the database do.

use std::task::Poll;
use std::time::{Duration, Instant};

/// Waits until a condition holds; fails after a minute.
#[cfg_attr(not(feature = "postgres"), allow(dead_code))]
pub(crate) async fn until<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) {
    let end = Instant::now() + Duration::from_secs(60);
    while !holds().await {
        assert!(Instant::now() < end, "it never came to be that {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Runs a future and stops in the middle, when it has got on so many times; false if it ended before.
/// What it holds is never given back.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) async fn stopped_after<F: Future>(steps: usize, future: F) -> bool {
    let mut future = Box::pin(future);
    let mut step = 0;
    let stopped = std::future::poll_fn(|context| {
        step += 1;
        match future.as_mut().poll(context) {
            Poll::Ready(_) => Poll::Ready(false),
            Poll::Pending if step > steps => Poll::Ready(true),
            Poll::Pending => Poll::Pending,
        }
    });
    let stopped = stopped.await;
    if stopped {
        std::mem::forget(future);
    }
    stopped
}

/// Runs futures side by side until all have ended.
pub(crate) async fn join_all<T, F: Future<Output = T>>(futures: Vec<F>) -> Vec<T> {
    let mut running: Vec<_> = futures.into_iter().map(Box::pin).enumerate().collect();
    let mut done = Vec::new();
    std::future::poll_fn(|context| {
        running.retain_mut(|(n, future)| match future.as_mut().poll(context) {
            Poll::Ready(value) => {
                done.push((*n, value));
                false
            }
            Poll::Pending => true,
        });
        if running.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    done.sort_by_key(|(n, _)| *n);
    done.into_iter().map(|(_, value)| value).collect()
}
