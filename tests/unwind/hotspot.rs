//! Steps up a JVM's frames by the unwinder's C on the host, over memory laid out as HotSpot does it: one frame of each kind, in both layouts
//! of code blobs (addresses until JDK 22, offsets from JDK 23 on), with the words that every frame must have.

use std::collections::BTreeMap;

use fragprof::bpf::{FRAME_BYTECODE_BITS, FRAME_CODE_BITS, FRAME_EXACT, FRAME_KIND_BIT, FrameKind, HOTSPOT_NONE, Hotspot, MappingKind};
use fragprof::machine::Machine;
use fragprof::unwind::End;
use fragprof::unwind::mappings::{CodeMapping, to_blocks};
use proptest::prelude::*;

use super::host::{Host, PtRegs, Thread};
use super::lab::Stack;
use super::recording::{Recording, World, words};

/// The code cache, its segment map, native code, and the stack.
const CODE: u64 = 0x7f10_0000_0000;
const CODE_BYTES: u64 = 0x2_0000;
const SEGMENTS: u64 = 0x7f20_0000_0000;
const NATIVE: u64 = 0x5500_0000_0000;
const STACK: u64 = 0x7ff0_0000_0000;
const STACK_BYTES: u64 = 0x4000;
/// Bytes of a segment: 1 << SHIFT.
const SHIFT: u32 = 7;

const NAME_NMETHOD: u64 = 0x7f30_0000_0010;
const NAME_NATIVE: u64 = 0x7f30_0000_0020;
const NAME_STUB: u64 = 0x7f30_0000_0030;

/// Offsets in a blob, of either layout.
#[derive(Clone, Copy)]
struct Layout {
    relative: bool,
    block: u64,
    name: u64,
    frame: u64,
    begin: u64,
    end: u64,
    id: u64,
    original: u64,
    deopt: u64,
    code: u64,
}

const OLD: Layout =
    Layout { relative: false, block: 16, name: 96, frame: 28, begin: 32, end: 40, id: 304, original: 300, deopt: 128, code: 0x180 };
const NEW: Layout =
    Layout { relative: true, block: 8, name: 8, frame: 44, begin: 36, end: 40, id: 212, original: 208, deopt: 176, code: 0x100 };

/// A JVM's memory.
struct Jvm {
    layout: Layout,
    code: Vec<u8>,
    segments: Vec<u8>,
    next: u64,
    record: Hotspot,
}

impl Jvm {
    fn new(layout: Layout) -> Self {
        let at = |field: u64| u32::try_from(field).unwrap();
        let first = layout.deopt.min(layout.id).min(layout.original);
        let record = Hotspot {
            code_begin: CODE,
            interpreter_begin: 0,
            interpreter_end: 0,
            name_nmethod: NAME_NMETHOD,
            name_native: NAME_NATIVE,
            call_stub_return: 0,
            barrier_begin: 0,
            barrier_end: 0,
            barrier_frame_bytes: 0,
            segment_shift: SHIFT,
            block_bytes: at(layout.block),
            relative: u32::from(layout.relative),
            at_name: at(layout.name),
            at_frame_size: at(layout.frame),
            at_code_begin: at(layout.begin),
            at_code_end: at(layout.end),
            at_method: at(first),
            at_compile_id: at(layout.id - first),
            at_original_pc: at(layout.original - first),
            at_deopt: at(layout.deopt - first),
            at_deopt_mh: HOTSPOT_NONE,
            bytecode_below: 64,
        };
        let segments = vec![0xff; (CODE_BYTES >> SHIFT) as usize];
        Self { layout, code: vec![0; CODE_BYTES as usize], segments, next: 0, record }
    }

    fn put(&mut self, address: u64, bytes: &[u8]) {
        let at = (address - CODE) as usize;
        self.code[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn put_place(&mut self, blob: u64, field: u64, place: u64) {
        match self.layout.relative {
            true => self.put(blob + field, &u32::try_from(place - blob).unwrap().to_le_bytes()),
            false => self.put(blob + field, &place.to_le_bytes()),
        }
    }

    /// Adds a blob of `segments` segments with a frame of so many words; returns the first address of its code.
    fn blob(&mut self, name: u64, frame_words: u32, id: u32, segments: u64) -> u64 {
        let Layout { block, code, .. } = self.layout;
        let blob = CODE + (self.next << SHIFT) + block;
        let (begin, end) = (blob + code, CODE + ((self.next + segments) << SHIFT));
        for segment in 0..segments {
            self.segments[(self.next + segment) as usize] = segment as u8;
        }
        self.next += segments;
        self.put(blob + self.layout.name, &name.to_le_bytes());
        self.put(blob + self.layout.frame, &frame_words.to_le_bytes());
        self.put_place(blob, self.layout.begin, begin);
        self.put_place(blob, self.layout.end, end);
        if name != NAME_STUB {
            self.put(blob + self.layout.id, &id.to_le_bytes());
            self.put(blob + self.layout.original, &8u32.to_le_bytes());
            self.put_place(blob, self.layout.deopt, end - 16);
        }
        begin
    }

    fn world(&self) -> World {
        let native = CodeMapping { begin: NATIVE, end: NATIVE + 0x1000, bias: 0, file: 0, kind: MappingKind::Jit };
        let own = CodeMapping { begin: CODE, end: CODE + CODE_BYTES, bias: SEGMENTS, file: 0, kind: MappingKind::Hotspot };
        let (blocks, _) = to_blocks(&[native, own], Some(&self.record), None);
        let texts = vec![(CODE, self.code.clone()), (SEGMENTS, self.segments.clone()), (NATIVE, vec![0; 0x1000])];
        World { files: Vec::new(), tables: Vec::new(), mappings: words(&blocks), texts }
    }
}

/// A stack that is written from its leaf up.
#[derive(Default)]
struct Frames(BTreeMap<u64, u64>);

impl Frames {
    fn set(&mut self, address: u64, word: u64) -> &mut Self {
        self.0.insert(address, word);
        self
    }

    /// A recording at native code whose frame pointer leads into the first Java frame.
    fn recording(&self, bp: u64) -> Recording {
        let mut bytes = vec![0; STACK_BYTES as usize];
        for (address, word) in &self.0 {
            let at = (address - STACK) as usize;
            bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        let mut regs = PtRegs::default();
        (regs.words[16], regs.words[19], regs.words[4]) = (NATIVE + 0x10, STACK + 0x100, bp);
        Recording { machine: Machine::X86_64, regs, regions: vec![(STACK, bytes)] }
    }
}

fn compiled(pc: u64, id: u64) -> u64 {
    (FrameKind::JavaCompiled as u64) << FRAME_KIND_BIT | id << FRAME_CODE_BITS | (pc - CODE)
}

fn interpreted(method: u64, bytecode: u64) -> u64 {
    (FrameKind::JavaInterpreted as u64) << FRAME_KIND_BIT | (method >> 3) << FRAME_BYTECODE_BITS | (bytecode & 0xffff)
}

fn stub(pc: u64) -> u64 {
    (FrameKind::JavaStub as u64) << FRAME_KIND_BIT | pc
}

/// The outermost native frame: bp is 0 there.
const OUTER: u64 = NATIVE + 0x800;
const JIT: u64 = fragprof::bpf::FRAME_JIT;

fn walked(host: &Host, thread: &mut Thread, jvm: &Jvm, recording: &Recording) -> (Stack, u32) {
    host.unwind(thread, &jvm.world(), recording)
}

fn assert_frames(stack: &Stack, java: &[u64]) {
    let leaf = (NATIVE + 0x10) | FRAME_EXACT | JIT;
    let expected: Vec<u64> = [leaf].iter().chain(java).copied().chain([OUTER | JIT]).collect();
    assert_eq!((&*stack.frames, stack.end), (&*expected, End::Complete), "{:x?}\nexpected {expected:x?}", stack.frames);
}

#[test]
fn every_kind_of_frame_leads_to_its_caller() {
    let host = Host::new(Machine::X86_64);
    // JDK 8 has the bytecode's address in another slot, and so has arm64, whose metadata lie above 2^47.
    let java_method = 0x7f40_0000_1008;
    for (layout, bytecode_below, java_method) in
        [(OLD, 64, java_method), (NEW, 64, java_method), (NEW, 56, java_method), (NEW, 72, java_method | 1 << 47)]
    {
        let mut jvm = Jvm::new(layout);
        jvm.record.bytecode_below = bytecode_below;
        let call_stub = jvm.blob(NAME_STUB, 0, 0, 8) + 0x20;
        jvm.record.call_stub_return = call_stub;
        let interpreter = jvm.blob(NAME_STUB, 0, 0, 40);
        (jvm.record.interpreter_begin, jvm.record.interpreter_end) = (interpreter, interpreter + 0x1000);
        let runtime_stub = jvm.blob(NAME_STUB, 4, 0, 8) + 0x40;
        let wrapper = jvm.blob(NAME_NATIVE, 10, 77, 8) + 0x50;
        let method = jvm.blob(NAME_NMETHOD, 6, 0x3ff_fff1, 200);
        // Far behind the begin: one tag cannot tell the distance of more than 254 segments, and a joined block has two.
        let far = method + 150 * 128;
        jvm.segments[((far - CODE) >> SHIFT) as usize] -= 1;

        let mut frames = Frames::default();
        let bp = STACK + 0x200;
        // Native code that the wrapper called.
        frames.set(bp, 0xb0).set(bp + 8, wrapper);
        // The wrapper's frame of 10 words begins behind; above it the runtime stub's of 4, and the compiled method's of 6.
        let cfa = bp + 16 + 80;
        frames.set(cfa - 16, 0xb1).set(cfa - 8, runtime_stub);
        let cfa = cfa + 32;
        frames.set(cfa - 16, 0xb2).set(cfa - 8, far);
        let cfa = cfa + 48;
        // An interpreted caller, whose bp the compiled method saved.
        let bp = cfa + 0x100;
        frames.set(cfa - 16, bp).set(cfa - 8, interpreter + 0x123);
        // It was called by a compiled method, which made room for its locals: the sender's sp is not behind the return address.
        let sender = bp + 16 + 0x38;
        frames
            .set(bp - u64::from(bytecode_below), 0x7f40_0001_2345)
            .set(bp - 24, java_method)
            .set(bp - 8, sender)
            .set(bp, 0xb3)
            .set(bp + 8, method + 0x30);
        let cfa = sender + 48;
        // The call stub goes by bp.
        let bp = cfa + 0x80;
        frames.set(cfa - 16, bp).set(cfa - 8, call_stub);
        frames.set(bp, 0).set(bp + 8, OUTER);
        let recording = frames.recording(STACK + 0x200);

        let mut thread = host.thread();
        let (stack, repeated) = walked(&host, &mut thread, &jvm, &recording);
        let expected = [
            compiled(wrapper, 77),
            stub(runtime_stub),
            compiled(far, 0x1ff_fff1),
            interpreted(java_method, 0x2345),
            compiled(method + 0x30, 0x1ff_fff1),
            stub(call_stub),
        ];
        assert_frames(&stack, &expected);
        assert_eq!(repeated, 0);

        // The same again is proven, not walked; with another bytecode it is walked again from there on, and the outer frames are repeated.
        let (again, repeated) = walked(&host, &mut thread, &jvm, &recording);
        assert_eq!((&again.frames, repeated), (&stack.frames, stack.frames.len() as u32));
        let bytecode = *frames.0.iter().find(|(_, word)| **word == 0x7f40_0001_2345).unwrap().0;
        frames.set(bytecode, 0x7f40_0001_2348);
        let (moved, repeated) = walked(&host, &mut thread, &jvm, &frames.recording(STACK + 0x200));
        let mut expected = expected;
        expected[3] = interpreted(java_method, 0x2348);
        assert_frames(&moved, &expected);
        assert!((1..stack.frames.len() as u32).contains(&repeated), "{repeated}");
        let (fresh, _) = walked(&host, &mut host.thread(), &jvm, &frames.recording(STACK + 0x200));
        assert_eq!(fresh, moved);
    }
}

#[test]
fn a_deoptimized_frame_has_the_pc_that_it_had() {
    let host = Host::new(Machine::X86_64);
    for layout in [OLD, NEW] {
        let mut jvm = Jvm::new(layout);
        let method = jvm.blob(NAME_NMETHOD, 6, 5, 20);
        let handler = CODE + (jvm.next << SHIFT) - 16;
        let (bp, original) = (STACK + 0x200, method + 0x44);
        let mut frames = Frames::default();
        frames.set(bp, 0xb0).set(bp + 8, handler).set(bp + 16 + 8, original);
        let cfa = bp + 16 + 48;
        frames.set(cfa - 16, 0).set(cfa - 8, OUTER);
        let mut thread = host.thread();
        let (stack, _) = walked(&host, &mut thread, &jvm, &frames.recording(bp));
        assert_frames(&stack, &[compiled(original, 5)]);
        // Its step is never repeated: what lies at its slot decides.
        frames.set(bp + 16 + 8, original + 4);
        let (stack, _) = walked(&host, &mut thread, &jvm, &frames.recording(bp));
        assert_frames(&stack, &[compiled(original + 4, 5)]);
    }
}

#[test]
fn behind_the_return_barrier_comes_the_carrier_whatever_bp_is() {
    let host = Host::new(Machine::X86_64);
    for layout in [OLD, NEW] {
        let mut jvm = Jvm::new(layout);
        let barrier = jvm.blob(NAME_STUB, 0, 0, 8);
        (jvm.record.barrier_begin, jvm.record.barrier_end, jvm.record.barrier_frame_bytes) = (barrier, barrier + 0x100, 96);
        let method = jvm.blob(NAME_NMETHOD, 6, 5, 20) + 0x10;
        let bp = STACK + 0x200;
        let mut frames = Frames::default();
        frames.set(bp, 0xb0).set(bp + 8, method);
        let cfa = bp + 16 + 48;
        frames.set(cfa - 16, 0xdead_beef).set(cfa - 8, barrier + 0x20);
        let cfa = cfa + 96;
        frames.set(cfa - 16, 0).set(cfa - 8, OUTER);
        let (stack, _) = walked(&host, &mut host.thread(), &jvm, &frames.recording(bp));
        assert_frames(&stack, &[compiled(method, 5), stub(barrier + 0x20)]);
    }
}

#[test]
fn a_register_that_only_holds_a_value_does_not_matter() {
    let host = Host::new(Machine::X86_64);
    for layout in [OLD, NEW] {
        let mut jvm = Jvm::new(layout);
        let method = jvm.blob(NAME_NMETHOD, 6, 5, 20) + 0x10;
        let other = jvm.blob(NAME_NMETHOD, 8, 6, 20) + 0x20;
        let bp = STACK + 0x200;
        let recording = |held: u64| {
            let mut frames = Frames::default();
            frames.set(bp, held).set(bp + 8, method);
            let cfa = bp + 16 + 48;
            frames.set(cfa - 16, held + 1).set(cfa - 8, other);
            let cfa = cfa + 64;
            frames.set(cfa - 16, 0).set(cfa - 8, OUTER);
            frames.recording(bp)
        };
        let mut thread = host.thread();
        for (round, held) in [0x1000, 0x2000, 0x1000].into_iter().enumerate() {
            let (stack, repeated) = walked(&host, &mut thread, &jvm, &recording(held));
            assert_frames(&stack, &[compiled(method, 5), compiled(other, 6)]);
            assert_eq!(repeated, if round == 0 { 0 } else { stack.frames.len() as u32 });
        }
    }
}

#[test]
fn code_that_takes_the_place_of_other_code_is_read_anew() {
    let host = Host::new(Machine::X86_64);
    for layout in [OLD, NEW] {
        let jvm = |frame_words: u32, id: u32| {
            let mut jvm = Jvm::new(layout);
            let method = jvm.blob(NAME_NMETHOD, frame_words, id, 20) + 0x10;
            (jvm, method)
        };
        let recording = |method: u64, frame_bytes: u64, at: u64| {
            let bp = STACK + at;
            let mut frames = Frames::default();
            frames.set(bp, 0xb0).set(bp + 8, method);
            let cfa = bp + 16 + frame_bytes;
            frames.set(cfa - 16, 0).set(cfa - 8, OUTER);
            frames.recording(bp)
        };
        let mut thread = host.thread();
        // At three places of the stack, so that nothing is repeated: the second walk knows the frame from the first.
        for (at, words, id) in [(0x200, 6, 5), (0x300, 6, 5), (0x400, 8, 7)] {
            let (jvm, method) = jvm(words, id);
            let (stack, _) = walked(&host, &mut thread, &jvm, &recording(method, 8 * u64::from(words), at));
            assert_frames(&stack, &[compiled(method, u64::from(id))]);
        }
    }
}

#[test]
fn code_without_a_blob_ends_a_walk() {
    let host = Host::new(Machine::X86_64);
    let jvm = Jvm::new(NEW);
    let bp = STACK + 0x200;
    let mut frames = Frames::default();
    frames.set(bp, 0xb0).set(bp + 8, CODE + 0x4444);
    let (stack, _) = walked(&host, &mut host.thread(), &jvm, &frames.recording(bp));
    assert_eq!((stack.end, stack.frames.last().copied()), (End::Jit, Some(stub(CODE + 0x4444))));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn any_memory_of_a_jvm_is_walked_in_bounds(
        words in proptest::collection::vec(any::<u64>(), 64..512),
        tags in proptest::collection::vec(any::<u8>(), 1024),
        into in proptest::collection::vec(0u64..CODE_BYTES, 64),
        relative: bool,
    ) {
        thread_local!(static HOST: Host = Host::new(Machine::X86_64));
        let mut jvm = Jvm::new(if relative { NEW } else { OLD });
        for (at, word) in words.iter().cycle().take((CODE_BYTES / 8) as usize).enumerate() {
            jvm.code[8 * at..8 * at + 8].copy_from_slice(&word.to_le_bytes());
        }
        jvm.segments = tags;
        (jvm.record.interpreter_begin, jvm.record.interpreter_end) = (CODE, CODE + 0x1000);
        let mut frames = Frames::default();
        for (at, word) in words.iter().enumerate() {
            let address = STACK + 0x100 + 8 * at as u64;
            // Mostly addresses of code and stack, so that walks get on.
            let word = match word % 3 {
                0 => CODE + into[at % into.len()],
                1 => (STACK + word % STACK_BYTES) & !7,
                _ => *word,
            };
            frames.set(address, word);
        }
        HOST.with(|host| {
            let mut thread = host.thread();
            let recording = frames.recording(STACK + 0x180);
            let (stack, _) = walked(host, &mut thread, &jvm, &recording);
            prop_assert!(stack.frames.len() <= 128);
            let (again, _) = walked(host, &mut thread, &jvm, &recording);
            prop_assert_eq!(&again.frames, &stack.frames);
            Ok(())
        })?;
    }
}
