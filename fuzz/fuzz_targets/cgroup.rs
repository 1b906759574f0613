//! Any bytes as `/proc/PID/cgroup`.
#![no_main]

#[allow(dead_code)]
#[path = "../readers.rs"]
mod readers;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| readers::cgroup(bytes));
