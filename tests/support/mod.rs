//! Shared by the integration tests: building and running the test programs, their rendezvous and ledgers, running fragprof, and reading
//! its reports. No expected value is computed with fragprof's own code.

pub mod build;
pub mod postgres;
pub mod process;
pub mod recording;
pub mod rendezvous;
pub mod report;
pub mod text;
#[path = "../../src/client/testing.rs"]
pub mod tls;
pub mod truth;

use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long a test waits for a condition that normally holds within a second. Generous: the machine may be loaded.
pub const LIMIT: Duration = Duration::from_secs(60);

/// Proof that BPF can be used here, so that a test cannot forget to check.
pub struct Bpf(());

/// Whether BPF programs can be loaded and attached here. If not, the reason is printed and the test passes as skipped, except under
/// `CI=true`, where a machine without BPF is a misconfiguration.
pub fn bpf() -> Option<Bpf> {
    let reason = match bpf_missing() {
        None => return Some(Bpf(())),
        Some(reason) => reason,
    };
    skip(&reason)
}

/// Skips a test and prints `reason`; fails under `CI=true`.
pub fn skip<T>(reason: &str) -> Option<T> {
    assert!(std::env::var("CI").as_deref() != Ok("true"), "cannot run here, and CI=true allows no skips: {reason}");
    println!("skipped: {reason}");
    None
}

fn bpf_missing() -> Option<String> {
    if !std::path::Path::new("/sys/kernel/btf/vmlinux").exists() {
        return Some("the kernel has no BTF (/sys/kernel/btf/vmlinux)".into());
    }
    let bytes = rustix::param::page_size() as u32;
    // SAFETY: a null name and null options are allowed; the result is a file descriptor or a negative error.
    let fd = unsafe { libbpf_sys::bpf_map_create(libbpf_sys::BPF_MAP_TYPE_RINGBUF, std::ptr::null(), 0, 0, bytes, std::ptr::null()) };
    if fd < 0 {
        return Some(format!("BPF maps cannot be created: {}", std::io::Error::from_raw_os_error(-fd)));
    }
    // SAFETY: fd was just created and has no other owner.
    drop(unsafe { OwnedFd::from_raw_fd(fd) });
    None
}

/// Lock for tests that load every core or measure time, so that they run one after the other.
pub fn serial() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}
