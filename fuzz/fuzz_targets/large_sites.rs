//! Any bytes as a line of what is known of a build of glibc.
#![no_main]

#[allow(dead_code)]
#[path = "../readers.rs"]
mod readers;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| readers::large_sites(bytes));
