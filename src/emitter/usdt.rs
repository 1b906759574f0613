//! Statically defined probes (USDT): the probes in a file, their locations, and how each passes its arguments.
//!
//! A probe is a note of type 3 with the owner "stapsdt" in the section `.note.stapsdt` (SystemTap wiki, "UserSpaceProbeImplementation";
//! systemtap's sys/sdt.h):
//!
//! ```text
//! 8 bytes  address of the probe's nop at link time
//! 8 bytes  address of .stapsdt.base, likewise: if the section is elsewhere now (prelink), all addresses moved by the difference
//! 8 bytes  address of the semaphore, 0 = none: a 16-bit count of listeners in writable data
//! text\0   provider
//! text\0   name
//! text\0   arguments, separated by blanks, each N@OPERAND: N = bytes, negative if signed
//! ```
//!
//! Operands are in assembler syntax, as the compiler chose them, so they can be anything that an instruction accepts. Operands without a
//! symbol are supported; others are refused and named.

mod arm64;

use crate::machine::Machine;
use crate::machine::register::Register;
use crate::process::elf::{Elf, ReadAt};
use crate::units::FileOffset;

/// Maximum number of bytes of notes read per file. A note has about 80 bytes; the largest users (libc, Python, Ruby, databases) have about
/// a thousand probes.
const NOTES_BYTES_MAX: u64 = 4 << 20;
/// Maximum number of probes kept per file; only those of the requested providers count.
const PROBES_MAX: usize = 1024;
/// Maximum number of arguments of one probe: sys/sdt.h has macros for twelve.
const ARGUMENTS_MAX: usize = 12;
/// Maximum length of a text from the file that is shown.
const TEXT_SHOWN_MAX: usize = 64;

const NOTES: &[u8] = b".note.stapsdt";
const NOTE_TYPE: u32 = 3;
const NOTE_OWNER: &[u8] = b"stapsdt\0";

/// The location of an argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operand {
    /// `$const`; on arm64 only a number.
    Constant(i64),
    /// `%reg`, `xN`: the low bytes of a register, or bits 8 to 15 of it (`%ah`).
    Register {
        /// The register.
        register: Register,
        /// Whether it is one of `%ah`, `%bh`, `%ch`, `%dh`.
        high_byte: bool,
    },
    /// `disp(%base,%index,scale)`, `[xN, disp]`.
    Memory {
        /// Added to the address.
        displacement: i64,
        /// `None` in `disp(,%index,scale)`.
        base: Option<Register>,
        /// Register and log2 of its factor.
        index: Option<(Register, u8)>,
    },
}

/// One argument of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Argument {
    /// Bytes: 1, 2, 4 or 8.
    pub bytes: u8,
    /// Whether it is sign-extended.
    pub signed: bool,
    /// Its location.
    pub operand: Operand,
}

/// A probe in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// Provider.
    pub provider: String,
    /// Name.
    pub name: String,
    /// File offset of the instruction.
    pub offset: FileOffset,
    /// Its first bytes, at most 8: they show which kind of `nop` it is.
    pub code: Vec<u8>,
    /// File offset of the semaphore, `None` if the probe has none.
    pub semaphore: Option<FileOffset>,
    /// The arguments, or why they are not supported.
    pub arguments: Result<Vec<Argument>, String>,
}

/// The probes of a file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Probes {
    /// Those of the requested providers, in the order of the notes.
    pub probes: Vec<Probe>,
    /// Notes that could not be used: truncated, outside the code, or beyond the limit.
    pub refused: u64,
}

/// Reads the probes of these providers. A file without notes has none; damaged notes and those beyond the limits are counted.
pub fn probes<R: ReadAt>(elf: &Elf<R>, providers: &[&str]) -> Probes {
    let mut found = Probes::default();
    if !elf.has_section(NOTES) {
        return found;
    }
    let Some(notes) = elf.section(NOTES, NOTES_BYTES_MAX) else {
        found.refused = 1;
        return found;
    };
    let base = elf.section_vaddr(b".stapsdt.base");
    let mut rest = notes.as_slice();
    while let Some((note, after)) = next_note(rest) {
        rest = after;
        if note.kind != NOTE_TYPE || note.owner != NOTE_OWNER {
            continue;
        }
        let Some(raw) = RawProbe::parse(note.description) else {
            found.refused += 1;
            continue;
        };
        if !providers.iter().any(|provider| provider.as_bytes() == raw.provider) {
            continue;
        }
        match raw.locate(elf, base).filter(|_| found.probes.len() < PROBES_MAX) {
            Some(probe) => found.probes.push(probe),
            None => found.refused += 1,
        }
    }
    // Zero padding after the last note is not counted.
    found.refused += u64::from(rest.iter().any(|&byte| byte != 0));
    found
}

struct Note<'a> {
    kind: u32,
    owner: &'a [u8],
    description: &'a [u8],
}

/// Splits off the first note: three words (length of the owner, of the description, type), then both, padded to 4 bytes.
fn next_note(bytes: &[u8]) -> Option<(Note<'_>, &[u8])> {
    let word = |at: usize| bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes);
    let (owner_bytes, description_bytes, kind) = (word(0)? as usize, word(4)? as usize, word(8)?);
    let owner_end = 12usize.checked_add(owner_bytes)?;
    let owner = bytes.get(12..owner_end)?;
    let start = owner_end.checked_next_multiple_of(4)?;
    let end = start.checked_add(description_bytes)?;
    let description = bytes.get(start..end)?;
    let next = end.checked_next_multiple_of(4)?.min(bytes.len());
    Some((Note { kind, owner, description }, bytes.get(next..)?))
}

/// A parsed note description.
struct RawProbe<'a> {
    vaddr: u64,
    base: u64,
    semaphore: u64,
    provider: &'a [u8],
    name: &'a [u8],
    arguments: &'a [u8],
}

impl<'a> RawProbe<'a> {
    fn parse(description: &'a [u8]) -> Option<Self> {
        let word = |at: usize| description.get(at..at + 8).and_then(|b| b.try_into().ok()).map(u64::from_le_bytes);
        let mut texts = description.get(24..)?.split(|&byte| byte == 0);
        let (provider, name, arguments) = (texts.next()?, texts.next()?, texts.next()?);
        // Each text ends with a 0, so there is at least an empty remainder.
        texts.next()?;
        Some(Self { vaddr: word(0)?, base: word(8)?, semaphore: word(16)?, provider, name, arguments })
    }

    fn locate<R: ReadAt>(&self, elf: &Elf<R>, base: Option<u64>) -> Option<Probe> {
        // If the file has no base section any more, nothing can have moved.
        let moved = base.filter(|_| self.base != 0).map_or(0, |base| base.wrapping_sub(self.base));
        let vaddr = self.vaddr.wrapping_add(moved);
        if !elf.is_code(vaddr) {
            return None;
        }
        let semaphore = match self.semaphore {
            0 => None,
            semaphore => Some(elf.offset_of(semaphore.wrapping_add(moved))?),
        };
        Some(Probe {
            provider: shown(self.provider),
            name: shown(self.name),
            offset: elf.offset_of(vaddr)?,
            code: elf.bytes_at(vaddr, 8),
            semaphore,
            arguments: arguments(self.arguments, Machine::HOST),
        })
    }
}

fn shown(text: &[u8]) -> String {
    String::from_utf8_lossy(text.get(..TEXT_SHOWN_MAX).unwrap_or(text)).into_owned()
}

/// Parses a note's arguments in a machine's syntax.
///
/// # Errors
/// The argument that is not supported.
pub fn arguments(text: &[u8], machine: Machine) -> Result<Vec<Argument>, String> {
    let text = std::str::from_utf8(text).map_err(|_| "its arguments are not valid text".to_owned())?;
    let mut arguments = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        if arguments.len() == ARGUMENTS_MAX {
            return Err(format!("it has more than {ARGUMENTS_MAX} arguments"));
        }
        // Parentheses and brackets may contain blanks.
        let mut depth = 0usize;
        let end = rest.find(|c: char| {
            depth = match c {
                '(' | '[' => depth + 1,
                ')' | ']' => depth.saturating_sub(1),
                _ => depth,
            };
            c.is_ascii_whitespace() && depth == 0
        });
        let (one, after) = rest.split_at(end.unwrap_or(rest.len()));
        let argument = argument(one, machine)
            .ok_or_else(|| format!("argument {} is not supported: {}", arguments.len() + 1, shown(one.as_bytes())))?;
        arguments.push(argument);
        rest = after.trim_start();
    }
    Ok(arguments)
}

fn argument(text: &str, machine: Machine) -> Option<Argument> {
    let (size, operand) = match text.split_once('@') {
        Some((size, operand)) => (size.parse::<i8>().ok()?, operand),
        // Old notes omit the size: a machine word.
        None => (8, text),
    };
    let bytes = size.unsigned_abs();
    if !matches!(bytes, 1 | 2 | 4 | 8) {
        return None;
    }
    let operand = match machine {
        Machine::X86_64 => x86_operand(operand)?,
        Machine::Aarch64 => arm64::operand(operand)?,
    };
    Some(Argument { bytes, signed: size < 0, operand })
}

fn x86_operand(text: &str) -> Option<Operand> {
    if let Some(constant) = text.strip_prefix('$') {
        return number(constant).map(Operand::Constant);
    }
    if let Some(name) = text.strip_prefix('%') {
        // A segment prefix (%fs:0x10) is not a register's name.
        let (register, high_byte) = register(name)?;
        return Some(Operand::Register { register, high_byte });
    }
    let (displacement, rest) = text.split_at(text.find('(')?);
    let inside = rest.strip_prefix('(')?.strip_suffix(')')?;
    let displacement = if displacement.is_empty() { 0 } else { number(displacement)? };
    let mut parts = inside.split(',').map(str::trim);
    let base = match parts.next()? {
        "" => None,
        base => Some(address_register(base)?),
    };
    let index = match (parts.next(), parts.next(), parts.next()) {
        (None, None, None) => None,
        (Some(index), None, None) => Some((address_register(index)?, 0)),
        (Some(index), Some(scale), None) => {
            let shift = match scale {
                "" | "1" => 0,
                "2" => 1,
                "4" => 2,
                "8" => 3,
                _ => return None,
            };
            Some((address_register(index)?, shift))
        }
        _ => return None,
    };
    (base.is_some() || index.is_some()).then_some(Operand::Memory { displacement, base, index })
}

/// A register that addresses memory: only full 64-bit registers do. `%rip` has no number here: its value is that of the instruction that
/// the compiler would have emitted, and it addresses a symbol.
fn address_register(text: &str) -> Option<Register> {
    let name = text.strip_prefix('%')?;
    let whole = name.starts_with('r') && !name.ends_with(['d', 'w', 'b']);
    register(name).filter(|_| whole).map(|(register, _)| register)
}

/// DWARF number of a register by its name (System V ABI, x86-64, figure 3.36), whichever part of it is named.
fn register(name: &str) -> Option<(Register, bool)> {
    let low = match name {
        "rax" | "eax" | "ax" | "al" | "ah" => 0,
        "rdx" | "edx" | "dx" | "dl" | "dh" => 1,
        "rcx" | "ecx" | "cx" | "cl" | "ch" => 2,
        "rbx" | "ebx" | "bx" | "bl" | "bh" => 3,
        "rsi" | "esi" | "si" | "sil" => 4,
        "rdi" | "edi" | "di" | "dil" => 5,
        "rbp" | "ebp" | "bp" | "bpl" => 6,
        "rsp" | "esp" | "sp" | "spl" => 7,
        _ => {
            let number = name.strip_prefix('r')?.trim_end_matches(['d', 'w', 'b']);
            let number: u8 = number.parse().ok()?;
            // Rejects "r08" and "r8dd".
            let canonical = [String::new(), "d".into(), "w".into(), "b".into()].iter().any(|end| name == format!("r{number}{end}"));
            return ((8..=15).contains(&number) && canonical).then_some((Register(number), false));
        }
    };
    Some((Register(low), matches!(name, "ah" | "bh" | "ch" | "dh")))
}

/// A number in assembler syntax: decimal or 0x, with a sign.
fn number(text: &str) -> Option<i64> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let value = match digits.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok()?,
        None if digits.bytes().all(|b| b.is_ascii_digit()) => digits.parse::<u64>().ok()?,
        None => return None,
    };
    // A constant may be written as the unsigned form of a negative number.
    Some(if negative { (value as i64).wrapping_neg() } else { value as i64 })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;
    use crate::machine::register::argument_register;
    use crate::sampler::library::Flavour;

    fn one(text: &str) -> Operand {
        arguments(text.as_bytes(), Machine::X86_64).unwrap()[0].operand
    }

    #[test]
    fn every_form_of_operand_that_compilers_emit_is_read() {
        let memory = |displacement, base, index| Operand::Memory { displacement, base, index };
        let plain = |n| Operand::Register { register: Register(n), high_byte: false };
        assert_eq!(one("8@%rdi"), plain(5));
        assert_eq!(one("-4@%r12d"), plain(12));
        assert_eq!(one("1@%ah"), Operand::Register { register: Register(0), high_byte: true });
        assert_eq!(one("8@-24(%rbp)"), memory(-24, Some(Register(6)), None));
        assert_eq!(one("8@(%rax)"), memory(0, Some(Register(0)), None));
        assert_eq!(one("8@0x10(%rsp,%rcx,8)"), memory(16, Some(Register(7)), Some((Register(2), 3))));
        assert_eq!(one("8@8( %rsp , %r9 )"), memory(8, Some(Register(7)), Some((Register(9), 0))));
        assert_eq!(one("4@40(,%rdx,4)"), memory(40, None, Some((Register(1), 2))));
        assert_eq!(one("-4@$-1"), Operand::Constant(-1));
        assert_eq!(one("8@$0xffffffffffffffff"), Operand::Constant(-1));
        let three = arguments(b"8@%rax -2@%dx 8@16(%rsp)", Machine::X86_64).unwrap();
        assert_eq!(three.iter().map(|a| (a.bytes, a.signed)).collect::<Vec<_>>(), [(8, false), (2, true), (8, false)]);
    }

    #[test]
    fn arguments_are_split_at_blanks_outside_brackets() {
        let three = arguments(b"8@x0 -4@[sp, 16] 8@[x1, x2, lsl 3]", Machine::Aarch64).unwrap();
        assert_eq!(three.iter().map(|a| (a.bytes, a.signed)).collect::<Vec<_>>(), [(8, false), (4, true), (8, false)]);
        assert!(arguments(b"8@%rdi", Machine::Aarch64).unwrap_err().contains("argument 1"));
    }

    #[test]
    fn unsupported_arguments_are_named() {
        for text in [
            "8@some_symbol(%rip)",
            "8@%fs:0x10",
            "3@%rax",
            "8@%xmm0",
            "8@(%eax)",
            "8@8(%rax,%rbx,3)",
            "8@",
            "@%rax",
            "8@()",
            "8@%r16",
            "8@%r08",
        ] {
            let error = arguments(format!("8@%rdi {text}").as_bytes(), Machine::X86_64).unwrap_err();
            assert!(error.contains("argument 2"), "{text}: {error}");
        }
    }

    #[test]
    fn the_samplers_probes_are_found_with_their_semaphores() {
        let elf = Elf::parse(Flavour::Standard.bytes().to_vec()).unwrap();
        let found = probes(&elf, &["otel_memory"]);
        let names: Vec<&str> = found.probes.iter().map(|p| p.name.as_str()).collect();
        assert_eq!((names, found.refused), (vec!["alloc", "free"], 0));
        for probe in &found.probes {
            assert_eq!(probe.code[0], if Machine::HOST == Machine::X86_64 { 0x90 } else { 0x1f });
            assert!(probe.semaphore.is_some());
            let arguments = probe.arguments.as_ref().unwrap();
            let registers = [0, 1, 2].map(|n| Operand::Register { register: argument_register(n).unwrap(), high_byte: false });
            assert!(arguments.iter().zip(registers).all(|(argument, register)| argument.operand == register && argument.bytes == 8));
        }
        assert_eq!(probes(&elf, &["ddheap"]), Probes::default());
    }

    #[test]
    fn the_probes_of_a_relocated_file_are_moved_with_it() {
        let elf = Elf::parse(Flavour::Standard.bytes().to_vec()).unwrap();
        let notes = elf.section(NOTES, 1 << 20).unwrap();
        let (note, _) = next_note(&notes).unwrap();
        let mut raw = RawProbe::parse(note.description).unwrap();
        let base = elf.section_vaddr(b".stapsdt.base");
        let here = raw.locate(&elf, base).unwrap();
        // The linker placed everything 64 KiB lower.
        (raw.vaddr, raw.base, raw.semaphore) =
            (raw.vaddr.wrapping_sub(1 << 16), raw.base.wrapping_sub(1 << 16), raw.semaphore.wrapping_sub(1 << 16));
        assert_eq!(raw.locate(&elf, base).unwrap(), here);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]

        #[test]
        fn damaged_notes_never_panic(damage in proptest::collection::vec((0usize..4096, any::<u8>()), 1..64), cut in 0usize..4096) {
            let mut bytes = Flavour::Standard.bytes().to_vec();
            let notes = Elf::parse(bytes.clone()).unwrap().section(NOTES, 1 << 20).unwrap();
            let offset = bytes.windows(notes.len()).position(|window| window == notes).unwrap();
            for (at, byte) in damage {
                bytes[offset + at % notes.len()] = byte;
            }
            if cut % 3 == 0 { bytes.truncate(bytes.len() - cut); }
            if let Ok(elf) = Elf::parse(bytes) {
                let _ = probes(&elf, &["otel_memory"]);
            }
        }

        #[test]
        fn no_text_makes_the_argument_parser_panic(text in "[-0-9@$%()\\[\\]a-z, x#]{0,60}", noise in proptest::collection::vec(any::<u8>(), 0..60)) {
            for machine in [Machine::X86_64, Machine::Aarch64] {
                let _ = arguments(text.as_bytes(), machine);
                let _ = arguments(&noise, machine);
            }
            let _ = next_note(&noise);
            let _ = RawProbe::parse(&noise);
        }
    }
}
