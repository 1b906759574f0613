//! Reads Python frames by the unwinder's C on the host, over memory laid out as CPython does it: each shape of its lists of frames, their
//! places among the native frames, and memory that is not one.

use fragprof::bpf::{
    PYTHON_FRAMES_MAX, PYTHON_NONE, PYTHON_OUTERMOST, PYTHON_OUTSIDE, PYTHON_UNKNOWN, PYTHON_UNREADABLE, PythonEnd, PythonFrame,
    PythonShape,
};
use fragprof::machine::Machine;
use fragprof::managed::cpython::layout::{Layout, Version};
use fragprof::unwind::mappings::{CodeMapping, to_blocks};
use fragprof::{bpf, bpf::MappingKind};
use proptest::prelude::*;

use super::host::{Host, PtRegs, Python, Thread};
use super::recording::{Recording, World, words};

/// Native code, of which the evaluation loop is a part; the stack; CPython's objects.
const NATIVE: u64 = 0x5500_0000_0000;
const LOOP: u64 = NATIVE + 0x400;
const LOOP_END: u64 = NATIVE + 0x600;
const STACK: u64 = 0x7ff0_0000_0000;
const STACK_BYTES: u64 = 0x8000;
const HEAP: u64 = 0x7f10_0000_0000;
const HEAP_BYTES: u64 = 0x4_0000;

/// Objects of the heap.
const RUNTIME: u64 = HEAP;
const INTERPRETER: u64 = HEAP + 0x800;
const OTHER_THREAD: u64 = HEAP + 0x1000;
const THREAD: u64 = HEAP + 0x1400;
const CODES: u64 = HEAP + 0x2000;
const FRAMES: u64 = HEAP + 0x8000;
/// The thread's own pointer.
const OWN: u64 = 0x7fee_0000_1740;

/// A version's memory.
struct Memory {
    record: bpf::Python,
    heap: Vec<u8>,
    stack: Vec<u8>,
    codes: u64,
    frames: u64,
}

impl Memory {
    fn new(minor: u8) -> Self {
        let mut layout = Layout::of(Version { minor, micro: None }, &[]).unwrap();
        layout.record.interpreters = RUNTIME + layout.interpreters;
        (layout.record.eval_begin, layout.record.eval_end) = (LOOP, LOOP_END);
        let record = layout.record;
        let mut memory =
            Self { record, heap: vec![0; HEAP_BYTES as usize], stack: vec![0; STACK_BYTES as usize], codes: CODES, frames: FRAMES };
        memory.set(record.interpreters, INTERPRETER);
        memory.set(INTERPRETER + u64::from(record.interpreter_threads), OTHER_THREAD);
        memory.set(OTHER_THREAD + u64::from(record.thread_next), THREAD);
        memory.set(OTHER_THREAD + u64::from(record.thread_id), OWN + 0x1000);
        memory.set(THREAD + u64::from(record.thread_id), OWN);
        memory
    }

    fn bytes(&mut self, address: u64) -> &mut [u8] {
        match address {
            STACK.. => &mut self.stack[(address - STACK) as usize..],
            _ => &mut self.heap[(address - HEAP) as usize..],
        }
    }

    fn set(&mut self, address: u64, word: u64) {
        self.bytes(address)[..8].copy_from_slice(&word.to_le_bytes());
    }

    fn set_byte(&mut self, address: u64, byte: u8) {
        self.bytes(address)[0] = byte;
    }

    /// A code object whose bytecode begins with so many instructions that are not shown.
    fn code(&mut self, first_traceable: u8) -> u64 {
        let code = self.codes;
        self.codes += 0x100;
        let record = self.record;
        for (field, value) in [(record.code_name, 1), (record.code_file, 2), (record.code_lines, 3)] {
            self.set(code + u64::from(field), HEAP + 0x100 * value + code % 0xfff);
        }
        if record.code_first_traceable != PYTHON_NONE {
            self.set_byte(code + u64::from(record.code_first_traceable), first_traceable);
        }
        code
    }

    /// A frame of a code object at an instruction; `previous`: the next one out.
    fn frame_at(&mut self, frame: u64, code: u64, instruction: i32, previous: u64) -> u64 {
        let record = self.record;
        self.set(frame + u64::from(record.frame_previous), previous);
        self.set(frame + u64::from(record.frame_code), code);
        let at = frame + u64::from(record.frame_instruction);
        if record.shape >= PythonShape::Entries as u32 {
            self.set(at, (code + u64::from(record.code_bytecode)).wrapping_add(instruction as u64));
        } else {
            self.bytes(at)[..4].copy_from_slice(&instruction.to_le_bytes());
        }
        frame
    }

    fn frame(&mut self, code: u64, instruction: i32, previous: u64) -> u64 {
        let frame = self.frames;
        self.frames += 0x80;
        self.frame_at(frame, code, instruction, previous)
    }

    /// The list of frames begins here.
    fn begin(&mut self, frame: u64, cframe: u64) {
        let record = self.record;
        if record.thread_frame != PYTHON_NONE {
            self.set(THREAD + u64::from(record.thread_frame), frame);
        }
        if record.thread_cframe != PYTHON_NONE {
            self.set(THREAD + u64::from(record.thread_cframe), cframe);
            if record.cframe_frame != PYTHON_NONE {
                self.set(cframe + u64::from(record.cframe_frame), frame);
            }
        }
    }

    fn world(&self) -> World {
        let native = CodeMapping { begin: NATIVE, end: NATIVE + 0x1000, bias: 0, file: 0, kind: MappingKind::Jit };
        let (blocks, _) = to_blocks(&[native], None, Some(&self.record));
        let texts = vec![(HEAP, self.heap.clone()), (NATIVE, vec![0; 0x1000])];
        World { files: Vec::new(), tables: Vec::new(), mappings: words(&blocks), texts }
    }

    /// A stack of native frames with these return addresses; each C frame has 0x100 bytes, the first one's bp is at STACK + 0x200.
    fn native(&mut self, callers: &[u64]) -> Recording {
        let mut bp = STACK + 0x200;
        for (at, &caller) in callers.iter().enumerate() {
            self.set(bp, if at + 1 == callers.len() { 0 } else { bp + 0x100 });
            self.set(bp + 8, caller);
            bp += 0x100;
        }
        let mut regs = PtRegs::default();
        (regs.words[16], regs.words[19], regs.words[4]) = (NATIVE + 0x10, STACK + 0x180, STACK + 0x200);
        Recording { machine: Machine::X86_64, regs, regions: vec![(STACK, self.stack.clone())] }
    }
}

/// An address within the C frame that the caller at this index has.
fn in_frame(index: u64) -> u64 {
    STACK + 0x200 + 0x100 * (index - 1) + 0x40
}

fn read(host: &Host, thread: &mut Thread, memory: &Memory, recording: &Recording) -> Python {
    let world = memory.world();
    host.unwind(thread, &world, recording);
    host.python(thread, &world, recording, OWN)
}

fn expected(code: u64, instruction: i32, native: u32, flags: u32) -> PythonFrame {
    PythonFrame { code, instruction, native: native as u16, flags: flags as u16 }
}

/// Two calls of the loop, the inner one with two frames where a version has such: native frames 1 and 3.
fn two_calls(minor: u8) -> (Memory, Vec<PythonFrame>) {
    let mut memory = Memory::new(minor);
    let record = memory.record;
    let [a, b, c] = [3, 3, 3].map(|first| memory.code(first));
    let known = |native: u32| if minor < 10 { PYTHON_UNKNOWN } else { native };
    let frames = match minor {
        8..=10 => {
            let outer = memory.frame(c, 30, 0);
            let inner = memory.frame(a, 10, outer);
            if minor == 10 {
                memory.set(in_frame(1) + u64::from(record.cframe_previous), in_frame(3));
            }
            memory.begin(inner, in_frame(1));
            vec![expected(a, 10, known(1), PYTHON_OUTERMOST), expected(c, 30, known(3), PYTHON_OUTERMOST)]
        }
        11 => {
            let outer = memory.frame(c, 30, 0);
            let middle = memory.frame(b, 20, outer);
            let inner = memory.frame(a, 10, middle);
            for frame in [outer, middle] {
                memory.set_byte(frame + u64::from(record.frame_entry), 1);
            }
            memory.set(in_frame(1) + u64::from(record.cframe_previous), in_frame(3));
            memory.begin(inner, in_frame(1));
            vec![expected(a, 10, PYTHON_UNKNOWN, 0), expected(b, 20, 1, PYTHON_OUTERMOST), expected(c, 30, 3, PYTHON_OUTERMOST)]
        }
        _ => {
            let shims = [in_frame(1), in_frame(3)];
            for shim in shims {
                memory.set_byte(shim + u64::from(record.frame_owner), 3);
            }
            let outer = memory.frame(c, 30, shims[1]);
            let middle = memory.frame(b, 20, shims[0]);
            memory.set(shims[0] + u64::from(record.frame_previous), outer);
            let inner = memory.frame(a, 10, middle);
            memory.begin(inner, HEAP + 0x600);
            vec![expected(a, 10, PYTHON_UNKNOWN, 0), expected(b, 20, 1, PYTHON_OUTERMOST), expected(c, 30, 3, PYTHON_OUTERMOST)]
        }
    };
    (memory, frames)
}

const CALLERS: [u64; 5] = [LOOP + 0x10, NATIVE + 0x20, LOOP + 0x20, NATIVE + 0x30, NATIVE + 0x40];

#[test]
fn every_shape_of_the_list_gives_the_frames_of_each_call() {
    let host = Host::new(Machine::X86_64);
    for minor in 8..=12 {
        let (mut memory, expected) = two_calls(minor);
        let recording = memory.native(&CALLERS);
        let mut thread = host.thread();
        let read_first = read(&host, &mut thread, &memory, &recording);
        assert_eq!((&read_first.frames, read_first.end), (&expected, PythonEnd::Complete as u32), "3.{minor}");
        // The same stack again has the same hash, in this thread and in another.
        assert_eq!(read(&host, &mut thread, &memory, &recording), read_first);
        assert_eq!(read(&host, &mut host.thread(), &memory, &recording), read_first);
        // Another instruction is another stack, though no word of the native stack has changed; so is another code object at the address.
        let at = FRAMES + if minor > 10 { 0x100 } else { 0x80 } + u64::from(memory.record.frame_instruction);
        let byte = memory.bytes(at)[0];
        memory.set_byte(at, byte + 2);
        let moved = read(&host, &mut thread, &memory, &recording);
        assert_eq!((moved.frames[0].instruction, moved.hash != read_first.hash), (12, true), "3.{minor}");
        memory.set_byte(at, byte);
        assert_eq!(read(&host, &mut thread, &memory, &recording), read_first);
        memory.set(CODES + u64::from(memory.record.code_name), HEAP + 0x7777);
        let replaced = read(&host, &mut host.thread(), &memory, &recording);
        assert_eq!((&replaced.frames, replaced.hash != read_first.hash), (&expected, true), "3.{minor}");
    }
}

#[test]
fn a_thread_that_python_does_not_know_is_said() {
    let host = Host::new(Machine::X86_64);
    for minor in 8..=12 {
        let (mut memory, _) = two_calls(minor);
        memory.set(THREAD + u64::from(memory.record.thread_id), 7);
        let recording = memory.native(&CALLERS);
        let with_loop = read(&host, &mut host.thread(), &memory, &recording);
        assert_eq!((with_loop.frames.len(), with_loop.end), (0, PythonEnd::NoThread as u32), "3.{minor}");
        // Native code alone needs no Python.
        let recording = memory.native(&[NATIVE + 0x20, NATIVE + 0x30]);
        let without = read(&host, &mut host.thread(), &memory, &recording);
        assert_eq!((without.frames.len(), without.end), (0, PythonEnd::Complete as u32), "3.{minor}");
    }
}

#[test]
fn frames_that_the_interpreter_does_not_show_are_left_out() {
    let host = Host::new(Machine::X86_64);
    for minor in 11..=12 {
        let (mut memory, mut expected) = two_calls(minor);
        // The inner frame has not begun; a generator's is shown before its first instruction.
        memory.set_byte(CODES + u64::from(memory.record.code_first_traceable), 6);
        let recording = memory.native(&CALLERS);
        let inner = FRAMES + 0x100;
        memory.set_byte(inner + u64::from(memory.record.frame_owner), 1);
        assert_eq!(read(&host, &mut host.thread(), &memory, &recording).frames, expected, "3.{minor}");
        memory.set_byte(inner + u64::from(memory.record.frame_owner), 0);
        expected.remove(0);
        assert_eq!(read(&host, &mut host.thread(), &memory, &recording).frames, expected, "3.{minor}");
    }
}

#[test]
fn more_frames_than_the_limit_and_frames_beyond_a_cut_stack_are_said() {
    let host = Host::new(Machine::X86_64);
    let mut memory = Memory::new(12);
    let code = memory.code(0);
    let mut frame = 0;
    for _ in 0..PYTHON_FRAMES_MAX + 50 {
        frame = memory.frame(code, 4, frame);
    }
    memory.begin(frame, HEAP + 0x600);
    let recording = memory.native(&CALLERS);
    let cut = read(&host, &mut host.thread(), &memory, &recording);
    assert_eq!((cut.frames.len(), cut.end), (PYTHON_FRAMES_MAX as usize, PythonEnd::Limit as u32));

    // The native stack ends at unknown code, below the second call.
    let (mut memory, mut expected) = two_calls(12);
    expected[2].native = PYTHON_OUTSIDE as u16;
    let recording = memory.native(&[LOOP + 0x10, NATIVE + 0x20, 0x1234_5678]);
    let beyond = read(&host, &mut host.thread(), &memory, &recording);
    assert_eq!(beyond.frames, expected);
}

#[test]
fn what_cannot_be_read_is_said() {
    let host = Host::new(Machine::X86_64);
    let (mut memory, _) = two_calls(12);
    memory.set(FRAMES + 0x100, 0x1000);
    let recording = memory.native(&CALLERS);
    let read_code = read(&host, &mut host.thread(), &memory, &recording);
    assert_eq!((read_code.frames[0].code, u32::from(read_code.frames[0].flags)), (0x1000, PYTHON_UNREADABLE));
    memory.set(FRAMES + 0x100 + u64::from(memory.record.frame_previous), 0x2000);
    let read_frame = read(&host, &mut host.thread(), &memory, &recording);
    assert_eq!((read_frame.frames.len(), read_frame.end), (1, PythonEnd::Unreadable as u32));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn any_memory_of_a_cpython_is_read_in_bounds(
        minor in 8u8..=12,
        noise in proptest::collection::vec(any::<u64>(), 64..512),
        layout in proptest::collection::vec((0usize..20, any::<u16>()), 0..6),
    ) {
        thread_local!(static HOST: Host = Host::new(Machine::X86_64));
        let (mut memory, _) = two_calls(minor);
        for (at, word) in noise.iter().cycle().take(((HEAP_BYTES - 0x8000) / 8) as usize).enumerate() {
            // Mostly addresses of objects, so that lists go on, and round.
            let word = match word % 4 {
                0 => *word,
                1 => (STACK + word % STACK_BYTES) & !7,
                _ => (HEAP + word % HEAP_BYTES) & !7,
            };
            memory.set(FRAMES + 8 * at as u64, word);
        }
        // Offsets come from the daemon, which takes them from the process's memory since 3.13.
        for (field, value) in layout {
            let record = &mut memory.record;
            let value = u32::from(value);
            match field {
                0 => record.frame_bytes = value,
                1 => record.frame_previous = value,
                2 => record.frame_code = value,
                3 => record.frame_instruction = value,
                4 => record.frame_owner = value,
                5 => record.code_bytes = value,
                6 => record.code_name = value,
                7 => record.code_file = value,
                8 => record.code_lines = value,
                9 => record.code_first_line = value,
                10 => record.code_first_traceable = value,
                11 => record.code_bytecode = value,
                12 => record.code_version = value,
                13 => record.frame_entry = value,
                14 => record.thread_next = value,
                15 => record.shape = value % 6,
                16 => record.cframe_previous = value,
                17 => record.interpreter_next = value,
                18 => record.interpreter_threads = value,
                _ => record.thread_id = value,
            }
        }
        let recording = memory.native(&CALLERS);
        HOST.with(|host| {
            let mut thread = host.thread();
            let python = read(host, &mut thread, &memory, &recording);
            prop_assert!(python.frames.len() <= PYTHON_FRAMES_MAX as usize);
            prop_assert_eq!(read(host, &mut thread, &memory, &recording), python);
            Ok(())
        })?;
    }
}
