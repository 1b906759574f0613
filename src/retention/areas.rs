//! The memory to scan: all that a process can write, without the allocators' own data, and with its threads' stacks cut at their pointers.

use std::ops::Range;

use crate::allocator::is_own_library;
use crate::census::memory::{Memory, MemoryError};
use crate::census::objects::{joined, range_of, without};
use crate::census::threads::ThreadState;
use crate::process::{Backing, Mapping, Maps};

/// Bytes below the stack pointer that a leaf function may use (System V x86-64 ABI, 3.2.2).
const RED_ZONE_BYTES: u64 = 128;
/// An inaccessible mapping of up to this size below a stack is its guard; larger ones are other reservations.
const GUARD_BYTES_MAX: u64 = 64 << 10;

/// The memory that a process shares with a recording of its calls (preload/attached_recorder.c).
const RING: &[u8] = b"/memfd:fragprof-ring";

/// The kind of memory that contains a root, in the order in which roots are followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Data of programs and libraries: globals and statics.
    Globals,
    /// Stacks from the stack pointer on, and thread-local storage next to them.
    Stack,
    /// Other private memory: heaps of runtimes, mapped areas, generated code.
    Anonymous,
    /// Memory shared with other processes.
    Shared,
}

/// A range of roots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Area {
    /// Addresses.
    pub range: Range<u64>,
    /// The kind of memory.
    pub class: Class,
    /// Alignment of pointers: 8, or 1 in generated code.
    pub step: u64,
}

/// Everything that can hold a pointer.
#[derive(Debug, Clone, Default)]
pub struct Areas {
    /// Memory without blocks, by class, then by address.
    pub roots: Vec<Area>,
    /// The allocators' memory that contains blocks, sorted and disjoint.
    pub heap: Vec<Range<u64>>,
    /// Words in registers, including stack pointers.
    pub registers: Vec<u64>,
    /// Threads.
    pub threads: usize,
    /// Threads that were running: their registers are not known, and their stacks are also read below the stack pointer.
    pub running_threads: usize,
}

impl Areas {
    /// Reads the present mappings and threads. `own` are the allocators' ranges, sorted and disjoint.
    ///
    /// # Errors
    /// If the process has ended.
    pub fn of(memory: &dyn Memory, own: &[Range<u64>]) -> Result<Self, MemoryError> {
        let maps = memory.maps()?;
        let threads = memory.threads();
        Ok(Self::from_parts(&maps, &threads, own))
    }

    fn from_parts(maps: &Maps, threads: &[ThreadState], own: &[Range<u64>]) -> Self {
        let mut areas = Self { threads: threads.len(), ..Self::default() };
        for thread in threads {
            areas.registers.extend(thread.registers.iter().chain(&thread.stack_pointer));
            areas.running_threads += usize::from(thread.stack_pointer.is_none());
        }
        let mut stack_pointers: Vec<u64> = threads.iter().filter_map(|thread| thread.stack_pointer).collect();
        stack_pointers.sort_unstable();
        let mut object: Option<(u64, u64)> = None;
        let mut is_own = false;
        let mut heap = Vec::new();
        for (number, mapping) in maps.mappings.iter().enumerate() {
            let before = number.checked_sub(1).and_then(|number| maps.mappings.get(number));
            let continues = object.is_some_and(|(end, inode)| end == mapping.start.0 && (mapping.inode == 0 || mapping.inode == inode));
            let is_bss = continues && matches!(mapping.backing, Backing::Anonymous) && mapping.permissions.write;
            let path = mapping.path().map(|path| path.as_os_str().as_encoded_bytes());
            if let Some(path) = path.filter(|_| !mapping.permissions.shared) {
                object = Some((mapping.end.0, mapping.inode));
                is_own = is_own_library(path);
            }
            // The sampler's and the recorder's data has addresses of blocks and words of stacks, and holds nothing.
            if is_own && (is_bss || path.is_some()) || path.is_some_and(|path| path.starts_with(RING)) {
                continue;
            }
            let after = maps.mappings.get(number + 1);
            let Some(class) = class_of(mapping, after, is_bss) else { continue };
            let range = mapping.start.0..mapping.end.0;
            let (mut start, mut class) = (range.start, class);
            let first = stack_pointers.partition_point(|&sp| sp < range.start);
            let inside: Vec<u64> = stack_pointers.iter().skip(first).copied().take_while(|&sp| sp < range.end).take(2).collect();
            if let (Class::Anonymous, Some(&sp)) = (class, inside.first()) {
                class = Class::Stack;
                if inside.len() == 1 && is_guarded(mapping, before) {
                    start = start.max(sp.saturating_sub(RED_ZONE_BYTES) & !7);
                }
            }
            let step = if mapping.permissions.execute && class == Class::Anonymous { 1 } else { 8 };
            let pieces = without(std::slice::from_ref(&(start..range.end)), own);
            areas.roots.extend(pieces.into_iter().map(|range| Area { range, class, step }));
            if range_of(own, range.start).is_some() || own.iter().any(|piece| piece.start < range.end && piece.end > range.start) {
                heap.push(range);
            }
        }
        // Only those parts of the allocators' ranges that are mapped and readable now.
        let outside = without(&joined(&heap), own);
        areas.heap = without(&joined(&heap), &outside);
        areas.roots.sort_by_key(|area| (area.class, area.range.start));
        areas
    }

    /// Adds parts of the heap that are not understood: any word there may be a pointer.
    pub fn add_unknown(&mut self, unknown: &[Range<u64>]) {
        self.roots.extend(unknown.iter().map(|range| Area { range: range.clone(), class: Class::Anonymous, step: 8 }));
    }
}

/// The kind of roots in a mapping; `None` if it cannot hold pointers to blocks, or cannot be read.
fn class_of(mapping: &Mapping, after: Option<&Mapping>, is_bss: bool) -> Option<Class> {
    let allowed = mapping.permissions;
    if !allowed.read {
        return None;
    }
    match &mapping.backing {
        _ if allowed.shared => allowed.write.then_some(Class::Shared),
        Backing::File { path, .. } if path.starts_with("/anon_hugepage") => Some(Class::Anonymous),
        Backing::File { .. } => {
            // Includes data that was written before it was protected (RELRO), which is right before an object's other data.
            let goes_on = after.is_some_and(|next| next.start == mapping.end && next.inode == mapping.inode && next.permissions.write);
            (allowed.write || goes_on && !allowed.execute).then_some(Class::Globals)
        }
        Backing::Named(name) if ["[vvar]", "[vdso]", "[vsyscall]", "[uprobes]"].iter().any(|own| name.starts_with(own)) => None,
        Backing::Named(name) if name == "[anon:.bss]" => Some(Class::Globals),
        Backing::Named(name) if name.starts_with("[vvar") => None,
        Backing::Anonymous if is_bss => Some(Class::Globals),
        Backing::Anonymous | Backing::Named(_) => Some(Class::Anonymous),
    }
}

/// Whether a mapping with a stack pointer begins where that stack ends: at a guard, or because it is the main stack.
fn is_guarded(mapping: &Mapping, before: Option<&Mapping>) -> bool {
    if matches!(&mapping.backing, Backing::Named(name) if name == "[stack]") {
        return true;
    }
    before.is_some_and(|guard| {
        let rights = guard.permissions;
        guard.end == mapping.start && !rights.read && !rights.write && !rights.execute && guard.len() <= GUARD_BYTES_MAX
    })
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges are meant")]
mod tests {
    use super::*;

    const MAPS: &[u8] = b"55d000000000-55d000001000 r--p 00000000 08:01 7 /bin/x\n\
        55d000001000-55d000002000 r-xp 00001000 08:01 7 /bin/x\n\
        55d000002000-55d000003000 r--p 00002000 08:01 7 /bin/x\n\
        55d000003000-55d000004000 rw-p 00003000 08:01 7 /bin/x\n\
        55d000004000-55d000006000 rw-p 00000000 00:00 0\n\
        55d001000000-55d001100000 rw-p 00000000 00:00 0 [heap]\n\
        7f0000000000-7f0000001000 ---p 00000000 00:00 0\n\
        7f0000001000-7f0000801000 rw-p 00000000 00:00 0\n\
        7f0001000000-7f0001800000 rw-p 00000000 00:00 0\n\
        7f0002000000-7f0002010000 rwxp 00000000 00:00 0\n\
        7f0003000000-7f0003010000 rw-s 00000000 00:01 9 /dev/shm/x\n\
        7f0003010000-7f0003020000 r--s 00000000 00:01 10 /usr/share/x\n\
        7f0004000000-7f0004001000 r-xp 00000000 08:01 8 /x/libfragprof_attached_recorder.so\n\
        7f0004001000-7f0004002000 r--p 00001000 08:01 8 /x/libfragprof_attached_recorder.so\n\
        7f0004002000-7f0004003000 rw-p 00002000 08:01 8 /x/libfragprof_attached_recorder.so\n\
        7f0004003000-7f0004b00000 rw-p 00000000 00:00 0\n\
        7f0005000000-7f000d000000 rw-s 00000000 00:01 11 /memfd:fragprof-ring (deleted)\n\
        7ffc00000000-7ffc00100000 rw-p 00000000 00:00 0 [stack]\n\
        7ffc00200000-7ffc00201000 r--p 00000000 00:00 0 [vvar]\n";

    fn thread(sp: Option<u64>) -> ThreadState {
        ThreadState { stack_pointer: sp, registers: vec![0x55d0_0100_0010], ..ThreadState::default() }
    }

    #[test]
    fn roots_are_writable_memory_without_blocks_and_stacks_begin_at_their_pointers() {
        let threads = [thread(Some(0x7ffc_0000_8010)), thread(Some(0x7f00_0040_0000)), thread(Some(0x7f00_0140_0000)), thread(None)];
        let own = [0x55d0_0100_1000..0x55d0_0110_0000, 0x7f00_0060_0000..0x7f00_0060_1000];
        let areas = Areas::from_parts(&Maps::parse(MAPS), &threads, &own);
        let of = |class: Class| {
            areas.roots.iter().filter(|area| area.class == class).map(|area| (area.range.start, area.range.end)).collect::<Vec<_>>()
        };
        let globals = [(0x55d0_0000_2000, 0x55d0_0000_3000), (0x55d0_0000_3000, 0x55d0_0000_4000)];
        assert_eq!(of(Class::Globals), [&globals[..], &[(0x55d0_0000_4000, 0x55d0_0000_6000)]].concat());
        let main = (0x7ffc_0000_7f90, 0x7ffc_0010_0000);
        // The first thread's stack has a guard; where the second one begins is not known.
        let stacks =
            [(0x7f00_003f_ff80, 0x7f00_0060_0000), (0x7f00_0060_1000, 0x7f00_0080_1000), (0x7f00_0100_0000, 0x7f00_0180_0000), main];
        assert_eq!(of(Class::Stack), stacks);
        assert_eq!(of(Class::Anonymous), [(0x55d0_0100_0000, 0x55d0_0100_1000), (0x7f00_0200_0000, 0x7f00_0201_0000)]);
        assert_eq!(of(Class::Shared), [(0x7f00_0300_0000, 0x7f00_0301_0000)]);
        assert_eq!(areas.heap, own);
        assert_eq!(areas.roots.iter().filter(|area| area.step == 1).count(), 1);
        assert_eq!((areas.threads, areas.running_threads, areas.registers.len()), (4, 1, 7));
    }
}
