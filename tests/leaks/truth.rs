//! Ten thousand blocks to which nothing points, in a heap at rest or with moving pointers, under each allocator.

use std::process::Command;
use std::time::Duration;

use super::target::{Judged, Target, build};

/// Checks that no block with a pointer was found (except `own` blocks that the program does not list), and 99 % of those without.
fn assert_true(judged: &Judged, own: u64, what: &str) {
    let wrong: Vec<(&str, u64)> = judged.wrong().into_iter().filter(|&(kind, found)| kind != "not known" || found > own).collect();
    assert_eq!(wrong, [], "{what}: {judged:?}");
    let (found, planted) = judged.of("leak-");
    assert_eq!(planted, 10_000);
    assert!(found * 100 >= planted * 99, "{what}: {found} of {planted}: {judged:?}");
}

fn look(command: Command, churn: Option<(u32, u32)>, what: &str) -> Judged {
    scan_with_own(command, churn, 0, what)
}

fn scan_with_own(command: Command, churn: Option<(u32, u32)>, own: u64, what: &str) -> Judged {
    let target = Target::start(command, churn);
    let seen = target.scan(if churn.is_some() { 5 } else { 1 }, Duration::from_millis(500));
    let judged = target.judge(&seen);
    println!(
        "{what}: {} after the first scan, {} remain; {:?}; {:?}",
        seen.first_pass_blocks,
        seen.candidates.len(),
        seen.doubts,
        judged.0
    );
    assert_true(&judged, own, what);
    judged
}

fn glibc() -> Command {
    Command::new(build("cc", "truth.c", &[], "glibc"))
}

#[test]
fn planted_leaks_are_found_in_a_heap_at_rest_and_hidden_pointers_look_like_them() {
    let judged = look(glibc(), None, "at rest");
    let (found, hidden) = judged.of("hidden-");
    assert!(found * 10 >= hidden * 9, "{judged:?}");
}

#[test]
fn planted_leaks_are_found_in_a_heap_whose_pointers_move_and_nothing_else() {
    for kops in [100, 250] {
        look(glibc(), Some((1, kops)), &format!("{kops},000 operations a second"));
    }
}

#[test]
fn planted_leaks_are_found_under_musl() {
    look(Command::new(build("musl-gcc", "truth.c", &["-static"], "musl")), None, "musl");
    look(Command::new(build("musl-gcc", "truth.c", &["-static"], "musl")), Some((1, 50)), "musl, busy");
}

#[test]
fn planted_leaks_are_found_under_jemalloc() {
    let preloaded = || {
        let mut command = glibc();
        command.env("LD_PRELOAD", "libjemalloc.so.2");
        command
    };
    look(preloaded(), None, "jemalloc");
    look(preloaded(), Some((1, 100)), "jemalloc, busy");
}

#[test]
fn planted_leaks_are_found_under_tcmalloc() {
    let preloaded = || {
        let mut command = glibc();
        command.env("LD_PRELOAD", "libtcmalloc_minimal.so.4");
        command
    };
    // One block of 8 bytes is the library's: it loses the pointer to the first of its own objects, which has its virtual table.
    scan_with_own(preloaded(), None, 1, "tcmalloc");
    scan_with_own(preloaded(), Some((1, 100)), 1, "tcmalloc, busy");
}

/// LeakSanitizer has an allocator of its own, so blocks are at other addresses: the results for each kind are compared.
#[test]
fn leak_sanitizer_says_the_same_of_each_kind_of_block() {
    let directory = tempfile::tempdir().unwrap();
    let truth = directory.path().join("truth");
    let mut command = Command::new(build("cc", "truth.c", &["-fsanitize=leak"], "lsan"));
    command.arg(&truth).stdin(std::process::Stdio::null()).env("LSAN_OPTIONS", "report_objects=1:max_leaks=0:exitcode=0");
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let known = super::target::read_truth(&truth);
    let mut theirs = Judged::default();
    for kind in known.values() {
        theirs.0.entry(kind.clone()).or_default().1 += 1;
    }
    // "0x602000000010 (24 bytes)"
    let addr = |line: &str| u64::from_str_radix(line.trim().strip_prefix("0x")?.split_once(" (")?.0, 16).ok();
    for addr in text.lines().filter_map(addr) {
        let kind = known.get(&addr).map_or("not known", String::as_str);
        theirs.0.entry(kind.to_owned()).or_default().0 += 1;
    }
    assert!(theirs.of("leak-").0 > 0, "{text}");
    let ours = look(glibc(), None, "compared with LeakSanitizer");
    println!("LeakSanitizer: {:?}", theirs.0);
    for (kind, (found, all)) in &theirs.0 {
        // Blocks to which only freed memory points depend on which memory is allocated again.
        if kind == "stale" || kind == "not known" {
            continue;
        }
        let own = ours.0.get(kind).copied().unwrap_or_default();
        assert!(own.0.abs_diff(*found) * 100 <= *all, "{kind}: {own:?} here, {found} of {all} there");
    }
}

#[test]
#[ignore = "a quarter of an hour: make coverage-leaks"]
fn leaks_are_found_twenty_times_at_each_rate() {
    for kops in [0u32, 100, 500, 1000] {
        for run in 0..20 {
            let churn = Some((1, kops)).filter(|churn| churn.1 > 0);
            look(glibc(), churn, &format!("{kops},000 operations a second, run {run}"));
        }
    }
}
