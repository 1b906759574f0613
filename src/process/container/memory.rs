//! A cgroup's memory: limit, usage, and the part of it that the kernel can reclaim.
//!
//! | | version 2 | version 1 |
//! |---|---|---|
//! | limit | the smallest `memory.max` of it and its ancestors | `memory.limit_in_bytes`, likewise |
//! | usage | `memory.current` | `memory.usage_in_bytes` |
//! | inactive file pages | `inactive_file` of `memory.stat` | `total_inactive_file` |
//! | OOM kills | `oom_kill` of `memory.events` | `oom_kill` of `memory.oom_control` |
//!
//! Sources: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of the kernel. The parsers are pure; [`read`] does the I/O.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::process::handle::read_bounded;
use crate::units::HumanBytes;

/// Maximum number of bytes read of a file of the memory controller: `memory.stat`, the longest, has about 2 KiB.
const FILE_BYTES_MAX: u64 = 64 << 10;
/// Maximum number of ancestors whose limit is read. A kubelet nests five levels, kind nine.
const ANCESTORS_MAX: usize = 32;
/// Version 1 reports "no limit" as a number: LONG_MAX rounded down to a page (mm/memcontrol-v1.c, PAGE_COUNTER_MAX). Any limit of an
/// exbibyte or more counts as none.
const NO_LIMIT_BYTES: u64 = 1 << 60;

/// The version of the memory controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// Version 1: `memory.limit_in_bytes` and so on.
    V1,
    /// Version 2: `memory.max` and so on.
    V2,
}

/// The figures of a cgroup's memory controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, serde::Deserialize, schemars::JsonSchema)]
pub struct CgroupMemory {
    /// Bytes that its processes may use: the smallest limit of it and its ancestors. `None` = no limit.
    pub limit_bytes: Option<u64>,
    /// Bytes in use, including page cache.
    pub usage_bytes: u64,
    /// Usage without inactive file pages, which the kernel reclaims first: the figure that a kubelet compares with the limit.
    pub working_set_bytes: u64,
    /// Processes killed because memory ran out, since the cgroup was created.
    pub oom_kills: u64,
}

impl CgroupMemory {
    /// `of 6.00 GiB used of a 6.00 GiB limit: 2.50 GiB live, 2.90 GiB trimmable`, with what is known of a process's heaps.
    #[must_use]
    pub fn sentence(&self, live_bytes: Option<u64>, trimmable_bytes: Option<u64>) -> String {
        let used = HumanBytes(self.usage_bytes);
        let limit = match self.limit_bytes {
            Some(limit) => format!("of {used} used of a {} limit", HumanBytes(limit)),
            None => format!("of {used} used without a limit"),
        };
        let parts: Vec<String> = [(live_bytes, "live"), (trimmable_bytes, "trimmable")]
            .into_iter()
            .filter_map(|(bytes, name)| Some(format!("{} {name}", HumanBytes(bytes?))))
            .collect();
        if parts.is_empty() { format!("{limit}: the heap is not known") } else { format!("{limit}: {}", parts.join(", ")) }
    }
}

/// Reads a cgroup's figures. `mount` is the mount point of the hierarchy; `path`, relative to it, is the cgroup. `None` without a memory
/// controller: its files are missing, or the path does not exist.
#[must_use]
pub fn read(version: Version, mount: &Path, path: &Path) -> Option<CgroupMemory> {
    let (limit_file, usage_file, events_file, inactive_key) = match version {
        Version::V1 => ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_inactive_file"),
        Version::V2 => ("memory.max", "memory.current", "memory.events", "inactive_file"),
    };
    let own = mount.join(path);
    let file = |directory: &Path, name: &str| read_bounded(&directory.join(name), FILE_BYTES_MAX).ok();
    let usage_bytes = number(&file(&own, usage_file)?)?;
    let inactive_bytes = file(&own, "memory.stat").and_then(|bytes| keyed(&bytes, inactive_key)).unwrap_or(0);
    let oom_kills = file(&own, events_file).and_then(|bytes| keyed(&bytes, "oom_kill")).unwrap_or(0);
    let limits = ancestors(path).into_iter().filter_map(|one| limit(&file(&mount.join(one), limit_file)?));
    Some(CgroupMemory { limit_bytes: limits.min(), usage_bytes, working_set_bytes: usage_bytes.saturating_sub(inactive_bytes), oom_kills })
}

/// The cgroup and its ancestors, nearest first, root last (version 2's root has no limit file, which does no harm).
fn ancestors(path: &Path) -> Vec<PathBuf> {
    path.ancestors().take(ANCESTORS_MAX).map(Path::to_path_buf).collect()
}

/// A limit: a number, or `max` for no limit.
fn limit(bytes: &[u8]) -> Option<u64> {
    number(bytes).filter(|&bytes| bytes < NO_LIMIT_BYTES)
}

fn number(bytes: &[u8]) -> Option<u64> {
    std::str::from_utf8(bytes).ok()?.trim().parse().ok()
}

/// The number after a key, in a file with lines of the form `key number`.
fn keyed(bytes: &[u8], key: &str) -> Option<u64> {
    let text = std::str::from_utf8(bytes).ok()?;
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = directory.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        directory
    }

    #[test]
    fn the_smallest_limit_of_the_ancestors_applies_in_version_2() {
        let tree = tree(&[
            ("kubepods/memory.max", "max\n"),
            ("kubepods/pod/memory.max", "500\n"),
            ("kubepods/pod/c/memory.max", "700\n"),
            ("kubepods/pod/c/memory.current", "450\n"),
            ("kubepods/pod/c/memory.stat", "anon 300\nfile 100\ninactive_file 90\ninactive_anon 1\n"),
            ("kubepods/pod/c/memory.events", "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n"),
        ]);
        let memory = read(Version::V2, tree.path(), Path::new("kubepods/pod/c")).unwrap();
        assert_eq!(memory, CgroupMemory { limit_bytes: Some(500), usage_bytes: 450, working_set_bytes: 360, oom_kills: 2 });
    }

    #[test]
    fn version_1_has_different_names_and_a_number_for_no_limit() {
        let none = "9223372036854771712\n";
        let tree = tree(&[
            ("memory.limit_in_bytes", none),
            ("docker/memory.limit_in_bytes", none),
            ("docker/c/memory.limit_in_bytes", none),
            ("docker/c/memory.usage_in_bytes", "1000\n"),
            ("docker/c/memory.stat", "inactive_file 1\ntotal_inactive_file 400\n"),
            ("docker/c/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"),
        ]);
        let memory = read(Version::V1, tree.path(), Path::new("docker/c")).unwrap();
        assert_eq!(memory, CgroupMemory { limit_bytes: None, usage_bytes: 1000, working_set_bytes: 600, oom_kills: 5 });
    }

    #[test]
    fn without_the_controller_nothing_is_known() {
        let tree = tree(&[("a/cgroup.procs", ""), ("b/memory.current", "garbage")]);
        for path in ["a", "b", "gone"] {
            assert_eq!(read(Version::V2, tree.path(), Path::new(path)), None, "{path}");
        }
    }

    #[test]
    fn the_sentence_has_the_known_figures() {
        let gib = |tenths: u64| (tenths << 30) / 10;
        let memory = CgroupMemory { limit_bytes: Some(gib(60)), usage_bytes: gib(60), ..CgroupMemory::default() };
        assert_eq!(
            memory.sentence(Some(gib(25)), Some(gib(29))),
            "of 6.00 GiB used of a 6.00 GiB limit: 2.50 GiB live, 2.90 GiB trimmable"
        );
        let unlimited = CgroupMemory { limit_bytes: None, ..memory };
        assert_eq!(unlimited.sentence(None, Some(gib(29))), "of 6.00 GiB used without a limit: 2.90 GiB trimmable");
        assert_eq!(memory.sentence(None, None), "of 6.00 GiB used of a 6.00 GiB limit: the heap is not known");
    }
}
