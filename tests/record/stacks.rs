//! The stacks of a recording: complete from the allocation to the thread's start, in code without frame pointers, with the line numbers of
//! the sources.

use std::path::Path;

use super::{Place, Program, place, target_command};
use crate::support::build::script;
use crate::support::recording::{Recording, fragprof};
use crate::support::rendezvous::Target;
use crate::support::report::{Report, Stack};
use crate::support::{bpf, serial};

fn recorded(program: Program, place: Place) -> Option<Report> {
    bpf()?;
    let mut target = Target::start(&mut target_command(program, place));
    let recording = Recording::attach(&[target.pid()]);
    target.go_to("done");
    Some(recording.stop())
}

/// Checks that every stack through a site has the functions `then` further out, in this order.
#[track_caller]
fn assert_sites_are_called_by(report: &Report, site: &str, then: &[&str]) {
    let mut seen = 0;
    for stack in &report.stacks {
        let names = stack.names();
        let Some(at) = names.iter().position(|name| *name == site) else { continue };
        seen += 1;
        let mut outer = names[at..].iter();
        for wanted in then {
            assert!(outer.any(|name| name == wanted), "{site} is not called by {wanted} (of {then:?}) in {names:?}");
        }
    }
    assert!(seen > 0, "no stack has {site}");
}

fn check_entry_points(place: Place) {
    let Some(report) = recorded(Program::new("entry_points"), place) else { return };
    for site in ["site_malloc", "site_calloc", "site_realloc", "site_posix_memalign", "site_aligned_alloc", "site_memalign"] {
        assert_sites_are_called_by(&report, site, &["main"]);
    }
}

#[test]
fn a_stack_reaches_main_in_a_dynamic_program() {
    check_entry_points(place::ATTACHED_TO_GLIBC);
}

#[test]
fn a_stack_reaches_main_through_jemalloc() {
    check_entry_points(place::ATTACHED_TO_PRELOADED_JEMALLOC);
}

#[test]
fn a_stack_reaches_main_through_tcmalloc() {
    check_entry_points(place::ATTACHED_TO_PRELOADED_TCMALLOC);
}

#[test]
fn a_stack_reaches_main_through_mimalloc() {
    check_entry_points(place::ATTACHED_TO_PRELOADED_MIMALLOC);
}

#[test]
fn a_stack_reaches_main_in_a_static_program() {
    check_entry_points(place::ATTACHED_TO_STATIC_GLIBC);
    check_entry_points(place::ATTACHED_TO_STATIC_MUSL);
}

#[test]
fn a_threads_stack_reaches_its_start_function() {
    let _alone = serial();
    let program = Program { args: &["2", "2000"], ..Program::new("cross_thread") };
    let Some(report) = recorded(program, place::ATTACHED_TO_GLIBC) else { return };
    for site in ["site_small", "site_medium", "site_zeroed", "site_resized"] {
        assert_sites_are_called_by(&report, site, &["work"]);
    }
}

#[test]
fn a_signal_handlers_stack_reaches_the_interrupted_function() {
    let Some(report) = recorded(Program::new("signal_stacks"), place::ATTACHED_TO_GLIBC) else { return };
    // The handler runs on another stack: the walk crosses the signal frame to the interrupted one.
    assert_sites_are_called_by(&report, "site_raised", &["on_raise", "main"]);
    assert_sites_are_called_by(&report, "site_timer", &["on_timer", "main"]);
}

#[test]
fn recursion_is_shown_frame_by_frame() {
    let Some(report) = recorded(Program::new("deep_recursion"), place::ATTACHED_TO_GLIBC) else { return };
    // The 20 survivors of depth number i have 200 + i bytes each: depths 0, 1 and 50 are numbers 0, 1 and 2.
    for (number, frames) in [(0, 1), (1, 2), (2, 51)] {
        let wanted_bytes = 20 * (200 + number);
        let of_depth = |stack: &&Stack| stack.totals.inuse_bytes == wanted_bytes && stack.totals.inuse_allocations == 20;
        let stack = report.stacks.iter().find(of_depth).unwrap_or_else(|| panic!("no stack holds {wanted_bytes} bytes"));
        let names = stack.names();
        assert_eq!(names.iter().filter(|name| **name == "descend").count(), frames, "{names:?}");
        assert!(names.contains(&"main"), "{names:?}");
    }
}

/// What `deep_recursion` allocates, recorded at a limit.
fn deep(limit: &str) -> Option<Report> {
    bpf()?;
    let mut target = Target::start(&mut target_command(Program::new("deep_recursion"), place::ATTACHED_TO_GLIBC));
    let recording = Recording::attach_by(fragprof(), &[target.pid()], &["--max-frames", limit]);
    target.go_to("done");
    Some(recording.stop())
}

/// The stack of these depths, by their numbers: how many recursive frames it has, how many in all, and what is said of its end.
fn of_depths(report: &Report, mut numbers: std::ops::Range<u64>) -> (usize, usize, Option<&str>) {
    let allocations = 20 * (numbers.end - numbers.start);
    let bytes = numbers.clone().map(|number| 20 * (200 + number)).sum::<u64>();
    let holds = |stack: &&Stack| (stack.totals.inuse_allocations, stack.totals.inuse_bytes) == (allocations, bytes);
    let stack = report.stacks.iter().find(holds).unwrap_or_else(|| panic!("no stack of depth number {:?}", numbers.next()));
    let names = stack.names();
    assert!(names.iter().position(|name| *name == "site_deep").is_some_and(|at| at <= 1), "the allocator's side is cut: {names:?}");
    assert_eq!(names.contains(&"main"), stack.truncated.is_none(), "{names:?}");
    (names.iter().filter(|name| **name == "descend").count(), names.len(), stack.truncated.as_deref())
}

/// The depths of `deep_recursion`.
const DEPTHS: [usize; 16] = [0, 1, 50, 120, 121, 122, 123, 124, 125, 126, 127, 128, 129, 130, 300, 5000];

#[test]
fn stacks_of_more_than_128_frames_are_whole_where_they_are_allowed() {
    let Some(report) = deep("600") else { return };
    for (number, depth) in (0..).zip(DEPTHS).take(15) {
        let (frames, _, truncated) = of_depths(&report, number..number + 1);
        assert_eq!((frames, truncated), (depth + 1, None));
    }
    // The deepest one is cut at the limit.
    let (frames, all, truncated) = of_depths(&report, 15..16);
    assert_eq!((all, truncated), (600, Some("more frames than the limit")));
    assert!(frames >= 597, "{frames}");
}

#[test]
fn a_lower_limit_of_frames_cuts_the_outer_side() {
    let Some(report) = deep("20") else { return };
    let [first, second, cut] = [0..1, 1..2, 2..16].map(|numbers| of_depths(&report, numbers));
    assert_eq!((first.0, first.2, second.0, second.2), (1, None, 2, None));
    // Cut, the others are one stack.
    assert_eq!((cut.1, cut.2), (20, Some("more frames than the limit")));
}

#[test]
fn a_frame_has_the_line_of_its_call() {
    let Some(report) = recorded(Program::new("entry_points"), place::ATTACHED_TO_GLIBC) else { return };
    let source = std::fs::read_to_string(script("entry_points.c")).unwrap();
    for (site, call) in
        [("site_malloc", "site_malloc(size_t size) {"), ("site_memalign", "memalign(64, size)"), ("site_realloc", "realloc(old.ptr, size)")]
    {
        let line = u64::try_from(source.lines().position(|line| line.contains(call)).unwrap() + 1).unwrap();
        let frames: Vec<_> = report.stacks.iter().flat_map(|stack| &stack.frames).filter(|f| f.function.as_deref() == Some(site)).collect();
        assert!(!frames.is_empty(), "no frame of {site}");
        for frame in frames {
            let file = frame.file.as_deref().unwrap_or_default();
            assert_eq!(Path::new(file).file_name().and_then(|name| name.to_str()), Some("entry_points.c"), "{frame:?}");
            // The return address is after the call: the frame must still show the call's line.
            assert_eq!(frame.line, Some(line), "{frame:?}");
        }
    }
}

#[test]
fn a_cpp_frame_is_demangled() {
    let Some(report) = recorded(Program::new("new_delete"), place::ATTACHED_TO_GLIBC) else { return };
    let functions: Vec<_> = report.stacks.iter().flat_map(|stack| &stack.frames).filter_map(|f| f.function.as_deref()).collect();
    assert!(functions.iter().any(|f| f.starts_with("site_new_aligned_nothrow(unsigned long)")), "{functions:?}");
    assert!(!functions.iter().any(|f| f.starts_with("_Z")), "{functions:?}");
}
