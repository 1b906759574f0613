//! No process is harmed: programs that check themselves, attached to and detached from again and again, with the command killed meanwhile.

use super::{attaching, detaching, done};
use crate::sampler::programs::Libraries;
use crate::support::serial;
use crate::trim::harmless::{churn, counts};
use crate::trim::programs::{PROGRAMS, Start, events, exercise, number, python, redis};
use crate::trim::{kill_at_every_step, kill_at_random, made};

/// Attaches and detaches in turn, with the library in its usual place.
fn in_turn(pid: u32, round: u32) -> Vec<String> {
    if round.is_multiple_of(2) { ["attach-sampler", &pid.to_string()].map(str::to_owned).to_vec() } else { detaching(pid) }
}

#[test]
fn a_program_that_checks_itself_survives_cycles_and_killed_commands() {
    let _alone = serial();
    let target = churn(1, 200);
    for round in 0..40 {
        let report = made(&in_turn(target.pid(), round));
        let why = report["refused"].as_str().unwrap_or("");
        assert!(matches!(why, "" | "in_allocator" | "no_parked_thread" | "not_attached"), "{report}");
    }
    let at_steps = kill_at_every_step(target.pid(), 2, in_turn);
    let at_random = kill_at_random(target.pid(), 40, 0xa77a, in_turn);
    let counts = counts(target);
    println!("killed at steps {at_steps}, at random {at_random}; {counts}");
    // A command whose predecessor was killed may have nothing to do, and ends before it is killed.
    assert!(at_steps >= 6 && at_random >= 15, "{at_steps} and {at_random} were killed in time");
}

#[test]
fn two_commands_that_race_make_their_calls_one_after_the_other_or_are_refused() {
    let libraries = Libraries::new();
    let library = libraries.path(fragprof::sampler::library::Flavour::Attached);
    let target = churn(1, 200);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..10 {
                    for arguments in [attaching(target.pid(), &library, 4096), detaching(target.pid())] {
                        let report = made(&arguments);
                        let expected = [
                            "",
                            "traced",
                            "call_in_progress",
                            "in_allocator",
                            "no_parked_thread",
                            "stopped",
                            "not_attached",
                            "not_all_put_back",
                            "nothing_swapped",
                            "call_under_way",
                        ];
                        assert!(expected.contains(&report["refused"].as_str().unwrap_or("")), "{report}");
                    }
                }
            });
        }
    });
    done(&attaching(target.pid(), &library, 4096));
    counts(target);
}

#[test]
fn real_programs_go_on_as_before_after_cycles_and_killed_commands() {
    let short: [(&str, Start); 2] = [("redis", redis), ("python", python)];
    for (name, start) in short {
        let Some(row) = exercise(start, in_turn, 6, 0, 6, 11) else { continue };
        println!("{name}: {row:?}");
        assert!(row.failure.is_none() && row.masks == 0 && row.made > 0, "{name}: {row:?}");
    }
}

/// The addresses of a call are of the program that was executed when they were looked up: in the next one they are somewhere else.
#[test]
fn a_program_that_executes_itself_all_the_time_is_left_alone() {
    let row = exercise(|| Some(events(&["exec"])), in_turn, 24, 0, 0, 3).unwrap();
    println!("{row:?}");
    assert!(row.failure.is_none() && row.masks == 0, "{row:?}");
}

#[test]
#[ignore = "takes half an hour: make faults-attach"]
fn thousands_of_cycles_in_real_programs_and_a_thousand_killed_commands_harm_nothing() {
    let _alone = serial();
    let programs = PROGRAMS.len() as u32;
    let calls = number("FRAGPROF_ATTACH_CALLS", 3000).div_ceil(programs);
    let kills = number("FRAGPROF_ATTACH_KILLS", 1000).div_ceil(programs);
    println!(
        "| program | commands | done | killed | crashes, hangs, wrong answers | masks changed | EINTR from a stop | refused |\n|---|---|---|---|---|---|---|---|"
    );
    let mut rows = Vec::new();
    for (seed, (name, start)) in (1..).zip(PROGRAMS) {
        let Some(row) = exercise(start, in_turn, calls, kills.div_ceil(20), kills / 2, seed) else {
            println!("| {name} | not installed | | | | | | |");
            continue;
        };
        let [refused, interrupted] = row.notes();
        let harmed = u32::from(row.failure.is_some());
        println!("| {name} | {} | {} | {} | {harmed} | {} | {interrupted} | {refused} |", row.calls, row.made, row.killed, row.masks);
        rows.push((name, row));
    }
    for (name, row) in &rows {
        assert!(row.failure.is_none() && row.masks == 0, "{name}: {row:?}");
    }
}
