//! `fragprof bench`: what watching costs, as ratios measured in one run.
//!
//! The target is this program itself, in a loop of malloc and free of 64 to 127 bytes; it counts its pairs in shared memory. Each way
//! of probing is measured in turn, round after round, in nanoseconds of the target's own CPU time a pair, so that a machine whose
//! speed drifts, or which is busy with other things, does not favour one of them. The middle value of the rounds is printed.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::process::{Child, Command};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Args;

use super::record::failed;
use crate::capture::floor::Floor;
use crate::capture::{AttachFile, AttachSite, Capture, Config, Sink, TargetFlags, wire};
use crate::probe::cookie::Cookie;
use crate::probe::features::Features;
use crate::probe::functions::argument_register;
use crate::probe::plan::{FilePlan, plan};
use crate::recorder::{Options, Recorder};
use crate::target::Process;
use crate::units::{FileOffset, Pid};

/// Measure what watching costs, as ratios within one run
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// Rounds; the middle value counts
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Milliseconds a measurement
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u64).range(10..=60_000))]
    pub ms: u64,
    /// Be the target: allocate and free in this many threads, and count pairs in the file that this descriptor is of
    #[arg(long, num_args = 2, value_names = ["THREADS", "FD"], hide = true)]
    pub target: Option<Vec<i32>>,
}

/// The shared counter of pairs, one for each thread, a cache line apart.
const COUNTERS_BYTES: usize = 4096;
const COUNTER_STRIDE: usize = 64;
const THREADS_MAX: usize = COUNTERS_BYTES / COUNTER_STRIDE;

/// Measures, or is what is measured.
///
/// # Errors
/// If BPF is not permitted here or the target cannot be started.
pub fn run(args: &BenchArgs) -> anyhow::Result<()> {
    if let Some(target) = &args.target {
        be_the_target(target[0].clamp(1, THREADS_MAX as i32) as usize, target[1]);
    }
    let window = Duration::from_millis(args.ms);
    let pair = pair_costs(args.rounds, window)?;
    println!("malloc and free of 64 to 127 bytes, one thread, ns of CPU time a pair (median of {} rounds)", args.rounds);
    let floor = pair[1];
    for (name, ns) in ["alone", "floor: empty probes, well placed", "exact mode", "exact mode, probes at the bare symbols"].iter().zip(pair)
    {
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
    let readers = capture.read(vec![Box::new(Discard)]).map_err(|e| failed(e.into()))?;
    let slot = capture.add_target(target.pid(), 0, TargetFlags(wire::TARGET_STACKS)).map_err(|e| failed(e.into()))?;
    let maps = process.maps().map_err(|e| failed(e.into()))?;
    capture.tables().sync_process(&process, target.pid().0, &maps).map_err(|e| failed(e.into()))?;
    if !capture.tables().wait_until_loaded(Duration::from_secs(10)) {
        bail!("the unwind tables of the benchmark's own files were not ready in 10 s");
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
    readers.stop();
    Ok(samples.map(median))
}

fn median(mut values: Vec<f64>) -> f64 {
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
    let lost = counters.iter().filter(|(name, ..)| name.starts_with("lost_")).map(|(_, _, value)| value).sum();
    drop(recorder.finish().map_err(failed)?);
    Ok((pairs, lost))
}

/// A sink for those who only want to know what the sending costs.
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
        let file = rustix::fs::memfd_create("fragprof-bench", rustix::fs::MemfdFlags::empty()).context("cannot make the counters")?;
        rustix::fs::ftruncate(&file, COUNTERS_BYTES as u64).context("cannot make the counters")?;
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

    /// CPU time of the target's main thread in ns: the first field of `schedstat`.
    fn cpu_ns(&self) -> anyhow::Result<u64> {
        let text = std::fs::read_to_string(format!("/proc/{}/schedstat", self.child.id())).context("cannot read the target's CPU time")?;
        text.split_ascii_whitespace().next().and_then(|field| field.parse().ok()).context("no CPU time in schedstat")
    }

    fn ns_per_pair(&self, window: Duration) -> anyhow::Result<f64> {
        let (pairs, cpu) = (self.pairs(), self.cpu_ns()?);
        std::thread::sleep(window);
        let (pairs, cpu) = (self.pairs() - pairs, self.cpu_ns()? - cpu);
        if pairs == 0 {
            bail!("the benchmark's target stands still");
        }
        Ok(cpu as f64 / pairs as f64)
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // It loops for ever; nothing can be done if it is gone already.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Allocates and frees for ever, or until whoever started it is gone.
fn be_the_target(threads: usize, fd: i32) -> ! {
    let Ok(counters) = Counters::map(fd) else { std::process::exit(1) };
    let counters: &'static Counters = Box::leak(Box::new(counters));
    // SAFETY: a plain system call: the kernel ends this process with its parent.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    for thread in 1..threads {
        std::thread::spawn(move || pairs_for_ever(counters.of_thread(thread)));
    }
    pairs_for_ever(counters.of_thread(0))
}

fn pairs_for_ever(counter: &AtomicU64) -> ! {
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
