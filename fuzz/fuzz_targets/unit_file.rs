//! Any text as a unit's file.
#![no_main]

#[allow(dead_code)]
#[path = "../readers.rs"]
mod readers;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| readers::unit_file(bytes));
