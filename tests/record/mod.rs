//! `fragprof record`: every test program and some real ones, with every allocator, attached and launched, compared with their own ledgers.

mod bad_input;
mod children;
mod debuginfod;
mod exact;
mod fallbacks;
mod google_tcmalloc;
pub(crate) mod life_cycle;
mod real_programs;
mod stacks;
mod stopping;
mod test_programs;
mod throwing;
mod trace;

use std::process::Command;

use crate::support::build::{LIB_DIR, Link, program};
use crate::support::recording::Recording;
use crate::support::rendezvous::{Rendezvous, Target};
use crate::support::report::Since;
use crate::support::{bpf, build};

/// A test program, its arguments and environment.
#[derive(Debug, Clone, Copy)]
struct Program {
    name: &'static str,
    args: &'static [&'static str],
    env: &'static [(&'static str, &'static str)],
    /// Recordings of it, each of a new process.
    runs: u32,
}

impl Program {
    const fn new(name: &'static str) -> Self {
        Self { name, args: &[], env: &[], runs: 1 }
    }
}

/// How a program gets its allocator, and how the recording attaches to the program.
#[derive(Debug, Clone, Copy)]
struct Place {
    link: Link,
    preload: Option<&'static str>,
    since: Since,
}

/// The places; their names end the names of tests.
mod place {
    use super::{Link, Place, Since};

    const fn attached(link: Link, preload: Option<&'static str>) -> Place {
        Place { link, preload, since: Since::Attach }
    }
    const fn launched(link: Link) -> Place {
        Place { link, preload: None, since: Since::Launch }
    }

    pub const ATTACHED_TO_GLIBC: Place = attached(Link::Dynamic, None);
    pub const ATTACHED_TO_PRELOADED_JEMALLOC: Place = attached(Link::Dynamic, Some("libjemalloc.so.2"));
    pub const ATTACHED_TO_PRELOADED_TCMALLOC: Place = attached(Link::Dynamic, Some("libtcmalloc_minimal.so.4"));
    pub const ATTACHED_TO_PRELOADED_MIMALLOC: Place = attached(Link::Dynamic, Some("libmimalloc.so.2"));
    pub const ATTACHED_TO_STATIC_GLIBC: Place = attached(Link::StaticGlibc, None);
    pub const ATTACHED_TO_STATIC_MUSL: Place = attached(Link::StaticMusl, None);
    pub const ATTACHED_TO_STATIC_JEMALLOC: Place = attached(Link::StaticJemalloc, None);
    pub const ATTACHED_TO_TCMALLOC_INSIDE: Place = attached(Link::TcmallocInside, None);
    pub const LAUNCHED_WITH_GLIBC: Place = launched(Link::Dynamic);
    pub const LAUNCHED_WITH_JEMALLOC: Place = launched(Link::Jemalloc);
    pub const LAUNCHED_WITH_TCMALLOC: Place = launched(Link::Tcmalloc);
    pub const LAUNCHED_WITH_MIMALLOC: Place = launched(Link::Mimalloc);
    pub const LAUNCHED_WITH_STATIC_GLIBC: Place = launched(Link::StaticGlibc);
    pub const LAUNCHED_WITH_STATIC_MUSL: Place = launched(Link::StaticMusl);
}

/// Records `program` at `place` and compares the report with the program's own ledger, to the byte.
fn check(program: Program, place: Place) {
    if bpf().is_none() {
        return;
    }
    for _ in 0..program.runs {
        match place.since {
            Since::Attach => check_attached(program, place),
            Since::Launch => check_launched(program, place),
        }
    }
}

fn target_command(what: Program, place: Place) -> Command {
    let mut command = Command::new(program(what.name, place.link));
    command.args(what.args).envs(what.env.iter().copied());
    if let Some(library) = place.preload {
        command.env("LD_PRELOAD", format!("{LIB_DIR}/{library}"));
    }
    command
}

fn check_attached(program: Program, place: Place) {
    let mut target = Target::start(&mut target_command(program, place));
    let recording = Recording::attach(&[target.pid()]);
    let truth = target.go_to("done");
    // Stopped while the survivors are live.
    recording.stop().assert_equals(&truth, Since::Attach);
}

fn check_launched(program: Program, place: Place) {
    let mut rendezvous = Rendezvous::new();
    let path = build::program(program.name, place.link);
    let recording = Recording::launch(&rendezvous, &path, program.args, program.env);
    rendezvous.expect("ready", &recording.process);
    rendezvous.go();
    let truth = rendezvous.expect("done", &recording.process);
    // The program ends while its survivors are live, and the recording ends with it.
    rendezvous.go();
    recording.finish().assert_equals(&truth, Since::Launch);
}
