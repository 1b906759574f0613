//! The executable part of a process's address space, kept so that stacks can be named after the process has ended. Pure.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use super::named::NamedFrames;
use super::perf_map::PerfMap;

/// A file that code is mapped from.
#[derive(Debug)]
pub struct Module {
    /// Path in the process's root, for display.
    pub path: String,
    /// Path by which fragprof opens it, such as `/proc/PID/root/usr/lib/libc.so.6` or `/proc/PID/map_files/…`.
    pub open_path: PathBuf,
    /// The file, opened while the process was running: for deleted files, and processes that have ended. `None` = only the path.
    pub file: Option<File>,
    /// Build id, empty = none.
    pub build_id: Vec<u8>,
}

/// The contents of a region.
#[derive(Debug, Clone)]
pub enum Backing {
    /// A mapped file.
    File(Arc<Module>),
    /// The kernel's virtual dynamic shared object.
    Vdso,
    /// Anonymous memory: generated code.
    Anonymous,
    /// Something else that the kernel or the process named, such as `[vsyscall]` or `[uprobes]`.
    Named(String),
}

/// A range of executable memory.
#[derive(Debug, Clone)]
pub struct Region {
    /// First address.
    pub start: u64,
    /// First address after it.
    pub end: u64,
    /// Offset in the file of the byte at `start`; 0 without a file.
    pub offset: u64,
    /// Its contents.
    pub backing: Backing,
}

/// The executable regions of one process.
#[derive(Debug, Default)]
pub struct AddressSpace {
    pid: u32,
    regions: Vec<Region>,
    perf_map: Option<PerfMap>,
    /// The file it is read from, kept open while the process runs: afterwards it is out of reach.
    perf_map_file: Option<File>,
    named: Arc<NamedFrames>,
}

impl AddressSpace {
    /// The space of a process. Regions may be in any order; where two overlap, as after a mapping was replaced between two reads, the later one
    /// in `regions` takes precedence.
    pub fn new(pid: u32, regions: Vec<Region>) -> Self {
        let mut space = Self { pid, regions: Vec::new(), perf_map: None, perf_map_file: None, named: Arc::default() };
        space.update(regions);
        space
    }

    /// Adds a later snapshot of the process: present mappings replace earlier ones at their addresses; removed ones are kept, because earlier
    /// stacks refer to them.
    pub fn update(&mut self, regions: Vec<Region>) {
        for region in regions.into_iter().filter(|r| r.start < r.end) {
            self.cut(region.start, region.end);
            let at = self.regions.partition_point(|r| r.start < region.start);
            self.regions.insert(at, region);
        }
    }

    /// Removes `start..end` from the regions.
    fn cut(&mut self, start: u64, end: u64) {
        let first = self.regions.partition_point(|r| r.end <= start);
        let last = self.regions.partition_point(|r| r.start < end);
        if first >= last {
            return;
        }
        let mut rest = Vec::new();
        for old in self.regions.drain(first..last) {
            if old.start < start {
                rest.push(Region { end: start, ..old.clone() });
            }
            if old.end > end {
                rest.push(Region { start: end, offset: old.offset.wrapping_add(end - old.start), ..old });
            }
        }
        self.regions.splice(first..first, rest);
    }

    /// Sets the process's perf map, which names generated code.
    pub fn set_perf_map(&mut self, perf_map: PerfMap) {
        self.perf_map = Some(perf_map);
    }

    /// Where its perf map is read from.
    pub(super) fn perf_map_file(&mut self) -> &mut Option<File> {
        &mut self.perf_map_file
    }

    /// Sets where the process's managed frames are named.
    pub fn set_named(&mut self, named: Arc<NamedFrames>) {
        self.named = named;
    }

    /// The names of the process's managed frames.
    pub fn named(&self) -> &Arc<NamedFrames> {
        &self.named
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The perf map, if there is one.
    pub(super) fn perf_map(&self) -> Option<&PerfMap> {
        self.perf_map.as_ref()
    }

    /// The region that contains an address.
    pub fn find(&self, address: u64) -> Option<&Region> {
        let at = self.regions.partition_point(|r| r.end <= address);
        self.regions.get(at).filter(|r| r.start <= address)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn region(start: u64, end: u64, name: &str) -> Region {
        Region { start, end, offset: start * 10, backing: Backing::Named(name.into()) }
    }

    fn name_at(space: &AddressSpace, address: u64) -> Option<(String, u64)> {
        let region = space.find(address)?;
        match &region.backing {
            Backing::Named(name) => Some((name.clone(), region.offset + (address - region.start))),
            _ => None,
        }
    }

    #[test]
    fn a_later_mapping_replaces_what_it_covers_and_no_more() {
        let mut space = AddressSpace::new(1, vec![region(100, 200, "old")]);
        space.update(vec![region(120, 130, "new")]);
        assert_eq!(name_at(&space, 99), None);
        assert_eq!(name_at(&space, 119), Some(("old".into(), 1019)));
        assert_eq!(name_at(&space, 120), Some(("new".into(), 1200)));
        assert_eq!(name_at(&space, 130), Some(("old".into(), 1030)));
        assert_eq!(name_at(&space, 200), None);
    }

    proptest! {
        #[test]
        fn a_lookup_equals_a_plain_array_of_addresses(updates in prop::collection::vec((0u64..60, 1u64..20), 0..30)) {
            let mut naive: Vec<Option<(String, u64)>> = vec![None; 100];
            let mut space = AddressSpace::default();
            for (i, &(start, len)) in updates.iter().enumerate() {
                space.update(vec![region(start, start + len, &i.to_string())]);
                for address in start..start + len {
                    naive[address as usize] = Some((i.to_string(), start * 10 + (address - start)));
                }
            }
            for (address, expected) in naive.iter().enumerate() {
                prop_assert_eq!(&name_at(&space, address as u64), expected);
            }
        }
    }
}
