//! What a call gives back, against the kernel's account of resident memory.

use std::process::Command;

use super::{Target, assert_predicted, build, refused, states, trim};
use crate::support::recording::fragprof;

/// Takes huge pages from a target: of one that was given unasked, all is resident.
fn small_pages(command: &mut Command) -> &mut Command {
    use std::os::unix::process::CommandExt as _;
    // SAFETY: five numbers, as prctl(2) wants them; between fork and exec nothing else is done.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        })
    }
}

fn check(command: &mut Command, what: &str, call: &str, more: &[&str]) {
    let target = Target::start(small_pages(command));
    let before = target.resident_bytes();
    let dry = trim(target.pid(), &["--dry-run", "--max-stall", "10s"]);
    assert_eq!(target.resident_bytes() / (1 << 20), before / (1 << 20), "{what}: a dry run changes nothing");
    assert_eq!((dry["dry_run"].as_bool(), dry["given_back_bytes"].is_null()), (Some(true), true));
    let report = trim(target.pid(), &[&["--yes", "--max-stall", "10s"], more].concat());
    assert_eq!((refused(&report), report["call"].as_str()), ("", Some(call)), "{what}: {report}");
    assert_predicted(&report, before, target.resident_bytes(), what);
    assert!(report["predicted_bytes"].as_u64().unwrap() > 8 << 20, "{what}: {report}");
    let again = trim(target.pid(), &["--yes"]);
    assert!(refused(&again) == "nothing" || again["predicted_bytes"].as_u64().unwrap() < 2 << 20, "{what}: {again}");
    target.assert_free();
    target.end();
}

#[test]
fn glibc_gives_back_what_is_predicted_from_one_arena_and_from_several() {
    check(Command::new(states()).args(["plain", "64"]), "one arena", "malloc_trim(0)", &[]);
    check(Command::new(states()).args(["plain", "96", "3"]), "four arenas", "malloc_trim(0)", &[]);
}

#[test]
fn a_pad_is_kept_at_the_end_of_the_heap() {
    let mut command = Command::new(states());
    command.args(["tail", "64"]);
    let target = Target::start(small_pages(&mut command));
    let before = target.resident_bytes();
    let report = trim(target.pid(), &["--yes", "--max-stall", "10s", "--pad", "20000000"]);
    assert_eq!(report["call"], "malloc_trim(20000000)", "{report}");
    assert_predicted(&report, before, target.resident_bytes(), "padded");
    let report = trim(target.pid(), &["--yes", "--max-stall", "10s"]);
    let rest = report["given_back_bytes"].as_u64().unwrap();
    assert!(rest.abs_diff(20_000_000) < 64 << 10, "the pad comes back afterwards: {rest}");
}

#[test]
fn jemalloc_and_tcmalloc_give_back_what_is_predicted_and_mimalloc_is_refused() {
    let library = |name: &str| format!("/usr/lib/x86_64-linux-gnu/{name}");
    let run = |name: &str, what: &str, call: &str| {
        let mut command = Command::new(states());
        // Purges that time alone would bring are put off.
        command.args(["plain", "64", "2"]).env("LD_PRELOAD", library(name)).env("MALLOC_CONF", "dirty_decay_ms:-1,muzzy_decay_ms:-1");
        check(&mut command, what, call, &[]);
    };
    run("libjemalloc.so.2", "jemalloc", "mallctl(\"arena.4096.purge\")");
    run("libtcmalloc_minimal.so.4", "tcmalloc", "MallocExtension_ReleaseFreeMemory()");
    let mimalloc = Target::start(Command::new(states()).args(["plain", "16"]).env("LD_PRELOAD", library("libmimalloc.so.2")));
    let report = trim(mimalloc.pid(), &["--yes"]);
    assert_eq!(refused(&report), "no_call", "{report}");
    assert!(report["refused"]["reason"].as_str().unwrap().contains("mi_collect"), "{report}");
}

#[test]
fn a_static_program_with_symbols_is_trimmed() {
    let program = build("states.c", "static", &["-pthread", "-static"]);
    check(Command::new(program).args(["plain", "32", "2"]), "static", "malloc_trim(0)", &[]);
}

#[test]
fn without_a_terminal_and_without_yes_nothing_is_done() {
    let target = Target::in_state("plain", 16, 0);
    let done = crate::support::process::run(fragprof().args(["trim", &target.pid().to_string()]));
    assert_eq!(done.status.code(), Some(2), "{}", done.err);
    assert!(done.err.contains("--yes"), "{}", done.err);
    target.end();
}

#[test]
fn the_plan_and_the_outcome_are_printed_for_people() {
    let target = Target::in_state("plain", 48, 2);
    let done = crate::support::process::run(fragprof().args(["trim", &target.pid().to_string(), "--yes", "--max-stall", "10s"]));
    assert!(done.status.success(), "{}", done.err);
    for text in ["malloc_trim(0) in libc.so.6", "gives back", "threads wait", "made by", "lock held", "gave back", "stood for"] {
        assert!(done.out.contains(text), "{text}: {}", done.out);
    }
}

#[test]
fn a_program_in_a_user_namespace_of_its_own_is_trimmed_by_its_own_library() {
    let Some(unshare) = crate::support::build::tool("unshare") else { return };
    let target = Target::start(Command::new(unshare).args(["--user", "--map-root-user", "--mount"]).arg(states()).args(["plain", "32"]));
    let report = trim(target.pid(), &["--yes", "--max-stall", "10s"]);
    assert_eq!((refused(&report), report["ending"].as_str()), ("", Some("returned")), "{report}");
}
