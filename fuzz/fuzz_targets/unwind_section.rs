//! Any bytes as unwind information: rows in order, never a panic.
#![no_main]

use fragprof::machine::Machine;
use fragprof::unwind::elf::{Format, Segment, UnwindSection};
use fragprof::unwind::{Table, rows};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((&first, rest)) = bytes.split_first() else { return };
    let format = if first & 1 == 0 { Format::EhFrame } else { Format::DebugFrame };
    let section = UnwindSection { format, address: 0x1000, bytes: rest.to_vec() };
    let text = Segment { offset: 0, address: 0, file_bytes: 1 << 32, executable: true };
    let machine = if first & 4 == 0 { Machine::X86_64 } else { Machine::Aarch64 };
    if let Ok(rows) = rows::convert(&section, &[text], first & 2 != 0, machine) {
        assert!(rows.rows.is_sorted_by(|a, b| a.address < b.address));
        if let Ok(table) = Table::build(rows) {
            assert_eq!(table.to_bytes().len(), table.bytes());
        }
    }
});
