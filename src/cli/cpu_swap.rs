//! Runs two processes side by side for comparison: each on a CPU of its own, and they swap CPUs every few milliseconds.
//!
//! The speed of a virtual machine's CPUs changes by half within a second, with the load of others on the same hardware. Two runs one after
//! the other then differ by more than what is measured; two processes that keep swapping CPUs run under the same conditions.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, bail};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::units::Pid;

/// Time between swaps: longer than a time slice of the scheduler, shorter than the changes in the machine's speed.
const STAY: Duration = Duration::from_millis(10);

/// Two processes that swap CPUs until this is dropped; then they may run on all CPUs again.
#[derive(Debug)]
pub struct CpuSwap {
    stop: Arc<AtomicBool>,
    mover: Option<JoinHandle<()>>,
}

impl CpuSwap {
    /// Pins them to the first two CPUs that this process may use.
    ///
    /// # Errors
    /// If there is only one.
    pub fn start(pids: [Pid; 2]) -> anyhow::Result<Self> {
        let all = sched_getaffinity(None).context("cannot read this process's CPU affinity")?;
        let mut processors = (0..CpuSet::MAX_CPU).filter(|&processor| all.is_set(processor));
        let (Some(first), Some(second)) = (processors.next(), processors.next()) else {
            bail!("this measurement needs two CPUs: two copies of the work run side by side");
        };
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let change_places = move || {
            let mut places = [only(first), only(second)];
            while !stopped.load(Ordering::Relaxed) {
                for (pid, place) in pids.into_iter().zip(&places) {
                    put(pid, place);
                }
                places.swap(0, 1);
                std::thread::sleep(STAY);
            }
            for pid in pids {
                put(pid, &all);
            }
        };
        let mover = std::thread::Builder::new().name("fragprof-beside".into()).spawn(change_places)?;
        Ok(Self { stop, mover: Some(mover) })
    }
}

impl Drop for CpuSwap {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(mover) = self.mover.take() {
            // The thread itself has reported its panic.
            let _ = mover.join();
        }
    }
}

fn only(processor: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(processor);
    set
}

/// Pins all its threads. One that has ended meanwhile is skipped.
fn put(pid: Pid, place: &CpuSet) {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return };
    for thread in threads.flatten() {
        let tid = thread.file_name().to_str().and_then(|name| name.parse().ok()).and_then(rustix::process::Pid::from_raw);
        if let Some(tid) = tid {
            let _ = sched_setaffinity(Some(tid), place);
        }
    }
}
