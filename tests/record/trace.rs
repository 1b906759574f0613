//! A trace, replayed in a table, has the blocks that the program's own ledger has.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::path::Path;
use std::process::Command;

use fragprof::trace::event::{Op, Request};
use fragprof::trace::read::{Item, Reader};
use fragprof::trace::{End, Names};

use super::{Program, place, target_command};
use crate::support::bpf;
use crate::support::build::{self, Link};
use crate::support::recording::{Recording, fragprof};
use crate::support::rendezvous::{Rendezvous, Target};
use crate::support::truth::SiteTruth;

/// A trace's contents in tables.
#[derive(Default)]
struct Replayed {
    requests: Vec<Request>,
    is_live: Vec<bool>,
    unknown_frees: u64,
    thread_ends: u64,
    accounts: u64,
    usage_samples: usize,
    seed_chunks: usize,
    names: Names,
    end: End,
}

impl Replayed {
    fn of(path: &Path) -> Self {
        let mut reader = Reader::new(std::io::BufReader::new(File::open(path).unwrap())).unwrap();
        let mut all = Self::default();
        while let Some(item) = reader.next_item().unwrap() {
            match item {
                Item::Event(event) => all.apply(event.op),
                Item::Account(account) => all.accounts += u64::from(account.heap.live_bytes.is_some()),
                Item::Names(names) => all.names = names,
                Item::Usage(usage) => all.usage_samples = usage.samples.len(),
                Item::Seed(regions) => all.seed_chunks += regions.iter().map(|region| region.chunks.len()).sum::<usize>(),
                Item::End(end) => all.end = end,
            }
        }
        assert!(reader.has_ended());
        all
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Alloc(request) => {
                self.requests.push(request);
                self.is_live.push(true);
            }
            Op::Free { block } | Op::ReallocFree { block } => {
                assert!(std::mem::replace(&mut self.is_live[block as usize], false), "block {block} is freed twice");
            }
            Op::ReallocFail { block } => self.is_live[block as usize] = true,
            Op::Exec => self.is_live.fill(false),
            Op::ThreadEnd => self.thread_ends += 1,
            Op::FreeUnknown { .. } | Op::ReallocFreeUnknown { .. } => self.unknown_frees += 1,
            _ => {}
        }
    }

    /// Alignments, and whether they are to be zeros, of the blocks of a function of the program.
    fn how(&self, site: &str) -> BTreeSet<(u8, bool)> {
        let is_of = |request: &&Request| self.names.functions_of(request.stack).any(|function| function == site);
        self.requests.iter().filter(is_of).map(|request| (request.alignment_bits, request.is_zeroed)).collect()
    }

    /// Figures by the program's functions whose name begins with `site_`.
    fn sites(&self) -> HashMap<String, (u64, u64, u64, u64)> {
        let mut sites: HashMap<String, (u64, u64, u64, u64)> = HashMap::new();
        for (request, is_live) in self.requests.iter().zip(&self.is_live) {
            let site = self.names.functions_of(request.stack).find(|function| function.starts_with("site_"));
            let Some(site) = site else { continue };
            let sums = sites.entry(site.to_owned()).or_default();
            *sums =
                (sums.0 + 1, sums.1 + request.size_bytes, sums.2 + u64::from(*is_live), sums.3 + u64::from(*is_live) * request.size_bytes);
        }
        sites
    }
}

#[test]
fn the_blocks_of_a_trace_are_those_of_the_programs_ledger() {
    if bpf().is_none() {
        return;
    }
    for program in ["realloc_forms", "short_threads", "entry_points"] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("trace");
        let mut target = Target::start(&mut target_command(Program::new(program), place::ATTACHED_TO_GLIBC));
        let recording = Recording::attach_by(fragprof(), &[target.pid()], &["--trace", path.to_str().unwrap()]);
        let truth = target.go_to("done");
        recording.stop();
        let replayed = Replayed::of(&path);
        assert_eq!(replayed.end.lost, 0);
        assert!(replayed.usage_samples >= 1, "{program}: there are no samples of its memory");
        assert!(replayed.accounts >= 1, "{program}: the census at the end is missing");
        if program == "entry_points" {
            // As tests/testprogs/entry_points.c requests them.
            for (site, how) in [
                ("site_malloc", (0, false)),
                ("site_calloc", (0, true)),
                ("site_memalign", (6, false)),
                ("site_aligned_alloc", (7, false)),
                ("site_posix_memalign", (8, false)),
                ("site_valloc", (12, false)),
            ] {
                assert_eq!(replayed.how(site), BTreeSet::from([how]), "{site}");
            }
        }
        if program == "short_threads" {
            // Of 200; the last ones may end after their records are read.
            assert!((190..=200).contains(&replayed.thread_ends), "{} threads ended", replayed.thread_ends);
        }
        let sites = replayed.sites();
        let of = |site: &SiteTruth| (site.allocations, site.allocated_bytes, site.live_count, site.live_bytes);
        for site in truth.sites.iter().filter(|site| site.site.starts_with("site_") && !site.live_only && site.allocations > 0) {
            assert_eq!(sites.get(&site.site), Some(&of(site)), "{program}: {}", site.site);
        }
    }
}

#[test]
fn the_blocks_of_a_trace_from_inside_are_those_of_the_programs_ledger() {
    for program in ["realloc_forms", "short_threads", "entry_points"] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("trace");
        let mut rendezvous = Rendezvous::new();
        let mut command = fragprof();
        command.args(["record", "--in-process", "--trace"]).arg(&path).env("TRUTH_SOCKET", rendezvous.path());
        let recording = Recording::start(&mut command, &[build::program(program, Link::Dynamic).as_os_str()]);
        rendezvous.expect("ready", &recording.process);
        rendezvous.go();
        let truth = rendezvous.expect("done", &recording.process);
        rendezvous.go();
        recording.finish();
        let replayed = Replayed::of(&path);
        assert_eq!(replayed.end.lost, 0);
        // The recorder, whose malloc the program calls, is no allocator.
        let allocators = &replayed.end.allocators;
        assert!(allocators.len() == 1 && allocators[0].starts_with("glibc in "), "{program}: {allocators:?}");
        assert!(replayed.usage_samples >= 1, "{program}: there are no samples of its memory");
        if program == "entry_points" {
            for (site, how) in [("site_calloc", (0, true)), ("site_aligned_alloc", (7, false)), ("site_valloc", (12, false))] {
                assert_eq!(replayed.how(site), BTreeSet::from([how]), "{site}");
            }
        }
        let sites = replayed.sites();
        for site in truth.sites.iter().filter(|site| site.site.starts_with("site_") && !site.live_only && site.allocations > 0) {
            // Without what the end of the program frees.
            let made = sites.get(&site.site).map(|of| (of.0, of.1));
            assert_eq!(made, Some((site.allocations, site.allocated_bytes)), "{program}: {}", site.site);
        }
    }
}

#[test]
fn a_trace_has_two_bytes_an_event_and_one_that_cannot_be_written_is_reported() {
    if bpf().is_none() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let trace = directory.path().join("trace");
    let record = |trace: &str, more: &[&str]| {
        let mut command = fragprof();
        command.args(["record", "--trace", trace, "-o"]).arg(directory.path().join("profile.pb.gz")).args(more);
        command.args(["--", "python3", "-c", "kept = [bytearray(600 + i % 5000) for i in range(60000)]"]);
        command.output().unwrap()
    };
    let done = record(trace.to_str().unwrap(), &[]);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let replayed = Replayed::of(&trace);
    assert!(replayed.end.events > 60_000 && replayed.unknown_frees == 0, "{:?}", replayed.end);
    let bytes = std::fs::metadata(&trace).unwrap().len();
    println!("{:.2} bytes an event", bytes as f64 / replayed.end.events as f64);
    assert!(bytes < 3 * replayed.end.events, "{bytes} bytes for {} events", replayed.end.events);

    let short = record(trace.to_str().unwrap(), &["--trace-max", "0"]);
    assert!(short.status.success());
    assert!(Replayed::of(&trace).end.cut_short.contains("its limit"));
    // The recording itself is not affected.
    let full = record("/dev/full", &[]);
    assert!(full.status.success(), "{}", String::from_utf8_lossy(&full.stderr));
    let nowhere = record("/nowhere/trace", &[]);
    assert_eq!(nowhere.status.code(), Some(2), "{}", String::from_utf8_lossy(&nowhere.stderr));
    let sampled =
        Command::new(env!("CARGO_BIN_EXE_fragprof")).args(["record", "--mode", "governed", "--trace", "x", "-p", "1"]).output().unwrap();
    assert_eq!(sampled.status.code(), Some(2));
}
