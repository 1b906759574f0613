//! Drops the privileges that the agent does not need once it runs: every capability but those of [`Capability::ALL`], also from the
//! bounding set, and the ability to gain any through exec.
//!
//! Called on the main thread before others exist: capabilities are per thread, and new threads inherit them. CAP_SYS_ADMIN and
//! CAP_SYS_RESOURCE are for kernels without uprobe_multi: they are kept only if a trial shows that uprobe_multi does not work without them.
//! CAP_SYS_ADMIN is also what the kernel asks for before it shows a process's seccomp filters: it is kept if calls are made in processes by policy.

use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};

use crate::capture::has_uprobe_multi;
use crate::probe::features::Capability;

/// Drops them. CAP_SYS_ADMIN stays if `needs_admin`. Never fails: what cannot be dropped is kept and logged; the agent works either way.
pub fn reduce(needs_admin: bool) {
    if let Err(error) = set_no_new_privs(true) {
        tracing::warn!("cannot set no_new_privs: {error}");
    }
    let all = Capability::ALL.into_iter().fold(CapabilitySet::empty(), |set, one| set | bit(one));
    let held = match capabilities(None) {
        Ok(held) => held,
        Err(error) => {
            tracing::warn!("cannot read the agent's capabilities: {error}");
            return;
        }
    };
    let mut keep = if is_enough(all - OF_OLD_KERNELS, held) { all - OF_OLD_KERNELS } else { all };
    keep.set(CapabilitySet::SYS_ADMIN, needs_admin || keep.contains(CapabilitySet::SYS_ADMIN));
    // Only CAP_SETPCAP allows narrowing the bounding set; without it the agent is not root on a plain host, and in a container the runtime
    // has narrowed it.
    if held.effective.contains(CapabilitySet::SETPCAP) {
        for one in CapabilitySet::all().iter().filter(|one| !keep.contains(*one)) {
            // A capability that this kernel does not know is not in the set.
            let _ = remove_capability_from_bounding_set(one);
        }
    }
    let less = CapabilitySets { effective: held.effective & keep, permitted: held.permitted & keep, inheritable: CapabilitySet::empty() };
    if let Err(error) = set_capabilities(None, less) {
        tracing::warn!("cannot drop capabilities: {error}");
    }
}

/// Capabilities that recordings need only on kernels without uprobe_multi.
const OF_OLD_KERNELS: CapabilitySet = CapabilitySet::SYS_ADMIN.union(CapabilitySet::SYS_RESOURCE);

/// Whether probes can be attached with only these. Restores the thread's capabilities afterwards.
fn is_enough(less: CapabilitySet, held: CapabilitySets) -> bool {
    if (held.permitted & OF_OLD_KERNELS).is_empty() {
        return true;
    }
    if set_capabilities(None, CapabilitySets { effective: held.effective & less, ..held }).is_err() {
        return false;
    }
    let is_enough = has_uprobe_multi();
    if let Err(error) = set_capabilities(None, held) {
        tracing::warn!("cannot restore capabilities: {error}");
    }
    is_enough
}

fn bit(capability: Capability) -> CapabilitySet {
    CapabilitySet::from_bits_retain(1 << capability as u8)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn only_the_needed_capabilities_are_left() {
        // Capabilities are the thread's own: the other tests keep theirs.
        let left = std::thread::spawn(|| {
            reduce(false);
            std::fs::read_to_string("/proc/thread-self/status").unwrap()
        });
        let status = left.join().unwrap();
        let set = |name: &str| u64::from_str_radix(status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim(), 16).unwrap();
        let keep = Capability::ALL.into_iter().fold(0, |set, one| set | 1u64 << one as u8);
        assert_eq!((set("CapEff:") & !keep, set("CapPrm:") & !keep, set("CapInh:")), (0, 0, 0));
        assert!(status.contains("NoNewPrivs:\t1"));
        if rustix::process::getuid().is_root() {
            assert_eq!(set("CapBnd:") & !keep, 0);
        }
        // Where the kernel has probes for many sites, root gives up what only older ones need.
        let of_old_kernels = 1u64 << Capability::SysAdmin as u8 | 1u64 << Capability::SysResource as u8;
        if has_uprobe_multi() {
            assert_eq!(set("CapPrm:") & of_old_kernels, 0, "{status}");
        }
    }

    #[test]
    fn the_right_to_see_seccomp_filters_is_kept_only_where_memory_is_given_back() {
        let left = |needs_admin: bool| {
            let reduced = std::thread::spawn(move || {
                reduce(needs_admin);
                capabilities(None).unwrap().permitted.contains(CapabilitySet::SYS_ADMIN)
            });
            reduced.join().unwrap()
        };
        let held = capabilities(None).unwrap().permitted.contains(CapabilitySet::SYS_ADMIN);
        assert_eq!(left(true), held);
        assert_eq!(left(false), held && !has_uprobe_multi());
    }
}
