//! The scratch process as a program with threads: it makes the requests of a script and reports the blocks that they got.
//!
//! There is only one task. Its threads exist only for the C library: a thread pointer with separate thread-local storage, created by the
//! loader's own function, and the flags that say that there are several threads. The allocator depends on nothing else (its cache and its
//! arena are found through thread-local variables), so the process needs no permission to start anything, and its threads contend where the
//! script determines it.

use std::collections::HashSet;
use std::path::Path;

use crate::process::elf::{Elf, ReadAt};
use crate::process::handle::read_bounded;
use crate::process::maps::Maps;
use crate::selective::observed::{Done, Function, Passes};
use crate::selective::sandbox::Sandbox;
use crate::selective::script::{Call, OTHERS, Request, Script, Thread};
use crate::selective::tracer::{Called, Failed, Interest, Tracer};

/// Maximum size of `/proc/PID/maps` of a process with three files.
const MAPS_BYTES_MAX: u64 = 1 << 20;
/// `tcbhead_t` of glibc's sysdeps/x86_64/nptl/tls.h, whose fields compilers and debuggers also know: the block's own address twice, the
/// flag that there are several threads (before 2.36), the stack guard and the pointer guard.
const TCB_SELF: [u64; 2] = [0x00, 0x10];
const TCB_SEVERAL: u64 = 0x18;
const TCB_GUARDS: [u64; 2] = [0x28, 0x30];
/// Flag in a chunk's size word, which precedes the block: the chunk is not in the main arena.
const NON_MAIN_ARENA: u64 = 4;
const SIZE_WORD_BEFORE: u64 = 8;

/// Virtual addresses in the library and the loader.
pub(super) struct Symbols {
    pub malloc: u64,
    pub calloc: u64,
    pub free: u64,
    pub mallopt: u64,
    /// `__libc_single_threaded`, since 2.32.
    pub single_threaded: Option<u64>,
    /// `_dl_allocate_tls` of the loader.
    pub allocate_tls: u64,
}

/// The paths that a run has taken. A path that was not taken has not been examined.
#[derive(Debug, Default)]
pub(super) struct Taken {
    /// Small blocks that were returned from the cache, for each kind of thread.
    pub cached: [bool; 3],
    /// Locks were used with several threads.
    pub locks: bool,
    /// A block from an arena other than the main one.
    pub other_arena: bool,
    /// Waits for a lock, in malloc and in free.
    pub waits: [bool; 2],
    /// A request that failed.
    pub failure: bool,
}

/// How a script is observed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Watch {
    /// With its injected faults; candidates are emulated.
    Closely,
    /// Without its injected faults; the CPU executes everything.
    Counting,
}

/// The process.
pub(super) struct Scratch {
    tracer: Tracer,
    symbols: Symbols,
    bias: u64,
    main: u64,
    others: Vec<u64>,
    /// The current state of the flags.
    alone: bool,
    pub taken: Taken,
}

impl Scratch {
    /// Runs the process to the point where it can serve requests.
    pub(super) fn start<R: ReadAt>(sandbox: Sandbox, library: &Elf<R>, loader: &Elf<R>, symbols: Symbols) -> Result<Self, Failed> {
        let mut tracer = Tracer::start(sandbox)?;
        let path = format!("/proc/{}/maps", tracer.sandbox().pid());
        let maps = Maps::parse(&read_bounded(Path::new(&path), MAPS_BYTES_MAX)?);
        let bias = |elf: &Elf<R>, inode: u64, what: &str| {
            let mapping = maps.mappings.iter().find(|mapping| mapping.permissions.execute && mapping.inode == inode);
            let bias = mapping.and_then(|mapping| elf.load_bias(mapping.start.0, mapping.offset));
            bias.ok_or_else(|| Failed(format!("did not load its {what}")))
        };
        tracer.sandbox().remove_files();
        let library_bias = bias(library, tracer.sandbox().library().0, "C library")?;
        let loader_bias = bias(loader, tracer.sandbox().loader().0, "loader")?;
        tracer.set_bias(library_bias);
        let main = tracer.registers()?.thread_pointer();
        let mut others = Vec::new();
        for _ in 0..OTHERS {
            let thread = tracer.count(main, symbols.allocate_tls.wrapping_add(loader_bias), [0; 3])?.result;
            if thread == 0 {
                return Err(Failed("got no thread-local storage".into()));
            }
            for at in TCB_SELF {
                tracer.poke(thread.wrapping_add(at), thread)?;
            }
            for at in TCB_GUARDS {
                tracer.poke(thread.wrapping_add(at), tracer.peek(main.wrapping_add(at))?)?;
            }
            tracer.poke_part(thread.wrapping_add(TCB_SEVERAL), 1, u32::MAX.into())?;
            others.push(thread);
        }
        Ok(Self { tracer, symbols, bias: library_bias, main, others, alone: true, taken: Taken::default() })
    }

    /// Makes the requests of a script, in order, with breakpoints at these addresses of the library's file.
    pub(super) fn run(&mut self, script: &Script, watch: Watch, at: impl Iterator<Item = (u64, Interest)>) -> Result<Vec<Done>, Failed> {
        self.tracer.arm(at)?;
        let mut done: Vec<Done> = Vec::with_capacity(script.requests.len());
        let mut live = HashSet::new();
        for request in &script.requests {
            let (bytes, freed) = match request.call {
                Call::Malloc(bytes) | Call::Calloc(bytes) => (bytes, 0),
                Call::Free(of) => (bytes_of(script, of), done.get(of).map_or(0, |made| made.block)),
                Call::Tune(..) => (0, 0),
            };
            let mut called = self.ask(request, freed, watch)?;
            called.visits.iter_mut().for_each(|visit| visit.note_live(|address| live.contains(&address)));
            // A call of another function is a request for no block, and may not reach any site.
            let function = request.call.function().unwrap_or(Function::Free);
            let block = if function == Function::Free { freed } else { called.result };
            let _was_there = if function == Function::Free { live.remove(&block) } else { !live.insert(block) };
            let mut now = Done { function, block, passes: Passes::of(bytes, block), visits: std::mem::take(&mut called.visits) };
            if request.from_cache
                && let Some(before) = done.last_mut()
                && before.block == block
            {
                (before.passes, now.passes) = (Passes::Never, Passes::Never);
            }
            self.note_ways(request, &now, &called)?;
            done.push(now);
        }
        self.tracer.arm(std::iter::empty())?;
        Ok(done)
    }

    fn ask(&mut self, request: &Request, freed: u64, watch: Watch) -> Result<Called, Failed> {
        self.set_alone(request.thread == Thread::Alone)?;
        let thread = match request.thread {
            Thread::Alone | Thread::Main => self.main,
            Thread::Other(nth) => self.others.get(usize::from(nth)).copied().unwrap_or(self.main),
        };
        let (function, arguments) = match request.call {
            Call::Malloc(bytes) => (self.symbols.malloc, [bytes, 0, 0]),
            Call::Calloc(bytes) => (self.symbols.calloc, [1, bytes, 0]),
            Call::Free(_) => (self.symbols.free, [freed, 0, 0]),
            Call::Tune(parameter, value) => {
                let word = |number: i32| u64::from(number.cast_unsigned());
                (self.symbols.mallopt, [word(parameter), word(value), 0])
            }
        };
        let function = function.wrapping_add(self.bias);
        match watch {
            Watch::Closely => self.tracer.watch(thread, function, arguments, request.trouble),
            Watch::Counting => self.tracer.count(thread, function, arguments),
        }
    }

    /// Sets the flags by which the library distinguishes one thread from several.
    fn set_alone(&mut self, alone: bool) -> Result<(), Failed> {
        if alone != self.alone {
            self.tracer.poke_part(self.main.wrapping_add(TCB_SEVERAL), u64::from(!alone), u32::MAX.into())?;
            if let Some(flag) = self.symbols.single_threaded {
                self.tracer.poke_part(flag.wrapping_add(self.bias), u64::from(alone), 0xff)?;
            }
            self.alone = alone;
        }
        Ok(())
    }

    fn note_ways(&mut self, request: &Request, done: &Done, called: &Called) -> Result<(), Failed> {
        if request.from_cache && done.passes == Passes::Never {
            let kind = match request.thread {
                Thread::Alone => 0,
                Thread::Main => 1,
                Thread::Other(_) => 2,
            };
            self.taken.cached[kind] = true;
        }
        self.taken.locks |= request.thread == Thread::Main && called.locked;
        self.taken.waits[usize::from(done.function == Function::Free)] |= called.waited;
        let made = done.function != Function::Free;
        self.taken.failure |= made && done.block == 0;
        if made && done.passes == Passes::Once && matches!(request.thread, Thread::Other(_)) {
            self.taken.other_arena |= self.tracer.peek(done.block.wrapping_sub(SIZE_WORD_BEFORE))? & NON_MAIN_ARENA != 0;
        }
        Ok(())
    }
}

/// The size that a request of a script allocates.
fn bytes_of(script: &Script, number: usize) -> u64 {
    match script.requests.get(number).map(|request| request.call) {
        Some(Call::Malloc(bytes) | Call::Calloc(bytes)) => bytes,
        _ => 0,
    }
}
