//! New jobs as an application makes them.

use std::marker::PhantomData;

use jobq_core::outcome::Outcome;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::handler::Handler;
use crate::job::{Job, JobDef, JobOptions, NewJob};

/// A job of kind `k` with this payload, as the twin type of a job function makes it.
pub(crate) fn new_job<P>(payload: &P) -> NewJob
where
    P: Serialize + DeserializeOwned + Send + 'static,
{
    NewJob::of::<Sample<P>>(payload)
}

/// A job of kind `k` without parameters.
pub(crate) fn plain() -> NewJob {
    new_job(&serde_json::json!({}))
}

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
