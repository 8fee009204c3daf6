//! The keys of jobs, and who may run.

use std::collections::BTreeMap;

use jobq_core::key::{MAX_KEY, OnBlock};
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};

use crate::error::Result;
use crate::store::{Settled, Settlement, Store};
use crate::unique::{UniqueKey, canonical};

/// A job's key, as it is stored.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct JobKey {
    pub(crate) text: String,
    pub(crate) on_block: OnBlock,
}

/// The key that parameters of a payload make: `image_id=7`, or `tenant="a",image_id=7`; none if all of
/// them are null.
///
/// One that would be too long is made of a digest (SHA-256) instead.
pub(crate) fn of_payload(payload: &str, by: &[&str]) -> Option<String> {
    // What was just written as an object can be read as one.
    let fields: BTreeMap<String, &RawValue> = serde_json::from_str(payload).unwrap_or_default();
    let value = |name: &&str| fields.get(*name).map_or("null", |value| value.get());
    if by.iter().all(|name| value(name) == "null") {
        return None;
    }
    let parts = by.iter().map(|name| format!("{name}={}", canonical(value(name))));
    let key = parts.collect::<Vec<_>>().join(",");
    if key.len() <= MAX_KEY && !key.contains('\0') {
        return Some(key);
    }
    let digest = UniqueKey(Sha256::digest(&key).into());
    Some(format!("sha256={digest}"))
}

/// Writes settlements. A job that was settled before, such as by its function in a transaction of its
/// own, has not passed on its key yet.
pub(crate) async fn settle(store: &dyn Store, settlements: &[Settlement]) -> Result<Vec<Settled>> {
    let settled = store.settle(settlements).await?;
    let found = settlements.iter().zip(&settled).filter(|(_, it)| **it == Settled::Found);
    let keys = found.filter_map(|(settlement, _)| Some(settlement.leaves()?.to_owned()));
    pass_on(store, keys.collect()).await;
    Ok(settled)
}

/// Passes on the keys of jobs that have ended; returns how many jobs it has woken. What fails is left to
/// the sweep.
pub(crate) async fn pass_on(store: &dyn Store, keys: Vec<String>) -> u64 {
    if keys.is_empty() {
        return 0;
    }
    match store.pass_on(&keys).await {
        Ok(woken) => {
            if woken > 0 {
                crate::wake::poke();
            }
            woken
        }
        Err(error) => {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "keys could not be passed on; the next sweep does it"
            );
            0
        }
    }
}

/// Keys in order, each once: the order in which their grants are locked.
pub(crate) fn in_order<'k>(keys: impl IntoIterator<Item = &'k str>) -> Vec<&'k str> {
    let mut keys: Vec<&str> = keys.into_iter().collect();
    keys.sort_unstable();
    keys.dedup();
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_made_of_the_parameters_in_the_order_in_which_they_are_named() {
        let payload = r#"{"a":1,"b":"x","c":{"q":1,"p":2},"n":null}"#;
        let key = |by: &[&str]| of_payload(payload, by);
        assert_eq!(key(&["a"]).as_deref(), Some("a=1"));
        assert_eq!(key(&["b", "a"]).as_deref(), Some(r#"b="x",a=1"#));
        assert_eq!(key(&["c"]).as_deref(), Some(r#"c={"p":2,"q":1}"#));
        assert_eq!(key(&["n", "a"]).as_deref(), Some("n=null,a=1"));
        assert_eq!(key(&["n", "missing"]), None, "all of them are null");
    }

    #[test]
    fn a_long_key_is_a_digest() {
        let long = |c: char| format!(r#"{{"a":"{}"}}"#, c.to_string().repeat(1_000));
        let key = of_payload(&long('x'), &["a"]).expect("a key");
        assert_eq!(jobq_core::key::problem_of(&key), None);
        assert_ne!(of_payload(&long('y'), &["a"]), Some(key));
    }
}
