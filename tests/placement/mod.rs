//! Placement of probes, checked against other tools' views of the same code: objdump's listing and gdb's registers.

mod arm64;
mod gdb;
mod listing;
mod programs;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use fragprof::allocator::Allocator;
use fragprof::allocator::functions::{Op, Shape, find};
use fragprof::allocator::in_file::identify;
use fragprof::machine::Machine;
use fragprof::probe::branches::BranchTargets;
use fragprof::probe::placement::{Emulation, Placement, WALK_BYTES_MAX, place};
use fragprof::probe::plan::place_all;
use fragprof::process::elf::Elf;

use self::listing::Listing;

const LIBRARIES: [(&str, Allocator); 6] = [
    ("/lib/x86_64-linux-gnu/libc.so.6", Allocator::Glibc),
    ("/usr/lib/x86_64-linux-gnu/libjemalloc.so.2", Allocator::Jemalloc),
    ("/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4", Allocator::Tcmalloc),
    ("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", Allocator::Tcmalloc),
    ("/usr/lib/x86_64-linux-gnu/libmimalloc.so.2", Allocator::Mimalloc),
    ("/usr/lib/x86_64-linux-musl/libc.so", Allocator::Musl),
];

/// Additional files to check, for example another distribution's C library: paths separated by colons.
const MORE_FILES: &str = "FRAGPROF_TEST_FILES";

/// Programs and libraries without an allocator of their own, of several compilers, and [`MORE_FILES`].
fn others() -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> =
        ["/lib/x86_64-linux-gnu/libstdc++.so.6", "/lib64/ld-linux-x86-64.so.2", "/bin/bash"].iter().map(PathBuf::from).collect();
    files.push(std::env::current_exe().unwrap());
    files.extend(std::env::var_os(MORE_FILES).iter().flat_map(std::env::split_paths));
    files
}

fn open(path: &Path) -> Elf<File> {
    Elf::parse(File::open(path).unwrap()).unwrap()
}

/// The size of each function, by its address.
fn sizes_of_functions(elf: &Elf<File>) -> BTreeMap<u64, u64> {
    let mut functions: BTreeMap<u64, u64> = BTreeMap::new();
    elf.for_each_function(|function| {
        let size = functions.entry(function.vaddr).or_default();
        *size = function.size.max(*size);
    });
    functions
}

#[test]
fn every_entry_point_of_every_allocator_has_a_site_that_objdump_s_listing_confirms() {
    for (path, allocator) in LIBRARIES {
        let elf = open(Path::new(path));
        let found = identify(&elf);
        assert_eq!(found.allocator, allocator);
        let listing = Listing::of(Path::new(path));
        let mut dear = Vec::new();
        for outcome in place_all(&elf, &found.functions, &found.function_starts, Emulation::default()) {
            let Ok(site) = outcome else { continue };
            let shape = site.function.get().unwrap().shape;
            listing.confirm(site.entry_vaddr, shape, &site.placement);
            if !site.placement.reason.is_emulated() {
                dear.push(site.symbols[0].clone());
            }
        }
        for name in ["malloc", "free", "calloc", "realloc", "_Znwm", "_ZdlPv"] {
            assert!(!dear.iter().any(|d| d == name), "{name} of {path} has a dear site");
        }
        assert!(dear.len() <= 1, "{path}: {dear:?}");
    }
}

#[test]
fn no_function_of_any_file_gets_a_site_that_objdump_s_listing_refutes() {
    let shape = |name: &str| {
        use fragprof::allocator::functions::Family;
        find(Family::C, name.as_bytes()).unwrap().get().unwrap().shape
    };
    let shapes: Vec<Shape> = ["malloc", "calloc", "reallocarray", "free", "posix_memalign"].map(shape).to_vec();
    let files = LIBRARIES.iter().map(|(path, _)| PathBuf::from(path)).chain(others());
    let mut sites_by_reason: BTreeMap<String, usize> = BTreeMap::new();
    for path in files {
        let elf = open(&path);
        let listing = Listing::of(&path);
        let functions = sizes_of_functions(&elf);
        let starts: Vec<u64> = functions.keys().copied().collect();
        let targets = BranchTargets::search(&elf, Machine::X86_64, &starts, &starts);
        // Only where the listing has an instruction: objdump uses sections, and symbols may be outside of them.
        for (&entry, &size) in functions.iter().filter(|(entry, size)| **size > 0 && listing.has(**entry)) {
            let code = elf.bytes_at(entry, size.min(WALK_BYTES_MAX));
            for &shape in &shapes {
                for emulation in [Emulation::default(), Emulation { long_nops: true }] {
                    let placement = place(&code, entry, shape, emulation, |vaddr| targets.contains(vaddr));
                    listing.confirm(entry, shape, &placement);
                    *sites_by_reason.entry(format!("{:?}", placement.reason)).or_default() += 1;
                }
            }
        }
    }
    let emulated = sites_by_reason["Emulated"] + sites_by_reason["EmulatedAfterNullCheck"];
    let total: usize = sites_by_reason.values().sum();
    println!("{total} placements: {sites_by_reason:?}");
    assert!(total > 50_000 && emulated * 2 > total, "{sites_by_reason:?}");
}

/// A site of a function that consists of `code` only, without jumps into it.
fn placed(code: &[u8], function: &str) -> Placement {
    placed_with(code, function, &[])
}

fn placed_with(code: &[u8], function: &str, targets: &[u64]) -> Placement {
    use fragprof::allocator::functions::Family;
    let shape = find(Family::C, function.as_bytes()).unwrap().get().unwrap().shape;
    place(code, 0x1000, shape, Emulation::default(), |vaddr| targets.contains(&vaddr))
}

/// The rules of placement on handwritten code; bytes as encoded in the Intel manual.
mod rules {
    use fragprof::machine::register::Register;
    use fragprof::probe::placement::Reason;

    use super::*;

    const RDI: Option<Register> = Some(Register(5));
    const RSI: Option<Register> = Some(Register(4));

    /// test rdi,rdi; je +0x10; push rbp; ret
    const FREE: [u8; 8] = [0x48, 0x85, 0xff, 0x74, 0x10, 0x55, 0xc3, 0x90];

    #[test]
    fn free_is_probed_after_the_null_check_and_malloc_before_it() {
        let site = placed(&FREE, "free");
        assert_eq!((site.offset, site.reason, site.pointer, site.has_return), (5, Reason::EmulatedAfterNullCheck, RDI, false));
        let site = placed(&FREE, "malloc");
        assert_eq!((site.offset, site.reason, site.size, site.has_return), (3, Reason::Emulated, RDI, true));
    }

    #[test]
    fn a_null_check_with_no_usable_site_after_it_is_itself_the_site() {
        // test rdi,rdi; je; mov edi,1; jmp: the argument is overwritten before the jump.
        let site = placed(&[0x48, 0x85, 0xff, 0x74, 0x10, 0xbf, 1, 0, 0, 0, 0xeb, 0x10], "free");
        assert_eq!((site.offset, site.reason), (3, Reason::Emulated));
        // test rsi,rsi; je: not a check of the pointer.
        let site = placed(&[0x48, 0x85, 0xf6, 0x74, 0x10, 0x55], "free");
        assert_eq!((site.offset, site.reason), (3, Reason::Emulated));
        // test rdi,rdi; jne: the relevant calls take the branch.
        let site = placed(&[0x48, 0x85, 0xff, 0x75, 0x10, 0x55], "free");
        assert_eq!((site.offset, site.reason), (3, Reason::Emulated));
    }

    #[test]
    fn endbr64_is_skipped() {
        let site = placed(&[0xf3, 0x0f, 0x1e, 0xfa, 0x41, 0x57, 0xc3], "malloc");
        assert_eq!((site.offset, site.reason), (4, Reason::Emulated));
    }

    #[test]
    fn an_argument_is_tracked_into_the_register_it_is_copied_to() {
        // mov rsi,rdi; mov edi,0x40; jmp
        let site = placed(&[0x48, 0x89, 0xfe, 0xbf, 0x40, 0, 0, 0, 0xeb, 0x20], "malloc");
        assert_eq!((site.offset, site.reason, site.size), (8, Reason::Emulated, RSI));
    }

    #[test]
    fn a_partial_copy_does_not_count_and_a_partial_write_invalidates() {
        // mov esi,edi; mov edi,0x40; jmp
        let site = placed(&[0x89, 0xfe, 0xbf, 0x40, 0, 0, 0, 0xeb, 0x20], "malloc");
        assert_eq!((site.offset, site.reason, site.size), (0, Reason::ArgumentLost, RDI));
        // mov dil,1; jmp
        let site = placed(&[0x40, 0xb7, 0x01, 0xeb, 0x20], "malloc");
        assert_eq!((site.offset, site.reason), (0, Reason::ArgumentLost));
    }

    #[test]
    fn a_multiplication_overwrites_its_implicit_registers() {
        // mov rax,rsi; mul rdx; jo: reallocarray's size was in rdx.
        let site = placed(&[0x48, 0x89, 0xf0, 0x48, 0xf7, 0xe2, 0x70, 0x10], "reallocarray");
        assert_eq!((site.offset, site.reason), (0, Reason::ArgumentLost));
    }

    #[test]
    fn a_moved_stack_pointer_is_counted_for_free_and_forbidden_where_the_return_matters() {
        // sub rsp,0x18; call
        let code = [0x48, 0x83, 0xec, 0x18, 0xe8, 0, 1, 0, 0];
        let site = placed(&code, "free");
        assert_eq!((site.offset, site.sp_words, site.reason), (4, 3, Reason::Emulated));
        let site = placed(&code, "malloc");
        assert_eq!((site.offset, site.sp_words, site.reason), (0, 0, Reason::StackMoved));
        // lea rsp,[rsp-8]; jmp: moved in a way that is not tracked.
        let site = placed(&[0x48, 0x8d, 0x64, 0x24, 0xf8, 0xeb, 0x20], "free");
        assert_eq!((site.offset, site.reason), (0, Reason::StackMoved));
    }

    #[test]
    fn a_push_may_be_the_site_and_is_never_skipped_for_malloc() {
        // push with REX.W is single-stepped by the kernel: not a site, and after it the stack pointer has moved.
        let site = placed(&[0x48, 0x57, 0xeb, 0x20], "malloc");
        assert_eq!((site.offset, site.reason), (0, Reason::StackMoved));
        let site = placed(&[0x48, 0x57, 0xeb, 0x20], "free");
        assert_eq!((site.offset, site.sp_words), (2, 1));
        let site = placed(&[0x57, 0xeb, 0x20], "malloc");
        assert_eq!((site.offset, site.reason), (0, Reason::Emulated));
    }

    #[test]
    fn no_jump_leads_between_the_entry_and_the_site() {
        let code = [0x48, 0x81, 0xff, 0, 0x10, 0, 0, 0x77, 0x20];
        assert_eq!(placed(&code, "malloc").offset, 7);
        assert_eq!(placed_with(&code, "malloc", &[0x1007]).reason, Reason::BranchInto);
        // After the site, at the entry, or into the middle of an instruction, which is not a jump target.
        assert_eq!(placed_with(&code, "malloc", &[0x1000, 0x1009]).offset, 7);
    }

    #[test]
    fn branches_and_undecodable_bytes_end_the_walk() {
        // mov rax,[rdi]; jmp rax
        assert_eq!(placed(&[0x48, 0x8b, 0x07, 0xff, 0xe0], "malloc").reason, Reason::ControlFlow);
        // An opcode that does not exist in 64-bit mode.
        assert_eq!(placed(&[0x48, 0x8b, 0x07, 0x06], "malloc").reason, Reason::Undecodable);
        // Truncated in the middle of an instruction, and empty.
        assert_eq!(placed(&[0x48, 0x81, 0xff, 0], "malloc").offset, 0);
        assert_eq!(placed(&[], "malloc").offset, 0);
    }

    #[test]
    fn long_nops_and_prefixed_branches_are_sites_only_where_the_kernel_emulates_them() {
        let nop = [0x0f, 0x1f, 0x40, 0, 0xc3];
        assert_eq!(placed(&nop, "malloc").reason, Reason::ControlFlow);
        let shape = Shape { op: Op::Alloc, size: Some(0), count: None, pointer: None, is_aligned: false };
        assert_eq!(place(&nop, 0, shape, Emulation { long_nops: true }, |_| false).reason, Reason::Emulated);
        // The five-byte one is a call to the kernel since 6.18, which forked children do not survive.
        let call_nop = [0x0f, 0x1f, 0x44, 0, 0, 0xc3];
        assert_ne!(place(&call_nop, 0, shape, Emulation { long_nops: true }, |_| false).reason, Reason::Emulated);
        // bnd jmp and jcc with an operand-size prefix: the kernel takes the first as another instruction and refuses the second.
        assert_ne!(placed(&[0xf2, 0xe9, 0, 1, 0, 0], "malloc").reason, Reason::Emulated);
        assert_ne!(placed(&[0x66, 0x74, 0x10, 0xc3], "malloc").reason, Reason::Emulated);
        assert_ne!(placed(&[0x41, 0x90, 0xc3], "malloc").reason, Reason::Emulated);
    }
}

proptest::proptest! {
    #[test]
    fn any_bytes_get_a_site_within_them(code in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..64)) {
        for function in ["malloc", "free", "reallocarray"] {
            let site = placed(&code, function);
            proptest::prop_assert!(site.offset == 0 || (site.offset as usize) < code.len());
            proptest::prop_assert!(!site.has_return || site.sp_words == 0);
        }
    }
}

/// Plans the probes of a file's bytes.
fn plan_bytes(bytes: Vec<u8>) {
    let Ok(elf) = Elf::parse(bytes) else { return };
    let found = identify(&elf);
    for site in place_all(&elf, &found.functions, &found.function_starts, Emulation::default()).into_iter().flatten() {
        assert_eq!(elf.offset_of(site.entry_vaddr.wrapping_add(site.placement.offset.into())), Some(site.offset));
    }
}

/// Moves the code and its symbols up until only `distance` bytes of address space follow the code's first byte, so that addresses wrap
/// around within functions or between them.
fn move_code(bytes: &mut [u8], distance: u64) {
    let word = |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let original = bytes.to_vec();
    // The second program header is the code's; p_vaddr is 16 bytes into it.
    let code = 0x40 + 56 + 16;
    let up = (u64::MAX - distance).wrapping_sub(word(bytes, code));
    let mut raise = |at: usize| {
        let raised = word(bytes, at).wrapping_add(up);
        bytes[at..at + 8].copy_from_slice(&raised.to_le_bytes());
    };
    raise(code);
    // Section headers of 64 bytes, from e_shoff on; SHT_DYNSYM is 11. Symbols have 24 bytes, the value 8 bytes into each.
    let sections = word(&original, 0x28) as usize;
    let dynamic_symbols = original[sections..].chunks_exact(64).find(|header| header[4..8] == [11, 0, 0, 0]).unwrap();
    let (offset, size) = (word(dynamic_symbols, 24) as usize, word(dynamic_symbols, 32) as usize);
    for symbol in (offset..offset + size).step_by(24) {
        raise(symbol + 8);
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(150))]

    #[test]
    fn a_damaged_library_never_breaks_the_plan(
        headers in proptest::collection::vec((0usize..0x400, proptest::prelude::any::<u8>()), 0..12),
        tables in proptest::collection::vec((0x400usize..0x6000, proptest::prelude::any::<u8>()), 0..60),
        code in proptest::collection::vec((0x10000usize..0x13000, proptest::prelude::any::<u8>()), 0..60),
        moved in proptest::option::of(0u64..0x14000),
    ) {
        let mut bytes = std::fs::read("/usr/lib/x86_64-linux-gnu/libmimalloc.so.2").unwrap();
        if let Some(distance) = moved {
            move_code(&mut bytes, distance);
        }
        for (at, byte) in headers.into_iter().chain(tables).chain(code) {
            bytes[at] = byte;
        }
        plan_bytes(bytes);
    }
}

#[test]
fn functions_beyond_the_end_of_the_address_space_are_skipped_and_the_others_planned() {
    let mut bytes = std::fs::read("/usr/lib/x86_64-linux-gnu/libmimalloc.so.2").unwrap();
    let whole = identify(&Elf::parse(bytes.clone()).unwrap()).functions.len();
    // The functions are about 40 KiB after the code's first byte.
    move_code(&mut bytes, 0xb000);
    let left = identify(&Elf::parse(bytes.clone()).unwrap()).functions.len();
    assert!(0 < left && left < whole);
    plan_bytes(bytes);
}

#[test]
fn a_function_at_the_end_of_the_address_space_is_walked_like_any_other() {
    use fragprof::allocator::functions::Family;
    let shape = find(Family::C, b"malloc").unwrap().get().unwrap().shape;
    // cmp rdi,0x1000; ja
    let code = [0x48, 0x81, 0xff, 0, 0x10, 0, 0, 0x77, 0x20];
    for entry in [u64::MAX - 8, u64::MAX - 3, u64::MAX] {
        assert_eq!(place(&code, entry, shape, Emulation::default(), |_| false).offset, 7);
    }
}
