//! Which functions that report failure by a C++ exception may be probed, and when their returns: see docs/design/0004.

use crate::allocator::functions::Function;
use crate::probe::plan::SitePlan;
use crate::process::Process;
use crate::process::handle::read_bounded;

/// Maximum number of bytes read of `/proc/PID/limits`, which has sixteen lines.
const LIMITS_BYTES_MAX: u64 = 8 << 10;

/// What decides whether functions that throw may be probed: an exception cannot be unwound through a probed return.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReturnProbePolicy {
    /// An allocation of ordinary size may fail.
    pub limited: bool,
    /// The kernel can leave the return of a single call unprobed.
    pub chooses_returns: bool,
    /// The user wants throwing functions probed even if it cannot.
    pub accepted: bool,
}

impl ReturnProbePolicy {
    /// Whether this site may be probed.
    #[must_use]
    pub fn allows(self, site: &SitePlan) -> bool {
        self.chooses_returns || (self.accepted && !self.limited) || !may_throw(site)
    }

    /// A sentence on what is left out: the functions of `place` that are not probed, or their calls that are skipped.
    #[must_use]
    pub fn sentence(self, throwing: usize, place: &str) -> Option<String> {
        const LIMITED: &str = "the process's memory is limited (RLIMIT_AS, RLIMIT_DATA or vm.overcommit_memory=2)";
        const CAUGHT: &str = "a probe would keep a std::bad_alloc from being caught; what they allocate is not recorded";
        match (throwing, self) {
            (0, _) | (_, Self { limited: false, chooses_returns: true, .. } | Self { limited: false, accepted: true, .. }) => None,
            (_, Self { limited: true, .. }) => {
                Some(format!("{throwing} throwing forms of operator new in {place} are not probed: {LIMITED}, and {CAUGHT}"))
            }
            (_, _) => Some(format!(
                "{throwing} throwing forms of operator new in {place} are not probed: before Linux 6.13 the kernel cannot leave the return \
                 of a failing call unprobed, and {CAUGHT} (`record --probe-throwing` records it in a program that never catches one)"
            )),
        }
    }
}

/// Whether a site is of a function that fails by an exception.
#[must_use]
pub fn may_throw(site: &SitePlan) -> bool {
    site.function.get().is_some_and(Function::may_throw)
}

/// Whether an allocation of ordinary size may fail: then operator new throws (see `FP_THROW_BYTES` in fragprof.h).
#[must_use]
pub fn memory_is_limited(process: &Process) -> bool {
    let limits = read_bounded(&process.directory().join("limits"), LIMITS_BYTES_MAX).unwrap_or_default();
    let strict = std::fs::read_to_string("/proc/sys/vm/overcommit_memory").is_ok_and(|mode| mode.trim() == "2");
    strict || is_limited(&String::from_utf8_lossy(&limits))
}

/// The same from the text of `/proc/PID/limits` (fs/proc/base.c: name, soft limit, hard limit, unit).
fn is_limited(limits: &str) -> bool {
    let soft = |line: &str| {
        let values = ["Max address space", "Max data size"].iter().find_map(|name| line.strip_prefix(name))?;
        values.split_ascii_whitespace().next().map(str::to_owned)
    };
    limits.lines().filter_map(soft).any(|soft| soft != "unlimited")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: &str = "Limit                     Soft Limit           Hard Limit           Units     \n\
        Max data size             unlimited            unlimited            bytes     \n\
        Max stack size            8388608              unlimited            bytes     \n\
        Max address space         unlimited            unlimited            bytes     \n";

    #[test]
    fn only_limits_of_what_malloc_takes_make_it_fail() {
        assert!(!is_limited(LIMITS));
        assert!(is_limited(&LIMITS.replace("address space         unlimited ", "address space         629145600 ")));
        assert!(is_limited(&LIMITS.replace("data size             unlimited ", "data size             1048576   ")));
        assert!(!is_limited(""));
    }

    #[test]
    fn functions_that_are_not_probed_are_reported_with_the_reason() {
        let return_probes = |limited, chooses_returns, accepted| ReturnProbePolicy { limited, chooses_returns, accepted };
        assert_eq!(return_probes(false, true, false).sentence(6, "libtcmalloc.so.4"), None);
        assert_eq!(return_probes(false, false, true).sentence(6, "libtcmalloc.so.4"), None);
        assert_eq!(return_probes(true, true, false).sentence(0, "libc.so.6"), None);
        assert!(return_probes(true, true, false).sentence(6, "x").is_some_and(|it| it.contains("RLIMIT_AS")));
        assert!(return_probes(true, false, true).sentence(6, "x").is_some_and(|it| it.contains("RLIMIT_AS")));
        assert!(return_probes(false, false, false).sentence(6, "x").is_some_and(|it| it.contains("--probe-throwing")));
    }
}
