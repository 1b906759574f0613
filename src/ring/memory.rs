//! The shared memory: a memory file (memfd), which needs no name, no space on a disk, and no removal.
//!
//! Processes open it through `/proc/PID/fd`, so a program that is executed finds it again without inheriting a descriptor, and once the
//! recorder is gone nobody finds it any more.

use std::io;
use std::mem::offset_of;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::bpf::{self, Ring, RingChunk, RingProcess};

/// Bytes of a chunk.
const CHUNK_BYTES: usize = bpf::RING_CHUNK_BYTES as usize;
/// Bytes of a cell.
pub(super) const CELL_BYTES: usize = bpf::RING_CELL_BYTES as usize;
/// Cells of a chunk for events.
pub(super) const CELLS: u32 = bpf::RING_CHUNK_BYTES / bpf::RING_CELL_BYTES - 1;
/// Time for which the machine's counter is compared with the clock at the start. The comparison goes on while the memory is used.
const COMPARE: Duration = Duration::from_millis(2);
/// The resolution of times in the memory is finer than 1 / this, in seconds: 60 ns, and 32 bits of it last a minute and more.
const TICKS_PER_SECOND_MIN: f64 = 16e6;

/// Why there is no shared memory.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The system has none.
    #[error("cannot create {mib} MiB of memory to share with the processes: {source}")]
    Create {
        /// MiB wanted.
        mib: u64,
        /// The system's reason.
        source: io::Error,
    },
}

/// A reading of the machine's counter and of the clock.
#[derive(Debug, Clone, Copy)]
pub struct Counter {
    ticks: u64,
    at: Instant,
}

impl Counter {
    /// Now.
    #[must_use]
    pub fn now() -> Self {
        Self { ticks: ticks(), at: Instant::now() }
    }
}

/// The machine's counter: runs at one rate on all CPUs.
fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has the instruction.
    unsafe {
        std::arch::x86_64::_rdtsc()
    }
    #[cfg(target_arch = "aarch64")]
    {
        let ticks: u64;
        // SAFETY: reads a counter that Linux makes readable.
        unsafe { std::arch::asm!("mrs {}, cntvct_el0", out(reg) ticks) };
        ticks
    }
}

/// The memory. All accesses are atomic: processes write at any time.
#[derive(Debug)]
pub struct Memory {
    start: NonNull<u8>,
    bytes: usize,
    /// Chunks, as the reader knows them, whatever the header says by now.
    chunks: u32,
    shift: u32,
    first: Counter,
    backing: Backing,
}

#[derive(Debug)]
enum Backing {
    File(OwnedFd),
    /// Of a test.
    Words(#[allow(dead_code)] Box<[AtomicU64]>),
}

// SAFETY: the memory is only accessed by atomic operations.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Backing::File(_) = self.backing {
            // SAFETY: mapped in `create`, and no reference outlives self.
            let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
        }
    }
}

/// Bytes before the chunks.
fn head_bytes(chunks: u32) -> usize {
    let head = bpf::RING_HEADER_BYTES as usize + bpf::RING_PROCESSES as usize * size_of::<RingProcess>() + chunks as usize * 4;
    head.next_multiple_of(CHUNK_BYTES)
}

impl Memory {
    /// Memory for events, `bytes` in all chunks; `flags`: what to record, `RING_*`.
    ///
    /// # Errors
    /// If the system does not give it.
    pub fn create(bytes: u64, flags: u32) -> Result<Self, MemoryError> {
        let failed = |source: rustix::io::Errno| MemoryError::Create { mib: bytes >> 20, source: source.into() };
        let file = rustix::fs::memfd_create("fragprof-ring", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(failed)?;
        Self::in_file(file, bytes, flags)
    }

    /// The same in a memory file that a process made. Its pages are allocated now, so that they count as this process's memory, and not as
    /// that of the process that writes into them.
    ///
    /// # Errors
    /// If the system does not give it.
    pub fn adopt(file: OwnedFd, bytes: u64, flags: u32) -> Result<Self, MemoryError> {
        let memory = Self::in_file(file, bytes, flags)?;
        if let Backing::File(file) = &memory.backing {
            rustix::fs::fallocate(file, FallocateFlags::empty(), 0, memory.bytes as u64)
                .map_err(|source| MemoryError::Create { mib: bytes >> 20, source: source.into() })?;
        }
        Ok(memory)
    }

    fn in_file(file: OwnedFd, bytes: u64, flags: u32) -> Result<Self, MemoryError> {
        let failed = |source: rustix::io::Errno| MemoryError::Create { mib: bytes >> 20, source: source.into() };
        let chunks = (bytes / CHUNK_BYTES as u64).clamp(2, u64::from(bpf::RING_CHUNKS_MAX)) as u32;
        let length = head_bytes(chunks) + chunks as usize * CHUNK_BYTES;
        rustix::fs::ftruncate(&file, length as u64).map_err(failed)?;
        // A process that made it smaller would end this one by a signal at its next access.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).map_err(failed)?;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), length, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0)
                .map_err(failed)?
        };
        let start = NonNull::new(start.cast()).ok_or_else(|| failed(rustix::io::Errno::NOMEM))?;
        let first = Counter::now();
        std::thread::sleep(COMPARE);
        let mut memory = Self { start, bytes: length, chunks, shift: 0, first, backing: Backing::File(file) };
        memory.shift = (1.0 / memory.seconds_per_tick(Counter::now()) / TICKS_PER_SECOND_MIN).log2().max(0.0) as u32;
        memory.ring32(offset_of!(Ring, version)).store(bpf::RING_VERSION, Ordering::Relaxed);
        memory.ring32(offset_of!(Ring, chunks)).store(chunks, Ordering::Relaxed);
        memory.ring32(offset_of!(Ring, flags)).store(flags, Ordering::Relaxed);
        memory.ring32(offset_of!(Ring, counter_shift)).store(memory.shift, Ordering::Relaxed);
        memory.ring32(offset_of!(Ring, magic)).store(bpf::RING_MAGIC, Ordering::Release);
        Ok(memory)
    }

    /// Memory with contents that processes could have written, for tests of the reader: as many chunks as the bytes fill.
    #[must_use]
    pub fn of_bytes(bytes: &[u8]) -> Self {
        let chunks = (bytes.len().saturating_sub(head_bytes(1)) / CHUNK_BYTES).clamp(1, 64) as u32;
        let length = head_bytes(chunks) + chunks as usize * CHUNK_BYTES;
        let word = |at: usize| {
            let part = bytes.get(at * 8..).unwrap_or_default();
            let mut word = [0; 8];
            for (to, from) in word.iter_mut().zip(part) {
                *to = *from;
            }
            AtomicU64::new(u64::from_le_bytes(word))
        };
        let words: Box<[AtomicU64]> = (0..length / 8).map(word).collect();
        let start = NonNull::from(&*words).cast();
        Self { start, bytes: length, chunks, shift: 0, first: Counter::now(), backing: Backing::Words(words) }
    }

    /// The path by which other processes open it.
    #[must_use]
    pub fn path(&self) -> String {
        let file = if let Backing::File(file) = &self.backing { file.as_raw_fd() } else { -1 };
        format!("/proc/{}/fd/{file}", std::process::id())
    }

    fn at<T>(&self, offset: usize) -> &T {
        assert!(offset + size_of::<T>() <= self.bytes && offset.is_multiple_of(align_of::<T>()), "an offset outside of the shared memory");
        // SAFETY: inside of the mapping, aligned, and T is an atomic (the callers below).
        unsafe { self.start.add(offset).cast().as_ref() }
    }

    fn ring32(&self, field: usize) -> &AtomicU32 {
        self.at(field)
    }

    fn process_at(&self, entry: usize, field: usize) -> usize {
        bpf::RING_HEADER_BYTES as usize + entry * size_of::<RingProcess>() + field
    }

    /// A field of an entry for a process image.
    pub(super) fn process32(&self, entry: usize, field: usize) -> &AtomicU32 {
        self.at(self.process_at(entry, field))
    }

    /// The same, of eight bytes.
    pub(super) fn process64(&self, entry: usize, field: usize) -> &AtomicU64 {
        self.at(self.process_at(entry, field))
    }

    /// The state of a chunk.
    pub(super) fn state(&self, chunk: u32) -> &AtomicU32 {
        self.at(bpf::RING_HEADER_BYTES as usize + bpf::RING_PROCESSES as usize * size_of::<RingProcess>() + chunk as usize * 4)
    }

    fn chunk_at(&self, chunk: u32, offset: usize) -> usize {
        head_bytes(self.chunks) + chunk as usize * CHUNK_BYTES + offset
    }

    /// The thread that owns a chunk, as it says.
    pub(super) fn tid(&self, chunk: u32) -> u32 {
        self.at::<AtomicU32>(self.chunk_at(chunk, offset_of!(RingChunk, tid))).load(Ordering::Relaxed)
    }

    /// Its number among the chunks of its process.
    pub(super) fn serial(&self, chunk: u32) -> u64 {
        self.at::<AtomicU64>(self.chunk_at(chunk, offset_of!(RingChunk, serial))).load(Ordering::Relaxed)
    }

    /// The complete cells of a chunk.
    pub(super) fn cells(&self, chunk: u32) -> u32 {
        self.at::<AtomicU32>(self.chunk_at(chunk, offset_of!(RingChunk, cells))).load(Ordering::Acquire).min(CELLS)
    }

    /// A word of a cell.
    pub(super) fn word(&self, chunk: u32, cell: u32, word: usize) -> u64 {
        self.at::<AtomicU64>(self.chunk_at(chunk, (cell as usize + 1) * CELL_BYTES + word * 8)).load(Ordering::Relaxed)
    }

    /// Number of chunks.
    pub(super) fn chunks(&self) -> u32 {
        self.chunks
    }

    /// Gives a chunk back.
    pub(super) fn give_back(&self, chunk: u32) {
        self.state(chunk).store(bpf::RING_CHUNK_FREE, Ordering::Release);
        self.ring32(offset_of!(Ring, returned)).fetch_add(1, Ordering::Release);
    }

    /// Says that the reader is alive, so that processes wait for it.
    pub(super) fn beat(&self) {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
        let now_ns = (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64);
        self.at::<AtomicU64>(offset_of!(Ring, alive_ns)).store(now_ns, Ordering::Relaxed);
    }

    /// Says that nobody reads any more.
    pub fn close(&self) {
        self.ring32(offset_of!(Ring, closed)).store(1, Ordering::Release);
    }

    /// Gives the pages of all chunks back to the system: a process that was recorded may have them mapped until it ends.
    pub fn discard(&self) {
        if let Backing::File(file) = &self.backing {
            let head = head_bytes(self.chunks) as u64;
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            if let Err(error) = rustix::fs::fallocate(file, flags, head, self.bytes as u64 - head) {
                tracing::debug!("cannot give the shared memory back: {error}");
            }
        }
    }

    /// Process images that found no free entry.
    #[must_use]
    pub fn refused(&self) -> u32 {
        self.ring32(offset_of!(Ring, refused)).load(Ordering::Relaxed)
    }

    /// How often processes have rung the bell.
    #[must_use]
    pub fn rung(&self) -> u32 {
        self.ring32(offset_of!(Ring, bell)).load(Ordering::Acquire)
    }

    /// Sleeps until a process rings the bell again, or this long.
    pub fn wait(&self, rung: u32, most: Duration) {
        let time = rustix::thread::Timespec { tv_sec: most.as_secs().cast_signed(), tv_nsec: i64::from(most.subsec_nanos()) };
        let _ = rustix::thread::futex::wait(self.ring32(offset_of!(Ring, bell)), rustix::thread::futex::Flags::empty(), rung, Some(&time));
    }

    /// Stores a word that a process waits for.
    fn answer(&self, word: &AtomicU32, value: u32) {
        word.store(value, Ordering::Release);
        let _ = rustix::thread::futex::wake(word, rustix::thread::futex::Flags::empty(), i32::MAX as u32);
    }

    /// Lets an announced process image go on.
    pub fn admit(&self, entry: usize) {
        self.answer(self.process32(entry, offset_of!(RingProcess, state)), bpf::RING_PROCESS_KNOWN);
    }

    /// How often a process image has found code that was not mapped before.
    #[must_use]
    pub fn look_wanted(&self, entry: usize) -> u32 {
        self.process32(entry, offset_of!(RingProcess, look)).load(Ordering::Acquire)
    }

    /// Whether it has been answered.
    #[must_use]
    pub fn has_looked(&self, entry: usize, wanted: u32) -> bool {
        self.process32(entry, offset_of!(RingProcess, looked)).load(Ordering::Relaxed) == wanted
    }

    /// The inode by which a mapping of the memory is recognised; 0 = there is none.
    #[must_use]
    pub fn inode(&self) -> u64 {
        if let Backing::File(file) = &self.backing { rustix::fs::fstat(file).map_or(0, |stat| stat.st_ino) } else { 0 }
    }

    /// Its mappings have been read since.
    pub fn looked(&self, entry: usize, wanted: u32) {
        self.answer(self.process32(entry, offset_of!(RingProcess, looked)), wanted);
    }

    /// Whether calls of malloc reach the library in a process image; `None` = not known yet.
    #[must_use]
    pub fn is_in_front(&self, entry: usize) -> Option<bool> {
        match self.process32(entry, offset_of!(RingProcess, in_front)).load(Ordering::Relaxed) {
            1 => Some(true),
            2 => Some(false),
            _ => None,
        }
    }

    fn seconds_per_tick(&self, now: Counter) -> f64 {
        let seconds = now.at.duration_since(self.first.at).as_secs_f64();
        let ticks = now.ticks.wrapping_sub(self.first.ticks).max(1);
        if seconds > 0.0 { seconds / ticks as f64 } else { 1e-9 }
    }

    /// Nanoseconds from an event to a later reading; 0 for one that seems to be later.
    pub(super) fn age(&self, now: Counter) -> impl Fn(u32) -> u64 + use<> {
        let (shift, ns_per_tick) = (self.shift, self.seconds_per_tick(now) * 1e9);
        move |when| {
            let age = ((now.ticks >> shift) as u32).wrapping_sub(when);
            if age > u32::MAX / 2 { 0 } else { (f64::from(age) * (1u64 << shift) as f64 * ns_per_tick) as u64 }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_process_cannot_make_the_memory_smaller() {
        let memory = Memory::create(1 << 20, 0).unwrap();
        let file = std::fs::File::options().write(true).open(memory.path()).unwrap();
        assert_eq!(file.set_len(4096).unwrap_err().raw_os_error(), Some(libc::EPERM));
        // Its pages may be given back all the same.
        memory.state(0).store(7, Ordering::Relaxed);
        memory.discard();
        assert_eq!(memory.state(0).load(Ordering::Relaxed), 7, "the head stays");
    }

    #[test]
    fn a_file_that_a_process_has_sealed_is_refused() {
        let made = |seals| {
            let file = rustix::fs::memfd_create("one", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
            rustix::fs::fcntl_add_seals(&file, seals).unwrap();
            file
        };
        assert!(Memory::adopt(made(SealFlags::empty()), 1 << 20, 0).is_ok());
        for seals in [SealFlags::GROW, SealFlags::SEAL, SealFlags::WRITE] {
            assert!(Memory::adopt(made(seals), 1 << 20, 0).is_err(), "{seals:?}");
        }
    }
}
