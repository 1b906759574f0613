//! Any changes of the page map, spans, lists and caches of Google's tcmalloc.
#![no_main]

#[allow(dead_code)]
#[path = "../readers.rs"]
mod readers;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| readers::google_tcmalloc(bytes));
