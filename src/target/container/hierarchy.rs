//! Where the cgroup hierarchies with the memory controller are, seen from here, and the directory of a path that `/proc` shows.
//!
//! `/proc/PID/cgroup` is relative to the reader's cgroup namespace. In a container that is mostly a private one: its root is the
//! container's own cgroup, others' paths begin with `/..`, and the hierarchy mounted in the container ends at that root. The whole tree
//! is reached through `/proc/1/root` (with the machine's pid namespace and CAP_SYS_PTRACE); the place of the own root in it is found by
//! its inode number, which is the same in every mount of a hierarchy.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::cgroup::CgroupFile;
use super::identity::Membership;
use super::memory::{self, CgroupMemory, Version};
use crate::target::process::read_bounded;

/// Bytes read of `mountinfo`: a node with a thousand containers has some ten thousand mounts of 200 bytes.
const MOUNTINFO_BYTES_MAX: u64 = 8 << 20;
/// Directories that are looked at for the own root: a node has some ten cgroups a container. It takes about 5 µs each, once.
const DIRECTORIES_MAX: usize = 100_000;

/// The hierarchies whose memory controller can be read.
#[derive(Debug, Clone, Default)]
pub struct Hierarchies {
    mounts: Vec<Mount>,
    /// What stands against reading memory limits here; empty if nothing does.
    pub doubts: Vec<String>,
}

/// One hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Mount {
    version: Version,
    /// The directory that is its root, as far as can be seen.
    root: PathBuf,
    /// Where below `root` the paths that `/proc` shows begin.
    prefix: PathBuf,
}

impl Hierarchies {
    /// Finds them. Never fails: what cannot be found is named in [`doubts`](Self::doubts) and costs the limits.
    #[must_use]
    pub fn find() -> Self {
        let mut found = Self::default();
        let whole = Path::new("/proc/1/root");
        let first = if is_private() { "/proc/1/mountinfo" } else { "/proc/self/mountinfo" };
        let base = if is_private() { whole } else { Path::new("/") };
        let Ok(bytes) = read_bounded(first.as_ref(), MOUNTINFO_BYTES_MAX) else {
            found.doubts.push(format!("{first} cannot be read, so memory limits of containers are not known"));
            return found;
        };
        for (version, point) in mounts(&String::from_utf8_lossy(&bytes)) {
            let root = base.join(point.strip_prefix("/").unwrap_or(&point));
            match own_prefix(version, &root) {
                Ok(prefix) => found.mounts.push(Mount { version, root, prefix }),
                Err(doubt) => found.doubts.push(doubt),
            }
        }
        found
    }

    /// The memory figures of the cgroup of a process: its container's, or its own outside containers. `None` in the root cgroup, and
    /// where no memory controller can be read.
    #[must_use]
    pub fn memory(&self, file: &CgroupFile) -> Option<CgroupMemory> {
        // In a hybrid only version 1 has the controller.
        self.mounts.iter().find_map(|mount| {
            let shown = match mount.version {
                Version::V1 => file.memory.as_deref()?,
                Version::V2 => file.unified.as_deref()?,
            };
            let path = resolve(&mount.prefix, &Membership::of(shown).path).filter(|path| !path.as_os_str().is_empty())?;
            memory::read(mount.version, &mount.root, &path)
        })
    }
}

/// Whether this process is in another cgroup namespace than pid 1. Where pid 1 may not be looked at, it is taken for the same: its root
/// could not be used either.
fn is_private() -> bool {
    let namespace = |path: &str| fs::read_link(path).ok();
    let (own, first) = (namespace("/proc/self/ns/cgroup"), namespace("/proc/1/ns/cgroup"));
    own.is_some() && first.is_some() && own != first
}

/// Where in the tree below `root` the own namespace's root is.
fn own_prefix(version: Version, root: &Path) -> Result<PathBuf, String> {
    if !is_private() {
        return Ok(PathBuf::new());
    }
    let bytes = read_bounded("/proc/self/mountinfo".as_ref(), MOUNTINFO_BYTES_MAX).unwrap_or_default();
    let own = mounts(&String::from_utf8_lossy(&bytes)).into_iter().find(|(one, _)| *one == version);
    let inode = own.and_then(|(_, point)| fs::metadata(point).ok()).map(|metadata| metadata.ino());
    let Some(inode) = inode else {
        return Err(
            "no cgroup hierarchy is mounted here, so this container's place in the machine's is not known, nor memory limits".into()
        );
    };
    find_inode(root, inode)
        .ok_or_else(|| format!("this container's cgroup is not found below {}: memory limits are not known", root.display()))
}

/// The path below `root` of the directory with an inode number, the nearest to the root first.
fn find_inode(root: &Path, inode: u64) -> Option<PathBuf> {
    if fs::metadata(root).ok()?.ino() == inode {
        return Some(PathBuf::new());
    }
    let mut looked_at = 0;
    let mut level = vec![PathBuf::new()];
    while !level.is_empty() {
        let mut below = Vec::new();
        for parent in &level {
            for entry in fs::read_dir(root.join(parent)).into_iter().flatten().flatten() {
                use std::os::unix::fs::DirEntryExt;
                if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    continue;
                }
                looked_at += 1;
                let path = parent.join(entry.file_name());
                if entry.ino() == inode {
                    return Some(path);
                }
                if looked_at >= DIRECTORIES_MAX {
                    return None;
                }
                below.push(path);
            }
        }
        level = below;
    }
    None
}

/// The hierarchies with the memory controller in a `mountinfo` (proc_pid_mountinfo(5)): their version and mount point, version 1 first.
fn mounts(mountinfo: &str) -> Vec<(Version, PathBuf)> {
    let mut found: Vec<(Version, PathBuf)> = Vec::new();
    for line in mountinfo.lines() {
        let Some((mount, super_block)) = line.split_once(" - ") else { continue };
        let Some(point) = mount.split(' ').nth(4).map(unescape) else { continue };
        let mut of_super = super_block.split(' ');
        let version = match (of_super.next(), of_super.nth(1)) {
            (Some("cgroup2"), _) => Version::V2,
            (Some("cgroup"), Some(options)) if options.split(',').any(|one| one == "memory") => Version::V1,
            _ => continue,
        };
        if !found.iter().any(|(one, _)| *one == version) {
            found.push((version, point));
        }
    }
    found.sort_by_key(|(version, _)| *version == Version::V2);
    found
}

/// `mountinfo` writes space, tab, newline and backslash as `\` and three octal digits.
fn unescape(text: &str) -> PathBuf {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        let (head, tail) = rest.split_at(at);
        out.push_str(head);
        match tail.get(1..4).and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                out.push(char::from(byte));
                rest = tail.get(4..).unwrap_or_default();
            }
            None => {
                out.push('\\');
                rest = tail.get(1..).unwrap_or_default();
            }
        }
    }
    out.push_str(rest);
    out.into()
}

/// The path below the hierarchy's root of a path that `/proc` shows. `None` if it leads above the root.
fn resolve(prefix: &Path, shown: &str) -> Option<PathBuf> {
    let mut path = prefix.to_path_buf();
    for part in shown.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                if !path.pop() {
                    return None;
                }
            }
            name => path.push(name),
        }
    }
    Some(path)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn both_versions_are_found_with_their_mount_points() {
        let text = "25 1 0:21 / /sys rw - sysfs sysfs rw\n\
            30 25 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n\
            31 30 0:27 / /sys/fs/cgroup/unified rw,nosuid shared:4 - cgroup2 cgroup2 rw\n\
            32 30 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
            33 30 0:29 /docker/x /sys/fs/cgroup/my\\040memory rw shared:7 master:1 - cgroup cgroup rw,memory\n\
            nonsense\n";
        assert_eq!(mounts(text), [(Version::V1, "/sys/fs/cgroup/my memory".into()), (Version::V2, "/sys/fs/cgroup/unified".into())]);
    }

    #[test]
    fn a_relative_path_is_resolved_from_the_own_root_and_never_above_the_hierarchy_s() {
        let own = Path::new("kubepods/pod1/own");
        let resolved = |shown| resolve(own, shown).map(|path| path.display().to_string());
        assert_eq!(resolved("/").as_deref(), Some("kubepods/pod1/own"));
        assert_eq!(resolved("/../../pod2/other").as_deref(), Some("kubepods/pod2/other"));
        assert_eq!(resolved("/../../../system.slice/./x").as_deref(), Some("system.slice/x"));
        assert_eq!(resolved("/../../../..").as_deref(), None);
        assert_eq!(resolve(Path::new(""), "/docker/x"), Some("docker/x".into()));
        assert_eq!(resolve(Path::new(""), "/../etc"), None);
    }

    #[test]
    fn the_own_root_is_found_by_its_inode() {
        let tree = tempfile::tempdir().unwrap();
        let own = tree.path().join("a/b/own");
        for path in ["a/b/own", "a/c", "d"] {
            fs::create_dir_all(tree.path().join(path)).unwrap();
        }
        let inode = fs::metadata(&own).unwrap().ino();
        assert_eq!(find_inode(tree.path(), inode), Some("a/b/own".into()));
        assert_eq!(find_inode(tree.path(), 1), None);
        assert_eq!(find_inode(&own, inode), Some(PathBuf::new()));
    }
}
