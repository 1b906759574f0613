//! Any bytes from the socket of a container runtime.
#![no_main]

#[allow(dead_code)]
#[path = "../readers.rs"]
mod readers;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| readers::nri(bytes));
