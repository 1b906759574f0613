//! The labels that identify a series' process. Names of processes are shown without control characters, so that no name breaks a line or a
//! terminal.

use std::collections::HashMap;

use crate::model::sample::ProcessSample;
use crate::model::snapshot::Snapshot;
use crate::sanitize;
use crate::units::Pid;

/// The value of `pid` and `comm` for the sum of the processes without series of their own.
pub const OTHER: &str = "other";

/// The labels of one process, or of the sum of those without series of their own.
pub struct Labels {
    own: Vec<(&'static str, String)>,
}

impl Labels {
    /// pid and comm; namespace, pod and container if known.
    pub fn of(process: &ProcessSample) -> Self {
        let mut labels = Self::of_name(process.identity.process.pid, &process.comm);
        if let Some(container) = &process.surroundings.container {
            labels.own.extend(container.labels().into_iter().map(|(label, name)| (label, shown(name))));
        }
        labels
    }

    /// pid and comm.
    fn of_name(pid: Pid, comm: &str) -> Self {
        Self { own: vec![("pid", pid.to_string()), ("comm", shown(comm))] }
    }

    /// The labels of the sum.
    pub fn other() -> Self {
        Self { own: vec![("pid", OTHER.to_owned()), ("comm", OTHER.to_owned())] }
    }

    /// These labels and others.
    pub fn with<'a>(&'a self, more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
        self.own.iter().map(|(name, value)| (*name, value.as_str())).chain(more.iter().copied()).collect()
    }
}

fn shown(text: &str) -> String {
    sanitize::terminal(text).into_owned()
}

/// The processes of a snapshot by id, for tiers that only know their names.
pub struct Known<'a>(HashMap<Pid, &'a ProcessSample>);

impl<'a> Known<'a> {
    /// Of this snapshot.
    #[must_use]
    pub fn of(snapshot: &'a Snapshot) -> Self {
        Self(snapshot.processes.iter().map(|process| (process.identity.process.pid, process.as_ref())).collect())
    }

    /// A process's labels, the same as in its other series; only its name, as `comm`, if the snapshot does not have it (yet, or any more).
    pub fn labels(&self, pid: Pid, comm: &str) -> Labels {
        self.0.get(&pid).map_or_else(|| Labels::of_name(pid, comm), |process| Labels::of(process))
    }
}
