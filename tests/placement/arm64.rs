//! arm64's placement on the libraries of the cross compiler, against objdump's listing: what instructions do is told from their text.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::path::Path;
use std::process::Command;

use fragprof::allocator::functions::{Family, Op, Shape, find};
use fragprof::machine::Machine;
use fragprof::probe::branches::BranchTargets;
use fragprof::probe::placement::{Placement, Reason, WALK_BYTES_MAX};
use fragprof::probe::placement_arm64::place;
use fragprof::process::elf::Elf;

const DIRECTORY: &str = "/usr/aarch64-linux-gnu/lib";

struct Line {
    mnemonic: String,
    operands: Vec<String>,
}

impl Line {
    fn parse(text: &str) -> Self {
        let text = text.split("//").next().unwrap().trim();
        let (mnemonic, rest) = text.split_once('\t').unwrap_or((text, ""));
        let rest = rest.split('<').next().unwrap();
        Self { mnemonic: mnemonic.to_owned(), operands: rest.split(',').map(|operand| operand.trim().to_owned()).collect() }
    }

    /// Whether the kernel simulates it.
    fn is_simulated(&self) -> bool {
        ["b", "bl", "cbz", "cbnz", "tbz", "tbnz", "adr", "adrp", "br", "blr", "ret"].contains(&self.mnemonic.as_str())
            || self.mnemonic.starts_with("b.")
    }

    /// Target of a direct branch.
    fn target(&self) -> Option<u64> {
        let is_branch = ["b", "bl", "cbz", "cbnz", "tbz", "tbnz"].contains(&self.mnemonic.as_str()) || self.mnemonic.starts_with("b.");
        is_branch.then(|| u64::from_str_radix(self.operands.last()?, 16).ok())?
    }

    /// Bytes by which it lowers the stack pointer; `None` if it changes it in another way.
    fn lowers_bytes(&self) -> Option<i64> {
        let number = |text: &str| {
            let text = text.trim_start_matches('#').trim_end_matches(['!', ']']);
            text.strip_prefix("0x").map_or_else(|| text.parse().ok(), |hex| i64::from_str_radix(hex, 16).ok())
        };
        let operands: Vec<&str> = self.operands.iter().map(String::as_str).collect();
        match (self.mnemonic.as_str(), operands.as_slice()) {
            ("sub", ["sp", "sp", bytes]) => number(bytes),
            ("sub", ["sp", "sp", bytes, "lsl #12"]) => Some(number(bytes)? << 12),
            // Before or after the access.
            (_, [.., "[sp", distance]) if distance.ends_with("]!") => Some(-number(distance)?),
            (_, [.., "[sp]", distance]) => Some(-number(distance)?),
            ("cmp" | "cmn" | "tst", _) => Some(0),
            (_, ["sp", ..]) => None,
            _ => Some(0),
        }
    }

    /// Registers that it writes, by number; the stack pointer is told by [`Self::lowers_bytes`].
    fn writes(&self) -> Vec<u8> {
        let register = |operand: &String| operand.strip_prefix(['x', 'w']).and_then(|number| number.parse().ok());
        let mut written: Vec<u8> = match self.mnemonic.as_str() {
            "cmp" | "cmn" | "tst" | "ccmp" | "ccmn" | "nop" | "bti" | "hint" | "dmb" | "prfm" => Vec::new(),
            store if store.starts_with("st") => Vec::new(),
            "ldp" | "ldpsw" | "ldnp" => self.operands.iter().take(2).filter_map(register).collect(),
            "paciasp" | "pacibsp" | "autiasp" => Vec::new(),
            _ => self.operands.iter().take(1).filter_map(register).collect(),
        };
        let base = self.operands.iter().find_map(|operand| operand.strip_prefix("[x"));
        let changes_base = self.operands.iter().any(|operand| operand.ends_with("]!"))
            || self.operands.iter().rev().skip(1).any(|operand| operand.ends_with(']'));
        written.extend(base.filter(|_| changes_base).and_then(|base| base.trim_end_matches(']').parse::<u8>().ok()));
        written
    }

    fn uses_link(&self) -> bool {
        self.mnemonic.starts_with("paci") || self.operands.iter().any(|operand| operand.trim_matches(['[', ']', '!']) == "x30")
    }

    fn falls_through(&self) -> bool {
        !self.is_simulated() && !["svc", "brk", "hlt", "udf", "eret", "retaa", "braa", "blraa"].contains(&self.mnemonic.as_str())
    }
}

struct Listing {
    lines: BTreeMap<u64, Line>,
    targets: HashSet<u64>,
}

impl Listing {
    fn of(path: &Path) -> Self {
        let output = Command::new("aarch64-linux-gnu-objdump").args(["-d", "-w", "--no-show-raw-insn"]).arg(path).output().unwrap();
        assert!(output.status.success());
        let mut listing = Self { lines: BTreeMap::new(), targets: HashSet::new() };
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            let Some((address, instruction)) = line.split_once(":\t") else { continue };
            let Ok(address) = u64::from_str_radix(address.trim(), 16) else { continue };
            let line = Line::parse(instruction);
            listing.targets.extend(line.target());
            listing.lines.insert(address, line);
        }
        listing
    }

    /// Panics unless the placement is correct according to this listing.
    fn confirm(&self, entry: u64, shape: Shape, placement: &Placement) {
        let site = entry + u64::from(placement.offset);
        let context = format!("entry {entry:#x} {shape:?} {placement:?}");
        let has_return = shape.op != Op::Free;
        assert_eq!(placement.has_return, has_return, "{context}");
        let at_site = self.lines.get(&site).unwrap_or_else(|| panic!("no instruction at the site: {context}"));
        assert_eq!(placement.reason.is_emulated(), at_site.is_simulated(), "{context}");
        assert!(placement.reason.is_emulated() || placement.offset == 0, "{context}");
        assert!(!(entry + 1..=site).any(|vaddr| self.targets.contains(&vaddr)), "a branch leads into the path: {context}");
        let arguments: Vec<u8> = [shape.size, shape.count, shape.pointer].into_iter().flatten().collect();
        let (mut lowered, mut null_checks) = (0, 0);
        for (_, line) in self.lines.range(entry..site) {
            if !line.falls_through() {
                let pointer = shape.pointer.map(|index| format!("x{index}"));
                assert!(
                    line.mnemonic == "cbz" && !has_return && Some(&line.operands[0]) == pointer.as_ref(),
                    "{}: {context}",
                    line.mnemonic
                );
                null_checks += 1;
                continue;
            }
            lowered += line.lowers_bytes().unwrap_or_else(|| panic!("the stack pointer changes in another way: {context}"));
            let written = line.writes();
            assert!(!written.iter().any(|register| arguments.contains(register) || [29, 30].contains(register)), "{written:?}: {context}");
            assert!(!has_return || !line.uses_link(), "the return address is used: {context}");
        }
        assert_eq!(lowered, 8 * i64::from(placement.sp_words), "{context}");
        assert!(!has_return || lowered == 0, "{context}");
        assert_eq!(null_checks, u32::from(placement.reason == Reason::EmulatedAfterNullCheck), "{context}");
        for (index, held_in) in [(shape.size, placement.size), (shape.count, placement.count), (shape.pointer, placement.pointer)] {
            assert_eq!(index, held_in.map(|register| register.0), "{context}");
        }
    }
}

/// A library whose header names this machine: others are refused, and symbols and code are all that is read.
fn of_this_machine(path: &Path, directory: &Path) -> Elf<File> {
    const E_MACHINE: usize = 18; // EM_X86_64 = 62
    let mut bytes = std::fs::read(path).unwrap();
    bytes[E_MACHINE..E_MACHINE + 2].copy_from_slice(&62u16.to_le_bytes());
    let copy = directory.join(path.file_name().unwrap());
    std::fs::write(&copy, bytes).unwrap();
    super::open(&copy)
}

#[test]
fn no_function_of_arm64_s_libraries_gets_a_site_that_objdump_s_listing_refutes() {
    let shape = |name: &str| find(Family::C, name.as_bytes()).unwrap().get().unwrap().shape;
    let shapes: Vec<Shape> = ["malloc", "calloc", "reallocarray", "free", "posix_memalign"].map(shape).to_vec();
    let mut sites_by_reason: BTreeMap<String, usize> = BTreeMap::new();
    let mut later = 0;
    let directory = tempfile::TempDir::new().unwrap();
    for file in ["libc.so.6", "ld-linux-aarch64.so.1", "libm.so.6", "libasan.so.8"] {
        let path = Path::new(DIRECTORY).join(file);
        let elf = of_this_machine(&path, directory.path());
        let listing = Listing::of(&path);
        let functions = super::sizes_of_functions(&elf);
        let starts: Vec<u64> = functions.keys().copied().collect();
        let targets = BranchTargets::search(&elf, Machine::Aarch64, &starts, &starts);
        for (&entry, &size) in functions.iter().filter(|(entry, size)| **size > 0 && listing.lines.contains_key(*entry)) {
            let code = elf.bytes_at(entry, size.min(WALK_BYTES_MAX));
            for &shape in &shapes {
                let placement = place(&code, entry, shape, |vaddr| targets.contains(vaddr));
                listing.confirm(entry, shape, &placement);
                later += usize::from(placement.offset > 0);
                *sites_by_reason.entry(format!("{:?}", placement.reason)).or_default() += 1;
            }
        }
    }
    let total: usize = sites_by_reason.values().sum();
    println!("{total} placements, {later} after the entry: {sites_by_reason:?}");
    assert!(total > 20_000 && later * 20 > total, "{later} of {total}: {sites_by_reason:?}");
}
