//! A process as a look through `/proc` sees it.

use super::sample::Identity;

/// A process that passed the rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// Who it is.
    pub identity: Identity,
    /// Its name, lossy where it is not UTF-8.
    pub comm: String,
    /// Its user, as the owner of `/proc/PID`.
    pub uid: u32,
    /// Resident bytes.
    pub rss_bytes: u64,
    /// What it has done.
    pub activity: Activity,
}

/// What a process has done, as far as its line tells: while none of this changes its heap changes by what ten milliseconds of processor
/// time allow, and touches no new page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Activity {
    /// Page faults, minor and major.
    pub faults: u64,
    /// Processor time in clock ticks, 10 ms each.
    pub ticks: u64,
    /// Resident pages.
    pub pages: u64,
}
