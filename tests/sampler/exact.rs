//! With an interval of one byte every allocation is a sample with its size as its weight, and nothing is random: the probes' reports equal
//! the program's own ledger by call site, to the byte. So blocks counted twice, not at all, or for the wrong caller are detected. The
//! unwinder takes the stacks through the sampler's own frames.

#![allow(non_snake_case)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use fragprof::sampler::library::Flavour;

use super::consumer::{Consumer, Ledger};
use super::programs::{Allocator, Libraries, compile, compile_source, sampled};
use crate::support::build::{Link, program};
use crate::support::rendezvous::Target;
use crate::support::truth::Truth;

/// A site's functions in the executable: start and end address, name.
pub(crate) struct Sites(Vec<(u64, u64, String)>);

impl Sites {
    /// From `nm`, shifted to the address at which the process has mapped the executable.
    pub(crate) fn of(pid: u32, executable: &Path) -> Self {
        let mut sites = Self(Vec::new());
        sites.add(pid, executable);
        sites
    }

    /// Those of another file that the process has mapped.
    pub(crate) fn add(&mut self, pid: u32, file: &Path) {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        let first = maps.lines().find(|line| line.ends_with(&name)).unwrap();
        // A program that is not position-independent (ET_EXEC) has its addresses in the file.
        let is_fixed = std::fs::read(file).unwrap()[16] == 2;
        let bias = if is_fixed { 0 } else { u64::from_str_radix(first.split('-').next().unwrap(), 16).unwrap() };
        let text = Command::new("nm").args(["--print-size", "--demangle", "--defined-only"]).arg(file).output().unwrap().stdout;
        for line in String::from_utf8(text).unwrap().lines() {
            let fields: Vec<&str> = line.splitn(4, ' ').collect();
            let [start, size, _, name] = fields[..] else { continue };
            let name = name.split('(').next().unwrap();
            if name.starts_with("site_") || name.starts_with("early_") {
                let hex = |text| u64::from_str_radix(text, 16).unwrap();
                self.0.push((bias + hex(start), bias + hex(start) + hex(size), name.to_owned()));
            }
        }
    }

    /// The name of the innermost frame that is a site.
    fn innermost(&self, frames: &[u64]) -> Option<&str> {
        frames.iter().find_map(|frame| {
            let found = self.0.iter().find(|(start, end, _)| (start + 1..=*end).contains(frame))?;
            Some(found.2.as_str())
        })
    }

    fn sums<'a>(&'a self, blocks: impl Iterator<Item = &'a super::consumer::Block>) -> BTreeMap<&'a str, (u64, u64)> {
        let mut sums: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
        for block in blocks {
            assert_eq!(block.weight_bytes, block.size_bytes, "every byte is sampled");
            if let Some(site) = self.innermost(&block.frames) {
                let sum = sums.entry(site).or_default();
                *sum = (sum.0 + block.size_bytes, sum.1 + 1);
            }
        }
        sums
    }
}

/// Runs a program to its ledger with a consumer attached, and compares.
fn check(executable: &Path, flavour: Flavour, allocator: Allocator, arguments: &[&str], except: &[&str]) {
    let libraries = Libraries::new();
    let library = libraries.path(flavour);
    let mut command = sampled(executable, &library, allocator, 1);
    check_command(command.args(arguments), executable, &library, except);
}

fn check_command(command: &mut Command, executable: &Path, library: &Path, except: &[&str]) {
    if crate::support::bpf().is_none() {
        return;
    }
    let mut target = Target::start(command);
    let mut consumer = Consumer::new();
    consumer.watch_stacks(target.pid());
    consumer.attach(target.pid() as i32, library);
    let sites = Sites::of(target.pid(), executable);
    let truth = target.go_to("done");
    let mut ledger = Ledger::default();
    ledger.add(&consumer.records());
    compare(&truth, &sites, &ledger, except);
    consumer.detach();
    target.rendezvous.go();
}

pub(crate) fn compare(truth: &Truth, sites: &Sites, ledger: &Ledger, except: &[&str]) {
    let (live, made) = (sites.sums(ledger.live.values()), sites.sums(ledger.made.iter()));
    let mut text = String::new();
    let compared = |name: &str| !name.starts_with("early_") && !except.contains(&name);
    // A block of 0 bytes is never sampled.
    for site in truth.sites.iter().filter(|site| compared(&site.site) && site.allocated_bytes > 0) {
        let got_live = live.get(site.site.as_str()).copied().unwrap_or_default();
        let got_made = made.get(site.site.as_str()).copied().unwrap_or_default();
        let (live, made) = ((site.live_bytes, site.live_count), (site.allocated_bytes, site.allocations));
        if got_live != live || (!site.live_only && got_made != made) {
            text.push_str(&format!("{}: live {live:?}, reported {got_live:?}; allocated {made:?}, reported {got_made:?}\n", site.site));
        }
    }
    // For sites that are not compared individually, only the sum is checked.
    let excepted: u64 = truth.sites.iter().filter(|site| except.contains(&site.site.as_str())).map(|site| site.live_bytes).sum();
    let told: u64 = except.iter().filter_map(|name| live.get(name)).map(|sum| sum.0).sum();
    if told != 0 && told != excepted {
        text.push_str(&format!("{except:?}: live {excepted}, reported {told}\n"));
    }
    assert!(
        text.is_empty(),
        "{text}{} blocks reported, {} freed, {} frees of others",
        ledger.made.len(),
        ledger.frees,
        ledger.unknown_frees
    );
    assert_eq!(ledger.collisions, 0, "a block was reported at the address of a live one");
}

/// A test for each allocator that the sampler may forward to.
macro_rules! with_every_allocator {
    ($sentence:ident, $name:expr, $arguments:expr, $except:expr) => {
        mod $sentence {
            use super::*;
            #[test]
            fn glibc() {
                check(&program($name, Link::Dynamic), Flavour::Standard, Allocator::Glibc, $arguments, $except);
            }
            #[test]
            fn jemalloc() {
                check(&program($name, Link::Dynamic), Flavour::Standard, Allocator::Jemalloc, $arguments, $except);
            }
            #[test]
            fn tcmalloc() {
                check(&program($name, Link::Dynamic), Flavour::Standard, Allocator::Tcmalloc, $arguments, $except);
            }
            #[test]
            fn mimalloc() {
                check(&program($name, Link::Dynamic), Flavour::Standard, Allocator::Mimalloc, $arguments, $except);
            }
        }
    };
}

with_every_allocator!(every_c_entry_point_is_reported, "entry_points", &[], &[]);
with_every_allocator!(every_operator_new_and_delete_is_told, "new_delete", &[], &[]);
with_every_allocator!(reallocs_are_reported_as_free_and_allocation, "realloc_forms", &[], &[]);
with_every_allocator!(nested_calls_of_entry_points_are_reported_once, "nested", &[], &[]);
with_every_allocator!(large_alignments_are_told, "over_aligned", &[], &[]);
// A realloc fails for lack of memory: the block is reported again, for the caller of realloc.
with_every_allocator!(failed_calls_are_not_reported, "failures", &[], &["site_lives", "site_realloc_fails"]);
with_every_allocator!(a_programs_own_operator_new_is_told_as_what_it_calls, "replaced_new", &[], &[]);
// So few rounds that the ring does not overflow.
with_every_allocator!(blocks_freed_and_resized_by_other_threads_are_reported, "cross_thread", &["4", "6000"], &[]);
with_every_allocator!(short_lived_threads_are_reported, "short_threads", &[], &[]);
with_every_allocator!(handlers_on_other_stacks_are_told, "signal_stacks", &[], &[]);

/// mimalloc has them since 2.2.
#[test]
fn copies_of_strings_by_an_allocators_own_functions_are_reported() {
    let libraries = Libraries::new();
    let library = libraries.path(Flavour::Standard);
    let allocator = compile(libraries.folder(), "own_strings.c", "cc", &["-shared", "-fPIC"]);
    let executable = program("nested", Link::Dynamic);
    let mut command = sampled(&executable, &library, Allocator::Glibc, 1);
    command.env("LD_PRELOAD", format!("{}:{}", library.display(), allocator.display()));
    check_command(&mut command, &executable, &library, &[]);
}

#[test]
fn jemallocs_own_entry_points_are_reported() {
    check(&program("jemalloc_api", Link::Dynamic), Flavour::Jemalloc, Allocator::Glibc, &[], &[]);
}

/// mimalloc as a C library aborts if operator new fails.
mod operators_that_throw_are_not_reported {
    use super::*;

    #[test]
    fn glibc() {
        check(&program("bad_alloc", Link::Dynamic), Flavour::Standard, Allocator::Glibc, &[], &[]);
    }
    #[test]
    fn jemalloc() {
        check(&program("bad_alloc", Link::Dynamic), Flavour::Standard, Allocator::Jemalloc, &[], &[]);
    }
    #[test]
    fn tcmalloc() {
        check(&program("bad_alloc", Link::Dynamic), Flavour::Standard, Allocator::Tcmalloc, &[], &[]);
    }
}

mod under_musl {
    use super::*;

    /// The same file as under glibc.
    fn check_musl(name: &str, except: &[&str]) {
        let libraries = Libraries::new();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/testprogs").join(name);
        let executable: PathBuf = compile_source(libraries.folder(), &source, "musl-gcc", &["-DTRUTH_STATIC"]);
        check(&executable, Flavour::Standard, Allocator::Glibc, &[], except);
    }

    #[test]
    fn every_c_entry_point_is_reported() {
        check_musl("entry_points.c", &[]);
    }

    #[test]
    fn reallocs_are_reported_as_free_and_allocation() {
        check_musl("realloc_forms.c", &[]);
    }

    #[test]
    fn nested_calls_of_entry_points_are_reported_once() {
        // Debian's musl has no unwind information, so stacks through its functions do not reach the caller.
        check_musl("nested.c", &["site_strdup", "site_strndup", "site_asprintf", "site_getline"]);
    }

    #[test]
    fn short_lived_threads_are_reported() {
        check_musl("short_threads.c", &[]);
    }
}
