//! Locates the cgroup hierarchies with the memory controller or the freezer, and the directory of a path that `/proc` shows.
//!
//! `/proc/PID/cgroup` is relative to the reader's cgroup namespace. In a container that is usually a private one: its root is the
//! container's own cgroup, and other paths begin with `/..`. In either case the mount in the container covers only its own cgroup. The
//! whole tree is reached through `/proc/PID/root` of a process of the host (with the host's pid namespace and CAP_SYS_PTRACE): the first
//! one that may be accessed and has the whole tree mounted, usually pid 1. The position of the own root in the tree is found by its inode
//! number, which is the same in every mount of a hierarchy.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::process::container::cgroup::CgroupFile;
use crate::process::container::identity::Membership;
use crate::process::container::memory::{self, CgroupMemory, Version};
use crate::process::handle::read_bounded;

/// Maximum number of bytes read of `mountinfo`: a node with a thousand containers has about ten thousand mounts of 200 bytes.
const MOUNTINFO_BYTES_MAX: u64 = 8 << 20;
/// Maximum number of directories searched for the own root: a node has about ten cgroups per container. It takes about 5 µs each, once.
const DIRECTORIES_MAX: usize = 100_000;
/// Maximum number of processes that are tried for their view of the cgroups: kernel threads, of which there are some hundred, come first
/// and have the host's view. About 50 µs each, once.
const WITNESSES_MAX: usize = 4096;

/// Maximum number of bytes read of a file that says whether a cgroup is frozen.
const STATE_BYTES_MAX: u64 = 4096;

/// Why the memory limits of containers are not known.
const NO_VIEW: &str = "memory limits of containers are not known: no process with a view of the machine's cgroups can be accessed (needs \
                       the machine's pid namespace and CAP_SYS_PTRACE)";

/// The hierarchies that can be read.
#[derive(Debug, Clone, Default)]
pub struct Hierarchies {
    mounts: Vec<Mount>,
    /// Reasons why memory limits may not be readable here; empty if there are none.
    pub doubts: Vec<String>,
}

/// Which hierarchy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Version 1's with the memory controller.
    Memory,
    /// Version 1's with the freezer.
    Freezer,
    /// Version 2's.
    Unified,
}

/// One hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Mount {
    kind: Kind,
    /// Its root directory, as far as visible.
    root: PathBuf,
    /// The directory below `root` to which the paths in `/proc` are relative.
    prefix: PathBuf,
}

impl Hierarchies {
    /// Locates the hierarchies with the memory controller. Never fails: what cannot be found is named in [`doubts`](Self::doubts), and
    /// limits are then not known.
    #[must_use]
    pub fn find() -> Self {
        Self::find_kinds([Kind::Memory, Kind::Unified])
    }

    /// Locates the hierarchies that can freeze processes.
    #[must_use]
    pub fn find_freezers() -> Self {
        Self::find_kinds([Kind::Freezer, Kind::Unified])
    }

    fn find_kinds(kinds: [Kind; 2]) -> Self {
        let private = is_private();
        let own = mounts_of("self");
        let mut found = Self::default();
        for kind in kinds {
            let here = own.iter().find(|one| one.kind == kind);
            let whole = match here {
                Some(one) if one.is_whole(private) => Some(one.at(Path::new("/"))),
                _ => witness(kind, private),
            };
            let prefix = match (&whole, private) {
                (Some(root), true) => own_prefix(here, root),
                (Some(_), false) => Ok(PathBuf::new()),
                (None, _) if here.is_none() => continue,
                (None, _) => Err(NO_VIEW.into()),
            };
            match (whole, prefix) {
                (Some(root), Ok(prefix)) => found.mounts.push(Mount { kind, root, prefix }),
                (_, Err(doubt)) => found.doubts.push(doubt),
                (None, Ok(_)) => {}
            }
        }
        found
    }

    /// The memory figures of a process's cgroup: its container's, or its own outside containers. `None` in the root cgroup, and if no
    /// memory controller can be read.
    #[must_use]
    pub fn memory(&self, file: &CgroupFile) -> Option<CgroupMemory> {
        // In a hybrid setup only version 1 has the controller.
        self.mounts.iter().find_map(|mount| {
            let (shown, version) = match mount.kind {
                Kind::Memory => (file.memory.as_deref()?, Version::V1),
                Kind::Unified => (file.unified.as_deref()?, Version::V2),
                Kind::Freezer => return None,
            };
            let path = resolve(&mount.prefix, &Membership::of(shown).path).filter(|path| !path.as_os_str().is_empty())?;
            memory::read(version, &mount.root, &path)
        })
    }

    /// Whether a process's cgroup, or an ancestor of it, is frozen or about to be. In either version a cgroup's own file says so for its
    /// ancestors too (Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/freezer-subsystem.rst).
    #[must_use]
    pub fn is_frozen(&self, file: &CgroupFile) -> bool {
        self.mounts.iter().any(|mount| {
            let (shown, name) = match mount.kind {
                Kind::Freezer => (file.freezer.as_deref(), "freezer.state"),
                Kind::Unified => (file.unified.as_deref(), "cgroup.events"),
                Kind::Memory => return false,
            };
            let Some(path) = shown.and_then(|shown| resolve(&mount.prefix, shown)) else { return false };
            let state = read_bounded(&mount.root.join(path).join(name), STATE_BYTES_MAX).unwrap_or_default();
            state.split(|byte| *byte == b'\n').any(|line| [&b"FROZEN"[..], b"FREEZING", b"frozen 1"].contains(&line))
        })
    }
}

/// A mounted hierarchy as shown by `mountinfo`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Mounted {
    kind: Kind,
    /// The mounted part of the hierarchy, relative to the reader's cgroup namespace.
    part: String,
    point: PathBuf,
}

impl Mounted {
    /// Whether everything is mounted that a reader in a private namespace, or in the host's, can ever see of the hierarchy: all paths
    /// outside a private namespace's root begin with `/..`.
    fn is_whole(&self, private: bool) -> bool {
        let mut parts = self.part.split('/').filter(|part| !part.is_empty()).peekable();
        parts.peek().is_some() == private && parts.all(|part| part == "..")
    }

    /// The mount point below a root directory.
    fn at(&self, root: &Path) -> PathBuf {
        root.join(self.point.strip_prefix("/").unwrap_or(&self.point))
    }
}

/// Whether this process is in a private cgroup namespace. The host's namespace has a fixed number (PROC_CGROUP_INIT_INO,
/// include/linux/proc_ns.h).
fn is_private() -> bool {
    const INIT: &str = "cgroup:[4026531835]";
    fs::read_link("/proc/self/ns/cgroup").is_ok_and(|namespace| namespace != Path::new(INIT))
}

/// The hierarchies that a process has mounted; none if it may not be accessed.
fn mounts_of(pid: &str) -> Vec<Mounted> {
    let bytes = read_bounded(format!("/proc/{pid}/mountinfo").as_ref(), MOUNTINFO_BYTES_MAX).unwrap_or_default();
    mounts(&String::from_utf8_lossy(&bytes))
}

/// The whole hierarchy as seen through another process's root.
fn witness(kind: Kind, private: bool) -> Option<PathBuf> {
    let mut pids: Vec<u32> = fs::read_dir("/proc").ok()?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    // The host's own processes started first.
    pids.sort_unstable();
    pids.into_iter().take(WITNESSES_MAX).find_map(|pid| {
        let mounted = mounts_of(&pid.to_string()).into_iter().find(|one| one.kind == kind && one.is_whole(private))?;
        let root = mounted.at(Path::new(&format!("/proc/{pid}/root")));
        fs::read_dir(&root).is_ok().then_some(root)
    })
}

/// The position of the own namespace's root in the tree below `root`; that root is what is mounted here.
fn own_prefix(own: Option<&Mounted>, root: &Path) -> Result<PathBuf, String> {
    let inode = own.filter(|own| own.part == "/").and_then(|own| fs::metadata(&own.point).ok()).map(|metadata| metadata.ino());
    inode
        .and_then(|inode| find_inode(root, inode))
        .ok_or_else(|| format!("memory limits are not known: this container's own cgroup was not found below {}", root.display()))
}

/// The path below `root` of the directory with an inode number, searched breadth-first.
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

/// The hierarchies in a `mountinfo` (proc_pid_mountinfo(5)), each where it is mounted first.
fn mounts(mountinfo: &str) -> Vec<Mounted> {
    let mut found: Vec<Mounted> = Vec::new();
    for line in mountinfo.lines() {
        let Some((mount, super_block)) = line.split_once(" - ") else { continue };
        let mut of_mount = mount.split(' ').skip(3);
        let (Some(part), Some(point)) = (of_mount.next(), of_mount.next()) else { continue };
        let mut of_super = super_block.split(' ');
        let (file_system, options) = (of_super.next(), of_super.nth(1).unwrap_or_default());
        let has = |controller| file_system == Some("cgroup") && options.split(',').any(|one| one == controller);
        // Version 1 can mount several controllers as one hierarchy.
        let kinds = [(Kind::Memory, has("memory")), (Kind::Freezer, has("freezer")), (Kind::Unified, file_system == Some("cgroup2"))];
        for (kind, _) in kinds.into_iter().filter(|(_, is_it)| *is_it) {
            if !found.iter().any(|one| one.kind == kind) {
                found.push(Mounted { kind, part: part.to_owned(), point: unescape(point) });
            }
        }
    }
    found
}

/// Decodes `mountinfo`'s escapes: space, tab, newline and backslash are written as `\` and three octal digits.
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

/// Converts a path shown by `/proc` to a path below the hierarchy's root. `None` if it leads above the root.
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
            33 30 0:29 /docker/x /sys/fs/cgroup/my\\040memory rw shared:7 master:1 - cgroup cgroup rw,freezer,memory\n\
            nonsense\n";
        let one = |kind, part: &str, point: &str| Mounted { kind, part: part.into(), point: point.into() };
        let first = [
            one(Kind::Unified, "/", "/sys/fs/cgroup/unified"),
            one(Kind::Memory, "/docker/x", "/sys/fs/cgroup/my memory"),
            one(Kind::Freezer, "/docker/x", "/sys/fs/cgroup/my memory"),
        ];
        assert_eq!(mounts(text), first);
    }

    #[test]
    fn a_relative_path_is_resolved_from_the_own_root_and_never_above_the_hierarchys() {
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
    fn a_whole_tree_is_distinguished_from_a_part_of_it() {
        let whole = |part: &str, private| Mounted { kind: Kind::Unified, part: part.into(), point: "/x".into() }.is_whole(private);
        assert!(whole("/", false) && whole("/..", true) && whole("/../../..", true));
        // In a private namespace `/` is only its own root; in the host's any other path is a container's part.
        assert!(!whole("/", true) && !whole("/docker/x", false) && !whole("/../other", true));
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
