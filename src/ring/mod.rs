//! Events of processes that record themselves, from memory that they share with the recorder (`src/sampler/preload/ring.h` has its layout).
//!
//! ```text
//! memory  the shared memory, created here and mapped by the processes
//! chunk   the cells of a chunk → events and stacks
//! reader  the chunks of all processes → each process's events, in the order of their tickets
//! ```
//!
//! The processes can write anything at any time, so nothing in the memory is believed: every number is checked where it is read, chunks and
//! entries are the only resources that a process can hold, and both are counted.

mod chunk;
mod memory;
mod reader;
#[cfg(test)]
mod tests;

pub use chunk::{Event, Kind};
pub use memory::{Counter, Memory, MemoryError};
pub use reader::{Announced, Counts, Reader, Receiver};

/// Default size of the memory's chunks in bytes: 4 million events, a tenth of a second of two threads that do nothing but allocate. Memory
/// that is not needed is never touched.
pub const BYTES_DEFAULT: u64 = 128 << 20;

/// The environment variable with the path of the memory. Read once, at a program's start.
pub const PATH_VARIABLE: &str = "FRAGPROF_RING";
