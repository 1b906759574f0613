//! Stack pointers and known registers of a process's threads, without stopping them: `/proc/PID/task/TID/syscall`.
//!
//! The kernel gives the system call in which a thread waits, its six arguments, the stack pointer and the program counter; of a running
//! thread it gives nothing (fs/proc/base.c, `proc_pid_syscall`).

use std::fs;
use std::path::Path;
use std::time::Duration;

pub use crate::units::THREADS_MAX;

/// How often a running thread is read again.
const TRIES: usize = 4;
/// Waits between tries, of all threads together.
const WAITS_MAX: usize = 64;
const WAIT: Duration = Duration::from_micros(200);

/// The state of a thread.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ThreadState {
    /// Thread id.
    pub tid: u32,
    /// Its name; empty if it is not known.
    pub comm: String,
    /// Its stack pointer; `None` while it is running.
    pub stack_pointer: Option<u64>,
    /// Its instruction pointer; `None` while it is running, and in core files.
    pub program_counter: Option<u64>,
    /// Registers that are known: in a system call its arguments, in a core file all general ones.
    pub registers: Vec<u64>,
}

/// The threads of the process whose `/proc` directory this is.
#[must_use]
pub fn of_process(directory: &Path) -> Vec<ThreadState> {
    let Ok(entries) = fs::read_dir(directory.join("task")) else { return Vec::new() };
    let mut waits = 0;
    let tids = entries.flatten().filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path())));
    tids.take(THREADS_MAX)
        .map(|(tid, path)| {
            let comm = fs::read(path.join("comm")).unwrap_or_default();
            let comm = String::from_utf8_lossy(comm.trim_ascii_end()).into_owned();
            let mut state = ThreadState { tid, comm, ..ThreadState::default() };
            for attempt in 0..TRIES {
                let (registers, standing) = parse(&fs::read_to_string(path.join("syscall")).unwrap_or_default());
                (state.registers, state.stack_pointer, state.program_counter) =
                    (registers, standing.map(|of| of.0), standing.map(|of| of.1));
                if standing.is_some() || attempt + 1 == TRIES || waits == WAITS_MAX {
                    break;
                }
                waits += 1;
                std::thread::sleep(WAIT);
            }
            state
        })
        .collect()
}

/// `running`, `-1 SP PC`, or `NUMBER ARGUMENT×6 SP PC`, all but the number in hexadecimal.
///
/// Returns the arguments, and stack pointer and program counter.
fn parse(line: &str) -> (Vec<u64>, Option<(u64, u64)>) {
    let words: Vec<u64> =
        line.split_ascii_whitespace().skip(1).map_while(|word| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok()).collect();
    match words.as_slice() {
        [arguments @ .., stack_pointer, program_counter] if matches!(arguments.len(), 0 | 6) => {
            (arguments.to_vec(), Some((*stack_pointer, *program_counter)))
        }
        _ => (Vec::new(), None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_waiting_threads_arguments_and_stack_pointer_are_read_and_a_running_one_has_none() {
        let waiting = "202 0x7f01 0x80 0x0 0x0 0x0 0xffffffff 0x7ffc10 0x7f99\n";
        assert_eq!(parse(waiting), (vec![0x7f01, 0x80, 0, 0, 0, 0xffff_ffff], Some((0x7ffc10, 0x7f99))));
        assert_eq!(parse("-1 0x7ffc20 0x7f98\n"), (Vec::new(), Some((0x7ffc20, 0x7f98))));
        assert_eq!(parse("running\n"), (Vec::new(), None));
        assert_eq!(parse("202 0x1 0x2\n").1, Some((0x1, 0x2)));
        assert_eq!(parse("0 0x1 zz 0x3 0x4"), (Vec::new(), None));
    }

    #[test]
    fn the_stack_pointer_of_a_thread_of_this_process_that_waits_lies_in_its_stack() {
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        let (place, told) = std::sync::mpsc::channel::<u64>();
        let waiter = std::thread::Builder::new().name("waits".into()).spawn(move || {
            let local = 0u8;
            let _ = place.send(&raw const local as u64);
            let _ = receiver.recv();
        });
        let local = told.recv().unwrap_or(0);
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        let near = |state: &ThreadState| state.stack_pointer.is_some_and(|sp| sp < local && local - sp < 64 << 10);
        while !of_process(Path::new("/proc/self")).iter().any(|state| state.comm == "waits" && near(state)) {
            assert!(std::time::Instant::now() < deadline, "the thread was never seen waiting");
        }
        drop(sender);
        assert!(waiter.is_ok_and(|thread| thread.join().is_ok()));
    }
}
