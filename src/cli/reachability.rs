//! What `explain` says of who holds memory: the owners of pinned or blocked bytes, and blocks to which no pointer is seen.

use std::io::{self, Write};
use std::time::Duration;

use serde::Serialize;

use super::leaks::registers_of;
use super::owners::main_owner;
use crate::census::live::LiveMemory;
use crate::census::{Pace, Places};
use crate::fragmentation::verdict::{Kind, Verdict};
use crate::retention::Leaks;
use crate::retention::looks::{Plan, look};
use crate::retention::owners::{By, Owners, Wanted, survey};
use crate::retention::told::{self, doubts};
use crate::sanitize::terminal;
use crate::units::{HumanBytes, counted, grouped};

/// Heaps with more blocks are left to `owners` and `leaks`: a graph of these takes a quarter of a gigabyte, and ten seconds.
const BLOCKS_MAX: u64 = 4 << 20;
/// Bytes in question from which on their owners are asked for.
const BYTES_MIN: u64 = 1 << 20;
/// Pinned bytes of this part of the heap, as 1 in so many, are asked for whatever the verdict.
const PINNED_SHARE_MIN: u64 = 5;
/// Groups told.
const GROUPS_MAX: usize = 5;
/// Looks for pointers after the first.
const LOOKS: u32 = 4;

/// Who holds what is in question.
#[derive(Debug, Serialize)]
pub struct HeldBy {
    /// `pinned` or `blocked`.
    pub what: &'static str,
    /// All of it.
    pub bytes: u64,
    /// One sentence.
    pub summary: String,
    /// The owners and types with most of it.
    pub groups: Vec<Part>,
    /// Reasons to doubt.
    pub doubts: Vec<String>,
}

/// Blocks that are alike.
#[derive(Debug, Serialize)]
pub struct Part {
    /// Bytes of what is in question.
    pub bytes: u64,
    /// Blocks.
    pub blocks: u64,
    /// What they are, by whom they are owned, from where they are reached first.
    pub words: String,
}

/// Blocks to which no pointer was seen.
#[derive(Debug, Serialize)]
pub struct Unreached {
    /// Blocks.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// One sentence.
    pub summary: String,
    /// What most of them are.
    pub groups: Vec<Part>,
    /// Reasons to doubt.
    pub doubts: Vec<String>,
}

/// What was found; each only where the verdict asks for it.
#[derive(Debug, Default, Serialize)]
pub struct Reachability {
    /// Who holds the bytes in question.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_by: Option<HeldBy>,
    /// Blocks to which no pointer was seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unreached: Option<Unreached>,
    /// Why something was not looked at.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<String>,
}

impl Reachability {
    /// Looks at a process as its verdict asks for. `live_blocks` are those of the census; with `is_once` nothing is looked at twice.
    pub fn of(memory: &LiveMemory, (pid, comm): (u32, &str), verdict: &Verdict, live_blocks: u64, is_once: bool) -> Self {
        let mut found = Self::default();
        let has = |kinds: &[Kind]| verdict.findings.iter().any(|finding| kinds.contains(&finding.verdict));
        let ladder = &verdict.evidence.ladder;
        let pinned = ladder.pinned_bytes.unwrap_or(0);
        let is_pinned = pinned >= BYTES_MIN && (has(&[Kind::Fragmentation]) || pinned >= ladder.resident_bytes / PINNED_SHARE_MIN);
        let is_kept = has(&[Kind::Hoarding, Kind::ArenaBlowUp]) && ladder.trimmable_bytes.unwrap_or(0) >= BYTES_MIN;
        let grows = has(&[Kind::Leak, Kind::Growing]);
        if !(is_pinned || is_kept || grows) {
            return found;
        }
        if live_blocks > BLOCKS_MAX {
            let blocks = grouped(live_blocks);
            found.left_out.push(format!(
                "who holds what: {blocks} blocks take a while and some memory; fragprof owners {pid} and fragprof leaks {pid} look"
            ));
            return found;
        }
        if is_pinned || is_kept {
            let by = if is_pinned { By::Pinned } else { By::Blocked };
            let registers = registers_of(memory);
            let read = registers.as_ref().map(|registers| move || registers.read());
            let read = read.as_ref().map(|read| read as &dyn Fn() -> Vec<u64>);
            let wanted = Wanted { with_shares: true, ..Wanted::default() };
            match survey(memory, (pid, comm), Pace::default(), by, &wanted, read) {
                Ok(owners) => found.held_by = held_by(&owners, by),
                Err(error) => found.left_out.push(format!("who holds what: {error}")),
            }
        }
        if grows && is_once {
            found.left_out.push("whether pointers to all blocks are left: this takes several looks (without --once)".to_owned());
        } else if grows {
            match unreached(memory, (pid, comm)) {
                Ok(unreached) => found.unreached = Some(unreached),
                Err(error) => found.left_out.push(format!("whether pointers to all blocks are left: {error}")),
            }
        }
        found
    }

    /// Writes it as a part of `explain`.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let mut part = |summary: &str, groups: &[Part], doubts: &[String]| -> io::Result<()> {
            writeln!(out, "    {}", terminal(summary))?;
            for group in groups {
                writeln!(out, "      {:>10} in {}: {}", HumanBytes(group.bytes), counted(group.blocks, "block"), terminal(&group.words))?;
            }
            for doubt in doubts {
                writeln!(out, "      doubt: {doubt}")?;
            }
            Ok(())
        };
        if let Some(held) = &self.held_by {
            part(&held.summary, &held.groups, &held.doubts)?;
        }
        if let Some(unreached) = &self.unreached {
            part(&unreached.summary, &unreached.groups, &unreached.doubts)?;
        }
        Ok(())
    }
}

/// Who holds the bytes that were ranked by; `None` if there are none.
fn held_by(owners: &Owners, by: By) -> Option<HeldBy> {
    let (what, bytes) = if by == By::Blocked { ("blocked", owners.blocked_bytes) } else { ("pinned", owners.pinned_bytes) };
    let summary = main_owner(owners, by)?;
    let of_share =
        |share: &crate::retention::shares::Share| Part { bytes: share.sums.by(by), blocks: share.sums.blocks, words: share.words() };
    let groups = owners.shares.iter().take(GROUPS_MAX).map(of_share).filter(|part| part.bytes > 0).collect();
    Some(HeldBy { what, bytes, summary, groups, doubts: doubts(&owners.doubts) })
}

/// Looks for blocks without pointers.
fn unreached(memory: &LiveMemory, (pid, comm): (u32, &str)) -> Result<Unreached, crate::retention::LooksError> {
    let registers = registers_of(memory);
    let read = registers.as_ref().map(|registers| move || registers.read());
    let read = read.as_ref().map(|read| read as &dyn Fn() -> Vec<u64>);
    let plan = Plan { looks: LOOKS, interval: Duration::from_secs(1), ..Plan::default() };
    let seen = look(memory, (pid, comm), plan, read, &mut Places::default())?;
    let leaks = Leaks::of(memory, pid, comm, &seen, false)?;
    let part = |group: &crate::retention::leaks::Group| Part {
        bytes: group.all_bytes(),
        blocks: group.blocks + group.held_blocks,
        words: format!("{}, {} B", group.words(), group.size_bytes),
    };
    let summary = if leaks.unreached_blocks == 0 {
        format!(
            "to each of its {} blocks a pointer is left: what grows is kept, not lost ({} looks)",
            grouped(leaks.live_blocks),
            leaks.looks
        )
    } else {
        told::sentence(&leaks)
    };
    Ok(Unreached {
        blocks: leaks.unreached_blocks,
        bytes: leaks.unreached_bytes,
        summary,
        groups: leaks.groups.iter().take(GROUPS_MAX).map(part).collect(),
        doubts: doubts(&leaks.doubts),
    })
}
