//! Measures the cost of a probe hit on this machine, on a child process that only allocates and frees, alternately with and without probes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::bpf;
use crate::capture::{AttachFile, AttachSite, Attached, Capture, Ring, Slot, TargetFlags};
use crate::governor::{HitCosts, Spent};
use crate::machine::register::argument_register;
use crate::probe::cookie::Cookie;
use crate::probe::plan::{FilePlan, Planner};
use crate::process::Process;
use crate::session::target::attach_file;
use crate::session::tier::windows::cpu_time::of_process_ns;
use crate::session::tier::windows::spent::spent;
use crate::units::{Addr, Pid};

/// Rounds; the median counts.
const ROUNDS: usize = 5;
/// Of them, those that measure an instruction that is single-stepped: attaching the probe takes longer than the measurement.
const STEPPED_ROUNDS: usize = 3;
/// Length of one measurement: about 10,000 probed pairs.
const MEASURE: Duration = Duration::from_millis(20);
/// Frames below the loop: a typical stack depth.
const DEPTH: u32 = 16;
/// Maximum wait for the child to run, and for its unwind tables.
const READY_WITHIN: Duration = Duration::from_secs(5);

/// Measures the costs. Returns [`HitCosts::ASSUMED`] and the reason if that is impossible.
pub fn calibrate(capture: &Capture, ring: &Ring, planner: &mut Planner) -> (HitCosts, Option<String>) {
    match measure(capture, ring, planner) {
        Ok(Some(costs)) => (costs, None),
        Ok(None) => (HitCosts::ASSUMED, Some("the measurement gave implausible values".to_owned())),
        Err(error) => (HitCosts::ASSUMED, Some(format!("{error:#}"))),
    }
}

fn measure(capture: &Capture, ring: &Ring, planner: &mut Planner) -> anyhow::Result<Option<HitCosts>> {
    let child = Child::start()?;
    let process = Process::open(child.pid())?;
    let plan = planner.plan(&process)?;
    let Some(file) = plan.files.iter().find(|file| file.serves_malloc) else { anyhow::bail!("this program's own malloc was not found") };
    let of = |name: &str| attach_file(file, |site| site.function.name() == name);
    let (mallocs, frees) = (of("malloc"), of("free"));
    let stepped = stepped_site(&process, file);
    let slot = capture.add_target(child.pid(), ring, TargetFlags(bpf::TARGET_STACKS | bpf::TARGET_GOVERNED))?;
    let measured = (|| {
        capture.tables().sync_process(&process, child.pid().0, &process.maps()?)?;
        let _ = capture.tables().wait_until_loaded(READY_WITHIN);
        anyhow::ensure!(capture.open(child.pid(), slot, u64::MAX / 2, u64::MAX), "another recording traces it");
        let mut rounds = Vec::with_capacity(ROUNDS);
        let mut programs = [Spent::default(); 2];
        let mut stepped_ns = Vec::with_capacity(STEPPED_ROUNDS);
        for round in 0..ROUNDS {
            let alone = child.ns_per_pair()?;
            let probes = attach(capture, child.pid(), slot, &frees)?;
            let before = spent(capture.hits(slot));
            let with_free = child.ns_per_pair()?;
            let between = spent(capture.hits(slot));
            let more = attach(capture, child.pid(), slot, &mallocs)?;
            let before_both = spent(capture.hits(slot));
            let with_both = child.ns_per_pair()?;
            programs[0] += between.since(before);
            programs[1] += spent(capture.hits(slot)).since(before_both);
            drop((probes, more));
            rounds.push([alone, with_free, with_both]);
            if let Some(stepped) = stepped.as_ref().filter(|_| round < STEPPED_ROUNDS) {
                let probe = attach(capture, child.pid(), slot, stepped)?;
                stepped_ns.push(child.ns_per_pair()? - alone);
                drop(probe);
            }
        }
        // For a free, and for a pair, which is two hits.
        let [free_ns, pair_ns] =
            [(programs[0], 1.0), (programs[1], 2.0)].map(|(spent, hits)| spent.programs_ns as f64 / (spent.hits().max(1) as f64) * hits);
        let of_pair = ["malloc", "free"].map(|name| file.sites.iter().any(|site| site.function.name() == name && site.cookie.stepped));
        Ok(HitCosts::from_rounds(&rounds).map(|costs| costs.with_programs(free_ns, pair_ns).with_step(&stepped_ns, free_ns, of_pair)))
    })();
    capture.switch(slot, false);
    drop(child);
    if let Err(error) = capture.remove_target(process.pid(), slot) {
        tracing::warn!("{error}");
    }
    measured
}

/// [`stepped`], as if it were a function that frees: its first instruction is one that no kernel emulates.
fn stepped_site(process: &Process, file: &FilePlan) -> Option<AttachFile> {
    let addr = Addr(stepped as unsafe extern "C" fn(usize) as usize as u64);
    let offset = process.maps().ok()?.find(addr)?.offset_of(addr)?;
    let free = file.sites.iter().find(|site| site.function.name() == "free")?;
    let cookie = Cookie { pointer: argument_register(0), sp_words: 0, stepped: true, ..free.cookie };
    let site = AttachSite { offset, cookie: cookie.encode(0), with_return: false };
    Some(AttachFile { path: "/proc/self/exe".into(), sites: vec![site] })
}

/// Does nothing, with the address of a block that does not exist.
#[unsafe(naked)]
unsafe extern "C" fn stepped(_block: usize) {
    #[cfg(target_arch = "x86_64")]
    std::arch::naked_asm!("sub rsp, 8", "add rsp, 8", "ret");
    #[cfg(target_arch = "aarch64")]
    std::arch::naked_asm!("add x9, x9, #0", "ret");
}

fn attach(capture: &Capture, pid: Pid, slot: Slot, file: &AttachFile) -> anyhow::Result<Attached> {
    Ok(capture.attach_window(pid, slot, std::slice::from_ref(file))?)
}

/// The child process. It ends with its parent, and when this value is dropped.
struct Child {
    pid: libc::pid_t,
    pairs: &'static AtomicU64,
}

const COUNTER_BYTES: usize = 4096;

impl Child {
    fn start() -> anyhow::Result<Self> {
        // SAFETY: a fresh shared mapping.
        let shared = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                COUNTER_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        anyhow::ensure!(shared != libc::MAP_FAILED, "cannot map the counter: {}", std::io::Error::last_os_error());
        // SAFETY: zeroed, aligned to a page, mapped until drop; only reached as an atomic.
        let pairs = unsafe { &*shared.cast::<AtomicU64>() };
        let parent = std::process::id();
        // SAFETY: the child calls prctl, getppid, malloc and free (whose locks glibc reinitializes in fork), nothing else of the parent's
        // code, and never returns.
        let pid = unsafe { libc::fork() };
        match pid {
            -1 => anyhow::bail!("cannot start a child to measure: {}", std::io::Error::last_os_error()),
            0 => {
                // SAFETY: plain system calls.
                unsafe {
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                    if libc::getppid() as u32 != parent {
                        libc::_exit(0);
                    }
                }
                deeper(DEPTH, pairs)
            }
            _ => Ok(Self { pid, pairs }),
        }
    }

    fn pid(&self) -> Pid {
        Pid(self.pid as u32)
    }

    /// Nanoseconds of the child's CPU time per pair, over one measurement.
    fn ns_per_pair(&self) -> anyhow::Result<f64> {
        let deadline = Instant::now() + READY_WITHIN;
        let (pairs, cpu_ns) = (self.pairs.load(Ordering::Relaxed), self.cpu_ns()?);
        loop {
            std::thread::sleep(MEASURE);
            let (now_pairs, now_cpu_ns) = (self.pairs.load(Ordering::Relaxed), self.cpu_ns()?);
            // On a busy machine the child may not have run at all.
            if now_cpu_ns - cpu_ns >= MEASURE.as_nanos() as u64 / 4 && now_pairs > pairs {
                return Ok((now_cpu_ns - cpu_ns) as f64 / (now_pairs - pairs) as f64);
            }
            anyhow::ensure!(Instant::now() < deadline, "the measured child gets no CPU time");
        }
    }

    fn cpu_ns(&self) -> anyhow::Result<u64> {
        of_process_ns(self.pid()).ok_or_else(|| anyhow::anyhow!("the measured child has ended"))
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let mut status = 0;
        // SAFETY: our own child, not waited for before; the mapping is not used after.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, &raw mut status, 0);
            libc::munmap(std::ptr::from_ref(self.pairs).cast_mut().cast(), COUNTER_BYTES);
        }
    }
}

/// Recurses to a typical stack depth, then runs the loop.
#[inline(never)]
fn deeper(depth: u32, pairs: &AtomicU64) -> ! {
    if depth > 0 {
        // Must not become a tail call, which would leave no frames.
        let done = std::hint::black_box(deeper as fn(u32, &AtomicU64) -> !);
        done(depth - 1, pairs)
    }
    let mut size = 64usize;
    loop {
        // SAFETY: what is allocated is freed at once.
        unsafe { libc::free(std::hint::black_box(libc::malloc(std::hint::black_box(size)))) };
        // SAFETY: it does nothing.
        unsafe { stepped(std::hint::black_box(16)) };
        size = 64 + (size + 1) % 64;
        pairs.fetch_add(1, Ordering::Relaxed);
    }
}
