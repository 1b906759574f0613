//! Attached while the program waits, with an interval of one byte: the samples equal the program's own ledger by call site, to the byte,
//! as with a preloaded library.

use std::path::Path;

use fragprof::sampler::library::Flavour;

use super::{attaching, detaching, done};
use crate::record::life_cycle::TLS_ROOM;
use crate::sampler::consumer::{Consumer, Ledger};
use crate::sampler::exact::{Sites, compare};
use crate::sampler::programs::{Allocator, Libraries, compile_source};
use crate::support::build::{Link, plugin, program};
use crate::support::rendezvous::Target;

/// A program started with an allocator, its library, and a consumer attached to it while it waits at its first rendezvous.
struct Attached {
    libraries: Libraries,
    target: Target,
    consumer: Consumer,
    sites: Sites,
}

impl Attached {
    fn start(executable: &Path, allocator: Allocator, arguments: &[&str]) -> Option<Self> {
        crate::support::bpf()?;
        let libraries = Libraries::new();
        let library = libraries.path(Flavour::Attached);
        let mut command = std::process::Command::new(executable);
        if let Some(preload) = allocator.library() {
            command.env("LD_PRELOAD", preload);
        }
        let target = Target::start(command.args(arguments).env(TLS_ROOM.0, TLS_ROOM.1));
        let report = done(&attaching(target.pid(), &library, 1));
        assert_eq!(report["state"]["failed"], 0, "{report}");
        let mut consumer = Consumer::new();
        consumer.watch_stacks(target.pid());
        consumer.attach(target.pid() as i32, &library);
        let sites = Sites::of(target.pid(), executable);
        Some(Self { libraries, target, consumer, sites })
    }

    fn finish(mut self, except: &[&str]) {
        let truth = self.target.go_to("done");
        let mut ledger = Ledger::default();
        ledger.add(&self.consumer.records());
        compare(&truth, &self.sites, &ledger, except);
        self.consumer.detach();
        done(&detaching(self.target.pid()));
        self.target.rendezvous.go();
        assert!(self.target.process.wait(crate::support::LIMIT).success(), "{}", self.target.process.err);
        drop(self.libraries);
    }
}

fn check(executable: &Path, allocator: Allocator, arguments: &[&str], except: &[&str]) {
    if let Some(attached) = Attached::start(executable, allocator, arguments) {
        attached.finish(except);
    }
}

macro_rules! with_every_allocator {
    ($sentence:ident, $name:expr, $arguments:expr, $except:expr) => {
        mod $sentence {
            use super::*;
            #[test]
            fn glibc() {
                check(&program($name, Link::Dynamic), Allocator::Glibc, $arguments, $except);
            }
            #[test]
            fn jemalloc() {
                check(&program($name, Link::Dynamic), Allocator::Jemalloc, $arguments, $except);
            }
            #[test]
            fn tcmalloc() {
                check(&program($name, Link::Dynamic), Allocator::Tcmalloc, $arguments, $except);
            }
            #[test]
            fn mimalloc() {
                check(&program($name, Link::Dynamic), Allocator::Mimalloc, $arguments, $except);
            }
        }
    };
}

with_every_allocator!(every_c_entry_point_is_reported, "entry_points", &[], &[]);
with_every_allocator!(every_operator_new_and_delete_is_told, "new_delete", &[], &[]);
with_every_allocator!(reallocs_are_reported_as_free_and_allocation, "realloc_forms", &[], &[]);
with_every_allocator!(nested_calls_of_entry_points_are_reported_once, "nested", &[], &[]);
with_every_allocator!(blocks_freed_and_resized_by_other_threads_are_reported, "cross_thread", &["4", "6000"], &[]);

#[test]
fn jemallocs_own_entry_points_are_reported() {
    check(&program("jemalloc_api", Link::Dynamic), Allocator::Glibc, &[], &[]);
}

/// strdup, getline, opendir and their like allocate inside the C library.
#[test]
fn what_the_c_library_allocates_is_reported() {
    let libraries = Libraries::new();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/attach/of_libc.c");
    for flags in [&["-Wl,-z,lazy", "-no-pie"][..], &["-Wl,-z,now"]] {
        let include = format!("-I{}", Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/testprogs").display());
        let program = compile_source(libraries.folder(), &source, "cc", &[flags, &[&include]].concat());
        check(&program, Allocator::Glibc, &[], &[]);
    }
}

/// A library that was loaded later is covered by another pass, and one with an allocator of its own is left alone.
#[test]
fn libraries_loaded_later_are_covered_by_another_pass() {
    for (own, closes) in [(false, false), (false, true), (true, false), (true, true)] {
        let library = plugin(own);
        let arguments = [&[library.to_str().unwrap()][..], if closes { &["close"] } else { &[] }].concat();
        let Some(mut attached) = Attached::start(&program("dlopen_plugin", Link::Dynamic), Allocator::Glibc, &arguments) else { return };
        attached.target.go_to("opened");
        let path = attached.libraries.path(Flavour::Attached);
        let report = done(&attaching(attached.target.pid(), &path, 1));
        assert_eq!(report["was_loaded"], true, "{report}");
        attached.consumer.watch_stacks(attached.target.pid());
        attached.sites.add(attached.target.pid(), &library);
        let own_sites = ["site_plugin_malloc", "site_plugin_calloc", "site_plugin_realloc"];
        attached.finish(if own { &own_sites } else { &[] });
    }
}
