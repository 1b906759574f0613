//! What `explain` reports of the blocks that hold memory: owners of pinned or blocked bytes, and blocks to which no pointer was seen.

use std::io::{self, Write};
use std::time::Duration;

use serde::Serialize;

use super::leaks::registers_of;
use super::owners::main_owner;
use crate::census::live::LiveMemory;
use crate::census::{LayoutCache, Pace};
use crate::fragmentation::verdict::{Kind, PINNED_BYTES_MIN, Verdict};
use crate::retention::Leaks;
use crate::retention::owners::{By, Owners, Wanted, survey};
use crate::retention::scans::{Plan, scan};
use crate::retention::wording::{self, doubts};
use crate::sanitize::terminal;
use crate::units::{HumanBytes, counted, grouped};

/// Heaps with more blocks are left to `owners` and `leaks`: the graph of this many takes a quarter of a gigabyte, and ten seconds.
const BLOCKS_MAX: u64 = 4 << 20;
/// Most groups reported.
const GROUPS_MAX: usize = 5;
/// Scans after the first.
const LOOKS: u32 = 4;

/// The owners of the pinned or blocked bytes.
#[derive(Debug, Serialize)]
pub struct HeldBy {
    /// `pinned` or `blocked`.
    pub what: &'static str,
    /// All pinned or blocked bytes.
    pub bytes: u64,
    /// One sentence.
    pub summary: String,
    /// The owners and types with most of it.
    pub groups: Vec<Part>,
    /// Reasons to doubt.
    pub doubts: Vec<String>,
}

/// Blocks with the same type, owner and root.
#[derive(Debug, Serialize)]
pub struct Part {
    /// Their pinned or blocked bytes, or, of unreached blocks, all their bytes.
    pub bytes: u64,
    /// Blocks.
    pub blocks: u64,
    /// Their type, their owner, and the root from which they are reached first.
    pub words: String,
    /// Of pinned bytes, those on pages on which nothing else lives: at most so many could be given back if only these blocks were elsewhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pinned_alone_bytes: Option<u64>,
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
    /// The largest groups of them.
    pub groups: Vec<Part>,
    /// Reasons to doubt.
    pub doubts: Vec<String>,
}

/// What was found; each part only if the verdict calls for it.
#[derive(Debug, Default, Serialize)]
pub struct Reachability {
    /// The owners of the pinned or blocked bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_by: Option<HeldBy>,
    /// Blocks to which no pointer was seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unreached: Option<Unreached>,
    /// What was not examined, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<String>,
}

impl Reachability {
    /// Scans a process as its verdict calls for. `live_blocks` are those of the census; with `is_once` nothing is scanned twice.
    pub fn of(memory: &LiveMemory, (pid, comm): (u32, &str), verdict: &Verdict, live_blocks: u64, is_once: bool) -> Self {
        let mut found = Self::default();
        let has = |kinds: &[Kind]| verdict.findings.iter().any(|finding| kinds.contains(&finding.verdict));
        let ladder = &verdict.evidence.ladder;
        let is_pinned = verdict.has_pinned_bytes();
        let is_kept = has(&[Kind::Hoarding, Kind::ArenaBlowUp]) && ladder.trimmable_bytes.unwrap_or(0) >= PINNED_BYTES_MIN;
        let grows = has(&[Kind::Leak, Kind::Growing]);
        if !(is_pinned || is_kept || grows) {
            return found;
        }
        if live_blocks > BLOCKS_MAX {
            let blocks = grouped(live_blocks);
            found.left_out.push(format!(
                "what holds the memory: a scan of {blocks} blocks takes time and memory; run fragprof owners {pid} and fragprof leaks {pid}"
            ));
            return found;
        }
        if is_pinned || is_kept {
            let by = if is_pinned { By::Pinned } else { By::Blocked };
            let registers = registers_of(memory);
            let read = registers.as_ref().map(|registers| move || registers.read());
            let read = read.as_ref().map(|read| read as &dyn Fn() -> Vec<u64>);
            let wanted = Wanted { with_shares: true, ..Wanted::default() };
            match survey(memory, (pid, comm), Pace::of_command(0), by, &wanted, read) {
                Ok(owners) => found.held_by = held_by(&owners, by),
                Err(error) => found.left_out.push(format!("what holds the memory: {error}")),
            }
        }
        if grows && is_once {
            found.left_out.push("whether all blocks are still pointed to: this takes several scans, so omit --once".to_owned());
        } else if grows {
            match unreached(memory, (pid, comm)) {
                Ok(unreached) => found.unreached = Some(unreached),
                Err(error) => found.left_out.push(format!("whether all blocks are still pointed to: {error}")),
            }
        }
        found
    }

    /// Writes it as a part of `explain`.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        if let Some(held) = &self.held_by {
            held.write(out)?;
        }
        if let Some(unreached) = &self.unreached {
            write_part(out, &unreached.summary, &unreached.groups, &unreached.doubts)?;
        }
        Ok(())
    }
}

impl HeldBy {
    /// Writes it, indented.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        write_part(out, &self.summary, &self.groups, &self.doubts)
    }
}

fn write_part(out: &mut dyn Write, summary: &str, groups: &[Part], doubts: &[String]) -> io::Result<()> {
    writeln!(out, "    {}", terminal(summary))?;
    for group in groups {
        writeln!(out, "      {:>10} in {}: {}", HumanBytes(group.bytes), counted(group.blocks, "block"), terminal(&group.words))?;
        if let Some(bytes) = group.pinned_alone_bytes {
            writeln!(out, "      {:>10} if only these were elsewhere: up to {} could be given back", "", HumanBytes(bytes))?;
        }
    }
    for doubt in doubts {
        writeln!(out, "      doubt: {doubt}")?;
    }
    Ok(())
}

/// The owners of the bytes that `by` ranks by; `None` if there are none.
fn held_by(owners: &Owners, by: By) -> Option<HeldBy> {
    let (what, bytes) = if by == By::Blocked { ("blocked", owners.blocked_bytes) } else { ("pinned", owners.pinned_bytes) };
    if bytes < PINNED_BYTES_MIN {
        return None;
    }
    let summary = main_owner(owners, by)
        .unwrap_or_else(|| format!("no single block holds the {what} bytes: roots point to their blocks, or several blocks do"));
    let explained = if by == By::Blocked { " (blocked: whole free pages below the heap's last block in use)" } else { "" };
    let summary = format!("{summary}{explained}");
    let of_share = |share: &crate::retention::shares::Share| Part {
        bytes: share.sums.by(by),
        blocks: share.sums.blocks,
        words: share.words(),
        pinned_alone_bytes: (by == By::Pinned).then_some(share.pinned_alone_bytes),
    };
    let groups = owners.shares.iter().take(GROUPS_MAX).map(of_share).filter(|part| part.bytes > 0).collect();
    Some(HeldBy { what, bytes, summary, groups, doubts: doubts(&owners.doubts) })
}

/// Finds blocks to which no pointer is left.
fn unreached(memory: &LiveMemory, (pid, comm): (u32, &str)) -> Result<Unreached, crate::retention::ScanError> {
    let registers = registers_of(memory);
    let read = registers.as_ref().map(|registers| move || registers.read());
    let read = read.as_ref().map(|read| read as &dyn Fn() -> Vec<u64>);
    let plan = Plan { looks: LOOKS, interval: Duration::from_secs(1), ..Plan::default() };
    let seen = scan(memory, (pid, comm), plan, read, &mut LayoutCache::of_malloc())?;
    let leaks = Leaks::of(memory, pid, comm, &seen, false)?;
    let part = |group: &crate::retention::leaks::Group| Part {
        bytes: group.all_bytes(),
        blocks: group.blocks + group.held_blocks,
        words: format!("{}, {} B", group.words(), group.size_bytes),
        pinned_alone_bytes: None,
    };
    let summary = if leaks.unreached_blocks == 0 {
        let scans = counted(u64::from(leaks.looks), "scan");
        format!("all {} blocks are still pointed to: what grows is retained, not lost ({scans})", grouped(leaks.live_blocks))
    } else {
        wording::sentence(&leaks)
    };
    Ok(Unreached {
        blocks: leaks.unreached_blocks,
        bytes: leaks.unreached_bytes,
        summary,
        groups: leaks.groups.iter().take(GROUPS_MAX).map(part).collect(),
        doubts: doubts(&leaks.doubts),
    })
}
