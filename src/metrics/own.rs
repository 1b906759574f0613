//! The agent itself: its costs, its limits and what it drops.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::family::Family;
use crate::model::counters::HttpCounters;
use crate::model::counters::PushCounters;
use crate::model::sample::WatchState;
use crate::model::snapshot::Snapshot;
use crate::store::KeeperCounters;
use crate::store::view::EventKind;

/// Levels in the order of the counters.
const LEVELS: [&str; 3] = ["top", "sampled", "full"];

/// The families.
#[must_use]
pub fn families(snapshot: &Snapshot, http: &HttpCounters, in_other: usize, now: Instant) -> Vec<Family> {
    let counters = &snapshot.counters;
    let mut info = Family::gauge("fragprof_agent_info", "1, with the agent's version.");
    info.add(&[("version", env!("CARGO_PKG_VERSION"))], 1.0);
    let in_state = |state| snapshot.processes.iter().filter(|one| one.state == state).count() as f64;
    let states = WatchState::ALL.into_iter().map(|state| (state.name(), in_state(state)));
    let by_level = |values: [f64; 3]| LEVELS.into_iter().zip(values);
    let cri = counters.cri;
    let mut cri_up = Family::gauge(
        "fragprof_cri_up",
        "1 if the container runtime answered the last request for names; no series if there is no runtime or names are off. Without names, containers are shown by their ids.",
    );
    if let Some(up) = cri.up {
        cri_up.add(&[], f64::from(u8::from(up)));
    }
    let age_s = |then: Instant| now.saturating_duration_since(then).as_secs_f64();
    vec![
        info,
        Family::gauge("fragprof_agent_uptime_seconds", "Time since the agent started.").with(age_s(snapshot.started)),
        Family::gauge("fragprof_agent_snapshot_age_seconds", "Time since the census thread last published a snapshot: above 60 it hangs.")
            .with(age_s(snapshot.at)),
        Family::gauge(
            "fragprof_agent_processes",
            "Processes selected by the rules, by state; over_limit: beyond discovery.processes_max, not watched.",
        )
        .with_each("state", states.chain([("over_limit", snapshot.processes_over_limit as f64)])),
        Family::gauge("fragprof_agent_processes_on_machine", "Processes on the machine, without kernel threads and zombies.")
            .with(snapshot.processes_on_machine as f64),
        Family::gauge("fragprof_agent_processes_in_other", "Watched processes without series of their own, summed in pid=\"other\" (metrics.processes_max).")
            .with(in_other as f64),
        Family::counter("fragprof_agent_processes_ended_total", "Watched processes that ended, executed another program, or are no longer selected by the rules.")
            .with(counters.ended as f64),
        Family::gauge("fragprof_agent_budget_ratio", "Share of one core that the census thread may use (census.budget_percent).")
            .with(snapshot.budget_ratio),
        Family::counter("fragprof_agent_cpu_seconds_total", "CPU time of the census thread. Its rate stays below fragprof_agent_budget_ratio.")
            .with(counters.thread_cpu_s),
        Family::counter("fragprof_agent_process_cpu_seconds_total", "CPU time of the whole agent, including answers to requests.")
            .with(process_cpu_s()),
        Family::counter("fragprof_agent_censuses_total", "Censuses taken, by level.")
            .with_each("level", by_level(counters.censuses.map(|count| count as f64))),
        Family::counter("fragprof_agent_census_cpu_seconds_total", "CPU time of censuses, by level; part of fragprof_agent_cpu_seconds_total.")
            .with_each("level", by_level(counters.census_cpu_s)),
        Family::counter("fragprof_agent_read_bytes_total", "Bytes read of the targets' memory.").with(counters.read_bytes as f64),
        Family::counter("fragprof_agent_census_failures_total", "Failed censuses: the process had ended (gone), or cannot or may not be read (refused).")
            .with_each("reason", [("gone", counters.gone as f64), ("refused", counters.refused as f64)]),
        Family::counter("fragprof_agent_census_unusable_total", "Censuses that are not usable for verdicts: more than 1 % unknown, or not balanced.")
            .with(counters.unusable as f64),
        Family::counter(
            "fragprof_agent_shed_total",
            "Work skipped, in this order: full rounds of a process for lack of budget, walks replaced by samples (too large for census.walk_memory_mib, or agent above census.memory_max_mib), cheap censuses of a process that take more than a quarter of the budget, cheap rounds for lack of budget.",
        )
        .with_each(
            "step",
            [
                ("full_round", counters.full_rounds_skipped as f64),
                ("walk_too_large", counters.sampled_too_large as f64),
                ("walk_own_memory", counters.sampled_memory as f64),
                ("top_stretched", counters.top_stretched as f64),
                ("top_round", counters.top_rounds_skipped as f64),
            ],
        ),
        Family::counter(
            "fragprof_agent_quiet_rounds_total",
            "Cheap censuses that were not needed: the process has used no CPU time and had no page fault since its last one.",
        )
        .with(counters.top_quiet as f64),
        Family::counter("fragprof_agent_samples_open_total", "First verdicts for which a sample of the heap was not enough, so that it had to be walked.")
            .with(counters.samples_open as f64),
        Family::counter("fragprof_agent_arenas_dropped_total", "Arenas left out of the censuses in the API: at most 512 per heap are kept.")
            .with(counters.arenas_dropped as f64),
        Family::gauge("fragprof_agent_resident_bytes", "The agent's own resident memory.").with(snapshot.own_rss_bytes as f64),
        Family::gauge("fragprof_agent_memory_limit_bytes", "The agent's resident memory above which heaps are sampled instead of walked (census.memory_max_mib).")
            .with(snapshot.memory_max_bytes as f64),
        Family::counter("fragprof_agent_scans_total", "Scans of the process list.").with(counters.scans as f64),
        Family::counter("fragprof_agent_scan_errors_total", "Failed scans of the process list.").with(counters.scan_errors as f64),
        Family::counter("fragprof_agent_config_reloads_total", "Configuration reloads on SIGHUP: applied (ok), or invalid (error).")
            .with_each("result", [("ok", counters.reloads as f64), ("error", counters.reload_errors as f64)]),
        cri_up,
        Family::gauge("fragprof_cri_containers", "Containers and pods whose names are known.").with(cri.containers as f64),
        Family::counter("fragprof_cri_requests_total", "Requests to the container runtime: answered (ok), or without a valid answer in time (error).")
            .with_each("result", [("ok", cri.answers as f64), ("error", cri.failures as f64)]),
        Family::counter("fragprof_cri_refused_total", "Containers and pods in answers that were ignored: beyond 10000, or without a valid id.")
            .with(cri.refused as f64),
        Family::counter("fragprof_http_requests_total", "Requests answered.").with(http.requests as f64),
        Family::counter("fragprof_http_unauthorized_total", "Requests refused: no token or a wrong one, a page of another site, a foreign host name.")
            .with(http.unauthorized as f64),
        Family::counter("fragprof_http_slowed_total", "Refused requests that were answered a second late, because their client was refused too often.")
            .with(http.slowed as f64),
        Family::counter(
            "fragprof_http_connections_refused_total",
            "Connections closed at once: server.connections_max were open, or the same client had half of them.",
        )
        .with(http.refused as f64),
        Family::counter(
            "fragprof_http_connections_closed_total",
            "Connections closed: displaced (idle, and a new connection needed the slot), late (no complete request head within 5 s).",
        )
        .with_each("reason", [("displaced", http.displaced as f64), ("late", http.late as f64)]),
    ]
}

/// History, flight records and maps.
#[must_use]
pub fn history(snapshot: &Snapshot, keeper: &KeeperCounters) -> Vec<Family> {
    let counters = &snapshot.counters;
    let flights = EventKind::ALL.iter().zip(counters.flight_records);
    // Trims have families of their own, and are made by another thread.
    let flights = flights.filter(|(kind, _)| **kind != EventKind::Trim).map(|(kind, count)| (kind.name(), count as f64));
    vec![
        Family::counter(
            "fragprof_flight_records_total",
            "Flight records of watched processes that the kernel killed for lack of memory (oom_kill), that came near their memory limit (memory_limit), that ended (exit), or that run with a setting advised for the process before them and were compared with it (setting). Kills are counted by the cgroup; which process was killed is inferred if several ended at once.",
        )
        .with_each("kind", flights),
        Family::counter("fragprof_flight_exits_passed_over_total", "Exits without a flight record: resident memory below flight.exit_rss_min_mib, or no census was taken.")
            .with(counters.exits_passed_over as f64),
        Family::counter("fragprof_agent_maps_total", "Requested maps of an address space.").with(counters.maps as f64),
        Family::counter("fragprof_agent_maps_refused_total", "Requested maps that were refused for lack of budget or memory.").with(counters.maps_refused as f64),
        Family::counter(
            "fragprof_history_written_total",
            "Rows written to the history: samples (one per process and time), profiles, events.",
        )
        .with_each("kind", [("sample", keeper.samples as f64), ("profile", keeper.profiles as f64), ("event", keeper.events as f64)]),
        Family::counter("fragprof_history_write_errors_total", "Failed writes to the history, for lack of space or other reasons. Committed data is kept.")
            .with(keeper.write_errors as f64),
        Family::counter("fragprof_history_events_lost_total", "Flight records that could not be written to the history; the newest 64 are still in memory.")
            .with(keeper.events_lost as f64),
        Family::counter(
            "fragprof_history_removed_total",
            "Rows removed from the history: thinned (replaced by a later sample of the same step), aged (history.age_max_days), dropped (history.size_max_mib was reached even after thinning).",
        )
        .with_each("reason", [("thinned", keeper.merged as f64), ("aged", keeper.aged as f64), ("dropped", keeper.dropped as f64)]),
        Family::gauge("fragprof_history_size_bytes", "Bytes of the history in use, without its log (4 MiB at most).").with(keeper.size_bytes as f64),
        Family::gauge("fragprof_history_size_limit_bytes", "Limit of fragprof_history_size_bytes (history.size_max_mib, or history.memory_max_mib in memory).")
            .with(keeper.size_bytes_max as f64),
        Family::counter("fragprof_history_set_aside_total", "Damaged history files that were renamed to history.db.broken and replaced by a new one.")
            .with(keeper.set_aside as f64),
        Family::gauge("fragprof_history_failing", "1 while the last write to the history failed.").with(f64::from(u8::from(keeper.is_failing))),
        Family::gauge("fragprof_history_on_disk", "1 if the history outlives the agent (history.directory), 0 if it is in memory.")
            .with(f64::from(u8::from(keeper.is_on_disk))),
    ]
}

/// Profiles pushed to a server.
pub fn push(counters: &PushCounters) -> Vec<Family> {
    let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed) as f64;
    vec![
        Family::counter(
            "fragprof_push_profiles_total",
            "Profiles by result: sent, dropped (the queue was full, or a file of it was damaged), refused (4xx from the server). The allocations of a \
             profile that was not sent are in the process's next one, unless it is from before a restart of the agent.",
        )
        .with_each("result", [("sent", read(&counters.sent)), ("dropped", read(&counters.dropped)), ("refused", read(&counters.refused))]),
        Family::counter("fragprof_push_failures_total", "Failed requests; the profile is sent again after 1 s to 5 min.")
            .with(read(&counters.failures)),
        Family::counter("fragprof_push_bytes_total", "Bytes of the requests that the server accepted; push.mib_per_day_max limits those of a day.")
            .with(read(&counters.bytes)),
        Family::counter("fragprof_push_unchanged_total", "Profiles without anything new since the last one, which were not sent.")
            .with(read(&counters.unchanged)),
        Family::counter("fragprof_push_remainder_stacks_total", "Stacks summed in [remainder], because a push has at most push.stacks_max.")
            .with(read(&counters.remainders)),
        Family::counter("fragprof_push_rounds_put_off_total", "Rounds put off because of push.mib_per_day_max; the next one has their values.")
            .with(read(&counters.rounds_put_off)),
        Family::gauge("fragprof_push_waiting", "Profiles waiting to be sent, on disk if push.spool_directory or the state directory allows: at most 4096, or 32 MiB.").with(read(&counters.waiting)),
    ]
}

fn process_cpu_s() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
