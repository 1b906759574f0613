//! What a program really takes: its anonymous memory without that of files' data and stacks, from `/proc`, while it runs.

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::fragprof;

const EVERY: Duration = Duration::from_millis(5);
const SMAPS_EVERY: Duration = Duration::from_millis(100);
const PAGE_BYTES: u64 = 4096;

/// Resident bytes of a program's heap.
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    pub peak_bytes: u64,
    /// Over the whole time.
    pub mean_bytes: u64,
    /// Over the last tenth of the time, without the teardown.
    pub end_bytes: u64,
}

impl Measured {
    /// Runs the command to its end.
    pub fn of(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).stdin(Stdio::null()).spawn().unwrap();
        Self::while_it_runs(child.id(), || child.try_wait().unwrap().is_none())
    }

    /// Measures a process while `runs`.
    pub fn while_it_runs(pid: u32, mut runs: impl FnMut() -> bool) -> Self {
        let began = Instant::now();
        let (mut samples, mut other, mut looked) = (Vec::new(), 0, None::<Instant>);
        while runs() {
            if looked.is_none_or(|at| at.elapsed() >= SMAPS_EVERY) {
                other = not_the_heaps(pid).unwrap_or(other);
                looked = Some(Instant::now());
            }
            if let Some(bytes) = anonymous(pid) {
                samples.push((began.elapsed(), bytes));
            }
            std::thread::sleep(EVERY);
        }
        let heap = |bytes: u64| bytes.saturating_sub(other);
        let (last, last_bytes) = *samples.last().expect("it ran for a while");
        let at_end: Vec<u64> =
            samples.iter().filter(|(at, _)| *at >= last.mul_f64(0.9) && *at <= last.mul_f64(0.97)).map(|one| heap(one.1)).collect();
        Self {
            peak_bytes: samples.iter().map(|one| heap(one.1)).max().unwrap_or(0),
            mean_bytes: samples.iter().map(|one| heap(one.1)).sum::<u64>() / samples.len() as u64,
            // No sample, if the machine stood still just then.
            end_bytes: at_end.iter().sum::<u64>().checked_div(at_end.len() as u64).unwrap_or(heap(last_bytes)),
        }
    }
}

/// Anonymous memory that a program of glibc's has mapped itself: what a census of it, near its end, leaves of what is neither files' data nor
/// stacks. It is in no prediction.
pub fn mapped_by_itself(command: &mut Command) -> u64 {
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).stdin(Stdio::null()).spawn().unwrap();
    let mut last = 0;
    while child.try_wait().unwrap().is_none() {
        let at = child.id();
        let beside = || {
            let report = fragprof().args(["census", "--json", &at.to_string()]).output().ok()?;
            let report: Value = serde_json::from_slice(&report.stdout).ok()?;
            let heap = report["heaps"].as_array()?.iter().find(|heap| heap["allocator"] == "glibc")?["resident_bytes"].as_u64()?;
            anonymous(at)?.checked_sub(not_the_heaps(at)?)?.checked_sub(heap)
        };
        last = beside().unwrap_or(last);
        std::thread::sleep(SMAPS_EVERY);
    }
    last
}

/// Resident pages that are neither of files nor shared.
fn anonymous(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let field = |nth: usize| text.split_whitespace().nth(nth)?.parse::<u64>().ok();
    let pages = field(1)?.checked_sub(field(2)?)?;
    (pages > 0).then_some(pages * PAGE_BYTES)
}

/// Anonymous memory of files' data, of the zeroed data that follows it, and of the stack.
fn not_the_heaps(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps")).ok()?;
    let (mut sum, mut counts, mut file_end) = (0, false, 0);
    for line in text.lines() {
        let mut fields = line.split_whitespace();
        let first = fields.next()?;
        if let Some(kilobytes) = line.strip_prefix("Anonymous:").filter(|_| counts) {
            sum += kilobytes.trim().trim_end_matches(" kB").parse::<u64>().ok()? * 1024;
        } else if let Some((start, end)) = first.split_once('-').filter(|_| !first.ends_with(':')) {
            let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
            let name = fields.nth(4).unwrap_or("");
            let is_file = name.starts_with('/');
            // The zeroed data of a library is small; what is larger beside a file is an allocator's.
            counts = is_file || name == "[stack]" || (name.is_empty() && start == file_end && end - start < 1 << 20);
            file_end = if is_file { end } else { 0 };
        }
    }
    Some(sum)
}
