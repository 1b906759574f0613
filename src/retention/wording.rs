//! The result of the scans, in sentences and as a profile.

use super::Leaks;
use super::scans::Doubts;
use crate::profile::{Frame, Metadata, Mode, Profile, ValueKind, Values, meta};
use crate::units::{HumanBytes, counted};

/// Maximum number of frames kept of a group.
pub const FRAMES_MAX: usize = 32;
/// Name of the outermost frame in profiles.
const ROOT_FRAME: &str = "[no pointer was seen]";

/// The groups as stacks of two frames: their type, and that no pointer was seen.
#[must_use]
pub fn profile(leaks: &Leaks) -> Profile {
    let kinds = [ValueKind::UnreachedObjects, ValueKind::UnreachedSpace].into_iter().collect();
    let process = meta::Process { pid: leaks.pid, comm: leaks.comm.clone(), ..Default::default() };
    let mut profile = Profile::new(Metadata {
        tool: format!("fragprof {}", env!("CARGO_PKG_VERSION")),
        mode: Mode::Looked,
        duration_s: leaks.duration_s,
        kinds,
        processes: vec![process],
        notes: vec![sentence(leaks)],
        limits: vec![LIMITS.to_owned()],
        doubts: doubts(&leaks.doubts),
        ..Metadata::default()
    });
    let mut add = |name: String, below: Option<&str>, stack: &[String], blocks: u64, bytes: u64| {
        let stack = stack.iter().map(String::as_str);
        let frames: Vec<Frame> = std::iter::once(name.as_str()).chain(below).chain(stack).chain([ROOT_FRAME]).map(Frame::named).collect();
        let values = Values::default().with(ValueKind::UnreachedObjects, blocks).with(ValueKind::UnreachedSpace, bytes);
        profile.add(leaks.pid, &frames, None, &values);
    };
    for group in &leaks.groups {
        let name = format!("{}, {} B", group.words(), group.size_bytes);
        if group.held_blocks > 0 {
            add("[held by it]".to_owned(), Some(&name), &group.frames, group.held_blocks, group.held_bytes);
        }
        add(name, None, &group.frames, group.blocks, group.bytes);
    }
    if leaks.more.blocks > 0 {
        add("[other groups]".to_owned(), None, &[], leaks.more.blocks, leaks.more.bytes);
    }
    profile
}

/// What no scan can show.
pub const LIMITS: &str = "Programs that hide pointers (XORed, compressed, tagged in the upper 16 bits) look the same. A block that is still \
                      pointed to, but never used again, is not among them.";

/// The result, in one sentence.
#[must_use]
pub fn sentence(leaks: &Leaks) -> String {
    let looks = counted(u64::from(leaks.looks), "scan");
    if leaks.unreached_blocks == 0 {
        return format!("A pointer to each of the {} blocks in use was seen ({looks} over {:.1} s).", leaks.live_blocks, leaks.duration_s);
    }
    let unchanged = if leaks.looks > 1 { ", and their contents did not change" } else { "" };
    format!(
        "No pointer to {} ({}) of {} ({}) in use was seen in {looks} over {:.1} s{unchanged}.",
        counted(leaks.unreached_blocks, "block"),
        HumanBytes(leaks.unreached_bytes),
        leaks.live_blocks,
        HumanBytes(leaks.live_bytes),
        leaks.duration_s
    )
}

/// Reasons to doubt, each as one sentence.
#[must_use]
pub fn doubts(seen: &Doubts) -> Vec<String> {
    let mut doubts = Vec::new();
    let mut add = |holds: bool, text: String| doubts.extend(holds.then_some(text));
    add(seen.swapped_bytes > 0, format!("{} are in swap and were not read: they may contain pointers", HumanBytes(seen.swapped_bytes)));
    add(seen.unread_bytes > 0, format!("{} could not be read: they may contain pointers", HumanBytes(seen.unread_bytes)));
    add(!seen.is_census_usable, "the census of the heap is not usable: blocks may be missing or wrong".to_owned());
    add(
        seen.broken_lists > 0,
        format!("{} changed while being read: free blocks may count as blocks in use", counted(seen.broken_lists, "free list")),
    );
    add(
        seen.unknown_bytes > 0,
        format!(
            "{} of the heap are not understood: they were scanned as roots, and blocks in them are not reported",
            HumanBytes(seen.unknown_bytes)
        ),
    );
    add(
        seen.dropped_pointers > 0,
        format!("{} were not kept for lack of memory: their targets count as reached", counted(seen.dropped_pointers, "pointer")),
    );
    add(
        !seen.are_registers_known,
        "registers were not read, except system call arguments (it needs CAP_BPF and CAP_PERFMON): a block that only a register holds \
         looks unreached"
            .to_owned(),
    );
    add(
        seen.running_threads > 0,
        format!(
            "{} of {} were running during a scan: their registers are not known, and their stacks were read in full",
            seen.running_threads,
            counted(seen.threads as u64, "thread")
        ),
    );
    doubts
}
