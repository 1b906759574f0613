//! Any changes of a CPython's description of itself, its code objects and what is sent of them.
#![no_main]

#[allow(dead_code)]
#[path = "../readers.rs"]
mod readers;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| readers::cpython(bytes));
