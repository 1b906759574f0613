//! Features of the kernel and available permissions, as plain data, and the attach method that follows from them.
//!
//! BPF features are determined by trying them (see [`crate::capture`]) and are filled in there; this module only reads `/proc` and the file
//! system, and decides.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

use serde::{Serialize, Serializer};
use thiserror::Error;

use super::placement::Emulation;
use crate::process::handle::read_bounded;

/// Whether a feature works.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case", tag = "works", content = "reason")]
pub enum Support {
    /// It was tried and works.
    Yes,
    /// It was tried and does not, for this reason.
    No(String),
    /// It was not tried.
    #[default]
    Unknown,
}

impl Support {
    /// Whether it was tried and works.
    #[must_use]
    pub fn works(&self) -> bool {
        *self == Self::Yes
    }
}

/// The capabilities that fragprof uses; values are bit numbers of include/uapi/linux/capability.h.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Capability {
    /// Reads files regardless of their mode.
    DacReadSearch = 2,
    /// Reads other processes' memory and maps.
    SysPtrace = 19,
    /// Perf-event uprobes, and everything on kernels before 5.8.
    SysAdmin = 21,
    /// Locks more memory than the limit: needed for BPF maps before 5.11.
    SysResource = 24,
    /// Attaches tracing programs.
    Perfmon = 38,
    /// Loads programs and creates maps.
    Bpf = 39,
    /// Opens `/proc/PID/map_files`.
    CheckpointRestore = 40,
}

impl Capability {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::Bpf, Self::Perfmon, Self::SysPtrace, Self::SysAdmin, Self::DacReadSearch, Self::SysResource, Self::CheckpointRestore];

    /// Its name as tools print it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::DacReadSearch => "CAP_DAC_READ_SEARCH",
            Self::SysPtrace => "CAP_SYS_PTRACE",
            Self::SysAdmin => "CAP_SYS_ADMIN",
            Self::SysResource => "CAP_SYS_RESOURCE",
            Self::Perfmon => "CAP_PERFMON",
            Self::Bpf => "CAP_BPF",
            Self::CheckpointRestore => "CAP_CHECKPOINT_RESTORE",
        }
    }

    /// What does not work without it.
    #[must_use]
    pub fn without(self) -> &'static str {
        match self {
            Self::DacReadSearch => "no symbols, unwind tables or probe sites from files that only their owner may read",
            Self::SysPtrace => "no census and no recording of other users' processes, or of those in containers",
            Self::SysAdmin => "no recordings on kernels without uprobe_multi (before 6.6); not needed elsewhere",
            Self::SysResource => "no recordings on kernels before 5.11; not needed elsewhere",
            Self::Perfmon => "no recordings",
            Self::Bpf => "no recordings; the census does not need it",
            Self::CheckpointRestore => "no symbols, unwind tables or probe sites from libraries that were replaced or deleted on disk",
        }
    }

    /// The capabilities in the effective set in the text of `/proc/self/status`.
    #[must_use]
    pub fn effective_in(status: &[u8]) -> BTreeSet<Self> {
        let set = status
            .split(|&b| b == b'\n')
            .find_map(|line| line.strip_prefix(b"CapEff:"))
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok())
            .unwrap_or(0);
        Self::ALL.into_iter().filter(|&capability| set >> capability as u8 & 1 == 1).collect()
    }
}

impl Serialize for Capability {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// Features of the kernel and available permissions.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Features {
    /// The kernel's release string. For display: features are determined by trying them, never from this.
    pub kernel_release: String,
    /// One link for entry and return of many sites, paired by the kernel (Linux 6.13).
    pub uprobe_session: Support,
    /// One link for many sites (6.6).
    pub uprobe_multi: Support,
    /// A perf event per site, with everything that the ordinary programs need.
    pub perf_uprobe: Support,
    /// A perf event per site, with the programs for older kernels.
    pub perf_uprobe_by_address: Support,
    /// Attach cookies: a word per site (5.15).
    pub attach_cookie: Support,
    /// Task storage: state per thread (5.11).
    pub task_storage: Support,
    /// bpf_loop: long loops in a program (5.17).
    pub bpf_loop: Support,
    /// The unwinder's tables, created while the programs run; without them stacks end at their first frame.
    pub unwind_tables: Support,
    /// Ring buffers (5.8).
    pub ring_buffer: Support,
    /// The kernel's type information, in `/sys/kernel/btf/vmlinux`.
    pub btf: Support,
    /// Tracepoints by name.
    pub tracefs: Support,
    /// `/proc/sys/kernel/perf_event_paranoid`; `None` if it cannot be read.
    pub perf_event_paranoid: Option<i32>,
    /// Effective capabilities.
    pub capabilities: BTreeSet<Capability>,
    /// Whether uprobes emulate long nops here.
    pub long_nops_emulated: bool,
}

/// Methods to attach entry and return probes, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Attach {
    /// uprobe_multi sessions.
    Session,
    /// uprobe_multi, one link for the entries and one for the returns.
    Multi,
    /// A perf event per site.
    PerfEvents,
    /// A perf event per site, with the sites distinguished by their addresses: for kernels without attach cookies, task storage or
    /// bpf_loop.
    ByAddress,
}

impl Attach {
    /// All methods, best first.
    pub const ALL: [Self; 4] = [Self::Session, Self::Multi, Self::PerfEvents, Self::ByAddress];

    /// Its name for display.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Session => "uprobe_multi session",
            Self::Multi => "uprobe_multi",
            Self::PerfEvents => "perf-event uprobes",
            Self::ByAddress => "perf-event uprobes by address",
        }
    }
}

impl fmt::Display for Attach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why nothing can be attached.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("recording needs features or permissions that are missing: {}", .0.join("; "))]
pub struct Missing(pub Vec<String>);

impl Features {
    /// Features that can be read without trying: release, permissions, BTF, tracefs. The others are [`Support::Unknown`].
    #[must_use]
    pub fn of_host() -> Self {
        let read = |path: &str| read_bounded(Path::new(path), 64 << 10).unwrap_or_default();
        let text = |path: &str| String::from_utf8_lossy(&read(path)).trim().to_owned();
        let exists = |path: &str, otherwise: &str| {
            if Path::new(path).exists() { Support::Yes } else { Support::No(otherwise.to_owned()) }
        };
        let kernel_release = text("/proc/sys/kernel/osrelease");
        Self {
            long_nops_emulated: Emulation::of_release(&kernel_release).long_nops,
            kernel_release,
            btf: exists(
                "/sys/kernel/btf/vmlinux",
                "/sys/kernel/btf/vmlinux does not exist: the kernel was built without CONFIG_DEBUG_INFO_BTF",
            ),
            tracefs: exists("/sys/kernel/tracing/events", "tracefs is not mounted at /sys/kernel/tracing, or not readable"),
            perf_event_paranoid: text("/proc/sys/kernel/perf_event_paranoid").parse().ok(),
            capabilities: Capability::effective_in(&read("/proc/self/status")),
            ..Self::default()
        }
    }

    /// The instructions that uprobes emulate here.
    #[must_use]
    pub fn emulation(&self) -> Emulation {
        Emulation { long_nops: self.long_nops_emulated }
    }

    /// The best method to attach.
    ///
    /// # Errors
    /// [`Missing`] names each missing feature that recording requires.
    pub fn attach(&self) -> Result<Attach, Missing> {
        let needed = [("BPF type information (BTF)", &self.btf), ("BPF ring buffers", &self.ring_buffer)];
        // Features that the programs for older kernels do not need.
        let recent = [("BPF task storage", &self.task_storage), ("BPF attach cookies", &self.attach_cookie), ("bpf_loop", &self.bpf_loop)];
        let lacks = |(name, support): (&str, &Support)| match support {
            Support::No(reason) => Some(format!("{name}: {reason}")),
            _ => None,
        };
        let mut missing: Vec<String> = needed.into_iter().filter_map(lacks).collect();
        let methods = [
            (Attach::Session, "uprobe_multi session", &self.uprobe_session),
            (Attach::Multi, "uprobe_multi", &self.uprobe_multi),
            (Attach::PerfEvents, "perf-event uprobes", &self.perf_uprobe),
            (Attach::ByAddress, "perf-event uprobes by address", &self.perf_uprobe_by_address),
        ];
        match methods.iter().find(|(_, _, support)| support.works()) {
            Some(&(method, ..)) if missing.is_empty() => Ok(method),
            Some(_) => Err(Missing(missing)),
            None => {
                missing.extend(recent.into_iter().filter_map(lacks));
                missing.extend(methods.into_iter().filter_map(|(_, name, support)| lacks((name, support))));
                if missing.is_empty() {
                    missing.push("no method to attach was tried".into());
                }
                Err(Missing(missing))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn everything() -> Features {
        Features {
            uprobe_session: Support::Yes,
            uprobe_multi: Support::Yes,
            perf_uprobe: Support::Yes,
            attach_cookie: Support::Yes,
            task_storage: Support::Yes,
            bpf_loop: Support::Yes,
            ring_buffer: Support::Yes,
            btf: Support::Yes,
            ..Features::default()
        }
    }

    #[test]
    fn the_best_method_that_works_is_taken() {
        let refused = || Support::No("refused".into());
        assert_eq!(everything().attach(), Ok(Attach::Session));
        assert_eq!(Features { uprobe_session: refused(), ..everything() }.attach(), Ok(Attach::Multi));
        let old = Features { uprobe_session: refused(), uprobe_multi: refused(), ..everything() };
        assert_eq!(old.attach(), Ok(Attach::PerfEvents));
        let older = Features {
            perf_uprobe: refused(),
            attach_cookie: refused(),
            task_storage: refused(),
            bpf_loop: refused(),
            perf_uprobe_by_address: Support::Yes,
            ..old
        };
        assert_eq!(older.attach(), Ok(Attach::ByAddress));
    }

    #[test]
    fn everything_that_is_missing_is_named_at_once() {
        let missing = Features {
            uprobe_session: Support::No("EINVAL".into()),
            uprobe_multi: Support::No("EINVAL".into()),
            perf_uprobe: Support::No("EACCES".into()),
            bpf_loop: Support::No("unknown helper".into()),
            ..everything()
        };
        let message = missing.attach().unwrap_err().to_string();
        for part in ["bpf_loop: unknown helper", "uprobe_multi session: EINVAL", "perf-event uprobes: EACCES"] {
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn capabilities_are_read_bit_by_bit() {
        let status = b"Name:\tx\nCapPrm:\t0000000000000000\nCapEff:\t000001c000080004\nCapBnd:\t0\n";
        assert_eq!(
            Capability::effective_in(status),
            [Capability::DacReadSearch, Capability::SysPtrace, Capability::Perfmon, Capability::Bpf, Capability::CheckpointRestore].into()
        );
        assert!(Capability::effective_in(b"").is_empty());
    }
}
