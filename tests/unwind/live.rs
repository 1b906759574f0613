//! On the live kernel: stacks against gdb's, and what a walk costs.

use std::time::{Duration, Instant};

use fragprof::unwind::End;
use tempfile::TempDir;

use super::lab::{Lab, Target, compile, libc_function};

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

/// Mean time in a program per run over a while, in ns.
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
    // malloc, leaf, down 13 times, main; beyond it is musl's start code, which has no tables.
    assert!(stack.frames.len() >= 16, "{stack:x?}");
}
