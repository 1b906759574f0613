//! `fragprof bench`: what tracing costs, as ratios measured in one run.
//!
//! The target is this program itself, in a loop of malloc and free of 64 to 127 bytes; it counts its pairs in shared memory. The ways of
//! probing are measured in turn in every round, in nanoseconds of the target's own CPU time per pair, so that a machine whose speed
//! drifts, or which is busy with other work, does not favour one of them. The median of the rounds is printed.
//!
//! With a command, a whole program that ends by itself is measured: its CPU time without probes, with empty probes on every entry point
//! that exact mode probes, and in exact mode.

use std::ffi::OsString;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Args;

use super::help::examples;
use super::record::failed;
use crate::bpf;
use crate::capture::floor::{Floor, FloorAttached};
use crate::capture::{AttachFile, AttachSite, Capture, Config, RING_BYTES, Sink, TargetFlags, wire};
use crate::machine::register::argument_register;
use crate::probe::cookie::Cookie;
use crate::probe::features::Features;
use crate::probe::plan::{FilePlan, plan};
use crate::process::Process;
use crate::profile::{Stack, ValueKind};
use crate::session::{Options, Recorder};
use crate::units::{FileOffset, Pid};

/// Measure what tracing costs a program, as ratios within one run
#[derive(Debug, Args)]
#[command(after_help = examples(&[
    ("sudo fragprof bench", "Exact mode, compared with empty probes"),
    ("sudo fragprof bench -- CMD ARGS", "The same for a whole program"),
    ("sudo fragprof bench --governed -- CMD ARGS", "A budget of 1 %, and the census alone"),
]))]
pub struct BenchArgs {
    /// Number of rounds; the median is reported
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Milliseconds per measurement
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(10..=60_000))]
    pub ms: u64,
    /// Measure what a budget of 1 % costs the command, or the processes given, and what the census alone costs
    #[arg(long, requires = "command")]
    pub governed: bool,
    /// With --governed: measure two processes that do the same work (give the option twice) while the command runs as their load
    #[arg(long, value_name = "PID", requires = "governed")]
    pub pid: Vec<u32>,
    /// Command to measure instead of the loop, after --; it must end by itself
    #[arg(last = true, value_name = "CMD")]
    pub command: Vec<OsString>,
    /// Act as the target: allocate and free in this many threads, and count pairs in the file behind this descriptor
    #[arg(long, num_args = 2, value_names = ["THREADS", "FD"], hide = true)]
    pub target: Option<Vec<i32>>,
}

/// The shared counters of pairs: one per thread, a cache line apart.
const COUNTERS_BYTES: usize = 4096;
const COUNTER_STRIDE: usize = 64;
const THREADS_MAX: usize = COUNTERS_BYTES / COUNTER_STRIDE;

/// Measures, or acts as the target.
///
/// # Errors
/// If BPF is not permitted here or the target cannot be started.
pub fn run(args: &BenchArgs) -> anyhow::Result<()> {
    if let Some(target) = &args.target {
        be_the_target(target[0].clamp(1, THREADS_MAX as i32) as usize, target[1]);
    }
    if args.governed {
        return super::bench_governed::run(&args.command, &args.pid, args.rounds);
    }
    if !args.command.is_empty() {
        return whole_program(&args.command, args.rounds);
    }
    let window = Duration::from_millis(args.ms);
    let pair = pair_costs(args.rounds, window)?;
    println!("malloc and free of 64 to 127 bytes, one thread, ns of CPU time per pair (median of {} rounds)", args.rounds);
    let floor = pair[1];
    for (name, ns) in ["alone", "floor: empty probes, same sites", "exact mode", "exact mode, probes at function entry"].iter().zip(pair) {
        println!("  {name:<42} {ns:>9.1} ns   {:>6.2} x floor", ns / floor);
    }
    let (pairs, lost) = two_threads(Duration::from_secs(3).max(window))?;
    println!("two threads at full speed, default buffers: {pairs} pairs, {lost} records lost");
    Ok(())
}

fn pair_costs(rounds: u32, window: Duration) -> anyhow::Result<[f64; 4]> {
    let target = Target::start(1)?;
    let process = Process::open(target.pid()).map_err(|e| failed(e.into()))?;
    let plan = plan(&process, Features::of_host().emulation()).map_err(|e| failed(e.into()))?;
    let Some(file) = plan.files.iter().find(|file| file.serves_malloc) else { bail!("the benchmark's own malloc was not found") };
    let placed = pair_sites(file, false);
    let bare = pair_sites(file, true);
    let floor = Floor::load().map_err(|e| failed(e.into()))?;
    let capture = Capture::load(&Config::default()).map_err(|e| failed(e.into()))?;
    let mut ring = capture.open_ring(RING_BYTES, Box::new(Discard)).map_err(|e| failed(e.into()))?;
    let slot = capture.add_target(target.pid(), &ring, TargetFlags(bpf::TARGET_STACKS)).map_err(|e| failed(e.into()))?;
    let maps = process.maps().map_err(|e| failed(e.into()))?;
    capture.tables().sync_process(&process, target.pid().0, &maps).map_err(|e| failed(e.into()))?;
    if !capture.tables().wait_until_loaded(Duration::from_secs(10)) {
        bail!("the unwind tables of the benchmark's own files were not ready within 10 s");
    }
    capture.switch(slot, true);

    let mut samples: [Vec<f64>; 4] = Default::default();
    for _ in 0..rounds {
        samples[0].push(target.ns_per_pair(window)?);
        let probes = floor.attach(target.pid(), &placed).map_err(|e| failed(e.into()))?;
        samples[1].push(target.ns_per_pair(window)?);
        drop(probes);
        for (which, sites) in [(2, &placed), (3, &bare)] {
            let probes = capture.attach(target.pid(), slot, std::slice::from_ref(sites)).map_err(|e| failed(e.into()))?;
            samples[which].push(target.ns_per_pair(window)?);
            drop(probes);
        }
    }
    ring.stop();
    Ok(samples.map(median))
}

/// CPU seconds of a program without probes, with empty probes, and in exact mode.
fn whole_program(command: &[OsString], rounds: u32) -> anyhow::Result<()> {
    let mut samples: [Vec<f64>; 3] = Default::default();
    let mut records = Counts::default();
    for _ in 0..rounds {
        samples[0].push(cpu_seconds(command, |_| Ok(Box::new(())))?);
        samples[1].push(cpu_seconds(command, |pid| Ok(Box::new(floor_on(pid)?)))?);
        samples[2].push(cpu_seconds(command, |pid| {
            let mut recorder = Recorder::new(Options::default()).map_err(failed)?;
            recorder.watch(pid).map_err(failed)?;
            Ok(Box::new(Watching { recorder: Some(recorder), counts: &mut records }))
        })?);
    }
    let [alone, floor, exact] = samples.map(median);
    println!("{}: CPU time (median of {rounds} rounds)", command[0].to_string_lossy());
    for (name, seconds) in [("alone", alone), ("floor: empty probes on every entry point", floor), ("exact mode", exact)] {
        println!("  {name:<42} {seconds:>9.3} s   {:>6.2} x alone   {:>6.2} x floor", seconds / alone, seconds / floor);
    }
    println!(
        "exact mode: {} allocations, {:.1} frames per stack, {:.1} of them of managed runtimes, {} records lost",
        records.allocations, records.frames_per_stack, records.managed_per_stack, records.lost
    );
    Ok(())
}

/// What exact mode saw of the program's last round.
#[derive(Default)]
struct Counts {
    allocations: u64,
    frames_per_stack: f64,
    managed_per_stack: f64,
    lost: u64,
}

/// Keeps probes attached to a program until it has ended.
pub(super) trait Holds {
    /// Does the periodic work while the program runs.
    fn step(&mut self) {
        std::thread::sleep(Duration::from_millis(20));
    }
}

impl Holds for () {}
impl Holds for (Floor, Vec<FloorAttached>) {}

struct Watching<'a> {
    recorder: Option<Recorder>,
    counts: &'a mut Counts,
}

impl Holds for Watching<'_> {
    fn step(&mut self) {
        if let Some(recorder) = &mut self.recorder {
            recorder.step(Duration::from_millis(20));
        }
    }
}

impl Drop for Watching<'_> {
    fn drop(&mut self) {
        let Some(Ok(profile)) = self.recorder.take().map(Recorder::finish) else { return };
        let allocations = |stack: &Stack| stack.values.get(ValueKind::AllocObjects);
        self.counts.allocations = profile.stacks().iter().map(allocations).sum();
        let per_stack = |count: &dyn Fn(&Stack) -> usize| {
            let frames: u64 = profile.stacks().iter().map(|stack| allocations(stack) * count(stack) as u64).sum();
            frames as f64 / self.counts.allocations.max(1) as f64
        };
        let managed = |stack: &Stack| profile.frames_of(stack).filter(|frame| frame.kind().is_managed()).count();
        let managed_per_stack = per_stack(&managed);
        self.counts.frames_per_stack = per_stack(&|stack| stack.frames.len());
        self.counts.managed_per_stack = managed_per_stack;
        self.counts.lost = profile.meta.losses.iter().filter(|loss| loss.name.starts_with("lost_")).map(|loss| loss.value).sum();
    }
}

fn floor_on(pid: Pid) -> anyhow::Result<(Floor, Vec<FloorAttached>)> {
    let process = Process::open(pid).map_err(|e| failed(e.into()))?;
    let plan = plan(&process, Features::of_host().emulation()).map_err(|e| failed(e.into()))?;
    let floor = Floor::load().map_err(|e| failed(e.into()))?;
    let attach = |file: &FilePlan| {
        let sites = file.sites.iter().map(|site| AttachSite { offset: site.offset, cookie: 0, with_return: site.cookie.op.needs_return() });
        floor.attach(pid, &AttachFile { path: file.attach_path.clone(), sites: sites.collect() }).map_err(|e| failed(e.into()))
    };
    let attached = plan.files.iter().map(attach).collect::<anyhow::Result<Vec<_>>>()?;
    Ok((floor, attached))
}

/// A running command whose resource use is read when it ends.
pub(super) struct Copy {
    child: Child,
    name: String,
    pub(super) pid: Pid,
    /// User and system time, once it has ended.
    pub(super) used_s: Option<f64>,
}

impl Copy {
    pub(super) fn start(command: &[OsString]) -> anyhow::Result<Self> {
        let name = command[0].to_string_lossy().into_owned();
        let mut words = Command::new(&command[0]);
        let child = words.args(&command[1..]).stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let child = child.with_context(|| format!("cannot run {name}"))?;
        Ok(Self { pid: Pid(child.id()), child, name, used_s: None })
    }

    /// Waits until its C library is mapped.
    pub(super) fn wait_until_probable(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + Duration::from_secs(10);
        let maps = format!("/proc/{}/maps", self.pid);
        while !std::fs::read_to_string(&maps).is_ok_and(|maps| maps.contains("libc.so") || maps.contains("ld-musl")) {
            if Instant::now() > deadline || self.child.try_wait()?.is_some() {
                return Err(self.too_short());
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    fn too_short(&self) -> anyhow::Error {
        anyhow::anyhow!("{} ended before it could be probed: give a command that runs for seconds", self.name)
    }

    /// Whether it has ended; if so, `used_s` is set.
    pub(super) fn try_wait(&mut self) -> anyhow::Result<bool> {
        let mut status = 0;
        // SAFETY: plain integers, for which zero is a valid value.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: waits for our own child; both pointers are to locals.
        match unsafe { libc::wait4(self.pid.0 as i32, &raw mut status, libc::WNOHANG, &raw mut usage) } {
            0 => Ok(false),
            -1 => Err(std::io::Error::last_os_error()).context("cannot wait for the command"),
            _ => {
                let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
                self.used_s = Some(seconds(usage.ru_utime) + seconds(usage.ru_stime));
                Ok(true)
            }
        }
    }
}

/// Runs the command to its end, with what `hold` attaches as soon as its C library is mapped. Returns its user and system time.
fn cpu_seconds<'a>(command: &[OsString], hold: impl FnOnce(Pid) -> anyhow::Result<Box<dyn Holds + 'a>>) -> anyhow::Result<f64> {
    let mut copy = Copy::start(command)?;
    copy.wait_until_probable()?;
    let mut held = match hold(copy.pid) {
        Err(_) if copy.try_wait()? => return Err(copy.too_short()),
        held => held?,
    };
    while !copy.try_wait()? {
        held.step();
    }
    Ok(copy.used_s.unwrap_or(f64::NAN))
}

pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// malloc and free alone, at the chosen sites or at their entries.
fn pair_sites(file: &FilePlan, bare: bool) -> AttachFile {
    let pair = file.sites.iter().filter(|site| ["malloc", "free"].contains(&site.function.name()));
    let sites = pair.map(|site| {
        let with_return = site.cookie.op.needs_return();
        if !bare {
            return AttachSite { offset: site.offset, cookie: site.cookie.encode(0), with_return };
        }
        let register = |argument: Option<u8>| argument.and_then(argument_register);
        let shape = site.function.get().map(|function| function.shape);
        let cookie = Cookie {
            size: shape.and_then(|shape| register(shape.size)),
            count: shape.and_then(|shape| register(shape.count)),
            pointer: shape.and_then(|shape| register(shape.pointer)),
            sp_words: 0,
            // The chosen site is the first instruction that is not single-stepped.
            stepped: site.cookie.stepped || site.placement.offset > 0,
            ..site.cookie
        };
        AttachSite { offset: FileOffset(site.offset.0 - u64::from(site.placement.offset)), cookie: cookie.encode(0), with_return }
    });
    AttachFile { path: file.attach_path.clone(), sites: sites.collect() }
}

/// Two threads in a tight loop under the recorder as `record` runs it: pairs done, and records lost.
fn two_threads(window: Duration) -> anyhow::Result<(u64, u64)> {
    let target = Target::start(2)?;
    let mut recorder = Recorder::new(Options::default()).map_err(failed)?;
    recorder.watch(target.pid()).map_err(failed)?;
    let before = target.pairs();
    let end = Instant::now() + window;
    while Instant::now() < end {
        recorder.step(Duration::from_millis(50));
    }
    let pairs = target.pairs() - before;
    let counters = recorder.counters().map_err(failed)?;
    let lost = counters.iter().filter(|(counter, _)| counter.words().0.starts_with("lost_")).map(|(_, value)| value).sum();
    drop(recorder.finish().map_err(failed)?);
    Ok((pairs, lost))
}

/// A sink that drops all records: only the cost of sending them is measured.
struct Discard;

impl Sink for Discard {
    fn record(&mut self, _: &wire::Record<'_>) {}
    fn pause(&mut self) {}
    fn finish(&mut self) {}
}

/// The shared counters.
struct Counters {
    base: NonNull<u8>,
}

// SAFETY: only atomics are reached through the pointer, and the mapping is never taken away.
unsafe impl Send for Counters {}
// SAFETY: as above.
unsafe impl Sync for Counters {}

impl Counters {
    /// Maps the file behind a descriptor; the mapping stays for the life of the process.
    fn map(fd: i32) -> anyhow::Result<Self> {
        // SAFETY: a fresh shared mapping; the kernel checks the descriptor.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), COUNTERS_BYTES, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, fd, 0) };
        if base == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error()).context("cannot map the benchmark's counters");
        }
        Ok(Self { base: NonNull::new(base.cast()).context("mapped at address 0")? })
    }

    fn of_thread(&self, thread: usize) -> &AtomicU64 {
        // SAFETY: in bounds and aligned by the modulus and the stride; any bit pattern is an AtomicU64.
        unsafe { self.base.add(thread % THREADS_MAX * COUNTER_STRIDE).cast::<AtomicU64>().as_ref() }
    }
}

/// The target and its counters.
struct Target {
    child: Child,
    counters: Counters,
    _file: OwnedFd,
}

impl Target {
    fn start(threads: usize) -> anyhow::Result<Self> {
        let file = rustix::fs::memfd_create("fragprof-bench", rustix::fs::MemfdFlags::empty()).context("cannot create the counters")?;
        rustix::fs::ftruncate(&file, COUNTERS_BYTES as u64).context("cannot create the counters")?;
        let counters = Counters::map(file.as_raw_fd())?;
        let fd = file.as_raw_fd().to_string();
        let child = Command::new("/proc/self/exe")
            .args(["bench", "--target", &threads.to_string(), &fd])
            .spawn()
            .context("cannot start the benchmark's target")?;
        let target = Self { child, counters, _file: file };
        let deadline = Instant::now() + Duration::from_secs(10);
        while target.pairs() == 0 {
            if Instant::now() > deadline {
                bail!("the benchmark's target does not run");
            }
            std::thread::yield_now();
        }
        Ok(target)
    }

    fn pid(&self) -> Pid {
        Pid(self.child.id())
    }

    fn pairs(&self) -> u64 {
        (0..THREADS_MAX).map(|thread| self.counters.of_thread(thread).load(Ordering::Relaxed)).sum()
    }

    /// CPU time of the target's threads in ns: the first field of each `schedstat`.
    fn cpu_ns(&self) -> anyhow::Result<u64> {
        let mut sum = 0;
        for task in std::fs::read_dir(format!("/proc/{}/task", self.child.id())).context("cannot list the target's threads")? {
            let text = std::fs::read_to_string(task?.path().join("schedstat")).context("cannot read the target's CPU time")?;
            let ns: u64 = text.split_ascii_whitespace().next().and_then(|field| field.parse().ok()).context("no CPU time in schedstat")?;
            sum += ns;
        }
        Ok(sum)
    }

    fn ns_per_pair(&self, window: Duration) -> anyhow::Result<f64> {
        let (pairs, cpu) = (self.pairs(), self.cpu_ns()?);
        std::thread::sleep(window);
        let (pairs, cpu) = (self.pairs() - pairs, self.cpu_ns()? - cpu);
        if pairs == 0 {
            bail!("the benchmark's target makes no progress");
        }
        Ok(cpu as f64 / pairs as f64)
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // It loops forever; if it has already ended, there is nothing to do.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Allocates and frees until it is killed or its parent has ended.
fn be_the_target(threads: usize, fd: i32) -> ! {
    let Ok(counters) = Counters::map(fd) else { std::process::exit(1) };
    let counters: &'static Counters = Box::leak(Box::new(counters));
    // SAFETY: a plain system call: the kernel ends this process with its parent.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    for thread in 0..threads {
        let mut id = 0;
        let counter = std::ptr::from_ref(counters.of_thread(thread)).cast_mut().cast();
        // A thread of the C library's own, so that the stack is as short as that of a loop in C: the loop, start_thread, clone.
        // SAFETY: the function takes the counter, which is never freed, and never returns.
        if unsafe { libc::pthread_create(&raw mut id, std::ptr::null(), pairs_for_ever, counter) } != 0 {
            std::process::exit(1);
        }
    }
    loop {
        std::thread::park();
    }
}

extern "C" fn pairs_for_ever(counter: *mut libc::c_void) -> *mut libc::c_void {
    // SAFETY: the caller passes an AtomicU64 that is never freed.
    let counter = unsafe { &*counter.cast::<AtomicU64>() };
    let mut random = 1u32;
    loop {
        for _ in 0..64 {
            random = random.wrapping_mul(1_103_515_245).wrapping_add(12_345);
            // SAFETY: the block is freed once, right after; black_box keeps the pair from being optimised away.
            unsafe { libc::free(std::hint::black_box(libc::malloc(64 + (random >> 16) as usize % 64))) };
        }
        counter.fetch_add(64, Ordering::Relaxed);
    }
}
