//! Kills for lack of memory by workload. Pure: times are parameters.
//!
//! A container's own counter ends with it, usually at the very kill; these counts live as long as the agent.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::process::workload::Workload;

/// Most workloads that are counted; beyond it the one whose last kill is the oldest is forgotten.
const WORKLOADS_MAX: usize = 256;
/// How long a workload without processes is shown after its last kill, in seconds: it may be about to be started again.
const SHOWN_S: f64 = 3600.0;

/// The counts.
#[derive(Debug, Default)]
pub(super) struct Kills(BTreeMap<Arc<Workload>, (u64, f64)>);

impl Kills {
    /// Counts one.
    pub fn add(&mut self, workload: &Arc<Workload>, now_s: f64) {
        let (count, last_s) = self.0.entry(Arc::clone(workload)).or_default();
        *count += 1;
        *last_s = now_s;
        if self.0.len() > WORKLOADS_MAX {
            let oldest = self.0.iter().min_by(|a, b| a.1.1.total_cmp(&b.1.1)).map(|(workload, _)| Arc::clone(workload));
            oldest.into_iter().for_each(|workload| {
                self.0.remove(&workload);
            });
        }
    }

    /// The counts of the workloads that have processes, or had a kill within an hour.
    pub fn shown<'a>(&self, now_s: f64, present: impl Iterator<Item = &'a Arc<Workload>>) -> Arc<BTreeMap<Arc<Workload>, u64>> {
        let mut shown: BTreeMap<_, _> =
            present.filter_map(|workload| self.0.get(workload).map(|(count, _)| (Arc::clone(workload), *count))).collect();
        let recent = self.0.iter().filter(|(_, (_, last_s))| now_s - last_s < SHOWN_S);
        shown.extend(recent.map(|(workload, (count, _))| (Arc::clone(workload), *count)));
        Arc::new(shown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::container::CgroupFile;

    fn workload(name: usize) -> Arc<Workload> {
        Arc::new(Workload::of(&name.to_string(), None, &CgroupFile::default(), None))
    }

    #[test]
    fn a_count_stays_while_there_are_processes_and_for_an_hour() {
        let mut kills = Kills::default();
        kills.add(&workload(1), 0.0);
        kills.add(&workload(1), 10.0);
        kills.add(&workload(2), 20.0);
        let counts = |now_s, present: &[Arc<Workload>]| kills.shown(now_s, present.iter()).values().copied().collect::<Vec<_>>();
        assert_eq!(counts(100.0, &[]), [2, 1]);
        assert_eq!(counts(4000.0, &[workload(1), workload(3)]), [2]);
        assert!(counts(4000.0, &[]).is_empty());
    }

    #[test]
    fn the_oldest_is_forgotten_when_there_are_too_many() {
        let mut kills = Kills::default();
        (0..WORKLOADS_MAX + 3).for_each(|name| kills.add(&workload(name), name as f64));
        assert_eq!(kills.0.len(), WORKLOADS_MAX);
        assert!(!kills.0.contains_key(&workload(2)) && kills.0.contains_key(&workload(3)));
    }
}
