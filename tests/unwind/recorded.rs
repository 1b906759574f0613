//! Recorded stacks of real programs: the unwinder's C code on the host compared with gimli's full evaluation, and with framehop.

use std::collections::BTreeMap;
use std::process::Command;

use fragprof::bpf::FRAME_ADDRESS_MASK;
use fragprof::machine::Machine;
use fragprof::unwind::End;
use tempfile::TempDir;

use super::host::Host;
use super::lab::{Target, compile, compile_musl, root};
use super::oracle::{Framehop, Gimli, Reached};
use super::recording::{Recording, World, record_many};

/// Stacks of one program.
const STACKS: usize = 300;
const FRAMES_MAX: usize = 128;

#[derive(Debug, Default)]
struct Score {
    stacks: usize,
    equal: usize,
    complete: usize,
    frames: usize,
    framehop_stacks: usize,
    framehop_equal: usize,
    /// For incomplete stacks: the reasons by both unwinders.
    ends: BTreeMap<String, usize>,
}

fn compare(host: &Host, name: &str, target: &Target) -> Score {
    // The program must have loaded its libraries.
    std::thread::sleep(std::time::Duration::from_millis(700));
    let world = World::of(target.pid());
    let recordings = record_many(target.pid(), STACKS);
    let gimli = Gimli::new(&world);
    let mut framehop = Framehop::new(&world);
    let mut score = Score::default();
    let mut thread = host.thread();
    for recording in &recordings {
        // The same thread state for all recordings: steps repeated from the previous walk must not make a difference.
        let (stack, _) = host.unwind(&mut thread, &world, recording);
        let (fresh, repeated) = host.unwind(&mut host.thread(), &world, recording);
        assert_eq!((&stack, repeated), (&fresh, 0), "{name}: a walk after another differs from a first one");
        let ours: Vec<u64> = stack.frames.iter().map(|frame| frame & FRAME_ADDRESS_MASK).collect();
        let (theirs, reached) = gimli.unwind(recording, FRAMES_MAX);
        // Where gimli has no rows, ours may continue with frame pointers: then all of gimli's frames must be among ours.
        let equal = match reached {
            Reached::Entry => ours == theirs && stack.end == End::Complete,
            Reached::Limit => ours == theirs && stack.end == End::FrameLimit,
            Reached::NoRow | Reached::Stuck => ours.starts_with(&theirs),
        };
        score.stacks += 1;
        score.equal += usize::from(equal);
        score.complete += usize::from(stack.end == End::Complete);
        score.frames += ours.len();
        if stack.end != End::Complete {
            *score.ends.entry(format!("{:?}, gimli {reached:?}", stack.end)).or_default() += 1;
        }
        if !equal && score.stacks - score.equal <= 3 {
            eprintln!("{name}: gimli {reached:?}\n{}ours {:?}\n{}", world.describe(&theirs), stack.end, world.describe(&ours));
        }
        let (theirs, ended) = framehop.unwind(recording, FRAMES_MAX);
        if ended && reached == Reached::Entry {
            score.framehop_stacks += 1;
            score.framehop_equal += usize::from(ours == theirs);
        }
    }
    eprintln!("{name}: {score:?}");
    score
}

/// Starts each program in turn and compares its stacks.
#[test]
fn recorded_stacks_of_real_programs_equal_gimlis() {
    let host = Host::new(Machine::X86_64);
    let directory = TempDir::new().unwrap();
    let dir = directory.path();
    let programs = root().join("tests/unwind/programs");
    let plain: &[&str] = &["-O2", "-fomit-frame-pointer"];
    let text = |name: &str| programs.join(name).display().to_string();
    let library = compile(dir, "library.c", "libplain.so", &["-O2", "-fomit-frame-pointer", "-shared", "-fPIC"]);
    let rust = dir.join("rust");
    super::lab::run(Command::new("rustc").args(["-O", "-o"]).arg(&rust).arg(programs.join("collections.rs")));
    let lib_flag = format!("-Wl,-rpath,{}", dir.display());
    let lib_path = library.display().to_string();
    let calls_library = compile(dir, "calls_library.c", "calls_library", &["-O2", &lib_path, &lib_flag]);
    strip_section_headers(&library);
    let path = |path: std::path::PathBuf| path.display().to_string();
    let targets: Vec<(&str, String, Vec<String>)> = vec![
        ("C", path(compile(dir, "deep.c", "deep", plain)), vec!["40".into(), "0".into()]),
        ("C++ exceptions", path(compile(dir, "exceptions.cc", "exceptions", &["-O2"])), vec![]),
        ("Rust", path(rust), vec![]),
        ("Python", "/usr/bin/python3".into(), vec![text("work.py")]),
        ("JVM", "java".into(), vec![text("Work.java")]),
        ("node", "node".into(), vec![text("work.js")]),
        ("static musl", path(compile_musl(dir)), vec!["40".into(), "0".into()]),
        ("static glibc", path(compile(dir, "deep.c", "static", &["-O2", "-static"])), vec!["40".into(), "0".into()]),
        ("alloca and large frames", path(compile(dir, "frames.c", "frames", plain)), vec![]),
        ("signal handler", path(compile(dir, "signals.c", "signals", plain)), vec![]),
        ("deep recursion", path(compile(dir, "deep.c", "recursion", &["-O0"])), vec!["1000".into(), "0".into()]),
        ("no section headers", path(calls_library), vec![]),
        (
            "OpenSSL assembly",
            "openssl".into(),
            vec!["speed".into(), "-seconds".into(), "30".into(), "sha256".into(), "aes-128-cbc".into(), "rsa2048".into()],
        ),
        ("realigned stacks", path(compile(dir, "realigned.c", "realigned", &["-O2", "-mavx2", "-fomit-frame-pointer"])), vec![]),
        (
            "perl",
            "perl".into(),
            vec!["-e".into(), "while (1) { %h = map { $_ => [split //, $_ x 3] } 1..500; join ',', sort keys %h }".into()],
        ),
        ("xz", "sh".into(), vec!["-c".into(), "exec xz -9 -k -c /usr/bin/node".into()]),
    ];
    let mut sum = Score::default();
    for (name, program, arguments) in &targets {
        let target = Target::start(program, &arguments.iter().map(String::as_str).collect::<Vec<_>>());
        let score = compare(&host, name, &target);
        assert!(score.stacks >= STACKS / 2, "{name}: only {} stacks", score.stacks);
        sum.stacks += score.stacks;
        sum.equal += score.equal;
        sum.complete += score.complete;
        sum.framehop_stacks += score.framehop_stacks;
        sum.framehop_equal += score.framehop_equal;
    }
    eprintln!("all: {sum:?}");
    assert!(sum.equal * 1000 >= sum.stacks * 999, "{sum:?}");
    assert!(sum.framehop_equal * 1000 >= sum.framehop_stacks * 999, "{sum:?}");
    assert!(sum.framehop_stacks * 2 > sum.stacks, "framehop saw too little: {sum:?}");
}

/// Clears the ELF header's section fields, as packers do.
fn strip_section_headers(path: &std::path::Path) {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[40..48].fill(0); // e_shoff
    bytes[58..64].fill(0); // e_shentsize, e_shnum, e_shstrndx
    std::fs::write(path, bytes).unwrap();
}

/// Index of rbp in `struct pt_regs`.
const BP: usize = 4;

/// Walks the same stack repeatedly, each time with a word changed, as by a program: cached steps must always be verified.
#[test]
fn a_walk_never_uses_outdated_cached_steps() {
    let host = Host::new(Machine::X86_64);
    let directory = TempDir::new().unwrap();
    for frame_pointers in ["-fno-omit-frame-pointer", "-fomit-frame-pointer"] {
        let program = compile(directory.path(), "deep.c", "deep", &["-O1", frame_pointers]);
        let target = Target::start(&program, &["30", "0"]);
        std::thread::sleep(std::time::Duration::from_millis(300));
        let world = World::of(target.pid());
        try_to_fool(&host, &world, &record_many(target.pid(), 30));
    }
}

fn try_to_fool(host: &Host, world: &World, recordings: &[Recording]) {
    let mut thread = host.thread();
    let (mut walks, mut repeated_walks, mut changed) = (0u32, 0u32, 0u32);
    let mut random = 0x2545_f491_4f6c_dd1du64;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    for original in recordings {
        let (before, _) = host.unwind(&mut host.thread(), world, original);
        let mut recording = original.clone();
        for _ in 0..200 {
            let sp = recording.sp();
            let Some((begin, bytes)) = recording.regions.iter_mut().find(|(begin, bytes)| *begin <= sp && sp < *begin + bytes.len() as u64)
            else {
                break;
            };
            // A word of the stack's frames is replaced by another word of them: mostly a return address or a frame pointer.
            let base = usize::try_from(sp - *begin).unwrap() & !7;
            let words = (bytes.len() - base) / 8;
            let place = |random: u64, within: usize| base + 8 * (random as usize % within.min(words));
            let (from, to) = (place(next(), 400), place(next(), 400));
            let kept = bytes[to..to + 8].to_vec();
            let value: [u8; 8] = if next() % 4 == 0 { next().to_le_bytes() } else { bytes[from..from + 8].try_into().unwrap() };
            bytes[to..to + 8].copy_from_slice(&value);
            // And rbp, which compilers use for anything, gets a word of the stack, or an address in it.
            recording.regs.words[BP] = match next() % 8 {
                0 => u64::from_le_bytes(value),
                1 => sp + 8 * (next() % 400),
                2 => next(),
                _ => original.regs.words[BP],
            };

            let (stack, repeated) = host.unwind(&mut thread, world, &recording);
            let (fresh, none) = host.unwind(&mut host.thread(), world, &recording);
            assert_eq!((&stack, none), (&fresh, 0));
            walks += 1;
            repeated_walks += u32::from(repeated > 0);
            changed += u32::from(stack.frames != before.frames);
            // Mostly restored, so that there are steps to repeat.
            if next() % 8 != 0 {
                let (_, bytes) =
                    recording.regions.iter_mut().find(|(begin, bytes)| *begin <= sp && sp < *begin + bytes.len() as u64).unwrap();
                bytes[to..to + 8].copy_from_slice(&kept);
            } else {
                recording = original.clone();
            }
        }
    }
    eprintln!("{walks} walks, {repeated_walks} with repeated steps, {changed} with another stack than before");
    assert!(walks > 4000 && repeated_walks * 4 > walks && changed * 40 > walks);
}
