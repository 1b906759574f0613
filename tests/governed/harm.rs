//! Nothing of fragprof stays behind in a target, however fragprof ends.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::process::Command;

use rustix::process::Signal;

use super::{Busy, Governed};
use crate::support::process::{Process, wait_until};
use crate::support::{LIMIT, bpf, serial};

/// Bytes of the C library's code in a process that differ from its file: probes.
pub fn changed_code_bytes(pid: u32) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let memory = File::open(format!("/proc/{pid}/mem")).unwrap();
    let mut changed = 0;
    for line in maps.lines().filter(|line| line.contains("libc.so") && line.contains("r-xp")) {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next().unwrap().split_once('-').unwrap();
        let (start, end) = (u64::from_str_radix(start, 16).unwrap(), u64::from_str_radix(end, 16).unwrap());
        let offset = u64::from_str_radix(fields.nth(1).unwrap(), 16).unwrap();
        let mut file = File::open(fields.last().unwrap()).unwrap();
        let (mut here, mut there) = (vec![0; (end - start) as usize], Vec::new());
        memory.read_exact_at(&mut here, start).unwrap();
        file.seek(SeekFrom::Start(offset)).unwrap();
        file.take(end - start).read_to_end(&mut there).unwrap();
        changed += here.iter().zip(&there).filter(|(here, there)| here != there).count();
    }
    changed
}

#[test]
fn a_recorder_killed_with_its_window_open_leaves_a_target_at_full_speed_and_a_new_one_starts_clean() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let target = Busy::start(&["0"]);
    let before = target.pairs_per_s();
    let recording = Governed::attach(target.pid(), "100%");
    wait_until("a window is open", || changed_code_bytes(target.pid()) > 0);
    recording.process.signal(Signal::KILL);
    let killed = recording.process.pid();
    wait_until("the killed recorder is gone", || match std::fs::read_to_string(format!("/proc/{killed}/stat")) {
        Ok(stat) => stat.contains(") Z "),
        Err(_) => true,
    });
    wait_until("the probes are removed", || changed_code_bytes(target.pid()) == 0);
    let after = target.pairs_per_s();
    assert!(after > 0.5 * before, "{before} pairs/s before, {after} after");
    let report = Governed::attach(target.pid(), "50%");
    wait_until("a window is open again", || changed_code_bytes(target.pid()) > 0);
    assert_eq!(report.report()["losses"]["lost_allocations"], 0);
    wait_until("the probes are removed again", || changed_code_bytes(target.pid()) == 0);
}

#[test]
fn a_target_that_forks_two_hundred_children_succeeds() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let script = "for i in $(seq 200); do /bin/true & done; wait; echo all; read line";
    let mut target = Process::start_piped(Command::new("/bin/bash").args(["-c", &format!("read line; {script}")]));
    let mut input = target.input();
    let recording = Governed::attach(target.pid(), "100%");
    std::io::Write::write_all(&mut input, b"\n").unwrap();
    assert!(target.out.wait_for(LIMIT, |line| line == "all").is_some(), "{}", target.err);
    recording.report();
    std::io::Write::write_all(&mut input, b"\n").unwrap();
    assert!(target.wait(LIMIT).success());
}
