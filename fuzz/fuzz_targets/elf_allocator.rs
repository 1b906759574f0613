//! Any bytes as an ELF file: allocators, USDT notes and probe sites.
#![no_main]

#[allow(dead_code)]
#[path = "../readers.rs"]
mod readers;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| readers::elf_allocator(bytes));
