//! arm64's unwinding on this machine: cross-compiled programs record their own stacks in emulation; the unwinder's C code, compiled for
//! the host with arm64's registers, walks them with the tables of their files, and gimli evaluates the same rows in full.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use fragprof::bpf::MappingKind;
use fragprof::bpf::{FRAME_ADDRESS_MASK, FRAME_SIGNAL};
use fragprof::machine::Machine;
use fragprof::unwind::elf::Elf;
use fragprof::unwind::mappings::{self, CodeMapping};
use fragprof::unwind::{End, Table};
use tempfile::TempDir;

use super::host::{Host, PtRegs};
use super::lab::{root, run};
use super::oracle::{Gimli, Reached};
use super::recording::{CodeFile, Recording, World, words};

/// Directory of arm64's libraries in Debian's cross packages.
const LIBRARIES: &str = "/usr/aarch64-linux-gnu";
/// Interruptions of one program, each recorded as interrupted and in the handler.
const INTERRUPTIONS: usize = 150;
const FRAMES_MAX: usize = 128;

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().unwrap())
}

/// A program's own recordings.
struct Told {
    world: World,
    /// As interrupted, and in the handler.
    stacks: Vec<(Recording, Recording)>,
}

/// Compiles the recorder, runs it in emulation, and parses its output.
fn told_by(directory: &Path, flags: &[&str]) -> Told {
    let program = directory.join("recorder");
    let source = root().join("tests/unwind/programs/self_recorder.c");
    run(Command::new("aarch64-linux-gnu-gcc").args(flags).arg(source).arg("-o").arg(&program));
    // All features of the architecture: return addresses are signed if the compiler requests it.
    let mut emulated = Command::new("qemu-aarch64-static");
    let output = run(emulated.args(["-cpu", "max", "-L", LIBRARIES]).arg(&program).arg(INTERRUPTIONS.to_string()));
    let (mut maps, mut texts, mut recordings) = (String::new(), Vec::new(), Vec::new());
    let mut rest = output.as_slice();
    while let Some((&letter, after)) = rest.split_first() {
        let (bytes, next) = after[8..].split_at(usize::try_from(word(after)).unwrap());
        rest = next;
        match letter {
            b'M' => maps = String::from_utf8(bytes.to_vec()).unwrap(),
            b'T' => texts.push((word(bytes), bytes[8..].to_vec())),
            _ => {
                let mut regs = PtRegs::default();
                regs.words[..33].copy_from_slice(&words(&bytes[..33 * 8]));
                let stack = (word(&bytes[33 * 8..]), bytes[34 * 8..].to_vec());
                recordings.push((letter, Recording { machine: Machine::Aarch64, regs, regions: vec![stack] }));
            }
        }
    }
    let stacks = recordings.chunks_exact(2).map(|pair| {
        assert_eq!((pair[0].0, pair[1].0), (b'I', b'H'));
        (pair[0].1.clone(), pair[1].1.clone())
    });
    Told { stacks: stacks.collect(), world: world_of(&maps, texts) }
}

/// The program's code, from the text of its maps.
fn world_of(maps: &str, texts: Vec<(u64, Vec<u8>)>) -> World {
    let mut files: Vec<CodeFile> = Vec::new();
    let (mut tables, mut code) = (Vec::new(), Vec::new());
    for line in maps.lines() {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let hex = |text: &str| u64::from_str_radix(text, 16).unwrap();
        let (begin, end) = fields[0].split_once('-').map(|(begin, end)| (hex(begin), hex(end))).unwrap();
        if !fields[1].contains('x') {
            continue;
        }
        // The emulator's own page, from which signal handlers return.
        let Some(path) = fields.get(5).map(PathBuf::from) else {
            code.push(CodeMapping { begin, end, bias: 0, file: 0, kind: MappingKind::NoCfi });
            continue;
        };
        let offset = hex(fields[2]);
        let bytes = std::fs::read(&path).unwrap();
        let segments = Elf::parse(bytes.as_slice()).unwrap().segments;
        let bias = mappings::bias_of(&segments, begin, offset).unwrap();
        tables.push(words(&Table::read_for(bytes.as_slice(), Machine::Aarch64).unwrap().to_bytes()));
        code.push(CodeMapping { begin, end, bias, file: files.len() as u32, kind: MappingKind::File });
        files.push(CodeFile { path, bytes: Arc::new(bytes), mapped: vec![(begin, end, offset)] });
    }
    World { files, tables, mappings: words(&mappings::to_blocks(&code, None, None).0), texts }
}

fn addresses(frames: &[u64]) -> Vec<u64> {
    frames.iter().map(|frame| frame & FRAME_ADDRESS_MASK).collect()
}

#[test]
fn stacks_recorded_by_arm64_programs_equal_gimlis() {
    let host = Host::new(Machine::Aarch64);
    let directory = TempDir::new().unwrap();
    for flags in [
        &["-O2"][..],
        &["-O2", "-fomit-frame-pointer"],
        &["-O0"],
        &["-O2", "-march=armv8.3-a", "-mbranch-protection=standard"],
        &["-O2", "-static"],
    ] {
        let told = told_by(directory.path(), flags);
        assert!(told.stacks.len() >= INTERRUPTIONS, "{flags:?}: {}", told.stacks.len());
        let gimli = Gimli::new(&told.world);
        let mut thread = host.thread();
        let mut ends: BTreeMap<String, usize> = BTreeMap::new();
        let (mut equal, mut complete, mut repeated_steps, mut proven, mut by_link) = (0, 0, 0, 0, 0);
        for (interrupted, in_handler) in &told.stacks {
            let (stack, repeated) = host.unwind(&mut thread, &told.world, interrupted);
            // Steps repeated from the previous walk must not make a difference.
            let (fresh, none) = host.unwind(&mut host.thread(), &told.world, interrupted);
            assert_eq!((&stack, none), (&fresh, 0), "{flags:?}");
            repeated_steps += repeated;
            // The same again is proven as a whole, also where the first frame's return address is in x30; with another one there it is not.
            let (again, repeated) = host.unwind(&mut thread, &told.world, interrupted);
            assert_eq!(again, stack, "{flags:?}");
            let proven_now = repeated as usize == stack.frames.len();
            proven += usize::from(proven_now);
            let mut other = interrupted.clone();
            other.regs.words[30] = interrupted.pc();
            let (with_other, _) = host.unwind(&mut thread, &told.world, &other);
            assert_eq!(with_other, host.unwind(&mut host.thread(), &told.world, &other).0, "{flags:?}");
            by_link += usize::from(with_other.frames != stack.frames && proven_now);
            let ours = addresses(&stack.frames);
            let (theirs, reached) = gimli.unwind(interrupted, FRAMES_MAX);
            let same = match reached {
                Reached::Entry => ours == theirs && stack.end == End::Complete,
                _ => ours.starts_with(&theirs),
            };
            // From the handler through the signal frame to the same stack.
            let (outer, _) = host.unwind(&mut thread, &told.world, in_handler);
            let through = outer.frames.iter().position(|frame| frame & FRAME_SIGNAL != 0).map(|at| addresses(&outer.frames[at + 1..]));
            let same_behind = through.as_ref() == Some(&ours);
            equal += usize::from(same && same_behind);
            complete += usize::from(stack.end == End::Complete);
            *ends.entry(format!("{:?}, gimli {reached:?}", stack.end)).or_default() += 1;
            if !same || !same_behind {
                eprintln!("{flags:?}: gimli {reached:?}\n{}", told.world.describe(&theirs));
                eprintln!("ours {:?}\n{}", stack.end, told.world.describe(&ours));
                eprintln!("from the handler {:?}\n{}", outer.end, told.world.describe(&addresses(&outer.frames)));
            }
        }
        eprintln!(
            "{flags:?}: {equal} of {} equal, {complete} complete, {repeated_steps} steps repeated, {proven} proven, {by_link} of them with x30; {ends:?}",
            told.stacks.len()
        );
        assert_eq!(equal, told.stacks.len(), "{flags:?}: {ends:?}");
        assert!(complete * 10 >= told.stacks.len() * 9, "{flags:?}: {ends:?}");
        assert!(repeated_steps > 0, "{flags:?}");
        // Without frame pointers x30 is saved alone, and such steps are done again.
        if !flags.contains(&"-fomit-frame-pointer") {
            assert!(proven * 2 > complete && by_link > 0, "{flags:?}: {proven} of {complete}, {by_link} with x30");
        }
    }
}

/// The C library has every form of row that its compiler writes, and assembly.
#[test]
fn nearly_every_row_of_arm64s_libraries_has_a_rule() {
    for library in ["libc.so.6", "libm.so.6", "ld-linux-aarch64.so.1", "libstdc++.so.6", "libgcc_s.so.1"] {
        let path = Path::new(LIBRARIES).join("lib").join(library);
        let Ok(bytes) = std::fs::read(&path) else { continue };
        let table = Table::read_for(bytes.as_slice(), Machine::Aarch64).unwrap();
        let counts = table.counts();
        eprintln!("{library}: {counts:?}");
        assert!(counts.functions > 50 && counts.functions_corrupt == 0, "{library}: {counts:?}");
        assert!(counts.rows_unsupported * 1000 <= counts.rows_read, "{library}: {counts:?}");
        assert_eq!(Table::read(bytes.as_slice()).err(), Some(fragprof::unwind::Error::OtherMachine), "a process here never runs it");
    }
}
