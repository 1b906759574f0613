//! The processes of the machine that can be watched, by resident memory: to choose from where none is named.

use std::fs;
use std::path::Path;

use super::heap::rss_of_statm;
use crate::target::process::{Stat, read_bounded};

/// Processes listed: the largest. Nobody scrolls further, and a filter finds among them what matters.
pub const LISTED_MAX: usize = 1000;
/// Bytes read of a `/proc/PID` file; the kernel writes at most a few hundred.
const FILE_BYTES_MAX: u64 = 4096;

/// A process to choose.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Its pid.
    pub pid: u32,
    /// Its name, any text.
    pub comm: String,
    /// Its memory in RAM.
    pub rss_bytes: u64,
}

/// The processes with memory of their own, largest first; neither kernel threads nor this program.
pub fn list() -> Vec<Candidate> {
    let own = std::process::id();
    let mut found: Vec<Candidate> = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|pid| *pid != own)
        .filter_map(|pid| candidate(pid, &Path::new("/proc").join(pid.to_string())))
        .collect();
    found.sort_by(|a, b| b.rss_bytes.cmp(&a.rss_bytes).then(a.pid.cmp(&b.pid)));
    found.truncate(LISTED_MAX);
    found
}

fn candidate(pid: u32, directory: &Path) -> Option<Candidate> {
    let stat = Stat::parse(&read_bounded(&directory.join("stat"), FILE_BYTES_MAX).ok()?)?;
    if stat.is_kernel_thread() || stat.is_dead() {
        return None;
    }
    let rss_bytes = rss_of_statm(&read_bounded(&directory.join("statm"), FILE_BYTES_MAX).ok()?)?;
    Some(Candidate { pid, comm: stat.comm, rss_bytes })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn running_programs_are_listed_by_size_but_neither_kernel_threads_nor_this_program() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        // Its exec has happened when it answers to its name.
        while fs::read_to_string(format!("/proc/{}/comm", child.id())).unwrap() != "cat\n" {
            std::thread::yield_now();
        }
        let listed = list();
        let cat = listed.iter().find(|candidate| candidate.pid == child.id());
        assert!(cat.is_some_and(|cat| cat.comm == "cat"), "{listed:?}");
        assert!(listed.iter().all(|candidate| candidate.pid != std::process::id() && candidate.pid != 2));
        assert!(listed.is_sorted_by(|a, b| a.rss_bytes >= b.rss_bytes));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(list().iter().all(|candidate| candidate.pid != child.id()));
    }
}
