//! Resident memory outside the malloc heaps, by kind, from `/proc/PID/smaps`. Pure; the caller reads the file.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use super::account::NotMalloc;
use super::runtime::{Claim, Kind};
use crate::process::{Backing, Mapping, Maps};

/// One mapping with its resident bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResidentMapping {
    /// The mapping.
    pub mapping: Mapping,
    /// Its resident bytes.
    pub resident_bytes: u64,
    /// Of them, those that other processes have too: a page of a forked process is shared until one of the two writes to it.
    pub shared_bytes: u64,
}

/// Resident bytes of anonymous memory in these address ranges that other processes have too, by mappings: what is shared of a mapping that
/// is in the ranges only in part counts as a whole, up to that part.
#[must_use]
pub fn shared_bytes(mappings: &[ResidentMapping], ranges: &[Range<u64>]) -> u64 {
    let within = |one: &ResidentMapping| {
        let (start, end) = (one.mapping.start.0, one.mapping.end.0);
        ranges.iter().map(|range| range.end.min(end).saturating_sub(range.start.max(start))).sum::<u64>()
    };
    let private = mappings.iter().filter(|one| !one.mapping.permissions.shared && one.shared_bytes > 0);
    private.map(|one| one.shared_bytes.min(within(one))).sum()
}

/// Maximum size of an area below a thread's stack that counts as its guard: threads request a page, some runtimes up to a megabyte.
const GUARD_BYTES_MAX: u64 = 1 << 20;
/// Compressed pointers reach 32 GiB; the JVM puts its heap below unless it is larger (HotSpot, CompressedOops).
const JAVA_HEAP_BELOW: u64 = 32 << 30;
/// ZGC's heap, which before JDK 21 was mapped three times.
pub const JAVA_HEAP_FILE: &str = "/memfd:java_heap";
/// The JVM's class space follows within 4 GiB.
const JAVA_CLASSES_BELOW: u64 = 36 << 30;

/// Parses `smaps`: a line as in `maps`, then `Key: value kB` lines. What cannot be read is skipped.
#[must_use]
pub fn parse_smaps(bytes: &[u8]) -> Vec<ResidentMapping> {
    let mut found: Vec<ResidentMapping> = Vec::new();
    for line in bytes.split(|&byte| byte == b'\n') {
        // Attribute lines begin with a capital letter, mappings with a hexadecimal digit in lower case.
        if line.first().is_some_and(u8::is_ascii_uppercase) {
            let Some(last) = found.last_mut() else { continue };
            let after = |key: &[u8]| line.strip_prefix(key).map(|rest| kilobytes(rest).saturating_mul(1024));
            if let Some(bytes) = after(b"Rss:") {
                last.resident_bytes = bytes;
            } else if let Some(bytes) = after(b"Shared_Clean:").or_else(|| after(b"Shared_Dirty:")) {
                last.shared_bytes = last.shared_bytes.saturating_add(bytes);
            }
        } else if let Some(mapping) = Maps::parse(line).mappings.pop() {
            found.push(ResidentMapping { mapping, resident_bytes: 0, shared_bytes: 0 });
        }
    }
    found
}

fn kilobytes(text: &[u8]) -> u64 {
    text.iter()
        .skip_while(|byte| **byte == b' ')
        .take_while(|byte| byte.is_ascii_digit())
        .fold(0u64, |sum, digit| sum.saturating_mul(10).saturating_add(u64::from(digit - b'0')))
}

/// Sums by kind. `heaps` are the ranges of malloc's own, `claims` those of runtimes (both sorted and disjoint): their parts of a mapping,
/// as `resident` gives them, are left out and counted for the runtime.
#[must_use]
pub fn classify(smaps: &[ResidentMapping], heaps: &[Range<u64>], claims: &[Claim], resident: impl Fn(Range<u64>) -> u64) -> Vec<NotMalloc> {
    let has_java_heap = claims.iter().any(|claim| claim.kind == Kind::JavaHeap);
    // Programs and libraries: files of which some part may be executed. Every process has them, however idle.
    let programs: BTreeSet<&Path> =
        smaps.iter().filter(|one| one.mapping.permissions.execute).filter_map(|one| one.mapping.path()).collect();
    let is_java = !has_java_heap && smaps.iter().any(|one| one.mapping.path().is_some_and(|path| path.ends_with("libjvm.so")));
    let mut sums: BTreeMap<&'static str, NotMalloc> = BTreeMap::new();
    for (index, one) in smaps.iter().enumerate() {
        let before = index.checked_sub(1).and_then(|before| smaps.get(before)).map(|before| &before.mapping);
        let range = one.mapping.start.0..one.mapping.end.0;
        let first = heaps.partition_point(|heap| heap.end <= range.start);
        let inside: u64 = heaps
            .get(first..)
            .unwrap_or_default()
            .iter()
            .take_while(|heap| heap.start < range.end)
            .map(|heap| resident(heap.start.max(range.start)..heap.end.min(range.end)))
            .sum();
        let mut left = one.resident_bytes.saturating_sub(inside);
        let mut add = |kind: &'static str, bytes: u64| {
            let bytes = bytes.min(left);
            left -= bytes;
            if bytes > 0 {
                let sum = sums.entry(kind).or_insert(NotMalloc { kind, resident_bytes: 0, mappings: 0 });
                sum.resident_bytes = sum.resident_bytes.saturating_add(bytes);
                sum.mappings += 1;
            }
        };
        let first = claims.partition_point(|claim| claim.range.end <= range.start);
        let claimed = claims.get(first..).unwrap_or_default().iter().take_while(|claim| claim.range.start < range.end);
        let mut by_kind: BTreeMap<&'static str, u64> = BTreeMap::new();
        for claim in claimed {
            *by_kind.entry(claim.kind.name()).or_default() += resident(claim.range.start.max(range.start)..claim.range.end.min(range.end));
        }
        by_kind.into_iter().for_each(|(kind, bytes)| add(kind, bytes));
        let is_program = |mapping: &Mapping| mapping.path().is_some_and(|path| programs.contains(path));
        let rest = match kind(&one.mapping, before, is_java, inside > 0) {
            // The bss of an object follows its data.
            "file_mappings" if is_program(&one.mapping) || (one.mapping.path().is_none() && before.is_some_and(is_program)) => {
                "program_files"
            }
            kind => kind,
        };
        add(rest, u64::MAX);
    }
    let mut list: Vec<NotMalloc> = sums.into_values().collect();
    list.sort_by_key(|one| std::cmp::Reverse(one.resident_bytes));
    list
}

fn kind(mapping: &Mapping, before: Option<&Mapping>, is_java: bool, holds_heap: bool) -> &'static str {
    let allowed = mapping.permissions;
    match &mapping.backing {
        Backing::File { path, .. } => {
            let path = path.to_string_lossy();
            if path.starts_with(JAVA_HEAP_FILE) {
                "java_heap"
            } else if path.starts_with("/dev/shm/") || path.starts_with("/SYSV") || path.starts_with("/memfd:") {
                "shared_memory"
            } else if path.starts_with("/anon_hugepage") {
                "other_anonymous"
            } else if path.starts_with("/dev/zero") && allowed.shared {
                "shared_memory"
            } else {
                "file_mappings"
            }
        }
        Backing::Named(name) if name == "[stack]" => "main_stack",
        Backing::Named(name) if name == "[heap]" => "brk_not_malloc",
        Backing::Named(name) if name.starts_with("[anon_shmem:") => "shared_memory",
        Backing::Named(name) if name.starts_with("[anon:") => {
            if name.contains("stack") {
                "thread_stacks"
            } else {
                "other_anonymous"
            }
        }
        Backing::Named(_) => "kernel_mappings",
        Backing::Anonymous if allowed.shared => "shared_memory",
        Backing::Anonymous if allowed.execute => "code_cache",
        Backing::Anonymous if is_java && mapping.start.0 < JAVA_HEAP_BELOW => "java_heap",
        Backing::Anonymous if is_java && mapping.start.0 < JAVA_CLASSES_BELOW => "java_classes",
        Backing::Anonymous if !holds_heap && before.is_some_and(|below| is_guard(below, mapping)) => "thread_stacks",
        // The bss of an object follows its data.
        Backing::Anonymous if before.is_some_and(|below| below.path().is_some() && below.end == mapping.start) => "file_mappings",
        Backing::Anonymous => "other_anonymous",
    }
}

/// Thread stacks are mapped as a whole without rights, then opened above their guard.
fn is_guard(below: &Mapping, mapping: &Mapping) -> bool {
    let rights = below.permissions;
    below.end == mapping.start
        && !rights.read
        && !rights.write
        && !rights.execute
        && matches!(below.backing, Backing::Anonymous)
        && below.len() <= GUARD_BYTES_MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &[u8] = b"55d0-66d0 rw-p 00000000 00:00 0 [heap]\nSize: 4 kB\nRss:  12 kB\nPss: 3 kB\n\
        7f00001000-7f00002000 ---p 00000000 00:00 0\nRss: 0 kB\n\
        7f00002000-7f00802000 rw-p 00000000 00:00 0\nRss: 40 kB\nVmFlags: rd wr\n\
        7f01000000-7f01100000 rwxp 00000000 00:00 0\nRss: 100 kB\n\
        7f02000000-7f02100000 r-xp 00000000 08:01 7 /usr/lib/x.so\nRss: 300 kB\n\
        7f02100000-7f02200000 rw-p 00000000 00:00 0\nRss: 8 kB\n\
        7f03000000-7f03100000 rw-s 00000000 00:01 9 /memfd:ring (deleted)\nRss: 64 kB\n";

    fn kinds(list: &[NotMalloc]) -> Vec<(&'static str, u64)> {
        list.iter().map(|one| (one.kind, one.resident_bytes / 1024)).collect()
    }

    #[test]
    fn mappings_are_classified_and_summed() {
        let smaps = parse_smaps(SMAPS);
        assert_eq!(smaps.len(), 7);
        let list = classify(&smaps, &[], &[], |_| 0);
        assert_eq!(
            kinds(&list),
            [("program_files", 308), ("code_cache", 100), ("shared_memory", 64), ("thread_stacks", 40), ("brk_not_malloc", 12)]
        );
    }

    #[test]
    fn what_other_processes_have_too_is_counted_as_far_as_it_is_in_the_heap() {
        let smaps = parse_smaps(
            b"1000-9000 rw-p 00000000 00:00 0 [heap]\nRss: 32 kB\nShared_Clean: 4 kB\nShared_Dirty: 8 kB\nPrivate_Dirty: 20 kB\n\
              a000-c000 rw-p 00000000 00:00 0\nRss: 8 kB\nShared_Dirty: 8 kB\n\
              d000-f000 rw-s 00000000 00:01 9 /memfd:x\nRss: 8 kB\nShared_Dirty: 8 kB\n",
        );
        let of = |ranges: [Range<u64>; 2]| shared_bytes(&smaps, &ranges) >> 10;
        assert_eq!(of([0x1000..0x8000, 0x8000..0x9000]), 12);
        assert_eq!(of([0x1000..0x2000, 0xa000..0xb000]), 8, "parts of mappings");
        assert_eq!(of([0xd000..0xe000, 0xe000..0xf000]), 0, "memory that is shared on purpose");
    }

    #[test]
    fn what_malloc_holds_of_a_mapping_is_left_out() {
        let held = std::iter::once(0x55d0..0x65d0).collect::<Vec<_>>();
        let list = classify(&parse_smaps(SMAPS), &held, &[], |range| range.end - range.start);
        assert_eq!(list.iter().find(|one| one.kind == "brk_not_malloc").map(|one| one.resident_bytes), Some(12 * 1024 - 0x1000));
    }

    #[test]
    fn the_claimed_part_of_a_mapping_counts_for_the_runtime_and_the_rest_by_its_mapping() {
        let claims = [Claim { kind: Kind::Pymalloc, range: 0x7f00003000..0x7f00005000 }];
        let list = classify(&parse_smaps(SMAPS), &[], &claims, |range| range.end - range.start);
        let of = |kind: &str| list.iter().find(|one| one.kind == kind).map(|one| one.resident_bytes / 1024);
        assert_eq!((of("pymalloc_arenas"), of("thread_stacks")), (Some(8), Some(32)));
    }
}
