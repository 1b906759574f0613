//! One module per technique, one test per place: live bytes and blocks, and all bytes and blocks ever allocated, equal the program's own
//! ledger by call site, to the byte.

#![allow(non_snake_case)]

use super::{Program, place, target_command};
use crate::support::bpf;
use crate::support::recording::Recording;
use crate::support::rendezvous::Target;

/// A module whose name is a sentence, with one test per place.
macro_rules! exact {
    ($sentence:ident, $program:expr, [$($place:ident),* $(,)?]) => {
        mod $sentence {
            #[allow(unused_imports)]
            use super::Program;
            $(
                #[test]
                fn $place() {
                    crate::record::check($program, crate::record::place::$place);
                }
            )*
        }
    };
}

/// As [`exact!`], for the places that apply to every dynamic program.
macro_rules! exact_everywhere {
    ($sentence:ident, $program:expr $(, $more:ident)* $(,)?) => {
        exact!($sentence, $program, [
            ATTACHED_TO_GLIBC,
            ATTACHED_TO_PRELOADED_JEMALLOC,
            ATTACHED_TO_PRELOADED_TCMALLOC,
            ATTACHED_TO_PRELOADED_MIMALLOC,
            LAUNCHED_WITH_GLIBC,
            LAUNCHED_WITH_JEMALLOC,
            LAUNCHED_WITH_TCMALLOC,
            LAUNCHED_WITH_MIMALLOC,
            $($more),*
        ]);
    };
}

/// As [`exact!`], attached only.
macro_rules! exact_attached {
    ($sentence:ident, $program:expr $(, $more:ident)* $(,)?) => {
        exact!($sentence, $program, [
            ATTACHED_TO_GLIBC,
            ATTACHED_TO_PRELOADED_JEMALLOC,
            ATTACHED_TO_PRELOADED_TCMALLOC,
            ATTACHED_TO_PRELOADED_MIMALLOC,
            $($more),*
        ]);
    };
}

exact_everywhere!(
    every_c_entry_point_is_counted,
    Program::new("entry_points"),
    ATTACHED_TO_STATIC_GLIBC,
    ATTACHED_TO_STATIC_MUSL,
    ATTACHED_TO_STATIC_JEMALLOC,
    ATTACHED_TO_TCMALLOC_INSIDE,
    LAUNCHED_WITH_STATIC_GLIBC,
    LAUNCHED_WITH_STATIC_MUSL,
);
exact_everywhere!(every_form_of_operator_new_and_delete_is_counted, Program::new("new_delete"));
exact!(the_allocx_functions_of_jemalloc_are_counted, Program::new("jemalloc_api"), [ATTACHED_TO_GLIBC, LAUNCHED_WITH_GLIBC]);
exact!(the_functions_of_snmalloc_for_rust_are_counted, Program::new("snmalloc_api"), [ATTACHED_TO_GLIBC, LAUNCHED_WITH_GLIBC]);
exact!(the_mi_functions_of_mimalloc_are_counted, Program::new("mimalloc_api"), [ATTACHED_TO_GLIBC, LAUNCHED_WITH_GLIBC]);
exact_attached!(a_failure_return_is_no_allocation, Program::new("failures"));
exact_everywhere!(
    realloc_is_counted_in_place_moving_to_zero_and_failing,
    Program::new("realloc_forms"),
    ATTACHED_TO_STATIC_GLIBC,
    ATTACHED_TO_STATIC_MUSL,
    ATTACHED_TO_STATIC_JEMALLOC,
);
exact_attached!(over_aligned_blocks_are_counted_by_the_bytes_asked_for, Program::new("over_aligned"));
exact_everywhere!(nested_entry_points_count_once, Program::new("nested"));
exact_attached!(a_replaced_operator_new_counts_once, Program::new("replaced_new"), LAUNCHED_WITH_GLIBC);
exact_attached!(a_cancelled_thread_leaves_nothing_behind, Program { runs: 2, ..Program::new("cancelled") });
// mimalloc as a C library aborts if operator new fails, so there is nothing to record.
exact!(
    a_call_that_never_returns_silences_no_thread,
    Program::new("bad_alloc"),
    [ATTACHED_TO_GLIBC, ATTACHED_TO_PRELOADED_JEMALLOC, ATTACHED_TO_PRELOADED_TCMALLOC]
);
exact!(
    a_program_short_of_memory_catches_bad_alloc_while_it_is_recorded,
    Program::new("limited"),
    [ATTACHED_TO_GLIBC, ATTACHED_TO_PRELOADED_JEMALLOC, ATTACHED_TO_PRELOADED_TCMALLOC]
);
exact_attached!(a_target_that_drops_root_stays_recorded, Program::new("setuid_drop"), LAUNCHED_WITH_GLIBC);
exact_attached!(a_stack_beyond_the_frame_limit_keeps_its_leaf, Program::new("deep_recursion"));
exact_attached!(signal_handlers_on_other_stacks_are_counted, Program { runs: 2, ..Program::new("signal_stacks") });
exact_everywhere!(short_lived_threads_are_counted_with_their_destructors, Program::new("short_threads"), ATTACHED_TO_STATIC_MUSL);

/// Their returns are not probed, because an exception may pass through. They are counted instead, so that nothing is missing silently.
#[test]
fn calls_of_operator_new_too_large_to_follow_are_counted() {
    if bpf().is_none() {
        return;
    }
    for place in [place::ATTACHED_TO_PRELOADED_JEMALLOC, place::ATTACHED_TO_PRELOADED_TCMALLOC] {
        let mut target = Target::start(&mut target_command(Program::new("bad_alloc"), place));
        let recording = Recording::attach(&[target.pid()]);
        target.go_to("done");
        let report = recording.stop();
        // In each of its 40 rounds the program calls a throwing operator new eight times for nearly the whole address space.
        assert_eq!(report.losses["not_followed_calls"], 40 * 8, "{place:?}: {:?}", report.losses);
    }
}

/// Programs that load every core: one after the other.
mod under_load {
    use std::io::Write;
    use std::process::Command;

    use crate::record::{Program, check, place};
    use rustix::process::Signal;

    use crate::support::build::{Link, program, tight_pairs};
    use crate::support::process::{Process, run};
    use crate::support::recording::{Recording, fragprof};
    use crate::support::rendezvous::Target;
    use crate::support::report::Report;
    use crate::support::{LIMIT, bpf, serial};

    const CROSS_THREAD: Program = Program { args: &["4", "10000"], runs: 3, ..Program::new("cross_thread") };

    #[test]
    fn blocks_freed_by_other_threads_are_matched_in_glibc() {
        let _alone = serial();
        check(CROSS_THREAD, place::ATTACHED_TO_GLIBC);
    }

    #[test]
    fn blocks_freed_by_other_threads_are_matched_in_one_glibc_arena() {
        let _alone = serial();
        check(Program { env: &[("MALLOC_ARENA_MAX", "1")], ..CROSS_THREAD }, place::ATTACHED_TO_GLIBC);
    }

    /// Every block of more than a KiB has its own mapping: an address that one thread unmaps is mapped at once by another.
    #[test]
    fn blocks_freed_by_other_threads_are_matched_where_each_is_a_mapping() {
        let _alone = serial();
        check(Program { env: &[("MALLOC_MMAP_THRESHOLD_", "1024")], ..CROSS_THREAD }, place::ATTACHED_TO_GLIBC);
    }

    #[test]
    fn a_range_that_is_unmapped_and_mapped_again_at_once_keeps_its_new_block() {
        let _alone = serial();
        // A fixed threshold: otherwise glibc raises it after the first free.
        let env = &[("MALLOC_MMAP_THRESHOLD_", "100000"), ("MALLOC_MMAP_MAX_", "1000000")];
        check(Program { env, runs: 2, ..Program::new("mapped_blocks") }, place::ATTACHED_TO_GLIBC);
    }

    /// The benchmark's tight loop: its own count of pairs is the ground truth.
    #[test]
    fn no_record_of_two_threads_at_full_speed_is_lost() {
        if bpf().is_none() {
            return;
        }
        let _alone = serial();
        let mut target = Process::start_piped(Command::new(tight_pairs()).args(["2", "1"]));
        let mut input = target.input();
        assert!(target.out.wait_for(LIMIT, |line| line.starts_with("ready")).is_some(), "{}", target.err);
        let recording = Recording::attach(&[target.pid()]);
        input.write_all(b"\n").unwrap();
        let said = target.out.wait_for(LIMIT, |line| line.starts_with('{')).unwrap_or_default();
        let pairs = serde_json::from_str::<serde_json::Value>(&said).unwrap()["pairs"].as_u64().unwrap();
        let report = recording.stop();
        assert_eq!(report.nonzero_losses(), Vec::<String>::new());
        assert_eq!((report.totals.allocations, report.totals.inuse_allocations), (pairs, 0));
    }

    /// The smallest possible buffer, on purpose.
    #[test]
    fn records_lost_to_a_full_buffer_are_reported_and_every_false_leak_is_doubtful() {
        if bpf().is_none() {
            return;
        }
        let _alone = serial();
        let mut target = Target::start(Command::new(program("cross_thread", Link::Dynamic)).args(["2", "30000"]));
        let pid = target.pid().to_string();
        let mut command = fragprof();
        command.args(["record", "--duration", "300s", "--buffer-kib", "4", "-p", &pid]);
        let mut recording = Recording::start(&mut command, &[]);
        recording.wait_until_attached(1);
        let truth = target.go_to("done");
        recording.process.signal(Signal::INT);
        assert!(recording.wait(LIMIT).success(), "{}", recording.process.err);
        assert!(recording.process.err.all().contains("doubt"), "{}", recording.process.err);

        let report = Report::read(&recording.file());
        assert!(!report.nonzero_losses().is_empty(), "{:?}", report.losses);
        let seen = report.by_site(truth.pid);
        for site in &truth.sites {
            let got = seen.get(&site.site).copied().unwrap_or_default();
            let certain = got.inuse_bytes - got.doubtful_bytes.unwrap_or_default();
            assert!(certain <= site.live_bytes, "{}: {got:?} without doubt is more than {}", site.site, site.live_bytes);
        }
        let text = run(fragprof().arg("report").arg(recording.file()));
        assert!(text.out.contains("doubt") || text.out.contains("lost"), "the report says nothing of losses:\n{}", text.out);
    }

    #[test]
    fn blocks_freed_by_other_threads_are_matched_in_jemalloc() {
        let _alone = serial();
        check(CROSS_THREAD, place::ATTACHED_TO_PRELOADED_JEMALLOC);
    }

    #[test]
    fn blocks_freed_by_other_threads_are_matched_in_tcmalloc() {
        let _alone = serial();
        check(CROSS_THREAD, place::ATTACHED_TO_PRELOADED_TCMALLOC);
    }

    #[test]
    fn blocks_freed_by_other_threads_are_matched_in_mimalloc() {
        let _alone = serial();
        check(CROSS_THREAD, place::ATTACHED_TO_PRELOADED_MIMALLOC);
    }

    #[test]
    fn blocks_freed_by_other_threads_are_matched_in_a_launched_program() {
        let _alone = serial();
        check(CROSS_THREAD, place::LAUNCHED_WITH_GLIBC);
    }

    #[test]
    fn blocks_freed_by_other_threads_are_matched_in_a_static_musl_program() {
        let _alone = serial();
        check(Program { runs: 1, ..CROSS_THREAD }, place::ATTACHED_TO_STATIC_MUSL);
    }
}
