//! Measures a day of pushes of a node with fifty workloads at the default settings: `make bench-push`. Every stack of every process changes in
//! each round, and names compress badly: the worst that can be.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::allowance::Allowance;
use super::interval::Account;
use super::{Outlet, PushProtocol, remainder};
use crate::agent::config::PushConfig;
use crate::model::sample::{Identity, ProcessSample};
use crate::process::ProcessId;
use crate::profile::testing::frame;
use crate::profile::{Metadata, Mode, Profile, ValueKind, Values};
use crate::units::Pid;

/// Attributed processes: as many as are by default, and all of them.
const PROCESSES: [u32; 2] = [8, 50];
/// Stacks of a process: several times as many as a push has.
const STACKS: u64 = 400;
const FRAMES: u64 = 25;
/// Functions of a program.
const FUNCTIONS: u64 = 2000;
/// Rounds that are encoded; a day has 1,440.
const ROUNDS: u64 = 20;
const MINUTE: Duration = Duration::from_secs(60);
const DAY_S: f64 = 86_400.0;

fn kinds() -> [ValueKind; 6] {
    use ValueKind::{AllocObjects, AllocSpace, InuseObjects, InuseSpace, PinnedSpace, SurvivorSpace};
    [AllocObjects, AllocSpace, InuseObjects, InuseSpace, PinnedSpace, SurvivorSpace]
}

/// A number without a pattern that compression would find.
fn mixed(seed: u64) -> u64 {
    let mut mixed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

/// The profile of a process after so many rounds: every stack has allocated more in each.
fn profile(pid: u32, round: u64) -> Profile {
    let start_unix_ns = 1_795_257_600_000_000_000;
    let meta = Metadata {
        kinds: kinds().into_iter().collect(),
        mode: Mode::Governed,
        start_unix_ns,
        duration_s: 60.0 * round as f64,
        ..Metadata::default()
    };
    let mut profile = Profile::new(meta);
    for stack in 0..STACKS {
        let seed = mixed(u64::from(pid) << 32 | stack);
        let frames: Vec<_> = (0..FRAMES)
            .map(|depth| {
                // Stacks of a program have their outer frames in common.
                let function = if depth > 15 { depth } else { mixed(seed ^ depth) % FUNCTIONS };
                frame(&format!("shop::module_{}::handler_of_requests_{function}", function % 37), function as u32)
            })
            .collect();
        // A few stacks allocate most.
        let bytes = 1 + mixed(seed) % (1 << (10 + stack % 14));
        let mut values = Values::default();
        for (index, kind) in kinds().into_iter().enumerate() {
            let so_far = if kind.adds_up_over_time() { round } else { 1 };
            values.set(kind, (bytes / (1 + index as u64)) * so_far + mixed(seed ^ round) % 100);
        }
        profile.add(pid, &frames, None, &values);
    }
    profile
}

fn thread_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap())
}

#[test]
#[ignore = "a measurement: make bench-push"]
fn a_day_of_pushes_has_few_bytes_and_little_cpu_time() {
    let config = PushConfig::default();
    let protocol = PushProtocol::PyroscopePush;
    let outlet = Outlet::Http(protocol);
    for processes in PROCESSES {
        let mut accounts: BTreeMap<u32, Account> = BTreeMap::new();
        let (mut bytes, mut spent) = (0_u64, Duration::ZERO);
        for round in 1..=ROUNDS {
            for pid in 1..=processes {
                let process = ProcessId { pid: Pid(pid), start_ticks: 1 };
                let sample = ProcessSample::new(Identity { process, stack: 0 }, format!("web-{pid}"), 0, 0);
                let profile = profile(pid, round);
                let end = super::end_unix_ns(&profile, std::time::SystemTime::now());
                let before = thread_cpu();
                let (interval, _) = accounts.entry(pid).or_default().next(&profile, end);
                let (reduced, _) = remainder::largest(&profile, interval, config.stacks_max);
                let kept = reduced.profile.as_ref().unwrap_or(&profile);
                let (_, body) = outlet.request(&sample, kept, &reduced.interval, &BTreeMap::new()).unwrap();
                spent += thread_cpu() - before;
                bytes += body.len() as u64;
            }
        }
        let (round_bytes, round_s) = (bytes / ROUNDS, spent.as_secs_f64() / ROUNDS as f64);
        let start = Instant::now();
        let mut allowance = Allowance::new(Some(config.mib_per_day_max << 20), start);
        let mut rounds = 0;
        for minute in 0..1440 {
            if allowance.permits(start + MINUTE * minute) {
                allowance.spend(round_bytes);
                rounds += 1;
            }
        }
        let (day_bytes, cpu_ratio) = (rounds * round_bytes, f64::from(u32::try_from(rounds).unwrap()) * round_s / DAY_S);
        println!(
            "{}: {round_bytes} bytes and {:.0} ms of CPU time a round of {processes} processes; {rounds} rounds a day: {:.2} MB (goal 5), {:.4} % of a core (goal 0.2)",
            protocol.name(),
            round_s * 1e3,
            day_bytes as f64 / 1e6,
            cpu_ratio * 100.0
        );
        assert!(day_bytes <= 5_000_000 && cpu_ratio <= 0.002);
    }
}
