//! On the live kernel: stacks compared with gdb's, and the cost of a walk.

use std::process::Command;
use std::time::{Duration, Instant};

use fragprof::bpf::{Counter, FRAME_ADDRESS_MASK, FRAME_EXACT, FRAME_SIGNAL};
use fragprof::capture::Counters;
use fragprof::process::Process;
use fragprof::unwind::End;
use tempfile::TempDir;

use super::lab::{Lab, Target, compile, libc_function};
use crate::support::process::wait_until;

/// Waits for the next stack.
fn next_stack(lab: &Lab) -> super::lab::Stack {
    let before = lab.last().walks;
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let stack = lab.last();
        if stack.walks > before {
            return stack;
        }
        assert!(Instant::now() < deadline, "no probe was hit");
        std::thread::yield_now();
    }
}

#[test]
fn a_deep_call_without_frame_pointers_is_walked_to_its_entry() {
    let directory = TempDir::new().unwrap();
    let program = compile(directory.path(), "deep.c", "deep", &["-O2", "-fomit-frame-pointer"]);
    let lab = Lab::new();
    let target = Target::start(program, &["20", "100"]);
    std::thread::sleep(Duration::from_millis(100));
    let process = lab.watch(target.pid());
    let (libc, offset) = libc_function(&process, "malloc");
    let _link = lab.attach("walk_and_copy", target.pid(), &libc, offset);
    let stack = next_stack(&lab);
    for file in lab.tables.files_of(target.pid()) {
        eprintln!("{file:?}");
    }
    eprintln!("{stack:x?}");
    assert_eq!(stack.end, End::Complete);
    // malloc, leaf, down 21 times, main, two of libc, _start
    assert_eq!(stack.frames.len(), 27, "{stack:x?}");
}

/// Mean time per run of a program during `run`, in ns.
fn cost_ns(lab: &Lab, program: &str, run: impl FnOnce()) -> (f64, u64) {
    // SAFETY: a system call wrapper without preconditions; the descriptor is owned here.
    let stats = unsafe { libbpf_sys::bpf_enable_stats(libbpf_sys::BPF_STATS_RUN_TIME) };
    assert!(stats >= 0);
    // SAFETY: the descriptor was just returned and nobody else has it.
    let _stats = unsafe { <std::os::fd::OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(stats) };
    let id = {
        let program = lab.object.progs_mut().find(|p| p.name() == program).unwrap();
        libbpf_rs::query::ProgInfoIter::default()
            .find(|info| Some(info.name.as_os_str()) == Some(program.name()) && info.run_cnt == 0)
            .map(|info| info.id)
            .unwrap()
    };
    run();
    let info = libbpf_rs::query::ProgInfoIter::default().find(|info| info.id == id).unwrap();
    (info.run_time_ns as f64 / info.run_cnt as f64, info.run_cnt)
}

#[test]
#[ignore = "a measurement"]
fn cost_of_a_walk() {
    let directory = TempDir::new().unwrap();
    let program = compile(directory.path(), "deep.c", "deep", &["-O2", "-fomit-frame-pointer"]);
    let wait = Duration::from_secs(2);
    for depth in ["0", "14", "60", "110"] {
        for name in ["empty", "walk_only"] {
            let lab = Lab::new();
            let target = Target::start(&program, &[depth, "0"]);
            std::thread::sleep(Duration::from_millis(100));
            let process = lab.watch(target.pid());
            let (libc, offset) = libc_function(&process, "malloc");
            let (ns, runs) = cost_ns(&lab, name, || {
                let _link = lab.attach(name, target.pid(), &libc, offset);
                std::thread::sleep(wait);
            });
            eprintln!("depth {depth}: {name} {ns:.0} ns, {runs} runs");
        }
    }
}

#[test]
fn an_allocation_in_a_static_musl_program_is_walked_although_musl_has_no_tables() {
    let directory = TempDir::new().unwrap();
    let program = super::lab::compile_musl(directory.path());
    let lab = Lab::new();
    let target = Target::start(&program, &["12", "100"]);
    std::thread::sleep(Duration::from_millis(100));
    lab.watch(target.pid());
    let offset = super::lab::symbol_offset(&program, "malloc");
    let _link = lab.attach("walk_and_copy", target.pid(), &program, offset);
    let stack = next_stack(&lab);
    eprintln!("{stack:x?}");
    // malloc, leaf, down 13 times, main; after it comes musl's start code, which has no tables.
    assert!(stack.frames.len() >= 16, "{stack:x?}");
}

#[test]
fn return_probes_of_outer_calls_do_not_hide_their_callers() {
    let directory = TempDir::new().unwrap();
    let program = compile(directory.path(), "deep.c", "deep", &["-O2", "-fomit-frame-pointer"]);
    let lab = Lab::new();
    let target = Target::start(&program, &["10", "100"]);
    std::thread::sleep(Duration::from_millis(100));
    let process = lab.watch(target.pid());
    let (libc, offset) = libc_function(&process, "malloc");
    let _link = lab.attach("walk_and_copy", target.pid(), &libc, offset);
    let plain = next_stack(&lab);
    assert_eq!(plain.end, End::Complete);

    // Every return address of the recursion is now the kernel's trampoline, except in the outermost calls, which began before.
    let down = super::lab::symbol_offset(&program, "down");
    let _returns = lab.attach_return("empty", target.pid(), &program, down);
    for _ in 0..50 {
        let traced = next_stack(&lab);
        assert_eq!(traced.frames, plain.frames, "{traced:x?}");
        assert_eq!(traced.end, End::Complete);
    }
}

#[test]
fn a_handler_on_an_alternate_stack_is_walked_through_the_signal_frame() {
    let directory = TempDir::new().unwrap();
    let program = compile(directory.path(), "signals.c", "signals", &["-O2", "-fomit-frame-pointer"]);
    let lab = Lab::new();
    let target = Target::start(&program, &[]);
    std::thread::sleep(Duration::from_millis(100));
    lab.watch(target.pid());
    let _link = lab.attach("walk_and_copy", target.pid(), &program, super::lab::symbol_offset(&program, "in_handler"));
    for _ in 0..50 {
        let stack = next_stack(&lab);
        assert_eq!(stack.end, End::Complete, "{stack:x?}");
        assert_eq!(stack.frames.iter().filter(|&frame| frame & FRAME_SIGNAL != 0).count(), 1, "{stack:x?}");
        // The interrupted instruction is exact, and so is the probed one.
        assert_eq!(stack.frames.iter().filter(|&frame| frame & FRAME_EXACT != 0).count(), 2, "{stack:x?}");
    }
}

/// gdb's backtrace of the main thread: the pcs, leaf first.
fn gdb_backtrace(pid: u32) -> Vec<u64> {
    let output = super::lab::run(
        Command::new("gdb")
            .args(["-nx", "-batch", "-p", &pid.to_string()])
            .args(["-ex", "set debuginfod enabled off", "-ex", "set backtrace past-main on", "-ex", "set backtrace past-entry on"])
            .args(["-ex", "set print address on", "-ex", "bt -frame-info location-and-address"]),
    );
    let text = String::from_utf8_lossy(&output).into_owned();
    let pc = |line: &str| line.split_whitespace().find_map(|word| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok());
    text.lines().filter(|line| line.starts_with('#')).filter_map(pc).collect()
}

#[test]
fn stacks_of_sleeping_programs_without_debug_information_equal_gdbs() {
    let directory = TempDir::new().unwrap();
    let socket = directory.path().join("redis.sock").display().to_string();
    let python = "import time\ndef f(n):\n    time.sleep(0.05) if n == 0 else max([1, 2], key=lambda x: f(n - 1) or x)\nwhile True: f(9)";
    let programs: [(&str, &[&str], &[&str]); 4] = [
        ("/usr/bin/python3", &["-c", python], &["clock_nanosleep"]),
        ("redis-server", &["--port", "0", "--unixsocket", &socket, "--save", ""], &["epoll_wait"]),
        ("perl", &["-e", "sub f { $_[0] ? f($_[0] - 1) : select(undef, undef, undef, 0.05) } f(9) while 1"], &["select"]),
        ("bash", &["-c", "while read -t 0.05 x < <(sleep 1) || true; do :; done"], &["pselect", "select"]),
    ];
    let mut compared = 0;
    for (program, arguments, functions) in programs {
        let lab = Lab::new();
        let target = Target::start(program, arguments);
        std::thread::sleep(Duration::from_millis(600));
        let process = lab.watch(target.pid());
        let found = functions.iter().any(|function| {
            let (libc, offset) = libc_function(&process, function);
            let _link = lab.attach("walk_and_copy", target.pid(), &libc, offset);
            let before = lab.last().walks;
            let deadline = Instant::now() + Duration::from_secs(3);
            while lab.last().walks == before {
                if Instant::now() > deadline {
                    return false;
                }
                std::thread::yield_now();
            }
            // The program may have continued in between: then both are repeated.
            (0..10).any(|_| {
                let stack = lab.last();
                let gdb = gdb_backtrace(target.pid());
                let ours: Vec<u64> = stack.frames.iter().skip(1).map(|frame| frame & FRAME_ADDRESS_MASK).collect();
                let same = !ours.is_empty() && gdb.ends_with(&ours);
                eprintln!("{program}: {} frames, {:?}, gdb {}: {same}", stack.frames.len(), stack.end, gdb.len());
                same && stack.end == End::Complete && stack.frames.len() >= 4
            })
        });
        compared += usize::from(found);
        assert!(found, "{program}");
    }
    assert_eq!(compared, programs.len());
}

fn walked(counters: &Counters) -> u64 {
    counters.get(Counter::Walk) + counters.get(Counter::WalkReused)
}

/// Counts a number of walks between two checks of the mappings that found the same code: a compiler in the target generates more of it
/// while it warms up, and these tests, unlike a recording, do not follow that.
fn count_while_code_stays(lab: &Lab, process: &Process, walks: u64) -> Counters {
    let code =
        || process.maps().unwrap().mappings.into_iter().filter(|m| m.permissions.execute).map(|m| (m.start, m.end)).collect::<Vec<_>>();
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let (known, before) = (code(), lab.counters());
        lab.watch(process.pid().0);
        let round = Instant::now();
        while walked(&lab.counters()) < walked(&before) + walks && round.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(20));
        }
        let after = lab.counters();
        if code() == known {
            return after.since(&before);
        }
        assert!(Instant::now() < deadline, "{}: the code keeps changing", process.comm());
    }
}

/// CPU time of a process in seconds.
fn cpu_s(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let (_, fields) = stat.rsplit_once(')').unwrap();
    // User and system time in ticks of 10 ms: the 14th and 15th field, the third comes first here.
    fields.split_whitespace().skip(11).take(2).map(|ticks| ticks.parse::<f64>().unwrap() / 100.0).sum()
}

#[test]
fn stacks_of_programs_under_load_are_complete() {
    let programs = super::lab::root().join("tests/unwind/programs");
    let file = |name: &str| programs.join(name).display().to_string();
    let targets: [(&str, Vec<String>); 3] = [
        ("/usr/bin/python3", vec![file("work.py")]),
        ("node", vec![file("work.js")]),
        ("java", vec!["-XX:+PreserveFramePointer".into(), file("Work.java")]),
    ];
    for (program, arguments) in targets {
        let lab = Lab::new();
        let target = Target::start(program, &arguments.iter().map(String::as_str).collect::<Vec<_>>());
        // By then its compiler has generated the code that it runs, however busy the machine is.
        wait_until("the program has warmed up", || cpu_s(target.pid()) >= 2.5);
        let process = lab.watch(target.pid());
        let (libc, offset) = libc_function(&process, "malloc");
        let _link = lab.attach("walk_only", target.pid(), &libc, offset);
        let counters = count_while_code_stays(&lab, &process, 3000);
        let walks = walked(&counters);
        let ends: Vec<(End, u64)> = End::ALL.iter().map(|&end| (end, counters.ends(end))).filter(|(_, n)| *n > 0).collect();
        eprintln!(
            "{program}: {walks} walks, {} frames, {} whole and {} partly repeated: {ends:?}",
            counters.get(Counter::Frames),
            counters.get(Counter::WalkReused),
            counters.get(Counter::WalkTailReused)
        );
        assert!(walks > 100, "{program} hardly allocates");
        assert!(counters.ends(End::Complete) * 100 >= walks * 99, "{program}: {ends:?}");
    }
}

#[test]
fn the_tables_of_a_process_with_many_files_are_loaded_or_queued_within_half_a_second() {
    let directory = TempDir::new().unwrap();
    // 200 libraries with different build ids, like a browser or a database with plug-ins.
    let source = super::lab::root().join("tests/unwind/programs/library.c");
    let first = directory.path().join("lib0.so");
    super::lab::run(Command::new("gcc").args(["-O2", "-shared", "-fPIC", "-Wl,--build-id=none"]).arg(&source).arg("-o").arg(&first));
    let mut paths = vec![first.display().to_string()];
    for i in 1..200 {
        let copy = directory.path().join(format!("lib{i}.so"));
        std::fs::copy(&first, &copy).unwrap();
        paths.push(copy.display().to_string());
    }
    let load = "import ctypes, sys, time\nall = [ctypes.CDLL(p) for p in sys.argv[1:]]\nopen(sys.argv[1] + '.ready', 'w')\ntime.sleep(60)";
    let mut arguments = vec!["-c", load];
    arguments.extend(paths.iter().map(String::as_str));
    let target = Target::start("/usr/bin/python3", &arguments);
    let ready = directory.path().join("lib0.so.ready");
    let deadline = Instant::now() + Duration::from_secs(20);
    while !ready.exists() {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(10));
    }
    let lab = Lab::new();
    let process = fragprof::process::Process::open(fragprof::units::Pid(target.pid())).unwrap();
    let maps = process.maps().unwrap();
    let begun = Instant::now();
    let report = lab.tables.sync_process(&process, target.pid(), &maps).unwrap();
    let first = begun.elapsed();
    assert!(lab.tables.wait_until_loaded(Duration::from_secs(30)));
    let all = begun.elapsed();
    let begun = Instant::now();
    let again = lab.tables.sync_process(&process, target.pid(), &maps).unwrap();
    eprintln!("{report:?} in {first:?}, all loaded in {all:?}, again in {:?}: {again:?}", begun.elapsed());
    assert!(report.files >= 200 && report.without_table == 0);
    assert_eq!((again.files, again.loaded, again.pending), (report.files, 0, 0));
    assert!(first < Duration::from_millis(500), "{first:?}");
}

/// The verifier's limit is a million instructions; growth should be noticed long before.
#[test]
fn the_verifier_needs_far_less_than_its_limit_for_a_walk() {
    let lab = Lab::new();
    let names: Vec<_> = lab.object.progs_mut().map(|program| program.name().to_owned()).collect();
    let ids: Vec<_> = libbpf_rs::query::ProgInfoIter::default().filter(|info| names.contains(&info.name)).collect();
    for info in &ids {
        eprintln!("{}: {} instructions verified", info.name.to_string_lossy(), info.verified_insns);
        assert!(info.verified_insns < 100_000);
    }
    assert!(ids.len() >= names.len());
}

/// Each program as it is loaded alone, in the object that this kernel uses.
#[test]
fn the_verifier_needs_at_most_200_000_instructions_for_each_program_of_a_recording() {
    if crate::support::bpf().is_none() {
        return;
    }
    let _one = crate::support::serial();
    let verified = fragprof::capture::programs::verify_each();
    for program in &verified {
        eprintln!("{} {}: {:?} instructions, {:?} ms", program.object, program.name, program.instructions, program.milliseconds);
        // Other methods' programs may be refused here.
        assert!(program.refused.is_some() || program.instructions.is_some_and(|number| number <= 200_000), "{program:?}");
    }
    assert!(verified.iter().any(|program| program.object == "ordinary" && program.refused.is_none()), "{verified:?}");
}
