//! Flight records: of processes that ended, and of cgroups that come near their memory limit.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Collector;
use crate::model::sample::ProcessSample;
use crate::process::Process;
use crate::process::container::{CgroupFile, CgroupMemory};
use crate::store::keeper::Record;
use crate::store::view::EventKind;

impl Collector {
    /// Makes flight records of the watched processes that ended since the last scan, not counting those that still run (another program, or no
    /// longer selected by the rules).
    pub(super) fn tell_of_ended(&mut self, left: Vec<Arc<ProcessSample>>) {
        let mut ended = std::mem::take(&mut self.ended);
        ended.extend(left);
        let runs =
            |one: &Arc<ProcessSample>| Process::open(one.identity.process.pid).is_ok_and(|process| process.id() == one.identity.process);
        ended.retain(|one| !runs(one));
        ended.iter().for_each(|one| self.outcomes.ended(one));
        let workloads: BTreeMap<_, _> = ended.iter().map(|one| (one.identity.process.pid.0, Arc::clone(&one.workload))).collect();
        let (records, passed_over) = self.flight.ended(ended, &self.containers, self.config.flight.exit_rss_min_mib << 20);
        self.counters.exits_passed_over += passed_over;
        let now_s = self.now_s();
        for record in records.iter().filter(|record| record.event.kind == EventKind::OomKill) {
            if let Some(workload) = workloads.get(&record.event.process.pid) {
                self.kills.add(workload, now_s);
            }
        }
        self.announce(records);
    }

    /// Makes flight records of processes that run with a setting advised for the one before them, with what it saved.
    pub(super) fn check_outcomes(&mut self) {
        self.outcomes.retain(|identity| self.watches.contains_key(identity));
        let samples: Vec<Arc<ProcessSample>> = self.watches.values().map(|watch| Arc::clone(&watch.sample)).collect();
        let checked = samples.iter().filter_map(|one| Some((one, self.outcomes.check(one)?)));
        let checked: Vec<_> = checked.collect();
        let records = checked.into_iter().map(|(one, outcome)| self.flight.compared(one, outcome)).collect();
        self.announce(records);
    }

    /// Reads the known memory limits again, and makes flight records of those nearly reached. Their processes get a full census at once, so that
    /// there is a fresh one if they are killed.
    pub(super) fn look_at_limits(&mut self) {
        let mut read: BTreeMap<CgroupFile, Option<CgroupMemory>> = BTreeMap::new();
        for watch in self.watches.values_mut() {
            let surroundings = &watch.sample.surroundings;
            if surroundings.memory.is_none_or(|memory| memory.limit_bytes.is_none()) {
                continue;
            }
            let cgroup = surroundings.cgroup.as_ref();
            let now = *read.entry(cgroup.clone()).or_insert_with(|| self.containers.memory(cgroup));
            if now.is_some() && now != surroundings.memory {
                Arc::make_mut(&mut watch.sample).surroundings.memory = now;
            }
        }
        let processes: Vec<Arc<ProcessSample>> = self.watches.values().map(|watch| Arc::clone(&watch.sample)).collect();
        let records = self.flight.near_limits(&processes);
        let now_s = self.now_s();
        for record in &records {
            let pid = record.event.process.pid;
            if let Some(watch) = self.watches.values_mut().find(|watch| watch.sample.identity.process.pid.0 == pid) {
                watch.due.full_s = watch.due.full_s.map(|due_s| due_s.min(now_s));
            }
        }
        self.announce(records);
    }

    fn announce(&mut self, records: Vec<Record>) {
        for record in records {
            let index = EventKind::ALL.iter().position(|kind| *kind == record.event.kind).unwrap_or(0);
            if let Some(count) = self.counters.flight_records.get_mut(index) {
                *count += 1;
            }
            let event = &record.event;
            match event.kind {
                // Processes end all the time.
                EventKind::Exit | EventKind::Trim | EventKind::Setting => {
                    tracing::info!("flight record {}: {} ({})", event.id, event.summary, event.evidence)
                }
                EventKind::OomKill | EventKind::MemoryLimit => {
                    tracing::warn!("flight record {}: {} ({})", event.id, event.summary, event.evidence);
                }
            }
            if let Some(keeper) = &self.keeper {
                keeper.record(record);
            }
        }
    }
}
