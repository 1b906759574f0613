//! The columns of the table: every call, estimates, the census; each compared with the ledger in the same process.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use super::compare::{Cell, Estimate, coverage, exact, within};
use super::ledger::{Allocator, Entry, Request};
use super::measure::{Prepared, RUN_LIMIT, Running, Start, report, wait_until_recording, wait_while_alive};
use crate::support::process::{Process, run};
use crate::support::recording::fragprof;

/// A cell with the name of its column.
pub type Named = (&'static str, Cell);

/// Figures of one process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Figures {
    allocations: u64,
    bytes: u64,
    live_blocks: u64,
    live_bytes: u64,
    peak_bytes: u64,
    peak_doubt_bytes: u64,
}

/// One of its figures.
type Of = fn(&Figures) -> u64;

/// By process: the allocations of all of its images, the live blocks of the last one.
fn truth_by_process(entries: &[Entry]) -> BTreeMap<u32, Figures> {
    let mut all: BTreeMap<u32, Figures> = BTreeMap::new();
    for entry in entries {
        let sum = all.entry(entry.pid).or_default();
        sum.allocations += entry.allocations();
        sum.bytes += entry.bytes();
        (sum.live_blocks, sum.live_bytes) = (entry.live_blocks(), entry.live_bytes());
        sum.peak_bytes = sum.peak_bytes.max(entry.peak_bytes());
        sum.peak_doubt_bytes = sum.peak_doubt_bytes.max(entry.peak_doubt_bytes());
    }
    all
}

fn seen_by_process(page: &Value) -> BTreeMap<u32, Figures> {
    let mut all: BTreeMap<u32, Figures> = BTreeMap::new();
    let number = |value: &Value, key: &str| value[key].as_u64().unwrap_or(0);
    for stack in page["stacks"].as_array().into_iter().flatten() {
        let sum = all.entry(number(stack, "pid") as u32).or_default();
        sum.allocations += number(stack, "allocations");
        sum.bytes += number(stack, "allocated_bytes");
        sum.live_blocks += number(stack, "inuse_allocations");
        sum.live_bytes += number(stack, "inuse_bytes");
    }
    for process in page["processes"].as_array().into_iter().flatten() {
        all.entry(number(process, "pid") as u32).or_default().peak_bytes = number(process, "peak_inuse_bytes");
    }
    all
}

/// Sums over processes, and both numbers for each process that differs.
fn summed(entries: &[Entry], truth: &BTreeMap<u32, Figures>, seen: &BTreeMap<u32, Figures>, of: Of, allowed: Of) -> Cell {
    let mut sums = (0, 0);
    let mut differ: BTreeMap<String, (u64, u64, u64)> = BTreeMap::new();
    for (pid, figures) in truth {
        let (told, was) = (seen.get(pid).map_or(0, of), of(figures));
        sums = (sums.0 + told, sums.1 + was);
        if told.abs_diff(was) > allowed(figures) {
            let name = entries.iter().rfind(|entry| entry.pid == *pid).map_or("?", Entry::program);
            let one = differ.entry(name.to_owned()).or_default();
            *one = (one.0 + told, one.1 + was, one.2 + allowed(figures));
        }
    }
    // Blocks that a child of vfork allocates before its exec are on its parent's heap and in its parent's ledger.
    if differ.is_empty() || sums.0 == sums.1 {
        return within(sums.0, sums.1, u64::MAX, "");
    }
    let words = |(name, (told, was, allowed)): (&String, &(u64, u64, u64))| {
        format!("{name} {}", within(*told, *was, *allowed, "the order of simultaneous calls is not known").text())
    };
    let list: Vec<String> = differ.iter().map(words).collect();
    Cell::Wrong(list.join("; "))
}

/// `fragprof record -- PROGRAM`, every call. The second value: the number of blocks that its busiest process allocated.
pub fn recorded(prepared: &Prepared) -> Result<(Vec<Named>, u64), String> {
    let folder = TempDir::new().expect("a temporary directory can be created");
    let file = folder.path().join("out.pb.gz");
    let rounds = prepared.rounds;
    let mut running = prepared.record(rounds, &file)?;
    prepared.drive(&mut running, rounds);
    let said = running.process.err.all();
    if !file.exists() {
        return Err(format!("no profile: {said}"));
    }
    let page = report(&file)?;
    let entries = running.ledgers.all();
    if let Some(broken) = entries.iter().find(|entry| entry.missed() > 0) {
        return Err(format!("the ledger of {} overflowed by {} blocks", broken.program(), broken.missed()));
    }
    let (truth, seen) = (truth_by_process(&entries), seen_by_process(&page));
    let found = truth.keys().filter(|pid| seen.contains_key(pid)).count();
    let mut cells = vec![("processes", exact(found as u64, truth.len() as u64))];
    let columns: [(&'static str, Of); 5] = [
        ("allocations", |one| one.allocations),
        ("bytes", |one| one.bytes),
        ("live blocks", |one| one.live_blocks),
        ("live bytes", |one| one.live_bytes),
        ("peak", |one| one.peak_bytes),
    ];
    for (name, of) in columns {
        let allowed: Of = if name == "peak" { |one| one.peak_doubt_bytes } else { |_| 0 };
        cells.push((name, summed(&entries, &truth, &seen, of, allowed)));
    }
    let losses: Vec<String> =
        page["losses"].as_object().into_iter().flatten().filter(|(_, n)| n.as_u64() != Some(0)).map(|(k, n)| format!("{k} {n}")).collect();
    let losses = if losses.is_empty() { "none".to_owned() } else { losses.join(", ") };
    // Reported losses are listed; they do not make a wrong figure right.
    cells.push(("losses", Cell::None(losses)));
    let made = entries.iter().map(Entry::allocations).max().unwrap_or(0);
    Ok((cells, made))
}

/// How a recording estimates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    /// Windows under a budget of 1 %.
    Governed,
    /// The in-process sampler, with an interval of 64 KiB.
    Sampled,
}

/// One recording: the report, and the program's own ledger since the recording began.
fn estimated(prepared: &Prepared, tier: Tier, rounds: u64) -> Result<(Value, Entry), String> {
    let folder = TempDir::new().expect("a temporary directory can be created");
    let file = folder.path().join("out.pb.gz");
    let start = if tier == Tier::Sampled { Start::KeptAndSampled } else { Start::Kept };
    let mut running = prepared.start(rounds, start)?;
    let pid = running.process.pid();
    running.ledgers.wait_until_kept(pid);
    let mut command = fragprof();
    command.args(["record", "--duration", "600s", "-p", &pid.to_string(), "-o"]).arg(&file);
    if tier == Tier::Governed {
        command.args(["--mode", "governed", "--budget", "1%"]);
    }
    let mut recorder = Process::start(&mut command);
    wait_until_recording(&recorder)?;
    running.ledgers.let_go();
    prepared.drive(&mut running, rounds);
    let status = recorder.wait(RUN_LIMIT);
    if !status.success() {
        return Err(format!("fragprof record ended with {status}: {}", recorder.err.all()));
    }
    let page = report(&file)?;
    let mode = page["mode"].as_str().unwrap_or_default();
    let wanted = if tier == Tier::Sampled { "sampled" } else { "governed" };
    if mode != wanted {
        return Err(format!("recorded as {mode} instead of {wanted}: {}", page["notes"]));
    }
    let entry = running.ledgers.of(pid).ok_or("the program has no ledger")?;
    Ok((page, entry))
}

/// A figure of a report and its error; a lower bound has a name of its own, and no error.
fn figure(page: &Value, key: &str, truth: u64) -> Option<Estimate> {
    let total = |suffix: &str| page["totals"][format!("{key}_{suffix}")].as_f64();
    let truth = truth as f64;
    match (total("est"), total("min")) {
        (Some(est), _) => Some(Estimate { est, stderr: Some(total("stderr").unwrap_or(0.0)), truth }),
        (None, Some(est)) => Some(Estimate { est, stderr: None, truth }),
        (None, None) => None,
    }
}

/// Several recordings of one program: how often the stated intervals cover the ledger's count.
pub fn estimates(prepared: &Prepared, tier: Tier, repeats: u32) -> Vec<Named> {
    let (allocations, bytes, live) = match tier {
        Tier::Governed => ("governed allocations", "governed bytes", None),
        Tier::Sampled => ("sampled allocations", "sampled bytes", Some("sampled live bytes")),
    };
    let columns = [Some(allocations), Some(bytes), live];
    let rounds = prepared.program.rounds_long;
    if rounds == 0 {
        let why = if prepared.program.is_tree { "several processes" } else { "too short" };
        return columns.into_iter().flatten().map(|column| (column, Cell::None(why.into()))).collect();
    }
    let mut found: [Vec<Estimate>; 3] = Default::default();
    for _ in 0..repeats {
        let (page, entry) = match estimated(prepared, tier, rounds) {
            Ok(one) => one,
            Err(why) => return columns.into_iter().flatten().map(|column| (column, Cell::Wrong(why.clone()))).collect(),
        };
        let truths = [("allocations", entry.allocations()), ("allocated_bytes", entry.bytes()), ("inuse_bytes", entry.live_bytes())];
        for (list, (key, truth)) in found.iter_mut().zip(truths) {
            list.extend(figure(&page, key, truth));
        }
    }
    columns.into_iter().zip(&found).filter_map(|(column, list)| Some((column?, coverage(list)))).collect()
}

/// Resident bytes of a process's anonymous memory.
fn anonymous_bytes(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("Anonymous:")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) * 1024
}

/// Stops the program at a call in the middle of its work. `made`: the total number of blocks that it allocates.
fn hold(prepared: &Prepared, made: u64) -> Result<(Running, Option<Process>, Entry), String> {
    let rounds = prepared.rounds;
    for part in [2, 4, 10] {
        // With several processes each would be stopped, and the others would never be resumed.
        let at = (made / part).max(1);
        let start = if prepared.program.is_tree { Start::AtOnce } else { Start::UntilAllocation(at) };
        let running = prepared.start(rounds, start)?;
        let load = prepared.begin_load(rounds);
        let began = std::time::Instant::now();
        let entry = loop {
            let enough = |entry: &Entry| entry.allocations() >= at;
            match running.ledgers.all().into_iter().rfind(enough) {
                Some(entry) => break Some(entry),
                None if began.elapsed() > Duration::from_secs(60) => break None,
                None => std::thread::sleep(Duration::from_micros(200)),
            }
        };
        let Some(entry) = entry else { continue };
        entry.ask(Request::Hold);
        if wait_while_alive(&entry, "the program stops at a call", || entry.answered(Request::Hold)).is_ok() {
            return Ok((running, load, entry));
        }
    }
    Err("it ended before it could be stopped at a call".into())
}

/// Sum over the heaps of a census.
fn sum(page: &Value, key: &str) -> u64 {
    page["heaps"].as_array().into_iter().flatten().filter_map(|heap| heap[key].as_u64()).sum()
}

fn census_page(pid: u32) -> Result<Value, String> {
    let done = run(fragprof().args(["census", &pid.to_string(), "--json"]));
    if !done.status.success() {
        return Err(format!("the census failed: {}", done.err));
    }
    let mut page: Value = serde_json::from_str(&done.out).map_err(|e| e.to_string())?;
    // The ledger is that of malloc: what Python keeps in arenas of its own is not in it.
    if let Some(heaps) = page["heaps"].as_array_mut() {
        heaps.retain(|heap| heap["allocator"] != "pymalloc");
    }
    Ok(page)
}

/// Compares a census of the program, stopped at a call in the middle of its work, with the ledger and the allocator's statistics; and the
/// predicted effect of a trim with the actual one.
pub fn census(prepared: &Prepared, made: u64) -> Result<Vec<Named>, String> {
    let (running, load, entry) = hold(prepared, made)?;
    let page = census_page(entry.pid)?;
    let at = entry.again();
    // A thread that only frees has a cache too.
    let threads = fs::read_dir(format!("/proc/{}/task", entry.pid)).map_or(0, |tasks| tasks.count() as u64);
    let before = anonymous_bytes(entry.pid);
    entry.ask(Request::Trim);
    let trimmed =
        wait_while_alive(&entry, "the trim", || entry.answered(Request::Trim)).map(|()| before.saturating_sub(anonymous_bytes(entry.pid)));
    entry.ask(Request::None);
    drop((running, load));
    let (live, blocks) = (sum(&page, "live_bytes"), sum(&page, "live_allocations"));
    let heaps: Vec<&str> = page["heaps"].as_array().into_iter().flatten().filter_map(|heap| heap["allocator"].as_str()).collect();
    let mut cells = vec![(
        "heaps",
        match (heaps.as_slice(), at.allocator()) {
            (["glibc"], Allocator::Glibc) | (["jemalloc"], Allocator::Jemalloc) | (["tcmalloc"], Allocator::Tcmalloc) => {
                Cell::Good(heaps.join(", "))
            }
            (found, of) => Cell::Wrong(format!("{found:?} of {of:?}")),
        },
    )];
    match at.allocator() {
        Allocator::Glibc => {
            // A thread's cache is a block that glibc allocates itself; threads that have ended have none.
            cells.push(("blocks", within(blocks, at.account(0), threads, "a cache for each thread")));
            // A chunk has the usable bytes and one word; a chunk with its own mapping has the size of the mapping.
            let heap_blocks = at.account(0) - at.account(2);
            let chunks = at.account(1) - at.account(3) + 8 * heap_blocks + at.account(5);
            cells.push(("live", within(live, chunks, 0x2a0 * threads, "a cache for each thread")));
            // glibc counts its fenceposts as in use, and the fast bins as free.
            let in_use = at.account(6) + at.account(5);
            let cached = sum(&page, "cached_bytes").saturating_sub(sum(&page, "fastbin_bytes"));
            cells.push(("in use", exact(live + cached + sum(&page, "overhead_bytes"), in_use)));
            cells.push(("extent", exact(sum(&page, "extent_bytes"), at.account(4) + at.account(5))));
            let given = trimmed?;
            // The call itself touches pages of its stack, and the allocator's metadata.
            cells.push(("trimmed", within(sum(&page, "trimmable_bytes"), given, 4 * 4096, "pages that the call touches")));
        }
        Allocator::Jemalloc | Allocator::Tcmalloc => {
            // Blocks in a thread's cache look live from outside, as documented: at least the live bytes, at most the allocated ones.
            let most = at.account(4) + if at.allocator() == Allocator::Tcmalloc { at.account(8) } else { 0 };
            let (least, allowed) = (at.account(1), most.saturating_sub(at.account(1)));
            cells.push(("blocks", within(blocks, at.account(0), blocks / 5, "blocks in the threads' caches")));
            cells.push((
                "live",
                within(live, least, allowed, "blocks in the threads' caches: the allocator counts them, the ledger does not"),
            ));
            if at.allocator() == Allocator::Jemalloc {
                cells.push((
                    "in use",
                    within(
                        sum(&page, "allocator_resident_bytes"),
                        at.account(6),
                        1 << 16,
                        "pages of the statistics themselves: stats.resident",
                    ),
                ));
                cells.push(("extent", Cell::None(format!("{}, stats.mapped {}", sum(&page, "extent_bytes"), at.account(7)))));
            } else {
                cells.push(("in use", Cell::None(format!("{}, current_allocated_bytes {}", live, at.account(4)))));
                cells.push(("extent", exact(sum(&page, "extent_bytes"), at.account(5))));
            }
            cells.push(("trimmed", Cell::None("no such call".into())));
        }
        Allocator::Unknown => return Err("no statistics".into()),
    }
    Ok(cells)
}

/// Whether the program is installed.
pub fn is_installed(program: &str) -> bool {
    program.starts_with('%')
        || Path::new(program).is_file()
        || run(Command::new("sh").args(["-c", &format!("command -v {program}")])).status.success()
}
