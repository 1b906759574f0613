//! A process as found by a scan of `/proc`.

use super::sample::Identity;

/// A process selected by the rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Who it is.
    pub identity: Identity,
    /// Its name, with invalid UTF-8 replaced.
    pub comm: String,
    /// Its user, as the owner of `/proc/PID`.
    pub uid: u32,
    /// Resident bytes.
    pub rss_bytes: u64,
    /// Its activity.
    pub activity: Activity,
}

/// A process's activity, from its line in `/proc`: while none of this changes, it has used less than ten milliseconds of CPU time and touched
/// no new page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Activity {
    /// Page faults, minor and major.
    pub faults: u64,
    /// CPU time in clock ticks of 10 ms.
    pub ticks: u64,
    /// Resident pages.
    pub pages: u64,
}
