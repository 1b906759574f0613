//! Any changes of CPython's table of arenas and of its pools.
#![no_main]

#[allow(dead_code)]
#[path = "../readers.rs"]
mod readers;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| readers::pymalloc(bytes));
