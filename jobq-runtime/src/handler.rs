//! Between a job function and the runtime: what a function may ask for, and what it may return.

use std::any::{Any, TypeId, type_name};
use std::collections::HashMap;
use std::error::Error as StdError;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use jobq_core::outcome::{AttemptReason, Outcome};
use jobq_core::payload;
use jobq_core::text::error_chain;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tokio_util::sync::CancellationToken;

use crate::context::JobContext;

/// A boxed future that can move between threads.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Any error.
pub type BoxError = Box<dyn StdError + Send + Sync + 'static>;

/// How to run a job function.
#[derive(Clone, Copy)]
pub enum Handler {
    /// An `async fn`.
    Async(fn(Call) -> BoxFuture<'static, Outcome>),
    /// A plain `fn`, run on a thread where it may block.
    Blocking(fn(Call) -> Outcome),
}

impl fmt::Debug for Handler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Async(_) => "async",
            Self::Blocking(_) => "blocking",
        })
    }
}

/// One attempt, as [`Inject`] sees it.
pub struct Call {
    pub(crate) context: JobContext,
    pub(crate) payload: String,
    pub(crate) states: Arc<States>,
}

impl Call {
    /// Reads the payload; an [`Outcome`] that buries the job if it does not fit.
    ///
    /// # Errors
    ///
    /// [`Outcome::Undecodable`].
    pub fn payload<P: DeserializeOwned>(&self) -> Result<P, Outcome> {
        payload::decode(&self.payload)
            .map_err(|error| Outcome::Undecodable { error: error_chain(&error) })
    }

    /// The attempt's context.
    pub fn context(&self) -> JobContext {
        self.context.clone()
    }
}

/// A parameter of a job function that comes from the runtime, not from the payload.
///
/// [`State`], [`JobContext`] and [`CancellationToken`] are recognised by name. For a type of
/// your own, implement this and mark the parameter `#[inject]`.
///
/// ```
/// # use jobq_runtime as jobq;
/// struct Attempt(u32);
///
/// impl jobq::Inject for Attempt {
///     fn inject(call: &jobq::Call) -> Self {
///         Self(call.context().attempt())
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be injected into a job function",
    label = "not injectable",
    note = "remove `#[inject]` to make it part of the payload, or take it as `State<{Self}>`"
)]
pub trait Inject: Sized {
    /// The state this needs, if it needs one; checked when the runtime starts.
    fn need() -> Option<Need> {
        None
    }

    /// Takes the value for one attempt.
    fn inject(call: &Call) -> Self;
}

/// Something the application gave the runtime with `.state(value)`.
///
/// Write `State(store): State<ImageStore>` in a job function's parameters. Each attempt gets a
/// clone, so give the runtime something cheap to clone, such as a pool or an `Arc`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State<T>(pub T);

impl<T: Clone + Send + Sync + 'static> Inject for State<T> {
    fn need() -> Option<Need> {
        Some(Need { id: TypeId::of::<T>(), name: type_name::<T>() })
    }

    fn inject(call: &Call) -> Self {
        let state = call.states.get::<T>();
        Self(state.expect("the runtime checks the state of every registered job when it starts"))
    }
}

impl Inject for JobContext {
    fn inject(call: &Call) -> Self {
        call.context()
    }
}

impl Inject for CancellationToken {
    fn inject(call: &Call) -> Self {
        call.context.cancellation_token().clone()
    }
}

/// The state that a job function needs from the runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    /// Its type.
    pub id: TypeId,
    /// Its type's name, for messages.
    pub name: &'static str,
}

/// What the application gave the runtime with `.state(value)`, one value per type.
#[derive(Default)]
pub(crate) struct States(HashMap<TypeId, Box<dyn Any + Send + Sync>>);

impl States {
    pub(crate) fn insert<T: Clone + Send + Sync + 'static>(&mut self, value: T) {
        self.0.insert(TypeId::of::<T>(), Box::new(value));
    }

    fn get<T: Clone + 'static>(&self) -> Option<T> {
        self.0.get(&TypeId::of::<T>())?.downcast_ref::<T>().cloned()
    }

    pub(crate) fn has(&self, need: Need) -> bool {
        self.0.contains_key(&need.id)
    }
}

/// What a job function may return: `()`, or a `Result` of something serializable and any error.
///
/// The value of `Ok` is kept with the completed job; one that cannot be (it has no JSON form, or
/// more than 2 MiB of it) makes the job a dead letter, for its function is not run again. An `Err` is retried with the job's backoff,
/// unless it is or contains a [`Control`].
#[diagnostic::on_unimplemented(
    message = "a job function cannot return `{Self}`",
    label = "not an outcome",
    note = "return `()`, `Result<(), E>` or `Result<T, E>`, where `T: Serialize` and `E` is any \
            error type (also `String`, `anyhow::Error` and the like)"
)]
pub trait IntoOutcome {
    /// Turns the returned value into an outcome.
    fn into_outcome(self) -> Outcome;
}

impl IntoOutcome for () {
    fn into_outcome(self) -> Outcome {
        Outcome::Completed { result: None }
    }
}

impl<T: Serialize, E: Into<BoxError>> IntoOutcome for Result<T, E> {
    fn into_outcome(self) -> Outcome {
        let value = match self {
            Ok(value) => value,
            Err(error) => return failure(&*error.into()),
        };
        match payload::encode_result(&value) {
            Ok(json) if json == "null" => Outcome::Completed { result: None },
            Ok(json) => Outcome::Completed { result: Some(json) },
            // What was to be done is done, and would only be done again.
            Err(error) => Outcome::Discarded {
                error: format!(
                    "the job function returned Ok, but its value cannot be kept: {}",
                    error_chain(&error)
                ),
            },
        }
    }
}

/// The outcome of a returned error: what a [`Control`] in it asks for, or a failure.
fn failure(error: &(dyn StdError + 'static)) -> Outcome {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(control) = error.downcast_ref::<ControlKind>() {
            return control.outcome();
        }
        if let Some(control) = error.downcast_ref::<Control>() {
            return control.0.outcome();
        }
        cause = error.source();
    }
    Outcome::Failed { reason: AttemptReason::Failed, error: error_chain(error), retry_after: None }
}

/// A parameter that is part of a job's payload.
///
/// It has methods instead of serde's traits as supertraits: those would be what the compiler
/// complains about, one by one, instead of this.
#[doc(hidden)]
#[diagnostic::on_unimplemented(
    message = "`{Self}` is neither a payload (`Serialize + DeserializeOwned`) nor injectable; \
               did you mean `State<{Self}>`?",
    label = "cannot be stored with the job",
    note = "for a payload, derive `serde::Serialize` and `serde::Deserialize`; for something of the \
            application, write `State(name): State<{Self}>` and give it to the runtime with \
            `.state(value)`"
)]
pub trait PayloadField: Sized {
    fn write<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error>;
    fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error>;
}

#[diagnostic::do_not_recommend]
impl<T: Serialize + DeserializeOwned> PayloadField for T {
    fn write<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.serialize(serializer)
    }

    fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::deserialize(deserializer)
    }
}

/// A field of a payload; serde sees right through it.
#[doc(hidden)]
#[derive(Default)]
pub struct Field<T>(pub T);

impl<T: PayloadField> Serialize for Field<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.write(serializer)
    }
}

impl<'de, T: PayloadField> Deserialize<'de> for Field<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        T::read(deserializer).map(Self)
    }
}

/// The type of parameter `N` of a job function, which is part of the payload.
///
/// `#[job]` implements this, and the three traits after it, for each type in a signature, so that
/// a type that does not fit is one error, at the type. What the macro makes besides asks for these
/// traits, never for what they promise of the type, and so repeats no error. `K` is a private type
/// beside the function: it keeps the function's private types out of a public interface.
#[doc(hidden)]
pub trait Param<K, const N: usize> {
    type Type: PayloadField;
}

/// As [`Param`], for a parameter with `#[serde(default)]`.
#[doc(hidden)]
pub trait DefaultParam<K, const N: usize> {
    type Type: PayloadField + Default;
}

/// The type of parameter `N` of a job function, which the runtime injects.
#[doc(hidden)]
pub trait Injected<K, const N: usize> {
    type Type: Inject;
}

/// What a job function returns.
#[doc(hidden)]
pub trait Returned<K> {
    type Type: IntoOutcome;
}

/// Takes the value of the injected parameter `N` of `J`.
#[doc(hidden)]
pub fn inject<J: Injected<K, N>, K, const N: usize>(call: &Call) -> J::Type {
    Inject::inject(call)
}

/// Adds what the injected parameter `N` of `J` needs.
#[doc(hidden)]
pub fn need<J: Injected<K, N>, K, const N: usize>(needs: &mut Vec<Need>) {
    needs.extend(<J::Type as Inject>::need());
}

/// Boxes the future of a job function, which must be able to move between threads.
#[doc(hidden)]
pub fn boxed<F: Future<Output = Outcome> + Send + 'static>(run: F) -> BoxFuture<'static, Outcome> {
    Box::pin(run)
}

/// Turns what `J` returned into an outcome.
#[doc(hidden)]
pub fn outcome<J: Returned<K>, K>(returned: J::Type) -> Outcome {
    returned.into_outcome()
}

/// An error that tells the runtime what to do with the job, instead of retrying with backoff.
///
/// Return it as the error of a job function, directly (`Result<(), Control>`) or inside your own
/// error type (`#[error(transparent)] Control(#[from] jobq::Control)`, or by `?` into
/// `anyhow::Error`): it is found anywhere in the chain of causes.
///
/// Made by [`retry_after`], [`snooze`], [`discard`] and [`cancel`].
#[derive(Debug)]
pub struct Control(ControlKind);

#[derive(Debug)]
enum ControlKind {
    RetryAfter(Duration, BoxError),
    Snooze(Duration),
    Discard(BoxError),
    Cancel(String),
}

/// Fails the attempt, to be retried after `delay` instead of the job's backoff.
pub fn retry_after(delay: Duration, error: impl Into<BoxError>) -> Control {
    Control(ControlKind::RetryAfter(delay, error.into()))
}

/// Runs the job again after `delay` without counting this attempt.
pub fn snooze(delay: Duration) -> Control {
    Control(ControlKind::Snooze(delay))
}

/// Gives the job up for good: it becomes a dead letter, whatever attempts are left.
pub fn discard(error: impl Into<BoxError>) -> Control {
    Control(ControlKind::Discard(error.into()))
}

/// Ends the job as cancelled.
pub fn cancel(reason: impl Into<String>) -> Control {
    Control(ControlKind::Cancel(reason.into()))
}

impl ControlKind {
    fn outcome(&self) -> Outcome {
        match self {
            Self::RetryAfter(delay, error) => Outcome::Failed {
                reason: AttemptReason::Failed,
                error: error_chain(&**error),
                retry_after: Some(*delay),
            },
            Self::Snooze(delay) => Outcome::Snoozed { delay: *delay },
            Self::Discard(error) => Outcome::Discarded { error: error_chain(&**error) },
            Self::Cancel(reason) => {
                Outcome::Cancelled { reason: Some(jobq_core::text::storable(reason)) }
            }
        }
    }
}

impl fmt::Display for ControlKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let duration = jobq_core::duration::display;
        match self {
            Self::RetryAfter(delay, _) => write!(f, "retry after {}", duration(*delay)),
            Self::Snooze(delay) => write!(f, "snooze for {}", duration(*delay)),
            Self::Discard(_) => f.write_str("discard"),
            Self::Cancel(reason) => write!(f, "cancel: {reason}"),
        }
    }
}

impl StdError for ControlKind {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::RetryAfter(_, error) | Self::Discard(error) => Some(&**error),
            Self::Snooze(_) | Self::Cancel(_) => None,
        }
    }
}

impl fmt::Display for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl StdError for Control {
    // Its own kind comes first in the chain, so that a wrapper that forwards `source`
    // (`#[error(transparent)]`, `anyhow`) still lets it be found.
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Wrapped {
        #[error(transparent)]
        Transparent(#[from] Control),
        #[error("while sending")]
        Source(#[source] Control),
    }

    #[test]
    fn a_control_is_found_wherever_it_is_in_the_chain() {
        let second = Duration::from_secs(1);
        let outcomes = [
            Err::<(), Control>(snooze(second)).into_outcome(),
            Err::<(), BoxError>(snooze(second).into()).into_outcome(),
            Err::<(), Wrapped>(snooze(second).into()).into_outcome(),
            Err::<(), Wrapped>(Wrapped::Source(snooze(second))).into_outcome(),
        ];
        for outcome in outcomes {
            assert_eq!(outcome, Outcome::Snoozed { delay: second });
        }
    }

    #[test]
    fn any_error_is_a_failure_with_its_whole_chain() {
        let error = discard(std::io::Error::other("no such customer"));
        assert_eq!(
            Err::<(), _>(error).into_outcome(),
            Outcome::Discarded { error: "no such customer".to_owned() }
        );
        assert!(matches!(
            Err::<(), _>("plain text").into_outcome(),
            Outcome::Failed { error, .. } if error == "plain text"
        ));
    }

    #[test]
    fn a_value_is_kept_and_one_that_cannot_be_makes_a_dead_letter() {
        assert_eq!(
            Ok::<_, String>(vec![1, 2]).into_outcome(),
            Outcome::Completed { result: Some("[1,2]".to_owned()) }
        );
        assert_eq!(Ok::<_, String>(()).into_outcome(), Outcome::Completed { result: None });
        for outcome in [
            Ok::<_, String>(f64::NAN).into_outcome(),
            Ok::<_, String>("x".repeat(payload::DEFAULT_LIMIT)).into_outcome(),
        ] {
            assert!(matches!(outcome, Outcome::Discarded { .. }), "{outcome:?}");
        }
    }
}
