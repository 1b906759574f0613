//! Any changes of mimalloc's segments, pages and lists.
#![no_main]

#[allow(dead_code)]
#[path = "../readers.rs"]
mod readers;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| readers::mimalloc(bytes));
