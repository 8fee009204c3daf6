//! The `#[job]` attribute of the jobq job queue; use it as `jobq::job`.
//!
//! `args` reads the options, `handler` checks the function, `expand` writes what is made of both.

use proc_macro2::TokenStream;

use crate::args::{Options, Problems};
use crate::handler::JobFn;

mod args;
mod expand;
mod handler;

/// Turns a function into a job.
///
/// The function stays what it is: call it, and test it, like any other. Beside it the attribute
/// makes a type of the same name, with
///
/// - `resize::new(image_id, width)`, a [`NewJob`] to set options on and enqueue,
/// - `resize::enqueue(&pool, image_id, width)`, which enqueues at once, also in your own
///   transaction,
/// - `resize::NAME`, what stored jobs call the function, and the trait [`Job`].
///
/// One `use` imports both.
///
/// ```
/// use jobq::{EnqueueTarget, JobContext, State, job};
///
/// # type Error = std::io::Error;
/// # #[derive(Clone)]
/// # struct ImageStore;
/// # impl ImageStore { async fn shrink(&self, _: i64, _: u32) -> Result<(), Error> { Ok(()) } }
/// /// Makes a small copy of an image.
/// #[job(queue = "images", timeout = "5m", max_attempts = 5)]
/// async fn resize(
///     image_id: i64,
///     width: u32,
///     State(store): State<ImageStore>,
///     ctx: &JobContext,
/// ) -> Result<(), Error> {
///     println!("attempt {}", ctx.attempt());
///     store.shrink(image_id, width).await
/// }
///
/// async fn upload(mut database: impl EnqueueTarget) -> jobq::Result<()> {
///     resize::enqueue(database, 7, 640).await?;
///     Ok(())
/// }
///
/// # fn main() {
/// let job = resize::new(7, 640).priority(2);
/// assert_eq!(resize::NAME, "resize");
/// # }
/// ```
///
/// # The function
///
/// An `async fn`, or a plain `fn`, which is run on a thread where it may block. It returns `()`,
/// `Result<(), E>` or `Result<T, E>`: see [`IntoOutcome`].
///
/// # Parameters
///
/// Each parameter is part of the payload, stored as a JSON object with the parameters' names as
/// keys, unless it is one of these, which the runtime injects:
///
/// | Parameter | What it is |
/// |---|---|
/// | `State(store): State<ImageStore>` | what the application gave the runtime |
/// | `ctx: &JobContext`, `ctx: JobContext` | the attempt: its number, the job's id, … |
/// | `cancelled: CancellationToken` | set when the attempt should stop |
/// | `#[inject] x: X` | any type of yours that is [`Inject`] |
///
/// A parameter of the payload is `Serialize + DeserializeOwned` (serde need not be in your
/// `Cargo.toml` for that). It takes serde's field attributes: with `#[serde(default)]` a new
/// parameter can be added while jobs without it are stored; an `Option<T>` needs none.
/// `#[payload] order: Order` makes one parameter the whole payload.
///
/// # Options
///
/// | Option | Meaning | Default |
/// |---|---|---|
/// | `queue = "images"` | the queue its jobs go to | `"default"` |
/// | `name = "resize"` | what stored jobs call the function | its name |
/// | `aliases("shrink")` | former names whose stored jobs it also runs | none |
/// | `lease = "30s"` | how long a worker that falls silent keeps a job | 30 s |
/// | `timeout = "5m"` | the longest an attempt may take | none |
/// | `max_attempts = 5` | how many attempts a job gets in all | 20 |
/// | `max_crashes = 3` | how often a job may crash its process | 3 |
/// | `priority = 1` | from 4 (first) to -4 (last) within its queue | 0 |
/// | `backoff(base = "2s", factor = 2.0, cap = "10m")` | the wait before a retry | 5 s, 2.0, 1 h |
/// | `retention = "7d"` | how long a finished job is kept | the queue's |
/// | `crate = "my::jobq"` | where jobq is, if renamed or re-exported | `::jobq` |
/// | `register = false` | leaves it to you to give the job to the runtime | `true` |
///
/// Durations are written `"250ms"`, `"30s"`, `"1h30m"`, `"7d"`. Durations and numbers can be
/// `const` expressions too: `timeout = MY_TIMEOUT`.
///
/// [`NewJob`]: ../jobq/struct.NewJob.html
/// [`Job`]: ../jobq/trait.Job.html
/// [`Inject`]: ../jobq/trait.Inject.html
/// [`IntoOutcome`]: ../jobq/trait.IntoOutcome.html
#[proc_macro_attribute]
pub fn job(
    options: proc_macro::TokenStream,
    item: proc_macro::TokenStream,
) -> proc_macro::TokenStream {
    job_tokens(options.into(), item.into()).into()
}

/// Reads, checks, writes. Whatever is wrong, the function is part of what comes out.
fn job_tokens(options: TokenStream, item: TokenStream) -> TokenStream {
    let mut problems = Problems::default();
    let options = Options::read(options, &mut problems);
    let mut function = match JobFn::read(item.clone()) {
        Ok(function) => function,
        Err(error) => {
            problems.add(error);
            return [Some(item), problems.into_compile_errors()].into_iter().flatten().collect();
        }
    };
    function.check(&options, &mut problems);
    options.check_aliases(&function.kind(&options), &mut problems);
    match problems.into_compile_errors() {
        None => expand::job(&function, &options),
        Some(errors) => expand::stub(&function, &options, &errors),
    }
}

#[cfg(test)]
mod tests;
