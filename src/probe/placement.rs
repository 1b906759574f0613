//! Chooses the instruction of a function that is probed on x86-64; `placement_arm64` has the rule for arm64.
//!
//! A uprobe on an instruction that the kernel emulates costs a trap (~0.7 µs); for any other the kernel also single-steps a copy out of
//! line (~9 µs). The arguments are in known registers only on the straight-line path from the entry, so the rule follows that path:
//!
//! 1. The site is the first instruction that the kernel emulates: `push reg`, `nop`, relative `jmp`, `jcc`, `call`.
//! 2. Everything the record needs is still in a register: the argument's own, or one that it was copied to before.
//! 3. A site with a return probe has the stack pointer as at the entry, because the kernel swaps the return address at `[rsp]`.
//! 4. No branch leads into (entry, site]: it would be recorded as a call, with arbitrary register contents.
//! 5. No call has left the straight-line path before the site, except `free(NULL)`, which the record does not need.
//!
//! If the rule finds nothing, or reaches a byte that cannot be decoded, the site is the entry itself, which is expensive but always
//! correct. Targets of indirect jumps are not followed: compilers do not emit a jump table whose code precedes the jump through the table.

use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Formatter, Instruction, InstructionInfoFactory, Mnemonic, NasmFormatter, OpAccess, OpKind,
    Register as X86,
};

use crate::allocator::functions::{Op, Shape};
use crate::machine::register::{Register, argument_register};

/// Maximum number of instructions examined from the entry. Compilers put the first branch or push within a few; after that few arguments
/// are still in registers.
const WALK_INSTRUCTIONS_MAX: usize = 16;
/// Maximum number of bytes of a function that [`place`] uses: [`WALK_INSTRUCTIONS_MAX`] of the longest instructions (15 bytes).
pub const WALK_BYTES_MAX: u64 = WALK_INSTRUCTIONS_MAX as u64 * 15;

/// Instructions that this kernel's uprobes emulate beyond those that all emulate (arch/x86/kernel/uprobes.c). All since 5.x: one-byte
/// `nop`, relative `jmp`, `jcc` and `call` (`branch_setup_xol_ops`), `push reg` with at most a REX.B prefix (`push_setup_xol_ops`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Emulation {
    /// The `nop` forms of 2 to 8 bytes that the kernel itself uses (`x86_nops`).
    pub long_nops: bool,
}

impl Emulation {
    /// The emulation of a kernel release. A release string proves nothing, and need not here: a wrong guess makes a probe more expensive,
    /// never incorrect. Long `nop`s since 6.18 at the latest (`emulate_nop_insn`).
    #[must_use]
    pub fn of_release(release: &str) -> Self {
        let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|digits| digits.parse::<u32>().unwrap_or(0));
        let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        Self { long_nops: version >= (6, 18) }
    }
}

/// Why a site was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The kernel emulates the instruction.
    Emulated,
    /// The kernel emulates it, and calls with a null pointer have branched off before it.
    EmulatedAfterNullCheck,
    /// The entry: a call or indirect branch comes before any emulated instruction.
    ControlFlow,
    /// The entry: an argument is overwritten before any emulated instruction.
    ArgumentLost,
    /// The entry: the stack pointer moves before any emulated instruction and the return address is needed.
    StackMoved,
    /// The entry: there is a branch into the path.
    BranchInto,
    /// The entry: the bytes cannot be decoded.
    Undecodable,
    /// The entry: the path reached the function's end or its limit.
    NothingFound,
    /// The entry: the return address is signed, saved or replaced before any emulated instruction (arm64).
    ReturnAddressUsed,
    /// The entry: the frame pointer changes before any emulated instruction (arm64).
    FramePointerMoved,
}

impl Reason {
    /// A sentence for display.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Emulated => "emulated by the kernel",
            Self::EmulatedAfterNullCheck => "emulated by the kernel, after the check for a null pointer",
            Self::ControlFlow => "entry: the path branches before an emulated instruction",
            Self::ArgumentLost => "entry: an argument is overwritten before an emulated instruction",
            Self::StackMoved => "entry: the stack pointer moves before an emulated instruction",
            Self::BranchInto => "entry: there is a jump into the path",
            Self::Undecodable => "entry: bytes that cannot be decoded",
            Self::NothingFound => "entry: no emulated instruction nearby",
            Self::ReturnAddressUsed => "entry: the return address is signed or saved before an emulated instruction",
            Self::FramePointerMoved => "entry: the frame pointer changes before an emulated instruction",
        }
    }

    /// Whether the kernel emulates the instruction at the site.
    #[must_use]
    pub fn is_emulated(self) -> bool {
        matches!(self, Self::Emulated | Self::EmulatedAfterNullCheck)
    }
}

/// Where a function's probe is placed, and the locations of the arguments there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// Offset from the function's entry, bytes.
    pub offset: u32,
    /// The instruction, as text.
    pub instruction: String,
    /// The reason for the choice.
    pub reason: Reason,
    /// The register with the size.
    pub size: Option<Register>,
    /// The register with the count.
    pub count: Option<Register>,
    /// The register with the pointer.
    pub pointer: Option<Register>,
    /// Words between the return address and the stack pointer; 0 if a return probe is needed.
    pub sp_words: u8,
    /// Whether it has a return probe.
    pub has_return: bool,
    /// The jump, if the instruction is an unconditional jump out of the straight-line path.
    pub jump: Option<Jump>,
}

/// An unconditional jump, and which registers hold the arguments when it is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Jump {
    /// Virtual address of the target.
    pub target: u64,
    size: u16,
    count: u16,
    pointer: u16,
}

impl Jump {
    /// A jump at the function's entry, where every argument of `shape` is in its own register.
    pub(super) fn with_arguments(target: u64, shape: Shape) -> Self {
        let holders = |index: Option<u8>| index.and_then(|index| Holders::new(Some(index))).map_or(0, |holders| holders.set);
        Self { target, size: holders(shape.size), count: holders(shape.count), pointer: holders(shape.pointer) }
    }

    /// Whether a function of `shape` at the target would find the same arguments in the expected registers.
    #[must_use]
    pub fn passes_on(&self, shape: Shape) -> bool {
        let finds = |index: Option<u8>, holders: u16| match index.and_then(argument_register) {
            Some(register) => holders >> register.0 & 1 == 1,
            None => holders == 0,
        };
        finds(shape.size, self.size) && finds(shape.count, self.count) && finds(shape.pointer, self.pointer)
    }
}

/// The registers that hold an argument now, its own first.
#[derive(Debug, Clone, Copy)]
struct Holders {
    /// Bit n = DWARF register n.
    set: u16,
    own: Register,
}

impl Holders {
    fn new(index: Option<u8>) -> Option<Self> {
        let own = argument_register(index?)?;
        Some(Self { set: 1 << own.0, own })
    }

    fn best(self) -> Option<Register> {
        if self.set >> self.own.0 & 1 == 1 {
            return Some(self.own);
        }
        (0..16).find(|n| self.set >> n & 1 == 1).map(Register)
    }
}

/// State at one instruction of the path.
#[derive(Debug, Clone, Copy)]
struct State {
    size: Option<Holders>,
    count: Option<Holders>,
    pointer: Option<Holders>,
    sp_words: u8,
    /// The flags say whether the pointer is null.
    null_tested: bool,
    after_null_check: bool,
}

impl State {
    fn arguments(&mut self) -> impl Iterator<Item = &mut Holders> {
        [&mut self.size, &mut self.count, &mut self.pointer].into_iter().flatten()
    }
}

/// Chooses the site of a function.
///
/// `code` starts at the function's entry and ends at or before its end; `entry` is its virtual address. `is_target(vaddr)` says whether
/// anything jumps to, calls or starts at `vaddr` (see [`super::branches`]); it is only called for addresses after the entry. Pure: the same
/// bytes give the same site.
#[must_use]
pub fn place(code: &[u8], entry: u64, shape: Shape, emulation: Emulation, is_target: impl Fn(u64) -> bool) -> Placement {
    let start = State {
        size: Holders::new(shape.size),
        count: Holders::new(shape.count),
        pointer: Holders::new(shape.pointer),
        sp_words: 0,
        null_tested: false,
        after_null_check: false,
    };
    let has_return = shape.op.needs_return();
    let mut decoder = Decoder::with_ip(64, code, entry, DecoderOptions::NONE);
    let mut info = InstructionInfoFactory::new();
    let mut state = start;
    let mut chosen: Option<Placement> = None;
    let mut stop = Reason::NothingFound;
    let mut first_text = None;

    for _ in 0..WALK_INSTRUCTIONS_MAX {
        if !decoder.can_decode() {
            break;
        }
        let instruction = decoder.decode();
        if instruction.is_invalid() {
            stop = Reason::Undecodable;
            break;
        }
        first_text.get_or_insert_with(|| text(&instruction));
        if instruction.ip() != entry && is_target(instruction.ip()) {
            stop = Reason::BranchInto;
            break;
        }
        let bytes =
            code.get(instruction.ip().wrapping_sub(entry) as usize..).and_then(|rest| rest.get(..instruction.len())).unwrap_or_default();
        if is_emulated(&instruction, bytes, emulation) {
            let reason = if state.after_null_check { Reason::EmulatedAfterNullCheck } else { Reason::Emulated };
            chosen = Some(placement_at(&instruction, entry, &state, reason, has_return));
            // Only a null test through which other pointers fall is worth skipping: free(NULL) then costs nothing.
            let passes_null_check = shape.op == Op::Free && state.null_tested && is_jump_if_zero(&instruction) && !state.after_null_check;
            if !passes_null_check {
                break;
            }
            state.after_null_check = true;
            state.null_tested = false;
            continue;
        }
        if instruction.flow_control() != FlowControl::Next {
            stop = Reason::ControlFlow;
            break;
        }
        if let Err(reason) = step(&mut state, &instruction, &mut info, has_return) {
            stop = reason;
            break;
        }
    }
    chosen.unwrap_or_else(|| Placement {
        offset: 0,
        instruction: first_text.unwrap_or_else(|| "(bad)".into()),
        reason: stop,
        size: start.size.and_then(Holders::best),
        count: start.count.and_then(Holders::best),
        pointer: start.pointer.and_then(Holders::best),
        sp_words: 0,
        has_return,
        jump: None,
    })
}

fn placement_at(instruction: &Instruction, entry: u64, state: &State, reason: Reason, has_return: bool) -> Placement {
    let holders = |argument: Option<Holders>| argument.map_or(0, |a| a.set);
    let leaves = matches!(instruction.code(), Code::Jmp_rel8_64 | Code::Jmp_rel32_64) && state.sp_words == 0;
    let jump = leaves.then(|| Jump {
        target: instruction.near_branch_target(),
        size: holders(state.size),
        count: holders(state.count),
        pointer: holders(state.pointer),
    });
    Placement {
        jump,
        offset: instruction.ip().wrapping_sub(entry) as u32,
        instruction: text(instruction),
        reason,
        size: state.size.and_then(Holders::best),
        count: state.count.and_then(Holders::best),
        pointer: state.pointer.and_then(Holders::best),
        sp_words: state.sp_words,
        has_return,
    }
}

/// Applies an instruction that falls through. `Err` if the path cannot continue after it.
fn step(state: &mut State, instruction: &Instruction, info: &mut InstructionInfoFactory, has_return: bool) -> Result<(), Reason> {
    move_stack(state, instruction, info, has_return)?;
    if instruction.rflags_modified() != 0 {
        state.null_tested = tests_pointer_for_null(state, instruction);
    }
    let copy = register_copy(instruction);
    let mut written = 0u16;
    for used in info.info(instruction).used_registers() {
        let writes = matches!(used.access(), OpAccess::Write | OpAccess::ReadWrite | OpAccess::CondWrite | OpAccess::ReadCondWrite);
        if let (true, Some(register)) = (writes, dwarf(used.register())) {
            written |= 1 << register.0;
        }
    }
    for argument in state.arguments() {
        let copied = copy.is_some_and(|(_, source)| argument.set >> source.0 & 1 == 1);
        argument.set &= !written;
        if let (true, Some((destination, _))) = (copied, copy) {
            argument.set |= 1 << destination.0;
        }
        if argument.set == 0 {
            return Err(Reason::ArgumentLost);
        }
    }
    Ok(())
}

/// Tracks the stack pointer: `sub rsp, n` and pushes if only the entry is probed, no movement if the return is.
fn move_stack(state: &mut State, instruction: &Instruction, info: &mut InstructionInfoFactory, has_return: bool) -> Result<(), Reason> {
    const STACK_POINTER: u16 = 1 << 7;
    let moves = info.info(instruction).used_registers().iter().any(|used| {
        used.access() != OpAccess::Read
            && used.access() != OpAccess::CondRead
            && dwarf(used.register()).is_some_and(|register| 1 << register.0 == STACK_POINTER)
    });
    if !moves {
        return Ok(());
    }
    if has_return {
        return Err(Reason::StackMoved);
    }
    let bytes = match instruction.code() {
        Code::Sub_rm64_imm8 | Code::Sub_rm64_imm32 if instruction.op0_register() == X86::RSP => instruction.immediate(1),
        _ if instruction.mnemonic() == Mnemonic::Push => instruction.stack_pointer_increment().unsigned_abs().into(),
        _ => return Err(Reason::StackMoved),
    };
    let words = u8::try_from(bytes / 8).map_err(|_| Reason::StackMoved)?;
    if bytes % 8 != 0 {
        return Err(Reason::StackMoved);
    }
    state.sp_words = state.sp_words.checked_add(words).ok_or(Reason::StackMoved)?;
    Ok(())
}

/// `mov r64, r64`: (destination, source). A 32-bit move truncates the value, so it is not a copy.
fn register_copy(instruction: &Instruction) -> Option<(Register, Register)> {
    let is_copy = matches!(instruction.code(), Code::Mov_r64_rm64 | Code::Mov_rm64_r64)
        && instruction.op0_kind() == OpKind::Register
        && instruction.op1_kind() == OpKind::Register;
    if !is_copy {
        return None;
    }
    Some((dwarf(instruction.op0_register())?, dwarf(instruction.op1_register())?))
}

fn tests_pointer_for_null(state: &State, instruction: &Instruction) -> bool {
    let (Code::Test_rm64_r64, Some(pointer)) = (instruction.code(), state.pointer) else { return false };
    let same = instruction.op0_kind() == OpKind::Register && instruction.op0_register() == instruction.op1_register();
    same && dwarf(instruction.op0_register()).is_some_and(|register| pointer.set >> register.0 & 1 == 1)
}

fn is_jump_if_zero(instruction: &Instruction) -> bool {
    matches!(instruction.code(), Code::Je_rel8_64 | Code::Je_rel32_64)
}

/// Whether the kernel emulates it. `bytes` are the instruction's own: prefixes matter too (a branch with 0x66 is rejected, a `push` with a
/// prefix other than REX.B is single-stepped).
pub fn is_emulated(instruction: &Instruction, bytes: &[u8], emulation: Emulation) -> bool {
    match bytes {
        [0x50..=0x57] | [0x41, 0x50..=0x57] | [0x90] => true,
        [0xeb | 0x70..=0x7f, _] | [0xe8 | 0xe9, _, _, _, _] | [0x0f, 0x80..=0x8f, _, _, _, _] => !instruction.is_invalid(),
        _ => emulation.long_nops && LONG_NOPS.contains(&bytes),
    }
}

/// `x86_nops` of the kernel (arch/x86/include/asm/nops.h), lengths 2 to 8 except 5: since 6.18 the kernel replaces that one by a call into
/// a page that was found to be missing in a forked child, so the child dies at its first hit.
const LONG_NOPS: [&[u8]; 6] = [
    &[0x66, 0x90],
    &[0x0f, 0x1f, 0x00],
    &[0x0f, 0x1f, 0x40, 0x00],
    &[0x66, 0x0f, 0x1f, 0x44, 0x00, 0x00],
    &[0x0f, 0x1f, 0x80, 0x00, 0x00, 0x00, 0x00],
    &[0x0f, 0x1f, 0x84, 0x00, 0x00, 0x00, 0x00, 0x00],
];

/// The DWARF number of the general-purpose register that contains a register.
pub fn dwarf(register: X86) -> Option<Register> {
    let number = match register.full_register() {
        X86::RAX => 0,
        X86::RDX => 1,
        X86::RCX => 2,
        X86::RBX => 3,
        X86::RSI => 4,
        X86::RDI => 5,
        X86::RBP => 6,
        X86::RSP => 7,
        X86::R8 => 8,
        X86::R9 => 9,
        X86::R10 => 10,
        X86::R11 => 11,
        X86::R12 => 12,
        X86::R13 => 13,
        X86::R14 => 14,
        X86::R15 => 15,
        _ => return None,
    };
    Some(Register(number))
}

fn text(instruction: &Instruction) -> String {
    let mut out = String::new();
    NasmFormatter::new().format(instruction, &mut out);
    out
}
