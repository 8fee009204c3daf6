//! New jobs as an application makes them.

use std::marker::PhantomData;

use jobq_core::job::JobId;
use jobq_core::outcome::Outcome;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::enqueue::Enqueued;
use crate::handler::Handler;
use crate::job::{Job, JobDef, JobOptions, NewJob};

/// A job of kind `k` with this payload, as the twin type of a job function makes it.
pub(crate) fn new_job<P>(payload: &P) -> NewJob
where
    P: Serialize + DeserializeOwned + Send + 'static,
{
    NewJob::of::<Sample<P>>(payload)
}

/// The ids of jobs that were enqueued.
pub(crate) fn ids_of(enqueued: Vec<Enqueued>) -> Vec<JobId> {
    enqueued.into_iter().map(Enqueued::id).collect()
}

/// A job of kind `k` without parameters.
pub(crate) fn plain() -> NewJob {
    new_job(&serde_json::json!({}))
}

/// Passwords that a URL may be cut at, each with `hunter2` or `sesame` in it.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) fn passwords() -> impl Iterator<Item = String> {
    ["hunter2", "%2Fhunter2%3Fsesame", "@hunter2", "/hunter2", "1/hunter2", "?hunter2"]
        .into_iter()
        .map(str::to_owned)
        .chain("@/?#:\\%&=[]{}^|<>\"'`~!$*()+,; \t".chars().map(|c| format!("hunter2{c}sesame")))
}

/// The job functions that a runtime of these tests has.
pub(crate) const JOBS: &[&JobDef] = &[Sample::<serde_json::Value>::DEF];

struct Sample<P>(PhantomData<fn(P)>);

impl<P: Serialize + DeserializeOwned + Send + 'static> Job for Sample<P> {
    type Payload = P;
    const NAME: &'static str = "k";
    const DEF: &'static JobDef = &JobDef {
        kind: "k",
        aliases: &[],
        options: JobOptions::DEFAULT,
        file: file!(),
        line: line!(),
        module: module_path!(),
        needs: Vec::new,
        handler: Handler::Blocking(|_| Outcome::Completed { result: None }),
    };
}
