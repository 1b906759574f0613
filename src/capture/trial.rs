//! Attaches a probe to fragprof itself, to check whether a method's probes attach and whether the cookie arrives with the hit.
//!
//! A kernel that loads and attaches everything but passes the programs the wrong cookie would silently lose every call. So this module
//! probes a function of this process for a slot of the target table that has no target yet, calls it, and checks that slot's row for the
//! hit.

use std::sync::{Mutex, PoisonError};

use libbpf_rs::{MapCore as _, MapFlags, Object, ObjectBuilder, UprobeMultiOpts, UprobeOpts};
use zerocopy::IntoBytes as _;

use super::slots::Slot;
use super::targets::TargetTable;
use super::{Set, floor, load, sites};
use crate::allocator::functions::Op;
use crate::bpf::{TARGET_GOVERNED, TARGETS_MAX};
use crate::probe::cookie;
use crate::probe::features::Attach;
use crate::units::{Addr, Pid};

/// The row that the trial uses: the last one to be allocated.
const SLOT: Slot = Slot { index: TARGETS_MAX as u16 - 1, generation: 1 };

/// The function of this process that is probed.
#[inline(never)]
extern "C" fn probed() {
    std::hint::black_box(());
}

/// Attaches the method's first program to a function of this process, calls the function, and detaches. Returns whether the probe also sees
/// vfork children, which run in the process's memory: kernels before 6.12 compare the address space, later ones the process.
///
/// # Errors
/// If the kernel refuses the probe, or the hit does not arrive at the slot in the cookie.
pub fn run(object: &Object, method: Attach) -> libbpf_rs::Result<bool> {
    let _alone = AT_IT.lock().unwrap_or_else(PoisonError::into_inner);
    let address = probed as *const () as u64;
    let offset = own_file_offset(address).ok_or_else(|| failed("own executable not found in /proc/self/maps"))?;
    let table = TargetTable::map(&load::map(object, "targets")).map_err(|error| failed(&error.to_string()))?;
    let pid = Pid(std::process::id());
    // Governed and switched off: the hit is counted, and nothing else is done.
    table.own(SLOT, pid, 0, TARGET_GOVERNED);
    let hits = || table.hits(SLOT).allocations;
    let counts = hit(object, method, pid, address, offset, &hits);
    table.never_owned(SLOT);
    let (own, of_child) = counts?;
    if own == 0 { Err(failed("a probe was attached and hit, but its program did not receive its cookie")) } else { Ok(of_child > 0) }
}

/// Only one thread at a time calls the probed function, so that all hits belong to this trial.
static AT_IT: Mutex<()> = Mutex::new(());

/// Hits of this process, and those of a vfork child.
fn hit(object: &Object, method: Attach, pid: Pid, address: u64, offset: u64, hits: &dyn Fn() -> u64) -> libbpf_rs::Result<(u64, u64)> {
    let cookie = Op::Alloc as u64 | cookie::of_slot(SLOT.index);
    let program = load::program(object, load::programs(method)[0])?;
    let key = sites::key(pid, Addr(address), Set::Calls);
    let link = match method {
        Attach::PerfEvents | Attach::ByAddress => {
            if method == Attach::ByAddress {
                load::map(object, "site_cookies").update(key.as_bytes(), &cookie.to_ne_bytes(), MapFlags::ANY)?;
            }
            let cookie = if method == Attach::PerfEvents { cookie } else { 0 };
            program.attach_uprobe_with_opts(pid.0 as i32, "/proc/self/exe", offset as usize, UprobeOpts { cookie, ..Default::default() })?
        }
        Attach::Session | Attach::Multi => {
            let session = method == Attach::Session;
            let opts = UprobeMultiOpts { offsets: vec![offset as usize], cookies: vec![cookie], session, ..Default::default() };
            program.attach_uprobe_multi_with_opts(pid.0 as i32, "/proc/self/exe", "", opts)?
        }
    };
    std::hint::black_box(probed as extern "C" fn())();
    let own = hits();
    let of_child = in_a_child_of_vfork().map(|()| hits() - own);
    drop(link);
    if method == Attach::ByAddress {
        load::map(object, "site_cookies").delete(key.as_bytes())?;
    }
    Ok((own, of_child?))
}

/// Calls the probed function in a child that runs in this process's memory, as after vfork, and waits for its end.
fn in_a_child_of_vfork() -> libbpf_rs::Result<()> {
    extern "C" fn call(_: *mut libc::c_void) -> libc::c_int {
        std::hint::black_box(probed as extern "C" fn())();
        0
    }
    /// Enough for a function that calls an empty one, and for the kernel's signal frame.
    const STACK_BYTES: usize = 64 << 10;
    let mut stack = vec![0_u128; STACK_BYTES / size_of::<u128>()];
    // SAFETY: the child runs on its own stack, which outlives it: CLONE_VFORK suspends this thread until the child has ended. The child
    // touches no other memory and takes no lock. It has no exit signal, so only a wait with __WCLONE sees it.
    let pid = unsafe { libc::clone(call, stack.as_mut_ptr_range().end.cast(), libc::CLONE_VM | libc::CLONE_VFORK, std::ptr::null_mut()) };
    // SAFETY: waits for the child created above.
    if pid < 0 || unsafe { libc::waitpid(pid, std::ptr::null_mut(), libc::__WCLONE) } != pid {
        return Err(std::io::Error::last_os_error().into());
    }
    Ok(())
}

/// Attaches an empty program by the method, if the method is a link for many sites. This detects a kernel without such links before its
/// verifier processes the large programs without use, which takes seconds on a slow machine.
///
/// # Errors
/// If the kernel refuses.
pub fn glance(method: Attach) -> libbpf_rs::Result<()> {
    let (name, session) = match method {
        Attach::Session => ("floor_session", true),
        Attach::Multi => ("floor_entry", false),
        Attach::PerfEvents | Attach::ByAddress => return Ok(()),
    };
    let mut open = ObjectBuilder::default().open_memory(floor::OBJECT)?;
    for mut program in open.progs_mut() {
        let wanted = program.name() == name;
        program.set_autoload(wanted);
    }
    let object = open.load()?;
    let offset = own_file_offset(probed as *const () as u64).ok_or_else(|| failed("own executable not found in /proc/self/maps"))?;
    let opts = UprobeMultiOpts { offsets: vec![offset as usize], session, ..Default::default() };
    load::program(&object, name)?.attach_uprobe_multi_with_opts(std::process::id() as i32, "/proc/self/exe", "", opts).map(drop)
}

fn failed(what: &str) -> libbpf_rs::Error {
    libbpf_rs::Error::from(std::io::Error::other(what.to_owned()))
}

fn own_file_offset(address: u64) -> Option<u64> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines().find_map(|line| {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        let offset = u64::from_str_radix(fields.nth(1)?, 16).ok()?;
        (start..end).contains(&address).then(|| address - start + offset)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_offset_of_an_own_function_is_found() {
        assert!(own_file_offset(probed as *const () as u64).is_some());
        assert_eq!(own_file_offset(0), None);
    }
}
