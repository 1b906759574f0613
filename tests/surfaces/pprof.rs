//! Served pprof files, read by `go tool pprof`.

use std::process::Command;

use fragprof::client::{Access, Address, Server};
use fragprof::profile::pprof;

use crate::agent::daemon::{Daemon, watching};
use crate::pages::pictures::{HOSTILE, allocates};
use crate::support::build::tool;
use crate::support::process::{Process, run, wait_until};
use crate::support::{LIMIT, bpf};

#[test]
fn go_tool_pprof_finds_each_sample_types_total_and_function() {
    let Some(_bpf) = bpf() else { return };
    let (Some(go), Some(_)) = (tool("go"), tool("objcopy")) else { return };
    let target = Process::start(&mut Command::new(allocates("allocates-pprof")));
    target.out.wait_for(LIMIT, |line| line == "ready").unwrap();
    let daemon = Daemon::start(&watching(&["allocates-pprof"], "[profile]\non_demand = true\nseconds_max = 1"));
    let pid = target.pid();
    wait_until("the process", || daemon.get(&format!("/api/v1/processes/{pid}")).status == 200);
    let address = Address::parse(&format!("http://{}", daemon.address)).unwrap();
    let server = Server::new(address, &Access::default()).unwrap();
    let place = tempfile::tempdir().unwrap();
    let recorded = [
        ("scraped", format!("/debug/pprof/heap?pid={pid}&seconds=1")),
        ("asked", format!("/api/v1/processes/{pid}/profile?format=pprof&seconds=1")),
    ]
    .map(|(name, path)| (name, server.get(&path).unwrap()));
    drop(target);
    let pprof_of_go = || {
        let mut command = Command::new(&go);
        command.args(["tool", "pprof"]).env("GOTOOLCHAIN", "local");
        command
    };
    // Newer releases build the tool when it is first requested, however long that takes.
    pprof_of_go().arg("-help").output().unwrap();
    for (name, bytes) in recorded {
        let file = place.path().join(name);
        std::fs::write(&file, &bytes).unwrap();
        let profile = pprof::read(bytes.as_slice()).unwrap();
        // The files differ only in time: checking one kind is enough.
        let kinds = profile.meta.kinds.iter().filter(|kind| name == "scraped" || kind.name() == "inuse_space");
        for kind in kinds {
            let mut top = pprof_of_go();
            top.args(["-symbolize=none", "-top", "-nodefraction=0", "-nodecount=100000", "-unit=B"]);
            top.arg(format!("-sample_index={}", kind.name())).arg(&file);
            let done = run(&mut top);
            assert!(done.status.success(), "{}: {}", kind.name(), done.err);
            let shown = done.out.lines().find(|line| line.starts_with("Showing nodes")).unwrap_or_else(|| panic!("{}", done.out));
            let total = shown.split(" of ").nth(1).unwrap().split_whitespace().next().unwrap().trim_end_matches('B');
            assert_eq!(total.parse(), Ok(profile.totals().get(kind)), "{} of {name}: {shown}", kind.name());
            if kind.name() == "inuse_space" {
                assert!(done.out.contains(HOSTILE), "{}", done.out);
            }
        }
    }
}
