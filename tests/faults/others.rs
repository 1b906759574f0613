//! Other tools that probe the same functions.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::support::build::{Link, program};
use crate::support::recording::Recording;
use crate::support::rendezvous::Target;
use crate::support::report::Since;
use crate::support::{bpf, skip, text};

const TRACING: &str = "/sys/kernel/tracing";

/// A uprobe of the kernel's own tracer, as `perf probe` sets it, in every process that maps the file; removed when dropped.
struct Probe(String);

impl Probe {
    fn at(file: &Path, offset: u64, on_return: bool) -> std::io::Result<Self> {
        let name = format!("fragprof_test_{}_{offset:x}_{on_return}", std::process::id());
        let kind = if on_return { 'r' } else { 'p' };
        let events = Path::new(TRACING).join("uprobe_events");
        let write = |text: String| {
            use std::io::Write as _;
            fs::OpenOptions::new().append(true).open(&events)?.write_all(text.as_bytes())
        };
        write(format!("{kind}:uprobes/{name} {}:{offset:#x}\n", file.display()))?;
        let probe = Self(name);
        fs::write(probe.enable(), "1")?;
        Ok(probe)
    }

    fn enable(&self) -> std::path::PathBuf {
        Path::new(TRACING).join("events/uprobes").join(&self.0).join("enable")
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        use std::io::Write as _;
        let _ = fs::write(self.enable(), "0");
        if let Ok(mut events) = fs::OpenOptions::new().append(true).open(Path::new(TRACING).join("uprobe_events")) {
            let _ = events.write_all(format!("-:uprobes/{}\n", self.0).as_bytes());
        }
    }
}

#[test]
fn probes_of_another_tool_at_the_same_functions_change_nothing() {
    if bpf().is_none() {
        return;
    }
    if !Path::new(TRACING).join("uprobe_events").exists() {
        return skip("tracefs is not mounted").unwrap_or_default();
    }
    // A copy of the library, so that no other process is probed.
    let dir = tempfile::TempDir::new().unwrap();
    let library = dir.path().join("libjemalloc.so.2");
    fs::copy(Path::new(crate::support::build::LIB_DIR).join("libjemalloc.so.2"), &library).unwrap();
    let mut target = Target::start(Command::new(program("realloc_forms", Link::Dynamic)).env("LD_PRELOAD", &library));
    let offset = |symbol: &str| text::file_offset(&library, symbol).unwrap();
    // One tool's probes exist before the recording, at entries and returns; another's are added while it runs.
    let before: Vec<Probe> = ["malloc", "realloc"].iter().map(|f| Probe::at(&library, offset(f), true).unwrap()).collect();
    let entry = Probe::at(&library, offset("free"), false).unwrap();
    let recording = Recording::attach(&[target.pid()]);
    let later = Probe::at(&library, offset("malloc"), false).unwrap();
    let truth = target.go_to("done");
    recording.stop().assert_equals(&truth, Since::Attach);
    drop((before, entry, later));
    assert!(target.process.is_running());
}
