//! `/proc/PID/cgroup`: the cgroup of a process in each hierarchy. Pure.
//!
//! A line is `hierarchy:controllers:path` (cgroups(7)). Version 2 has one line, `0::PATH`; version 1 has one per hierarchy; the hybrid
//! setup has version 1's controllers and a version 2 hierarchy without any. Paths are relative to the reader's cgroup namespace: from
//! inside a private one, other processes' paths begin with `/..`.

/// Maximum number of bytes read of `/proc/PID/cgroup`: about 14 hierarchies, each with a path of at most [`PATH_BYTES_MAX`].
pub const FILE_BYTES_MAX: u64 = 64 << 10;
/// Maximum length of a path: the kernel's PATH_MAX, at which it truncates paths itself.
pub const PATH_BYTES_MAX: usize = 4096;
/// Maximum number of lines: the kernel has 14 controllers and one version 2 hierarchy.
const LINES_MAX: usize = 32;

/// The paths of one process. `None` if it has none in that hierarchy.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct CgroupFile {
    /// In version 2.
    pub unified: Option<String>,
    /// In the hierarchy of version 1 that has the memory controller.
    pub memory: Option<String>,
    /// In the hierarchy of version 1 that has the freezer.
    pub freezer: Option<String>,
    /// In version 1's `name=systemd`, which has no controller.
    pub systemd: Option<String>,
    /// In another version 1 hierarchy, the first whose path is not the root.
    pub other: Option<String>,
    /// Lines that were malformed, too long, or beyond the limit.
    pub refused_lines: u64,
}

impl CgroupFile {
    /// Parses the bytes. Never fails: unreadable lines are counted.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Self {
        let mut file = Self::default();
        for (number, line) in bytes.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()).enumerate() {
            let Some((controllers, path)) = parse_line(line).filter(|_| number < LINES_MAX) else {
                file.refused_lines += 1;
                continue;
            };
            let has = |controller| controllers.split(',').any(|name| name == controller);
            if has("freezer") {
                file.freezer.get_or_insert_with(|| path.clone());
            }
            let place = match controllers {
                "" => &mut file.unified,
                "name=systemd" => &mut file.systemd,
                _ if has("memory") => &mut file.memory,
                _ if path == "/" => continue,
                _ => &mut file.other,
            };
            place.get_or_insert(path);
        }
        file
    }

    /// The paths in the order in which they are searched for the container, that of the memory controller first. Runtimes put a container
    /// under the same name into each hierarchy that they use.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        [&self.memory, &self.unified, &self.systemd, &self.other].into_iter().flatten().map(String::as_str)
    }
}

/// Controllers and path of a line. A path may contain any byte except the newline, including colons; controllers' names contain no colon.
fn parse_line(line: &[u8]) -> Option<(&str, String)> {
    let mut parts = line.splitn(3, |&byte| byte == b':');
    let number = std::str::from_utf8(parts.next()?).ok()?;
    number.parse::<u32>().ok()?;
    let controllers = std::str::from_utf8(parts.next()?).ok()?;
    let path = parts.next()?;
    if path.len() > PATH_BYTES_MAX || path.first() != Some(&b'/') {
        return None;
    }
    // The kernel appends this to a removed cgroup that still has zombies.
    let path = path.strip_suffix(b" (deleted)").unwrap_or(path);
    Some((controllers, String::from_utf8_lossy(path).into_owned()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn version_2_has_one_path() {
        let file = CgroupFile::parse(b"0::/system.slice/redis.service\n");
        assert_eq!(file.unified.as_deref(), Some("/system.slice/redis.service"));
        assert_eq!(file.paths().count(), 1);
    }

    #[test]
    fn the_path_with_the_memory_controller_comes_first_in_a_hybrid_setup() {
        let file = CgroupFile::parse(b"9:name=systemd:/s\n4:cpu,cpuacct:/c\n3:hugetlb,memory:/m:with:colons\n1:pids:/\n0::/u\n");
        assert_eq!(file.paths().collect::<Vec<_>>(), ["/m:with:colons", "/u", "/s", "/c"]);
        assert_eq!(file.refused_lines, 0);
    }

    #[test]
    fn malformed_lines_are_counted_and_skipped() {
        let long = [b"0::/".as_slice(), &[b'a'; PATH_BYTES_MAX]].concat();
        let file = CgroupFile::parse(&[b"x\n0:\n::/a\n1:memory:relative\n\xff:memory:/\n".as_slice(), &long].concat());
        assert_eq!((file.paths().count(), file.refused_lines), (0, 6));
        let many = "5:memory:/a\n".repeat(100);
        assert_eq!(CgroupFile::parse(many.as_bytes()).refused_lines, 100 - LINES_MAX as u64);
    }

    #[test]
    fn the_own_file_is_parsed() {
        let bytes = std::fs::read("/proc/self/cgroup").unwrap();
        let file = CgroupFile::parse(&bytes);
        assert!(file.paths().count() >= 1);
        assert_eq!(file.refused_lines, 0);
    }
}
