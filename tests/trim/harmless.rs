//! No process is harmed: programs that check themselves, hundreds of calls, the command killed at each of its steps and at random.

use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use super::{Target, build, kill_at_every_step, kill_at_random, refused, trim, trims};
use crate::support::serial;

/// The program that checks itself.
pub(crate) fn program() -> PathBuf {
    build("churn.c", "churn", &["-pthread", "-lm"])
}

/// Starts it.
pub(crate) fn churn(workers: u32, pause_us: u32) -> Target {
    Target::start(Command::new(program()).args([workers.to_string(), "1".to_owned(), pause_us.to_string()]))
}

/// Ends it; what it counted, which it only prints if nothing was wrong.
pub(crate) fn counts(target: Target) -> Value {
    target.assert_free();
    let line = target.end();
    let counts: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"));
    for key in ["rounds", "wakes", "reads", "register_checks", "suspends", "timer_signals"] {
        assert!(counts[key].as_u64().unwrap() > 0, "{key}: {counts}");
    }
    counts
}

/// Calls that are made, and why others were not. A heap in motion may be refused; it must not be for another reason.
pub(crate) fn call(target: &Target, times: u32) -> u32 {
    let reports = (0..times).map(|_| trim(target.pid(), &["--yes"]));
    let made = reports.filter(|report| {
        let is_made = report["ending"] == "returned";
        assert!(is_made || matches!(refused(report), "not_predicted" | "in_allocator" | "no_parked_thread" | "nothing"), "{report}");
        is_made
    });
    made.count() as u32
}

fn survive(calls: u32, step_rounds: u32, random_kills: u32) {
    let _alone = serial();
    let target = churn(1, 200);
    let made = call(&target, calls);
    let at_steps = kill_at_every_step(target.pid(), step_rounds, trims);
    let at_random = kill_at_random(target.pid(), random_kills, 0x5eed, trims);
    let still = call(&target, 5);
    let counts = counts(target);
    println!("{made} calls, killed at steps {at_steps}, at random {at_random}, {still} calls afterwards; {counts}");
    assert!(made >= calls * 3 / 4, "{made} of {calls} calls were made");
    assert!(still > 0);
    assert!(at_steps >= step_rounds * 5 && at_random == random_kills, "{at_steps} and {at_random} were killed in time");
}

#[test]
fn a_program_that_checks_itself_survives_calls_and_killed_commands() {
    survive(100, 8, 80);
}

#[test]
#[ignore = "takes minutes: make stress-trim"]
fn a_program_that_checks_itself_survives_thousands_of_calls_and_killed_commands() {
    survive(2000, 60, 1000);
}

#[test]
fn two_commands_that_race_make_their_calls_one_after_the_other_or_are_refused() {
    let target = churn(1, 200);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..20 {
                    let report = trim(target.pid(), &["--yes"]);
                    let name = refused(&report);
                    let expected =
                        ["", "traced", "call_in_progress", "not_predicted", "nothing", "in_allocator", "no_parked_thread", "stopped"];
                    assert!(expected.contains(&name), "{report}");
                }
            });
        }
    });
    counts(target);
}

#[test]
fn a_wait_with_a_timeout_ends_by_itself_before_the_call_is_made() {
    let program = program();
    for kind in ["sleep", "poll"] {
        // All other threads run, or wait as main does, which sleeps too.
        let target = Target::start(Command::new(&program).args(["1", "0", "200", kind]));
        // On an emulated machine each attempt takes half a minute.
        let made = (0..10)
            .map(|_| call(&target, 1))
            .scan(0, |made, one| {
                (*made < 3).then(|| {
                    *made += one;
                    one
                })
            })
            .sum::<u32>();
        target.assert_free();
        let counts: Value = serde_json::from_str(&target.end()).unwrap();
        assert!(made > 0 && counts["eintr"][kind] == 0, "{kind}: {made} calls, {counts}");
    }
}

/// Such a read returns EINTR after any stop, which not every program expects: another thread is used, although it waits for a short time.
#[test]
fn a_read_of_a_socket_with_a_timeout_is_not_interrupted() {
    let target = Target::in_state("receives", 16, 0);
    let made = (0..10).map(|_| trim(target.pid(), &["--yes"])).find(|report| report["ending"] == "returned");
    let report = made.expect("one of ten calls is made");
    assert_eq!((&report["thread"], &report["interrupted"]), (&target.pid().into(), &false.into()), "{report}");
    target.assert_free();
    target.end();
}
