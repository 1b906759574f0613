//! Compares the results of reading ELF files with those of other tools.

#![allow(clippy::unwrap_used)]
use std::collections::BTreeMap;
use std::process::Command;

use proptest::prelude::*;

use crate::process::elf::*;

const LIBRARY: &str = "/lib/x86_64-linux-gnu/libc.so.6";

fn functions<R: ReadAt>(elf: &Elf<R>, table: SymbolTable) -> BTreeMap<String, u64> {
    let mut found = BTreeMap::new();
    elf.for_each_function(|f| {
        if f.table == table {
            found.insert(String::from_utf8_lossy(f.name).into_owned(), f.vaddr);
        }
    });
    found
}

#[test]
fn dynamic_functions_are_those_that_nm_lists() {
    let elf = Elf::parse(File::open(LIBRARY).unwrap()).unwrap();
    let ours = functions(&elf, SymbolTable::Dynamic);
    let nm = Command::new("nm").args(["-D", "--defined-only", "--without-symbol-versions", LIBRARY]).output().unwrap();
    let mut seen = 0;
    for line in String::from_utf8(nm.stdout).unwrap().lines() {
        let mut fields = line.split_whitespace();
        let (vaddr, kind, name) = (fields.next().unwrap(), fields.next().unwrap(), fields.next().unwrap());
        if matches!(kind, "T" | "W") && ["malloc", "free", "calloc", "realloc", "posix_memalign"].contains(&name) {
            assert_eq!(ours[name], u64::from_str_radix(vaddr, 16).unwrap(), "{name}");
            seen += 1;
        }
    }
    assert_eq!(seen, 5);
}

#[test]
fn a_file_without_section_headers_has_the_same_dynamic_functions() {
    let bytes = std::fs::read(LIBRARY).unwrap();
    let whole = functions(&Elf::parse(bytes.clone()).unwrap(), SymbolTable::Dynamic);
    let mut stripped = bytes;
    // e_shoff, e_shnum, e_shstrndx.
    stripped[0x28..0x30].fill(0);
    stripped[0x3c..0x40].fill(0);
    assert_eq!(functions(&Elf::parse(stripped).unwrap(), SymbolTable::Dynamic), whole);
    assert!(whole.len() > 1000);
}

#[test]
fn the_build_id_equals_readelfs() {
    let shown = String::from_utf8(Command::new("readelf").args(["-n", LIBRARY]).output().unwrap().stdout).unwrap();
    let expected = shown.lines().find_map(|l| l.trim().strip_prefix("Build ID: ")).unwrap();
    assert_eq!(Elf::parse(File::open(LIBRARY).unwrap()).unwrap().build_id().unwrap().to_string(), expected);
}

#[test]
fn the_build_id_of_the_section_is_that_of_the_notes() {
    let elf = Elf::parse(File::open(LIBRARY).unwrap()).unwrap();
    assert_eq!((elf.build_id_of_section(), elf.bytes_to_read()), (elf.build_id(), elf.length));
}

#[test]
fn the_bytes_to_read_are_those_of_the_file_and_of_its_decompressed_sections() {
    let directory = tempfile::tempdir().unwrap();
    let (source, plain, packed) = (directory.path().join("a.c"), directory.path().join("a"), directory.path().join("packed"));
    std::fs::write(&source, "int main(void) { return 0; }").unwrap();
    let run = |command: &mut Command| assert!(command.status().unwrap().success());
    run(Command::new("cc").args(["-g3", "-gz=none", "-o"]).args([&plain, &source]));
    run(Command::new("objcopy").arg("--compress-debug-sections=zlib").args([&plain, &packed]));
    let packed = Elf::parse(File::open(packed).unwrap()).unwrap();
    let plain = Elf::parse(File::open(plain).unwrap()).unwrap();
    let names: [&[u8]; 3] = [b".debug_info", b".debug_str", b".debug_macro"];
    let names = names.into_iter().filter(|name| packed.is_compressed(name));
    let expected: u64 = names.map(|name| plain.section(name, u64::MAX).unwrap().len() as u64).sum();
    assert!(expected > 0 && packed.bytes_to_read() >= packed.length + expected, "{} {expected}", packed.bytes_to_read());
    assert!(packed.bytes_to_read() <= packed.length + plain.length);
    assert_eq!(plain.bytes_to_read(), plain.length);
}

#[test]
fn the_load_bias_is_right_if_segments_share_a_page() {
    // Text at offset 0x1a10 and virtual address 0x2a10, as lld places it; data before it in the same page.
    let segment = |offset, vaddr, executable| Segment { offset, vaddr, file_bytes: 0x1000, executable };
    let mut elf = Elf::parse(std::fs::read(LIBRARY).unwrap()).unwrap();
    elf.segments = vec![segment(0xa10, 0xa10, false), segment(0x1a10, 0x2a10, true)];
    // The loader maps the page at offset 0x1000 at the file's address 0x2000.
    assert_eq!(elf.load_bias(0x7000_0000 + 0x2000, FileOffset(0x1000)), Some(0x7000_0000));
}

#[test]
fn a_virtual_address_is_found_in_the_file_through_its_segment() {
    let elf = Elf::parse(File::open(LIBRARY).unwrap()).unwrap();
    let text = elf.segments().iter().find(|s| s.executable).unwrap();
    let offset = elf.offset_of(text.vaddr + 77).unwrap();
    assert_eq!(offset.0, text.offset + 77);
    assert_eq!(elf.offset_of(u64::MAX), None);
}

/// Calls every function that the crate applies to untrusted files.
fn exercise(bytes: Vec<u8>) {
    let Ok(elf) = Elf::parse(bytes) else { return };
    let mut last = 0;
    elf.for_each_function(|f| last = f.vaddr);
    let _ = (elf.build_id_of_section(), elf.bytes_to_read());
    let _ = (elf.build_id(), elf.dynamic(), elf.linkage_slots(), elf.is_go(), elf.bytes_at(last, 64), elf.offset_of(last));
    let _ = elf.load_bias(last, FileOffset(last));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_damaged_file_never_panics(
        damage in proptest::collection::vec((0usize..0x6000, any::<u8>()), 1..40),
        header in proptest::collection::vec((0usize..0x400, any::<u8>()), 0..8),
        cut in proptest::option::of(0usize..150_000),
        strip in any::<bool>(),
    ) {
        let mut bytes = std::fs::read("/lib/x86_64-linux-gnu/libmimalloc.so.2").unwrap();
        for (at, byte) in damage.into_iter().chain(header) {
            if let Some(b) = bytes.get_mut(at) { *b = byte; }
        }
        if strip { bytes[0x28..0x30].fill(0); }
        if let Some(cut) = cut { bytes.truncate(cut); }
        exercise(bytes);
    }

    #[test]
    fn random_bytes_after_a_valid_magic_never_panic(noise in proptest::collection::vec(any::<u8>(), 0..600)) {
        let mut bytes = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x03\0\x3e\0".to_vec();
        bytes.extend(noise);
        exercise(bytes);
    }
}
