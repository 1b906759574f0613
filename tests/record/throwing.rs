//! Programs that rely on catching std::bad_alloc, under recordings that could prevent it.

use std::time::{Duration, Instant};

use fragprof::probe::features::Attach;
use fragprof::profile::Profile;
use fragprof::session::{Options, Recorder};
use fragprof::units::Pid;

use super::{Place, Program, place, target_command};
use crate::support::rendezvous::Target;
use crate::support::{LIMIT, bpf};

/// Records the program from one rendezvous to the next, with time for the recorder after each. The program fails if it does not catch what
/// it throws.
fn record(program: Program, place: Place, method: Option<Attach>, stages: &'static [&'static str]) -> Profile {
    let mut target = Target::start(&mut target_command(program, place));
    let mut recorder = Recorder::new(Options { method, ..Options::default() }).unwrap();
    recorder.watch(Pid(target.pid())).unwrap();
    for stage in stages {
        let leader = std::thread::spawn(move || {
            target.go_to(stage);
            target
        });
        let deadline = Instant::now() + LIMIT;
        while !leader.is_finished() {
            recorder.step(Duration::from_millis(20));
            assert!(Instant::now() < deadline, "the program did not reach {stage:?}");
        }
        target = leader.join().unwrap();
        recorder.step(Duration::from_millis(500));
    }
    recorder.finish().unwrap()
}

fn says(profile: &Profile, what: &str) -> bool {
    profile.meta.notes.iter().chain(&profile.meta.limits).any(|note| note.contains(what))
}

#[test]
fn bad_alloc_is_caught_after_a_limit_is_set_during_the_recording() {
    if bpf().is_none() {
        return;
    }
    let limited_later = Program { args: &["later"], ..Program::new("limited") };
    for place in [place::ATTACHED_TO_PRELOADED_JEMALLOC, place::ATTACHED_TO_PRELOADED_TCMALLOC] {
        let profile = record(limited_later, place, None, &["limited", "done"]);
        assert!(says(&profile, "RLIMIT_AS"), "{:?} {:?}", profile.meta.notes, profile.meta.limits);
    }
}

#[test]
fn without_sessions_no_throwing_function_is_probed_and_bad_alloc_is_caught() {
    if bpf().is_none() {
        return;
    }
    for method in [Attach::Multi, Attach::PerfEvents, Attach::ByAddress] {
        for place in [place::ATTACHED_TO_PRELOADED_JEMALLOC, place::ATTACHED_TO_PRELOADED_TCMALLOC] {
            let profile = record(Program::new("bad_alloc"), place, Some(method), &["done"]);
            assert!(says(&profile, "--probe-throwing"), "{:?} {:?}", profile.meta.notes, profile.meta.limits);
        }
    }
}
