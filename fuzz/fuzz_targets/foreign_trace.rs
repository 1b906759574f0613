//! Any bytes as a file of heaptrack or of glibc's tracer.
#![no_main]

#[allow(dead_code)]
#[path = "../readers.rs"]
mod readers;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| readers::foreign_trace(bytes));
