//! Any bytes as an ELF file: an error, or a table of the size that it states, never a panic.
#![no_main]

use fragprof::unwind::Table;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(table) = Table::read(bytes) {
        assert_eq!(table.to_bytes().len(), table.bytes());
    }
});
