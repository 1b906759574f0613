//! Any bytes as a line with the size-selective sites of a build of glibc.
#![no_main]

#[allow(dead_code)]
#[path = "../readers.rs"]
mod readers;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| readers::large_sites(bytes));
