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
