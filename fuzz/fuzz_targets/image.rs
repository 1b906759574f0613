//! Any bytes as the program of an image.
#![no_main]

#[allow(dead_code)]
#[path = "../readers.rs"]
mod readers;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| readers::image(bytes));
