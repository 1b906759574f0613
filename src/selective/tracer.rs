//! Traces single calls in the scratch process.
//!
//! Between two calls the process is stopped at its breakpoint (`scratch.c`). To make a call, the tracer sets its registers and resumes it
//! until it stops there again; on the way it stops at breakpoints in the library's code, and at system calls if the script injects a fault.
//!
//! Candidates are instructions that the kernel's uprobes emulate, and they are emulated here too: a stop costs some microseconds, and a
//! single step several times that on virtual machines. When sites are judged, the CPU single-steps over them instead, so that the second
//! check does not rely on the emulation of the first.

use std::collections::HashMap;
use std::io;

use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, Register as X86};

use crate::machine::stopped::{BREAKPOINT, BREAKPOINT_MASK, BREAKPOINT_PASSED_BYTES, Registers, peek, poke, ptrace, wait_for};
use crate::probe::placement::dwarf;
use crate::selective::observed::Visit;
use crate::selective::sandbox::Sandbox;
use crate::selective::script::Trouble;

/// Maximum number of stops in a whole run. A normal one has about 200,000; each costs the tracer about as much as the process.
const STOPS_MAX: u32 = 3_000_000;
/// Maximum number of visits kept in a whole run, 160 bytes each. A normal one has about 100,000.
const VISITS_MAX: u32 = 500_000;
/// Maximum number of visits of one instruction kept per call: two already disqualify it.
const VISITS_OF_ONE_MAX: u8 = 2;
/// Contents of registers without an argument: not an address, and different in each register.
const JUNK: u64 = 0x5eed_0000_dead_0001;
/// DWARF numbers of the registers used by name here.
const RAX: u8 = 0;
const RSP: u8 = 7;
/// rdi, rsi, rdx.
const ARGUMENTS: [u8; 3] = [5, 4, 1];
/// The longest instruction, in bytes.
const INSTRUCTION_BYTES_MAX: usize = 15;
/// The low half of a word: a lock has 32 bits.
const HALF: u64 = 0xffff_ffff;

/// Why a run cannot continue: what the process did, as the end of a sentence.
#[derive(Debug)]
pub(super) struct Failed(pub String);

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Self(format!("could not be traced: {error}"))
    }
}

/// A call's outcome.
#[derive(Debug, Default)]
pub(super) struct Called {
    pub result: u64,
    pub visits: Vec<Visit>,
    /// Whether it acquired a lock.
    pub locked: bool,
    /// Whether it waited for a lock that another thread held.
    pub waited: bool,
    /// Number of visits kept for each instruction.
    times: HashMap<u64, u8>,
}

/// The purpose of a breakpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Interest {
    /// An instruction that may be a site.
    Candidate,
    /// An instruction that acquires a lock.
    Lock,
}

/// A breakpoint.
struct Armed {
    interest: Interest,
    /// The original word.
    word: u64,
    instruction: Instruction,
}

/// Why the process is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    Trap,
    /// At the entry or exit of a system call.
    SystemCall,
}

/// What happens at the exit of a system call that the tracer modified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AtEnd {
    /// It was not made; this is the result.
    Answer(i64),
    /// Its first argument was replaced; this is the original.
    Argument(u64),
}

/// The tracer of the scratch process.
pub(super) struct Tracer {
    sandbox: Sandbox,
    /// The address where the process is stopped between calls.
    ready: u64,
    /// The load bias of the library's file.
    bias: u64,
    /// By virtual address in the file.
    armed: HashMap<u64, Armed>,
    stops_left: u32,
    visits_left: u32,
}

impl Tracer {
    /// Runs the process to its breakpoint.
    pub(super) fn start(sandbox: Sandbox) -> Result<Self, Failed> {
        let mut tracer = Self { sandbox, ready: 0, bias: 0, armed: HashMap::new(), stops_left: STOPS_MAX, visits_left: VISITS_MAX };
        tracer.resume(libc::PTRACE_CONT)?;
        tracer.ready = tracer.registers()?.pc();
        Ok(tracer)
    }

    pub(super) fn sandbox(&mut self) -> &mut Sandbox {
        &mut self.sandbox
    }

    pub(super) fn set_bias(&mut self, bias: u64) {
        self.bias = bias;
    }

    pub(super) fn registers(&self) -> Result<Registers, Failed> {
        Ok(Registers::read(self.sandbox.pid())?)
    }

    fn set_registers(&self, registers: &mut Registers) -> Result<(), Failed> {
        registers.forget_call();
        Ok(registers.write(self.sandbox.pid())?)
    }

    pub(super) fn peek(&self, address: u64) -> Result<u64, Failed> {
        Ok(peek(self.sandbox.pid(), address)?)
    }

    pub(super) fn poke(&self, address: u64, word: u64) -> Result<(), Failed> {
        Ok(poke(self.sandbox.pid(), address, word)?)
    }

    /// Writes the bits of a word that are set in `mask`.
    pub(super) fn poke_part(&self, address: u64, value: u64, mask: u64) -> Result<(), Failed> {
        let word = self.peek(address)?;
        self.poke(address, word & !mask | value & mask)
    }

    /// Sets breakpoints at addresses of the library's file, replacing the previous ones.
    pub(super) fn arm(&mut self, at: impl Iterator<Item = (u64, Interest)>) -> Result<(), Failed> {
        for (vaddr, armed) in std::mem::take(&mut self.armed) {
            self.poke_part(vaddr.wrapping_add(self.bias), armed.word, BREAKPOINT_MASK)?;
        }
        let mut new = HashMap::new();
        // All are decoded before the first is set, because a breakpoint overwrites adjacent instructions.
        for (vaddr, interest) in at {
            let address = vaddr.wrapping_add(self.bias);
            let (word, next) = (self.peek(address)?, self.peek(address.wrapping_add(8))?);
            let bytes = [word.to_le_bytes(), next.to_le_bytes()].concat();
            let bytes = bytes.get(..INSTRUCTION_BYTES_MAX).unwrap_or(&bytes);
            let instruction = Decoder::with_ip(64, bytes, address, DecoderOptions::NONE).decode();
            new.insert(vaddr, Armed { interest, word, instruction });
        }
        self.armed = new;
        for vaddr in self.armed.keys() {
            self.poke_part(vaddr.wrapping_add(self.bias), BREAKPOINT, BREAKPOINT_MASK)?;
        }
        Ok(())
    }

    /// Makes a call and records the breakpoints that it reaches; the CPU steps over each.
    pub(super) fn count(&mut self, thread: u64, function: u64, arguments: [u64; 3]) -> Result<Called, Failed> {
        self.prepare(thread, function, arguments)?;
        let mut called = Called::default();
        loop {
            self.resume(libc::PTRACE_CONT)?;
            let registers = self.registers()?;
            if registers.pc() == self.ready {
                called.result = registers.result();
                return Ok(called);
            }
            let vaddr = self.stopped_at(&registers)?;
            self.note(&mut called, vaddr, &registers)?;
            self.step_over(vaddr, registers)?;
        }
    }

    /// Makes a call with or without injected faults, and records the candidates that it reaches.
    pub(super) fn watch(&mut self, thread: u64, function: u64, arguments: [u64; 3], trouble: Trouble) -> Result<Called, Failed> {
        self.prepare(thread, function, arguments)?;
        let mut called = Called::default();
        let mut refusals = if let Trouble::Refused(times) = trouble { times } else { 0 };
        let mut contend = trouble == Trouble::Contended;
        // Without faults, system calls continue without a stop.
        let request = if trouble == Trouble::None { libc::PTRACE_CONT } else { libc::PTRACE_SYSCALL };
        // Set within a system call: what happens at its exit.
        let mut in_call: Option<Option<AtEnd>> = None;
        loop {
            let stop = self.resume(request)?;
            let mut registers = self.registers()?;
            if stop == Stop::SystemCall {
                in_call = match in_call {
                    None => Some(self.interfere(&mut registers, &mut refusals, &mut called.waited)?),
                    Some(at_end) => {
                        self.end_call(&mut registers, at_end)?;
                        None
                    }
                };
                continue;
            }
            if registers.pc() == self.ready {
                called.result = registers.result();
                return Ok(called);
            }
            let vaddr = self.stopped_at(&registers)?;
            let Some(&Armed { interest, instruction, .. }) = self.armed.get(&vaddr) else { continue };
            match interest {
                Interest::Candidate => {
                    self.note(&mut called, vaddr, &registers)?;
                    self.emulate(&instruction, &mut registers)?;
                    self.set_registers(&mut registers)?;
                }
                Interest::Lock => {
                    called.locked = true;
                    if contend && let Some(lock) = lock_address(&instruction, &registers) {
                        contend = !self.hold(lock)?;
                    }
                    self.step_over(vaddr, registers)?;
                }
            }
        }
    }

    /// Records a visit of a call.
    fn note(&mut self, called: &mut Called, vaddr: u64, registers: &Registers) -> Result<(), Failed> {
        let times = called.times.entry(vaddr).or_default();
        if *times < VISITS_OF_ONE_MAX {
            *times += 1;
            self.visits_left =
                self.visits_left.checked_sub(1).ok_or_else(|| Failed("reached more candidates than any glibc does".into()))?;
            called.visits.push(Visit { vaddr, registers: registers.general(), live: 0 });
        }
        Ok(())
    }

    /// Sets the registers for a call.
    fn prepare(&mut self, thread: u64, function: u64, arguments: [u64; 3]) -> Result<(), Failed> {
        let mut registers = self.registers()?;
        for number in (0..16).filter(|&number| number != RSP) {
            registers.set_general(number, JUNK.wrapping_add(u64::from(number) << 8));
        }
        registers.set_general(RAX, function);
        for (number, value) in ARGUMENTS.into_iter().zip(arguments) {
            registers.set_general(number, value);
        }
        registers.set_thread_pointer(thread);
        self.set_registers(&mut registers)
    }

    /// The breakpoint at which the process stopped, by virtual address in the file.
    fn stopped_at(&self, registers: &Registers) -> Result<u64, Failed> {
        let vaddr = registers.pc().wrapping_sub(BREAKPOINT_PASSED_BYTES).wrapping_sub(self.bias);
        let known = self.armed.contains_key(&vaddr);
        known.then_some(vaddr).ok_or_else(|| Failed("stopped at an unknown breakpoint".into()))
    }

    /// Lets the CPU execute the instruction at a breakpoint.
    fn step_over(&mut self, vaddr: u64, mut registers: Registers) -> Result<(), Failed> {
        let address = vaddr.wrapping_add(self.bias);
        let word = self.armed.get(&vaddr).map_or(BREAKPOINT, |armed| armed.word);
        self.poke_part(address, word, BREAKPOINT_MASK)?;
        registers.set_pc(address);
        self.set_registers(&mut registers)?;
        self.resume(libc::PTRACE_SINGLESTEP)?;
        self.poke_part(address, BREAKPOINT, BREAKPOINT_MASK)
    }

    /// Emulates a candidate's instruction; candidates are those that uprobes emulate.
    fn emulate(&self, instruction: &Instruction, registers: &mut Registers) -> Result<(), Failed> {
        let push = |registers: &mut Registers, value: u64| {
            let general = registers.general();
            let top = general.get(usize::from(RSP)).copied().unwrap_or(0).wrapping_sub(8);
            registers.set_general(RSP, top);
            self.poke(top, value)
        };
        let pc = match instruction.flow_control() {
            FlowControl::UnconditionalBranch => instruction.near_branch_target(),
            FlowControl::ConditionalBranch if registers.takes(condition(instruction)) => instruction.near_branch_target(),
            FlowControl::Call => {
                push(registers, instruction.next_ip())?;
                instruction.near_branch_target()
            }
            _ => {
                if instruction.mnemonic() == Mnemonic::Push {
                    let value = dwarf(instruction.op0_register()).and_then(|r| registers.general().get(usize::from(r.0)).copied());
                    push(registers, value.unwrap_or(0))?;
                }
                instruction.next_ip()
            }
        };
        registers.set_pc(pc);
        Ok(())
    }

    /// At the entry of a system call: replaces the kernel's result if the script says so. Memory calls are refused; a wait for a lock finds
    /// it unlocked.
    fn interfere(&self, registers: &mut Registers, refusals: &mut u32, waited: &mut bool) -> Result<Option<AtEnd>, Failed> {
        /// Operations of futex(2), without their flags.
        const FUTEX_COMMAND: u64 = 0x7f;
        let general = registers.general();
        let [first, second, _] = ARGUMENTS.map(|number| general.get(usize::from(number)).copied().unwrap_or(0));
        let at_end = match i64::try_from(registers.call()).unwrap_or(-1) {
            libc::SYS_mmap | libc::SYS_mprotect if *refusals > 0 => AtEnd::Answer(-i64::from(libc::ENOMEM)),
            // brk does not fail but returns the current break, which a call with 0 does.
            libc::SYS_brk if *refusals > 0 && first != 0 => AtEnd::Argument(first),
            libc::SYS_futex => {
                let command = i32::try_from(second & FUTEX_COMMAND).unwrap_or(-1);
                if matches!(command, libc::FUTEX_WAIT | libc::FUTEX_WAIT_BITSET) {
                    *waited = true;
                    self.poke_part(first, 0, HALF)?;
                }
                AtEnd::Answer(0)
            }
            _ => return Ok(None),
        };
        *refusals = refusals.saturating_sub(u32::from(at_end != AtEnd::Answer(0)));
        match at_end {
            // With an invalid number the call is not made.
            AtEnd::Answer(_) => registers.forget_call(),
            AtEnd::Argument(_) => registers.set_general(ARGUMENTS[0], 0),
        }
        registers.write(self.sandbox.pid())?;
        Ok(Some(at_end))
    }

    fn end_call(&self, registers: &mut Registers, at_end: Option<AtEnd>) -> Result<(), Failed> {
        match at_end {
            None => return Ok(()),
            Some(AtEnd::Answer(result)) => registers.set_general(RAX, result.cast_unsigned()),
            Some(AtEnd::Argument(value)) => registers.set_general(ARGUMENTS[0], value),
        }
        self.set_registers(registers)
    }

    /// Marks a free lock as held; returns whether it was free.
    fn hold(&self, lock: u64) -> Result<bool, Failed> {
        let free = self.peek(lock)? & HALF == 0;
        if free {
            self.poke_part(lock, 1, HALF)?;
        }
        Ok(free)
    }

    /// Resumes the process until its next stop.
    fn resume(&mut self, request: libc::c_uint) -> Result<Stop, Failed> {
        /// `PTRACE_O_TRACESYSGOOD`.
        const SYSTEM_CALL: i32 = libc::SIGTRAP | 0x80;
        self.stops_left = self.stops_left.checked_sub(1).ok_or_else(|| Failed("stopped more often than any glibc does".into()))?;
        ptrace(request, self.sandbox.pid(), 0, 0)?;
        let status = wait_for(self.sandbox.pid())?;
        if !libc::WIFSTOPPED(status) {
            self.sandbox.note_reaped();
            let how = if libc::WIFSIGNALED(status) {
                format!("was killed by signal {}", libc::WTERMSIG(status))
            } else {
                format!("ended with status {}", libc::WEXITSTATUS(status))
            };
            return Err(Failed(if self.sandbox.timed_out() { "did not end in time".into() } else { how }));
        }
        match (libc::WSTOPSIG(status), status >> 16) {
            (libc::SIGTRAP, 0) => Ok(Stop::Trap),
            (SYSTEM_CALL, 0) => Ok(Stop::SystemCall),
            (_, libc::PTRACE_EVENT_EXEC) => Err(Failed("executed another program".into())),
            (signal, _) => Err(Failed(format!("stopped by signal {signal}"))),
        }
    }
}

/// The low four bits of a conditional branch's opcode, which are its condition.
fn condition(instruction: &Instruction) -> u8 {
    // iced's numbers are these plus one: 0 means none.
    (instruction.condition_code() as u8).wrapping_sub(1)
}

/// The address of the lock that an instruction acquires.
fn lock_address(instruction: &Instruction, registers: &Registers) -> Option<u64> {
    let general = registers.general();
    instruction.virtual_address(0, 0, |register, _, _| match register {
        X86::FS => Some(registers.thread_pointer()),
        X86::CS | X86::DS | X86::ES | X86::SS => Some(0),
        register => general.get(usize::from(dwarf(register)?.0)).copied(),
    })
}
