//! Any bytes as the memory that recorded processes share with the recorder.
#![no_main]

#[allow(dead_code)]
#[path = "../readers.rs"]
mod readers;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| readers::ring(bytes));
