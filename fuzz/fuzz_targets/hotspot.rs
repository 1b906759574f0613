//! Any changes of a JVM's description of itself, its code and its methods.
#![no_main]

#[allow(dead_code)]
#[path = "../readers.rs"]
mod readers;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| readers::hotspot(bytes));
