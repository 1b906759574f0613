//! `fragprof census`: the state of a process's heap, read from outside.

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde::Serialize;

use super::help::examples;
use super::output;
use super::progress::{self, Said};
use crate::allocator::Release;
use crate::census::pace;
use crate::census::runtime::hotspot::JavaMemory;
use crate::census::{ArenaChunks, Census, CoreFile, HeapAccount, LayoutCache, Level, LiveMemory, MemoryError, Options, Pace, Taken, take};
use crate::error::{ExitStatus, Failed};
use crate::heap::ladder::fragmentation_ratio;
use crate::process::container::{CgroupMemory, Container, Hierarchies, Surroundings};
use crate::process::{Process, ProcessError};
use crate::sanitize::terminal;
use crate::units::{HumanBytes, Pid, counted, half_width};

/// Rows shown of a table; the rest is summed in one line.
const ROWS_MAX: usize = 16;

/// Show where the bytes of a process's heap are: live, cached, free, trimmable, pinned, per arena
#[derive(Debug, Args)]
#[command(after_help = examples(&[
    ("sudo fragprof census PID", "Where the heap's bytes are, with arenas and size classes"),
    ("sudo fragprof census PID --map heap.svg", "Draw the heap page by page"),
    ("sudo fragprof census PID --json --watch 10", "One JSON object every 10 seconds"),
    ("fragprof census --core core.4242", "The heap in a core file"),
]))]
pub struct CensusArgs {
    /// Process id
    #[arg(required_unless_present = "core")]
    pub pid: Option<u32>,
    /// Read this ELF core file instead of a process
    #[arg(long, value_name = "FILE", conflicts_with = "pid")]
    pub core: Option<PathBuf>,
    /// How much of the heap to read
    #[arg(long, value_enum, default_value_t = Level::Full)]
    pub level: Level,
    /// Print one JSON object; with --watch one per line
    #[arg(long)]
    pub json: bool,
    /// Write a map of the heap's address space, page by page, to this SVG file
    #[arg(long, value_name = "FILE")]
    pub map: Option<PathBuf>,
    /// Repeat the census every so many seconds
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "5", conflicts_with = "core")]
    pub watch: Option<u64>,
    /// Pause for this many milliseconds after each MiB read, for latency-sensitive processes; it is read with one thread then, not two
    #[arg(long, value_name = "MS", default_value_t = 0)]
    pub pause: u64,
}

/// Takes the census and prints it.
///
/// # Errors
/// If the process or the core cannot be read, or the output cannot be written.
pub fn run(args: &CensusArgs) -> anyhow::Result<()> {
    if let Some(path) = &args.map {
        output::check_writable(path)?;
    }
    let pace = Pace::of_command(args.pause);
    let options = Options { level: if args.map.is_some() { Level::Full } else { args.level }, pace, with_not_malloc: true };
    let mut layouts = LayoutCache::default();
    let hierarchies = Hierarchies::find();
    loop {
        let shown = progress::show(reading());
        let taken = of_source(args.pid, args.core.as_deref(), options, &mut layouts, args.map.as_deref());
        drop(shown);
        let taken = taken?;
        let surroundings = args.pid.map(|pid| Surroundings::of(Pid(pid), &hierarchies)).unwrap_or_default();
        output::to_stdout(|out| print(out, &taken.census, &surroundings, args))?;
        let Some(seconds) = args.watch else { return Ok(()) };
        std::thread::sleep(Duration::from_secs(seconds.max(1)));
    }
}

/// The progress of the walk, for the progress line.
pub fn reading() -> impl Fn() -> Said + Send {
    let before = pace::read_bytes();
    move || Said { what: format!("reading the heap: {}", HumanBytes(pace::read_bytes().saturating_sub(before))), share: None }
}

fn of_source(
    pid: Option<u32>,
    core: Option<&std::path::Path>,
    options: Options,
    layouts: &mut LayoutCache,
    map: Option<&std::path::Path>,
) -> anyhow::Result<Taken> {
    read_from(core, pid, |memory, pid, comm| {
        let taken = take(memory, pid, comm, options, layouts).map_err(failed)?;
        if let Some(path) = map {
            output::to_file(path, |out| crate::census::map::draw(memory, &taken, out))?;
        }
        Ok(taken)
    })
}

/// Opens a process's memory; an error carries its exit status.
///
/// # Errors
/// If the process does not exist or may not be read.
pub fn open(pid: u32) -> anyhow::Result<LiveMemory> {
    let process = Process::open(Pid(pid)).map_err(|error| failed(MemoryError::Target(error)))?;
    Ok(LiveMemory::open(process).map_err(failed)?)
}

/// Reads the core file if there is one, else the process: `of` gets the memory, the process's id and its name.
///
/// # Errors
/// If there is no such process or file, it may not be read, or `of` fails.
pub fn read_from<T>(
    core: Option<&std::path::Path>,
    pid: Option<u32>,
    of: impl FnOnce(&dyn crate::census::Memory, u32, &str) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    if let Some(path) = core {
        let memory = CoreFile::open(path).map_err(failed)?;
        return of(&memory, memory.pid(), memory.comm());
    }
    let pid = pid.unwrap_or(0);
    let memory = open(pid)?;
    let comm = memory.process().comm().to_owned();
    of(&memory, pid, &comm)
}

/// The failure with its exit status.
#[must_use]
pub fn failed(error: MemoryError) -> Failed {
    let status = match &error {
        MemoryError::Refused { .. } | MemoryError::Target(ProcessError::Denied { .. }) => ExitStatus::Unsupported,
        MemoryError::Core { .. } => ExitStatus::Usage,
        _ => ExitStatus::Target,
    };
    Failed::new(status, error.to_string())
}

/// The census, with the process's container and memory limit.
#[derive(Serialize)]
struct Page<'a> {
    #[serde(flatten)]
    census: &'a Census,
    container: Option<&'a Container>,
    cgroup_memory: Option<&'a CgroupMemory>,
}

fn print(out: &mut dyn Write, census: &Census, surroundings: &Surroundings, args: &CensusArgs) -> io::Result<()> {
    let page = Page { census, container: surroundings.container.as_deref(), cgroup_memory: surroundings.memory.as_ref() };
    match (args.json, args.watch) {
        (true, None) => serde_json::to_writer_pretty(&mut *out, &page)?,
        // One object per line, for readers of the stream.
        (true, Some(_)) => serde_json::to_writer(&mut *out, &page)?,
        (false, None) => return write_text(out, census, surroundings),
        (false, Some(_)) => write_text(out, census, surroundings)?,
    }
    writeln!(out)
}

fn write_text(out: &mut dyn Write, census: &Census, surroundings: &Surroundings) -> io::Result<()> {
    writeln!(out, "{} (pid {}), resident {}", terminal(&census.comm), census.pid, HumanBytes(census.rss_bytes))?;
    if let Some(container) = &surroundings.container {
        writeln!(out, "  in {}", terminal(&container.title()))?;
    }
    let ladder = census.ladder();
    if let Some(sentence) = surroundings.sentence(ladder.live_bytes, ladder.trimmable_bytes) {
        writeln!(out, "  {sentence}")?;
    }
    if census.heaps.is_empty() && census.layout_unknown.is_empty() {
        writeln!(out, "  no malloc heap that can be read: no glibc, jemalloc, musl, tcmalloc of gperftools or Google, or mimalloc in use")?;
    }
    for unknown in &census.layout_unknown {
        writeln!(out, "  layout unknown: {unknown}")?;
    }
    for heap in &census.heaps {
        write_heap(out, heap)?;
    }
    if !census.not_malloc.is_empty() {
        writeln!(out, "\n  not malloc             resident  mappings")?;
        for one in &census.not_malloc {
            writeln!(out, "    {:<18} {:>10}  {:>8}", one.kind, HumanBytes(one.resident_bytes), one.mappings)?;
        }
    }
    if let Some(java) = &census.runtimes.java {
        write_java(out, java)?;
    }
    let walk = &census.walk;
    writeln!(
        out,
        "\n  walk: {:.1} ms, {} windows, {} broken headers, {} unknown, {}",
        walk.duration_ms,
        walk.windows,
        walk.broken_headers,
        HumanBytes(walk.unknown_bytes),
        if walk.usable { "usable" } else { "NOT usable for verdicts" }
    )
}

/// The Java heap, with its own limit, and metaspace.
fn write_java(out: &mut dyn Write, java: &JavaMemory) -> io::Result<()> {
    writeln!(out, "\n  java{}", java.collector.map(|name| format!(" ({name} collector)")).unwrap_or_default())?;
    let mut row = |name: &str, bytes: Option<u64>, more: &str| match bytes {
        Some(bytes) => writeln!(out, "    {name:<24} {:>10}  {more}", HumanBytes(bytes)),
        None => Ok(()),
    };
    let heap = &java.heap;
    let set_by = match heap.max_set_by {
        Some("command_line") => "set on the command line (-Xmx)",
        Some("max_ram_percentage") => "set as a share of memory (-XX:MaxRAMPercentage)",
        Some("default") => "the JVM's default: a quarter of the container's or machine's memory",
        Some(other) => other,
        None => "",
    };
    row("heap limit", heap.max_bytes, set_by)?;
    row("heap reserved", heap.reserved_bytes.filter(|&bytes| Some(bytes) != heap.max_bytes), "")?;
    row("heap committed", heap.committed_bytes, "")?;
    row("heap resident", heap.resident_bytes, "")?;
    row("heap used", heap.used_bytes, "by the JVM's counters, garbage included")?;
    if let Some(metaspace) = &java.metaspace {
        row("metaspace committed", Some(metaspace.committed_bytes), &format!("{} used", HumanBytes(metaspace.used_bytes)))?;
    }
    Ok(())
}

fn write_heap(out: &mut dyn Write, heap: &HeapAccount) -> io::Result<()> {
    let (ladder, details) = (&heap.ladder, &heap.details);
    writeln!(out, "\n  {} ({})", heap.allocator.title(), heap.layout)?;
    let mut row = |depth: usize, name: &str, bytes: Option<u64>, more: String| match bytes {
        Some(bytes) => writeln!(out, "  {:depth$}{name:<width$} {:>10}  {more}", "", HumanBytes(bytes), width = 26 - depth),
        None => Ok(()),
    };
    row(2, "extent", Some(ladder.extent_bytes), String::new())?;
    row(4, "swapped", Some(details.swapped_bytes).filter(|&bytes| bytes > 0), String::new())?;
    row(
        4,
        "resident",
        Some(ladder.resident_bytes),
        if details.huge_bytes > 0 { format!("{} in huge pages", HumanBytes(details.huge_bytes)) } else { String::new() },
    )?;
    row(6, "live, resident", heap.live_resident_bytes(), String::new())?;
    let released = match heap.allocator.row().release {
        Release::Calls([call, ..]) => format!("{} would release it now", call.text),
        Release::NoCall(why) => format!("whole free pages; {why}"),
        Release::Calls([]) => "whole free pages".into(),
    };
    row(6, "trimmable", ladder.trimmable_bytes, released)?;
    row(6, "pinned", ladder.pinned_bytes, "free, on pages with live bytes".into())?;
    row(6, "kept", details.kept_bytes, "free pages that a trim leaves".into())?;
    let has_cached = details.cached_bytes.is_none() && heap.allocator.row().has_caches;
    let cached = if has_cached { ", with those in the allocator's caches, which are free for the program" } else { "" };
    row(
        2,
        "live",
        ladder.live_bytes,
        heap.live_allocations.map_or(String::new(), |count| format!("{}{cached}", counted(count, "allocation"))),
    )?;
    if let (Some(estimate), Some(error)) = (heap.live_bytes_est, heap.live_bytes_stderr) {
        row(2, "live, estimated", Some(estimate), format!("±{}", HumanBytes(half_width(error))))?;
    }
    row(4, "of it mmapped", Some(heap.mmapped_bytes).filter(|&bytes| bytes > 0), counted(heap.mmapped_allocations, "allocation"))?;
    row(2, "cached", details.cached_bytes, String::new())?;
    row(
        2,
        "free",
        heap.free_bytes,
        heap.largest_free_bytes.map_or(String::new(), |bytes| format!("largest run {}, with caches and top", HumanBytes(bytes))),
    )?;
    row(2, "top", Some(heap.top_bytes).filter(|&bytes| bytes > 0), String::new())?;
    row(2, "overhead", Some(heap.overhead_bytes), String::new())?;
    row(2, "unknown", ladder.unknown_bytes, String::new())?;
    if let Some(off) = heap.off_balance_bytes() {
        let verdict = if off == 0 { "holds".to_owned() } else { format!("is off by {off} bytes") };
        writeln!(out, "    balance: extent = live + cached + free + top + overhead + unknown {verdict}")?;
    }
    let used = ladder.used_bytes(heap.live_resident_bytes());
    if let Some(ratio) = used.and_then(|used| fragmentation_ratio(used, ladder.resident_bytes)) {
        writeln!(out, "    fragmentation_ratio {ratio:.3}")?;
    }
    write_decay(out, heap)?;
    write_arenas(out, heap)?;
    write_classes(out, heap)
}

/// The free pages that jemalloc keeps, and for how long.
fn write_decay(out: &mut dyn Write, heap: &HeapAccount) -> io::Result<()> {
    let after = |time: Option<i64>| match time {
        Some(0) => "returned at once".to_owned(),
        Some(..0) => "never returned".to_owned(),
        Some(ms) => format!("returned after {} s", ms as f64 / 1e3),
        None => String::new(),
    };
    let rows = [
        ("free, dirty", heap.dirty_bytes, after(heap.dirty_decay_ms)),
        ("free, muzzy", heap.muzzy_bytes, after(heap.muzzy_decay_ms)),
        ("free, retained", heap.retained_bytes, "address space without memory".to_owned()),
    ];
    for (name, bytes, more) in rows {
        if let Some(bytes) = bytes {
            writeln!(out, "      {name:<22} {:>10}  {more}", HumanBytes(bytes))?;
        }
    }
    Ok(())
}

fn write_arenas(out: &mut dyn Write, heap: &HeapAccount) -> io::Result<()> {
    if heap.arenas.len() < 2 {
        return Ok(());
    }
    writeln!(
        out,
        "\n    {:<18} {:>7} {:>7} {:>10} {:>10} {:>10} {:>10} {:>10}",
        "arena", "threads", "pieces", "extent", "resident", "live", "free", "top"
    )?;
    // Chunks are attributed to arenas by a full walk alone.
    let walked = |chunks: Option<ArenaChunks>, bytes: fn(&ArenaChunks) -> u64| {
        chunks.map_or_else(|| "?".to_owned(), |chunks| HumanBytes(bytes(&chunks)).to_string())
    };
    let mut arenas: Vec<_> = heap.arenas.iter().collect();
    arenas.sort_by_key(|arena| std::cmp::Reverse(arena.extent_bytes));
    for arena in arenas.iter().take(ROWS_MAX) {
        writeln!(
            out,
            "    {:<18} {:>7} {:>7} {:>10} {:>10} {:>10} {:>10} {:>10}",
            format!("{:#x}", arena.address),
            arena.attached_threads.map_or_else(|| "?".to_owned(), |threads| threads.to_string()),
            arena.pieces,
            HumanBytes(arena.extent_bytes).to_string(),
            HumanBytes(arena.resident_bytes).to_string(),
            walked(arena.chunks, |chunks| chunks.live_bytes),
            walked(arena.chunks, |chunks| chunks.free_bytes.saturating_add(chunks.cached_bytes)),
            walked(arena.chunks, |chunks| chunks.top_bytes)
        )?;
    }
    match arenas.len().checked_sub(ROWS_MAX) {
        Some(more) if more > 0 => writeln!(out, "    and {more} smaller arenas"),
        _ => Ok(()),
    }
}

fn write_classes(out: &mut dyn Write, heap: &HeapAccount) -> io::Result<()> {
    if heap.size_classes.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n    {:<14} {:>10} {:>11} {:>10} {:>11}", "chunks up to", "live", "allocations", "free", "chunks")?;
    for class in &heap.size_classes {
        writeln!(
            out,
            "    {:<14} {:>10} {:>11} {:>10} {:>11}",
            HumanBytes(class.chunk_bytes_max).to_string(),
            HumanBytes(class.live_bytes),
            class.live_allocations,
            HumanBytes(class.free_bytes),
            class.free_chunks
        )?;
    }
    Ok(())
}
