//! The player's process, and the ring through which it gets its calls (player.h, player.c).

use std::cell::Cell;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

use super::sandbox::Confinement;
use crate::bpf::{self, Play, PlayOp};
use crate::heap::residency::page_bytes;
use crate::process::Statm;
use crate::units::ShortDuration;

/// The program, linked at the build.
static PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/player"));

const SAMPLES_AT: usize = bpf::PLAYER_HEAD_BYTES as usize;
const SAMPLES: usize = bpf::PLAYER_SAMPLES_MAX as usize;
const RING_AT: usize = SAMPLES_AT + 8 * SAMPLES;
const RING: u32 = bpf::PLAYER_RING;
const SHARED_BYTES: usize = RING_AT + size_of::<Play>() * RING as usize;
/// Calls written before the player is told of them.
const BATCH: u32 = 512;
/// How long one sleep lasts at most, so that the end of the process is noticed.
const SLEEP: Duration = Duration::from_millis(100);

/// Limits of a replay.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes that the recorded blocks may take.
    pub heap_bytes_max: u64,
    /// Time for all calls.
    pub time_max: Duration,
    /// Time without any call made.
    pub stall_max: Duration,
}

impl Default for Limits {
    /// Three quarters of the memory that is available now, ten minutes, and half a minute.
    fn default() -> Self {
        let available = available_bytes().unwrap_or(1 << 30);
        Self { heap_bytes_max: available / 4 * 3, time_max: Duration::from_secs(600), stall_max: Duration::from_secs(30) }
    }
}

/// `MemAvailable` of `/proc/meminfo`.
fn available_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// How a player ended before it had made all calls.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Stopped {
    /// By a signal: the allocator crashed, or gave up.
    #[error("the allocator crashed (signal {0})")]
    Signal(i32),
    /// With a status: the allocator ended the process, or it could not be loaded.
    #[error("the process ended with status {0}")]
    Status(i32),
    /// No call returned for so long.
    #[error("the allocator hangs: no call returned for {} s", .0.as_secs())]
    Hangs(Duration),
    /// The time was not enough.
    #[error("the replay takes more than {} (--time-limit)", ShortDuration(.0.as_secs_f64()))]
    TimeOver(Duration),
}

/// Why a player could not be started.
#[derive(Debug, thiserror::Error)]
#[error("cannot start the replay's process: {what}: {source}")]
pub struct NoPlayer {
    what: &'static str,
    source: io::Error,
}

/// The memory that both processes have mapped.
struct Shared {
    start: *mut u8,
}

impl Shared {
    fn map(file: &OwnedFd) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice; the file has this length and is sealed against shrinking.
        let start =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), SHARED_BYTES, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0)? };
        Ok(Self { start: start.cast() })
    }

    fn player(&self) -> &bpf::Player {
        // SAFETY: the mapping begins with the struct, page-aligned and initialised with zeros, and lives as long as `self`. All fields are
        // atomics, so that the other process may write at any time.
        unsafe { &*self.start.cast::<bpf::Player>() }
    }

    /// A sample, in pages.
    fn sample(&self, index: usize) -> u64 {
        assert!(index < SAMPLES);
        // SAFETY: the samples lie in the mapping, aligned; the other process writes them in one store each.
        unsafe { self.start.add(SAMPLES_AT).cast::<std::sync::atomic::AtomicU64>().add(index).as_ref() }
            .map_or(0, |sample| sample.load(Ordering::Relaxed))
    }

    fn write(&self, at: u32, play: Play) {
        // SAFETY: the index is within the ring, and the player reads the entry only after `head` has passed it.
        unsafe { self.start.add(RING_AT).cast::<Play>().add((at % RING) as usize).write(play) }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping is this struct's own, with this length, and no reference into it is left.
        let _ = unsafe { rustix::mm::munmap(self.start.cast(), SHARED_BYTES) };
    }
}

/// A process that makes calls. It is killed when this is dropped.
pub struct Player {
    child: Child,
    shared: Shared,
    head: u32,
    published: u32,
    pauses: u32,
    limits: Limits,
    began: Instant,
    /// Calls made at the last look, and when that number changed.
    progress: Cell<(u32, Instant)>,
    samples: u32,
}

/// Figures of a player.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Allocator calls made.
    pub calls: u64,
    /// Calls that returned no block.
    pub failures: u64,
    /// Time of an average call in nanoseconds, from a sample; 0 = none.
    pub call_ns: u64,
    /// Threads that could not be created.
    pub thread_failures: u64,
}

impl Player {
    /// Starts a player with room for so many blocks and threads at a time. `environment`: what selects and configures the allocator.
    ///
    /// # Errors
    /// If memory or permissions are missing.
    pub fn start(environment: &[(OsString, OsString)], blocks_max: u32, threads_max: u32, limits: Limits) -> Result<Self, NoPlayer> {
        let at = |what: &'static str| move |source: io::Error| NoPlayer { what, source };
        let shared_file = memory_file("fragprof-calls", SHARED_BYTES as u64).map_err(at("no memory to share"))?;
        let shared = Shared::map(&shared_file).map_err(at("no memory to share"))?;
        shared.player().blocks_max.store(blocks_max, Ordering::SeqCst);
        shared.player().threads_max.store(threads_max.min(bpf::PLAYER_THREADS_MAX), Ordering::SeqCst);
        let program = memory_file("fragprof-player", 0).map_err(at("no memory for its program"))?;
        let mut file = File::from(program);
        file.write_all(PROGRAM).map_err(at("no memory for its program"))?;
        // Allocators reserve address space that counts as data although it is never touched.
        let data_bytes_max = limits.heap_bytes_max.saturating_mul(4).saturating_add(16 << 30);
        let confinement = Confinement::new(data_bytes_max, limits.time_max.as_secs().saturating_mul(2).max(10));
        let (shared_fd, program_fd) = (shared_file.as_raw_fd(), file.as_raw_fd());
        let mut command = Command::new(format!("/proc/self/fd/{program_fd}"));
        command.arg0("fragprof-player").env_clear().envs(environment.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        // SAFETY: the closure runs between fork and exec, and makes system calls only. The descriptors stay open in the parent until then.
        unsafe {
            command.pre_exec(move || {
                // A descriptor that is given to itself would keep its close-on-exec flag.
                if shared_fd == bpf::PLAYER_FD as i32 {
                    check(libc::fcntl(shared_fd, libc::F_SETFD, 0))?;
                } else {
                    if program_fd == bpf::PLAYER_FD as i32 {
                        return Err(io::Error::from_raw_os_error(libc::EBADF));
                    }
                    check(libc::dup2(shared_fd, bpf::PLAYER_FD as i32))?;
                }
                confinement.apply()
            });
        }
        let child = command.spawn().map_err(at("it cannot be confined or executed"))?;
        let now = Instant::now();
        Ok(Self { child, shared, head: 0, published: 0, pauses: 0, limits, began: now, progress: Cell::new((0, now)), samples: 0 })
    }

    /// The process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Has a call made.
    ///
    /// # Errors
    /// If the process ended or makes no progress.
    pub fn push(&mut self, play: Play) -> Result<(), Stopped> {
        while self.head.wrapping_sub(self.shared.player().tail.load(Ordering::Acquire)) == RING {
            self.publish();
            self.await_room()?;
        }
        self.shared.write(self.head, play);
        self.head = self.head.wrapping_add(1);
        if self.head.wrapping_sub(self.published) >= BATCH {
            self.publish();
        }
        Ok(())
    }

    /// Has a sample taken after the calls so far; `None` if there were too many. `ticks`: time since the last call.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub fn push_sample(&mut self, ticks: u32) -> Result<Option<u32>, Stopped> {
        if self.samples as usize >= SAMPLES {
            return Ok(None);
        }
        let block = self.samples;
        self.samples += 1;
        self.push(Play { ticks, block, ..nothing(PlayOp::Sample) })?;
        Ok(Some(block))
    }

    /// Waits until all calls so far are made, has `look` look at the process, which then stands still, and lets it go on.
    ///
    /// # Errors
    /// As [`Self::push`].
    pub fn pause<T>(&mut self, look: impl FnOnce(u32) -> T) -> Result<T, Stopped> {
        self.push(nothing(PlayOp::Pause))?;
        self.pauses += 1;
        self.publish();
        loop {
            let reached = self.shared.player().paused.load(Ordering::SeqCst);
            if reached >= self.pauses {
                break;
            }
            self.sleep(&self.shared.player().paused, reached)?;
        }
        let looked = look(self.pid());
        self.progress.set((self.progress.get().0, Instant::now()));
        self.shared.player().resumed.store(self.pauses, Ordering::SeqCst);
        wake(&self.shared.player().resumed);
        Ok(looked)
    }

    /// A sample, in bytes. Only valid once the player has passed it, as after a pause.
    #[must_use]
    pub fn sample_bytes(&self, index: u32) -> u64 {
        self.shared.sample(index as usize).saturating_mul(page_bytes())
    }

    /// Address of its table of blocks: an address for each place.
    #[must_use]
    pub fn blocks_at(&self) -> u64 {
        self.shared.player().blocks_at.load(Ordering::Relaxed)
    }

    /// Its anonymous memory now, in bytes.
    #[must_use]
    pub fn anonymous_bytes(&self) -> Option<u64> {
        anonymous_bytes(self.pid())
    }

    /// Figures so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let player = self.shared.player();
        let timed = player.timed_calls.load(Ordering::Relaxed);
        Counts {
            calls: player.calls.load(Ordering::Relaxed),
            failures: player.failures.load(Ordering::Relaxed),
            call_ns: player.timed_ns.load(Ordering::Relaxed).checked_div(timed).unwrap_or(0),
            thread_failures: player.thread_failures.load(Ordering::Relaxed).into(),
        }
    }

    fn publish(&mut self) {
        let player = self.shared.player();
        player.head.store(self.head, Ordering::SeqCst);
        self.published = self.head;
        if player.player_waits.load(Ordering::SeqCst) != 0 {
            wake(&player.head);
        }
    }

    fn await_room(&mut self) -> Result<(), Stopped> {
        let player = self.shared.player();
        player.writer_waits.store(1, Ordering::SeqCst);
        let tail = player.tail.load(Ordering::SeqCst);
        let slept = if self.head.wrapping_sub(tail) == RING { self.sleep(&player.tail, tail) } else { Ok(()) };
        player.writer_waits.store(0, Ordering::SeqCst);
        slept
    }

    /// Sleeps until a word is no longer `seen`, or for a while.
    fn sleep(&self, word: &AtomicU32, seen: u32) -> Result<(), Stopped> {
        let limit = libc::timespec { tv_sec: 0, tv_nsec: SLEEP.as_nanos() as libc::c_long };
        // SAFETY: the word is in the shared mapping and outlives the call; the limit is a local.
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, seen, &raw const limit, 0, 0) };
        if word.load(Ordering::SeqCst) != seen {
            return Ok(());
        }
        self.check()
    }

    /// Whether the process is there and has time left.
    fn check(&self) -> Result<(), Stopped> {
        if let Some(stopped) = self.ended() {
            return Err(stopped);
        }
        if self.began.elapsed() > self.limits.time_max {
            return Err(Stopped::TimeOver(self.limits.time_max));
        }
        let (tail, (before, since)) = (self.shared.player().tail.load(Ordering::Relaxed), self.progress.get());
        if tail != before {
            self.progress.set((tail, Instant::now()));
        } else if since.elapsed() > self.limits.stall_max {
            return Err(Stopped::Hangs(self.limits.stall_max));
        }
        Ok(())
    }

    /// How the process ended, without reaping it.
    fn ended(&self) -> Option<Stopped> {
        let pid = rustix::process::Pid::from_child(&self.child);
        let options =
            rustix::process::WaitIdOptions::EXITED | rustix::process::WaitIdOptions::NOHANG | rustix::process::WaitIdOptions::NOWAIT;
        let status = rustix::process::waitid(rustix::process::WaitId::Pid(pid), options).ok()??;
        status.terminating_signal().map(Stopped::Signal).or_else(|| Some(Stopped::Status(status.exit_status().unwrap_or(-1))))
    }

    /// The first line that the process wrote to its standard error, once it has ended.
    #[must_use]
    pub fn last_words(mut self) -> Option<String> {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let mut text = Vec::new();
        let error = self.child.stderr.take()?;
        io::Read::read_to_end(&mut io::Read::take(error, 4096), &mut text).ok()?;
        let line = String::from_utf8_lossy(&text).lines().next()?.trim().to_owned();
        (!line.is_empty()).then_some(line)
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A call of a kind, with nothing in it.
#[must_use]
pub fn nothing(op: PlayOp) -> Play {
    Play { bytes: 0, touch_from: 0, touch_to: 0, block: 0, thread: 0, ticks: 0, op: op as u8, alignment_bits: 0, pad: [0; 2] }
}

/// Anonymous memory of a process, in bytes.
#[must_use]
pub fn anonymous_bytes(pid: u32) -> Option<u64> {
    Statm::of(format!("/proc/{pid}").as_ref()).map(|statm| statm.anonymous_bytes())
}

fn memory_file(name: &str, bytes: u64) -> io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(file.as_fd(), bytes)?;
    Ok(file)
}

fn wake(word: &AtomicU32) {
    // SAFETY: the word is in the shared mapping and outlives the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX, 0, 0, 0) };
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
