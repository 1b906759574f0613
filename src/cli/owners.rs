//! `fragprof owners`: which blocks hold what.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Args;

use super::census::{failed, read_from, reading};
use super::help::examples;
use super::leaks::{memory_max, registers_of};
use super::{output, progress};
use crate::census::{Memory, Pace};
use crate::error::{ExitStatus, Failed};
use crate::profile::{Metadata, Mode, Profile, ValueKind, Values, pprof};
use crate::retention::owners::{By, Owner, Owners, Wanted, survey};
use crate::retention::scans::ScanError;
use crate::retention::wording::doubts;
use crate::sanitize::terminal;
use crate::units::{HumanBytes, counted};

/// Show which blocks hold which: what each retains and pins, its type, and the root it is reached from
#[derive(Debug, Args)]
#[command(after_help = examples(&[
    ("sudo fragprof owners PID", "Blocks that retain the most live bytes"),
    ("sudo fragprof owners PID --by pinned", "Blocks that pin the most free bytes"),
    ("sudo fragprof owners PID --path 0x55d0c0de1230", "How a block is reached from a root"),
    ("sudo fragprof owners PID -o owners.pb.gz", "Write a profile, for report and flamegraph"),
]))]
pub struct OwnersArgs {
    /// Process id
    #[arg(required_unless_present = "core")]
    pub pid: Option<u32>,
    /// Read this ELF core file instead of a process
    #[arg(long, value_name = "FILE", conflicts_with = "pid")]
    pub core: Option<PathBuf>,
    /// Bytes to rank by
    #[arg(long, value_enum, default_value_t = By::Live)]
    pub by: By,
    /// Show only blocks of this C++ class or Rust type, named as in the table of types
    #[arg(long = "type", value_name = "NAME")]
    pub type_name: Option<String>,
    /// Show the path from a root to the block at this hexadecimal address
    #[arg(long, value_name = "ADDRESS", value_parser = parse_address)]
    pub path: Option<u64>,
    /// Rows per table [default: 10, with --json 200]
    #[arg(long, value_name = "N")]
    pub top: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Write a profile (gzipped pprof) of all blocks by root, owner and type, for report and flamegraph
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Most memory that the scan itself may use, in MiB; a heap that needs more is refused [default: half of the available memory]
    #[arg(long, value_name = "MIB")]
    pub memory_max: Option<u64>,
    /// Pause for this many milliseconds after each MiB read, for latency-sensitive processes
    #[arg(long, value_name = "MS", default_value_t = 0)]
    pub pause: u64,
}

/// Rows shown when `--top` is not given.
const TOP_DEFAULT: usize = 10;

fn parse_address(text: &str) -> Result<u64, String> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    u64::from_str_radix(digits, 16).map_err(|_| format!("{text:?} is not a hexadecimal address"))
}

/// Runs the command.
///
/// # Errors
/// If the process or the core cannot be read or has no heap that can be read, or the output cannot be written.
pub fn run(args: &OwnersArgs) -> anyhow::Result<()> {
    if let Some(path) = &args.output {
        output::check_writable(path)?;
    }
    let shown = progress::show(reading());
    let owners = read_from(args.core.as_deref(), args.pid, |memory, pid, comm| of(memory, pid, comm, args))?;
    drop(shown);
    if let Some(path) = &args.output {
        write_profile(&owners, path)?;
    }
    output::to_stdout(|out| {
        if args.json {
            serde_json::to_writer_pretty(&mut *out, &owners)?;
            return writeln!(out);
        }
        write_text(out, &owners, args)
    })
}

fn of(memory: &dyn Memory, pid: u32, comm: &str, args: &OwnersArgs) -> anyhow::Result<Owners> {
    let pace = Pace::of_command(args.pause);
    let wanted = Wanted {
        type_name: args.type_name.clone(),
        path: args.path,
        with_shares: args.output.is_some(),
        memory_max_bytes: Some(memory_max(args.memory_max)),
    };
    let registers = registers_of(memory);
    let read = registers.as_ref().map(|registers| move || registers.read());
    let read = read.as_ref().map(|read| read as &dyn Fn() -> Vec<u64>);
    let found = survey(memory, (pid, comm), pace, args.by, &wanted, read);
    let mut owners = found.map_err(|error| match error {
        ScanError::Memory(error) => failed(error),
        other => Failed::new(ExitStatus::Unsupported, other.to_string()),
    })?;
    if let Some(top) = args.top {
        owners.owners.truncate(top);
        owners.types.truncate(top);
        owners.roots.truncate(top);
    }
    if args.path.is_some() && owners.path.is_empty() {
        let message = "no path leads to that address: it is in no block, or no pointer to its block was seen";
        return Err(Failed::new(ExitStatus::Target, message).into());
    }
    Ok(owners)
}

/// All blocks as stacks of three frames: the root from which they are reached first, the owner, the type.
fn write_profile(owners: &Owners, path: &Path) -> anyhow::Result<()> {
    let kinds = [ValueKind::LiveObjects, ValueKind::LiveSpace, ValueKind::PinnedSpace, ValueKind::BlockedSpace];
    let process = crate::profile::meta::Process { pid: owners.pid, comm: owners.comm.clone(), ..Default::default() };
    let mut profile = Profile::new(Metadata {
        tool: format!("fragprof {}", env!("CARGO_PKG_VERSION")),
        mode: Mode::Looked,
        duration_s: owners.duration_s,
        kinds: kinds.into_iter().collect(),
        processes: vec![process],
        limits: vec![LIMITS.to_owned()],
        doubts: doubts(&owners.doubts),
        ..Metadata::default()
    });
    for share in &owners.shares {
        let sums = &share.sums;
        let values = Values::default()
            .with(ValueKind::LiveObjects, sums.blocks)
            .with(ValueKind::LiveSpace, sums.bytes)
            .with(ValueKind::PinnedSpace, sums.pinned)
            .with(ValueKind::BlockedSpace, sums.blocked);
        profile.add(owners.pid, &share.frames(), None, &values);
    }
    output::to_file(path, |out| pprof::write(&profile, out))
}

/// Smallest share, in percent, for which a block is named as the holder.
const PERCENT_MIN: u64 = 10;

/// A sentence that names the block in which most of the retained bytes come together.
pub(super) fn main_owner(owners: &Owners, by: By) -> Option<String> {
    let owner = owners.main_owner.as_ref()?;
    let (held, all, what) = match by {
        By::Live => (owner.retained_bytes, owners.live_bytes, "bytes in use"),
        By::Pinned => (owner.retained_pinned_bytes, owners.pinned_bytes, "pinned bytes"),
        By::Blocked => (owner.retained_blocked_bytes, owners.blocked_bytes, "blocked bytes"),
    };
    let percent = held.saturating_mul(100).checked_div(all)?;
    Some(match percent {
        0..PERCENT_MIN => format!("no single block holds more than {percent} % of the {what}"),
        _ => format!("{percent} % of the {what} are held by {}", owner.words()),
    })
}

/// What a single scan cannot show.
const LIMITS: &str = "a single scan, during which pointers may have moved; what two owners share is retained by neither";

fn write_text(out: &mut dyn Write, owners: &Owners, args: &OwnersArgs) -> io::Result<()> {
    let top = args.top.unwrap_or(TOP_DEFAULT);
    writeln!(out, "{} (pid {})", terminal(&owners.comm), owners.pid)?;
    writeln!(
        out,
        "  {} in {} in use, {} pinned, {} blocked; to {} of them the scan saw no pointer",
        HumanBytes(owners.live_bytes),
        counted(owners.live_blocks, "block"),
        HumanBytes(owners.pinned_bytes),
        HumanBytes(owners.blocked_bytes),
        HumanBytes(owners.unreached_bytes)
    )?;
    if !owners.path.is_empty() {
        writeln!(out, "\n  the shortest path to the block, from the first kind of root that leads to it")?;
        for step in &owners.path {
            let size = if step.size_bytes > 0 { format!("{} B", step.size_bytes) } else { String::new() };
            writeln!(out, "  {:>18} {size:>12}  {}", step.address, terminal(&step.label))?;
        }
        return Ok(());
    }
    writeln!(out, "\n  blocks that retain most: what is reachable only through them")?;
    let wide = args.by == By::Blocked;
    let head = if wide { "blocked" } else { "pinned" };
    writeln!(out, "  {:>10} {:>10} {:>9} {:>18} {:>10}  what it is", "retained", head, "blocks", "address", "size")?;
    for owner in owners.owners.iter().take(top) {
        write_owner(out, owner, wide)?;
    }
    if let Some(sentence) = main_owner(owners, args.by) {
        writeln!(out, "\n  {}", terminal(&sentence))?;
    }
    if !owners.types.is_empty() {
        writeln!(out, "\n  {:>10} {:>10} {:>9}  type (without what it holds)", "live", head, "blocks")?;
        for sum in owners.types.iter().take(top) {
            let (bytes, pinned) =
                (HumanBytes(sum.bytes).to_string(), HumanBytes(if wide { sum.blocked_bytes } else { sum.pinned_bytes }).to_string());
            writeln!(out, "  {bytes:>10} {pinned:>10} {:>9}  {}", sum.blocks, terminal(&sum.type_name))?;
        }
    }
    if !owners.roots.is_empty() {
        writeln!(out, "\n  {:>10} {:>10} {:>9}  reached first from (others may lead there too)", "live", head, "blocks")?;
        for sum in owners.roots.iter().take(top) {
            let (bytes, pinned) =
                (HumanBytes(sum.bytes).to_string(), HumanBytes(if wide { sum.blocked_bytes } else { sum.pinned_bytes }).to_string());
            writeln!(out, "  {bytes:>10} {pinned:>10} {:>9}  {}", sum.blocks, terminal(&sum.reached_first_from))?;
        }
    }
    if !owners.roots_left_out.is_empty() {
        writeln!(out, "\n  roots are not named: {}", owners.roots_left_out)?;
    }
    writeln!(out, "\n  {LIMITS}")?;
    for doubt in doubts(&owners.doubts) {
        writeln!(out, "  doubt: {doubt}")?;
    }
    Ok(())
}

fn write_owner(out: &mut dyn Write, owner: &Owner, is_blocked: bool) -> io::Result<()> {
    let role = owner.role.as_ref().map_or_else(String::new, |role| format!(", {role}"));
    let from = if !role.is_empty() || owner.reached_first_from.is_empty() {
        String::new()
    } else {
        format!(", reached first from {}", owner.reached_first_from)
    };
    writeln!(
        out,
        "  {:>10} {:>10} {:>9} {:>18} {:>10}  {}{}{}{}",
        HumanBytes(owner.retained_bytes).to_string(),
        HumanBytes(if is_blocked { owner.retained_blocked_bytes } else { owner.retained_pinned_bytes }).to_string(),
        owner.blocks,
        owner.address,
        format!("{} B", owner.size_bytes),
        terminal(&owner.label),
        terminal(&role),
        terminal(&from),
        if owner.shared { ", shared by several" } else { "" }
    )
}
