//! Any changes of the page map, arenas, pages and lists of mimalloc 3.x.
#![no_main]

#[allow(dead_code)]
#[path = "../readers.rs"]
mod readers;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| readers::mimalloc_arenas(bytes));
