//! Finds the processes to watch: a scan of `/proc`, with one small file per process.
//!
//! It costs about 10 µs per process; user and cgroup of a process are read only if its name and size match the rules.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::rules::Rules;
use crate::heap::residency::page_bytes;
use crate::model::sample::Identity;
use crate::model::seen::{Activity, Candidate};
use crate::process::ProcessId;
use crate::process::container;
use crate::process::handle::{Stat, read_bounded};
use crate::units::Pid;

/// `/proc/PID/stat` has about 300 bytes.
const STAT_BYTES_MAX: u64 = 4096;
/// Most entries of `/proc` that are read: the kernel's largest pid (PID_MAX_LIMIT, include/linux/threads.h).
const PIDS_MAX: usize = 1 << 22;

/// The result of a scan.
#[derive(Debug, Clone, Default)]
pub struct Scan {
    /// Processes to watch, the largest first.
    pub seen: Vec<Candidate>,
    /// All processes, without kernel threads and zombies.
    pub processes: usize,
    /// Processes selected by the rules except for their size: they are listened to if they have an emitter.
    pub small: Vec<Candidate>,
    /// Processes selected by the rules, but beyond the limit on their number.
    pub over_limit: usize,
}

/// Scans `/proc`, and keeps the sizes of small processes.
#[derive(Debug, Default)]
pub struct Scanner {
    /// Resident bytes of a process when it was first seen, if the rules select by growth; `None` = it has grown enough once.
    first: HashMap<Identity, Option<u64>>,
    /// Processes that are watched whatever their size, because they are listened to.
    pub whatever_size: BTreeSet<Identity>,
}

impl Scanner {
    /// Scans once. Processes that end meanwhile are left out.
    ///
    /// # Errors
    /// If `/proc` itself cannot be read.
    pub fn scan(&mut self, rules: &Rules, processes_max: usize, own: Pid) -> std::io::Result<Scan> {
        let mut found = Scan::default();
        let mut before = std::mem::take(&mut self.first);
        for entry in fs::read_dir("/proc")?.take(PIDS_MAX) {
            let Some(pid) = entry.ok().and_then(|entry| entry.file_name().to_str()?.parse().ok()).map(Pid) else { continue };
            let directory = format!("/proc/{pid}");
            let Ok(bytes) = read_bounded(&Path::new(&directory).join("stat"), STAT_BYTES_MAX) else { continue };
            let Some((stat, figures)) = Stat::parse(&bytes).zip(Figures::parse(&bytes)) else { continue };
            if stat.is_kernel_thread() || stat.is_dead() {
                continue;
            }
            found.processes += 1;
            if pid == own || !rules.allow_name(&stat.comm) {
                continue;
            }
            let identity = Identity { process: ProcessId { pid, start_ticks: stat.start_ticks }, stack: figures.start_stack };
            let first = before.remove(&identity).unwrap_or(Some(figures.rss_bytes));
            let grown_bytes = first.map_or(u64::MAX, |first| figures.rss_bytes.saturating_sub(first));
            let is_large = rules.allow_size(figures.rss_bytes, grown_bytes) || self.whatever_size.contains(&identity);
            if rules.asks_for_growth() {
                // Once it has grown it is watched to its end, also while it is smaller again.
                let has_grown = !rules.allow_size(0, 0) && rules.allow_size(0, grown_bytes);
                self.first.insert(identity, first.filter(|_| !has_grown));
            }
            if rules.asks_for_cgroup() && !allows_cgroup(rules, pid) {
                continue;
            }
            let Ok(metadata) = fs::metadata(&directory) else { continue };
            if !rules.allow_user(metadata.uid()) {
                continue;
            }
            let list = if is_large { &mut found.seen } else { &mut found.small };
            list.push(Candidate {
                identity,
                comm: stat.comm,
                uid: metadata.uid(),
                rss_bytes: figures.rss_bytes,
                activity: figures.activity,
            });
        }
        found.seen.sort_by_key(|seen| (std::cmp::Reverse(seen.rss_bytes), seen.identity));
        found.over_limit = found.seen.len().saturating_sub(processes_max);
        found.seen.truncate(processes_max);
        Ok(found)
    }
}

fn allows_cgroup(rules: &Rules, pid: Pid) -> bool {
    let file = container::read(pid);
    let paths: Vec<&str> = [&file.unified, &file.memory, &file.systemd, &file.other].into_iter().filter_map(Option::as_deref).collect();
    rules.allow_cgroup(&paths)
}

/// Further fields of `/proc/PID/stat` (proc_pid_stat(5)): minflt is field 10, majflt 12, utime and stime 14 and 15, rss 24, startstack 28.
#[derive(Debug, PartialEq, Eq)]
struct Figures {
    rss_bytes: u64,
    /// Start of the stack, which the kernel chooses at random at each exec. 0 if it may not be read.
    start_stack: u64,
    activity: Activity,
}

impl Figures {
    fn parse(bytes: &[u8]) -> Option<Self> {
        let close = bytes.iter().rposition(|&byte| byte == b')')?;
        let rest = std::str::from_utf8(bytes.get(close + 1..)?).ok()?;
        // The first one here is field 3, and each is taken by its distance from the one before.
        let mut fields = rest.split_ascii_whitespace();
        let mut number = |skip: usize| fields.nth(skip)?.parse::<u64>().ok();
        let (minor, major) = (number(10 - 3)?, number(1)?);
        let (user, system) = (number(1)?, number(0)?);
        let pages = number(24 - 15 - 1)?;
        let start_stack = number(28 - 24 - 1)?;
        let activity = Activity { faults: minor.saturating_add(major), ticks: user.saturating_add(system), pages };
        Some(Self { rss_bytes: pages.saturating_mul(page_bytes()), start_stack, activity })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::agent::config::DiscoveryConfig;
    use crate::process::testing::Cat;

    fn all() -> Rules {
        Rules::new(&DiscoveryConfig { rss_min_mib: 0, ..Default::default() }, "")
    }

    #[test]
    fn resident_bytes_and_stack_are_taken_from_their_fields() {
        let line = b"77 (a) b) S 1 77 77 0 -1 4194560 100 0 0 0 1 2 0 0 20 0 1 0 123456 1000 200 18446744073709551615 1 2 140722 0 0\n";
        let activity = Activity { faults: 100, ticks: 3, pages: 200 };
        assert_eq!(Figures::parse(line), Some(Figures { rss_bytes: 200 * 4096, start_stack: 140_722, activity }));
        assert_eq!(Figures::parse(&line[..70]), None);
    }

    #[test]
    fn a_process_is_found_with_its_user_until_it_ends() {
        let mut cat = Cat::start(Path::new("/bin/cat"), None);
        let find = || {
            Scanner::default().scan(&all(), 100_000, Pid(0)).unwrap().seen.into_iter().find(|seen| seen.identity.process.pid == cat.pid())
        };
        let seen = find().unwrap();
        assert_eq!((seen.comm.as_str(), seen.uid), ("cat", rustix::process::getuid().as_raw()));
        assert!(seen.rss_bytes > 100_000 && seen.identity.stack != 0);
        let pid = cat.pid();
        cat.end();
        assert!(!Scanner::default().scan(&all(), 100_000, Pid(0)).unwrap().seen.iter().any(|seen| seen.identity.process.pid == pid));
    }

    #[test]
    fn the_largest_are_kept_and_the_rest_is_counted() {
        let everything = Scanner::default().scan(&all(), 100_000, Pid(0)).unwrap();
        assert!(everything.seen.len() >= 2 && everything.over_limit == 0);
        let one = Scanner::default().scan(&all(), 1, Pid(0)).unwrap();
        assert_eq!(one.seen.len(), 1);
        assert!(one.over_limit >= 1);
    }

    #[test]
    fn a_small_process_is_listed_as_small_and_watched_once_it_is_listened_to() {
        let cat = Cat::start(Path::new("/bin/cat"), None);
        let rules = Rules::new(&DiscoveryConfig { rss_min_mib: 1 << 20, ..Default::default() }, "");
        let mut scanner = Scanner::default();
        let of_cat = |list: &[Candidate]| list.iter().find(|seen| seen.identity.process.pid == cat.pid()).map(|seen| seen.identity);
        let found = scanner.scan(&rules, 100_000, Pid(0)).unwrap();
        assert_eq!(of_cat(&found.seen), None);
        scanner.whatever_size.extend(of_cat(&found.small));
        let found = scanner.scan(&rules, 100_000, Pid(0)).unwrap();
        assert!(of_cat(&found.seen).is_some() && of_cat(&found.small).is_none());
    }

    #[test]
    fn a_process_of_an_excluded_cgroup_is_left_out() {
        let cat = Cat::start(Path::new("/bin/cat"), None);
        let find = |cgroups: &[&str], exclude: &[&str]| {
            let list = |names: &[&str]| names.iter().map(ToString::to_string).collect();
            let config = DiscoveryConfig { rss_min_mib: 0, cgroups: list(cgroups), exclude_cgroups: list(exclude), ..Default::default() };
            let found = Scanner::default().scan(&Rules::new(&config, ""), 100_000, Pid(0)).unwrap();
            found.seen.iter().any(|seen| seen.identity.process.pid == cat.pid())
        };
        assert!(find(&["/*"], &[]) && find(&[], &["/no/such"]));
        assert!(!find(&["/no/such/*"], &[]) && !find(&[], &["/*"]));
    }

    #[test]
    fn a_process_that_has_grown_stays_watched() {
        let cat = Cat::start(Path::new("/bin/cat"), None);
        let config = DiscoveryConfig { rss_min_mib: 1 << 20, growth_min_mib: 1, ..Default::default() };
        let rules = Rules::new(&config, "");
        let mut scanner = Scanner::default();
        let find = |scanner: &mut Scanner| {
            let found = scanner.scan(&rules, 100_000, Pid(0)).unwrap();
            found.seen.into_iter().find(|seen| seen.identity.process.pid == cat.pid()).map(|seen| seen.identity)
        };
        assert_eq!(find(&mut scanner), None);
        // As if it had been seen when it was smaller than it is; and then larger.
        let (identity, first) =
            scanner.first.iter().find(|(identity, _)| identity.process.pid == cat.pid()).map(|(a, b)| (*a, *b)).unwrap();
        let least = first.unwrap().checked_sub(1 << 20).unwrap();
        scanner.first.insert(identity, Some(least));
        assert_eq!(find(&mut scanner), Some(identity));
        assert_eq!(scanner.first[&identity], None);
        assert_eq!(find(&mut scanner), Some(identity));
    }

    #[test]
    fn the_agent_itself_is_left_out() {
        let own = Pid(std::process::id());
        assert!(!Scanner::default().scan(&all(), 100_000, own).unwrap().seen.iter().any(|seen| seen.identity.process.pid == own));
    }
}
