//! The jobs a process can run: found by the linker, listed by hand, or both.

use std::collections::HashMap;

use crate::error::StartProblem;
use crate::handler::States;
use crate::job::JobDef;

/// Kinds and aliases, each with the definition that runs it.
#[derive(Default)]
pub(crate) struct Registry {
    kinds: HashMap<&'static str, &'static JobDef>,
    defs: Vec<&'static JobDef>,
}

impl Registry {
    /// Every job that is linked into this program.
    pub(crate) fn linked() -> Vec<&'static JobDef> {
        inventory::iter::<crate::__private::Registration>().map(|found| found.0).collect()
    }

    /// Takes definitions; one that is named twice counts once, two of one name are a problem.
    pub(crate) fn new(defs: Vec<&'static JobDef>, problems: &mut Vec<StartProblem>) -> Self {
        let mut registry = Self::default();
        for def in defs {
            if registry.defs.iter().any(|known| same(known, def)) {
                continue;
            }
            registry.defs.push(def);
            for kind in std::iter::once(&def.kind).chain(def.aliases) {
                if let Some(first) = registry.kinds.insert(kind, def) {
                    problems.push(StartProblem::DuplicateJob {
                        kind: (*kind).to_owned(),
                        first: place(first),
                        second: place(def),
                    });
                }
            }
        }
        if registry.defs.is_empty() {
            problems.push(StartProblem::NoJobs);
        }
        registry
    }

    /// Lists the state that registered jobs need and `states` lacks.
    pub(crate) fn check_states(&self, states: &States, problems: &mut Vec<StartProblem>) {
        for def in &self.defs {
            for need in (def.needs)() {
                if !states.has(need) {
                    problems.push(StartProblem::MissingState {
                        kind: def.kind,
                        place: place(def),
                        state: need.name,
                    });
                }
            }
        }
    }

    pub(crate) fn get(&self, kind: &str) -> Option<&'static JobDef> {
        self.kinds.get(kind).copied()
    }

    pub(crate) fn has(&self, def: &'static JobDef) -> bool {
        self.defs.iter().any(|known| same(known, def))
    }

    pub(crate) fn defs(&self) -> &[&'static JobDef] {
        &self.defs
    }

    /// Every kind and alias with its definition, sorted.
    pub(crate) fn kinds(&self) -> Vec<(&'static str, &'static JobDef)> {
        let mut kinds: Vec<_> = self.kinds.iter().map(|(kind, def)| (*kind, *def)).collect();
        kinds.sort_unstable_by_key(|(kind, _)| *kind);
        kinds
    }
}

/// Whether two references are to one definition: its address may differ between crates. A line
/// alone does not tell: a macro of the application may make many functions in one.
fn same(a: &JobDef, b: &JobDef) -> bool {
    (a.kind, a.module, a.file, a.line) == (b.kind, b.module, b.file, b.line)
}

/// Where a job function is.
pub(crate) fn place(def: &JobDef) -> String {
    format!("{}:{}", def.file, def.line)
}
