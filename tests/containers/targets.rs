//! Processes in containers, examined from the machine and from a container with the permissions of a DaemonSet's pod: identity, limit,
//! census, recordings.

use serde_json::Value;

use super::podman::{Podman, holder, wait_until_paused};
use crate::support::build::Link;
use crate::support::process::{Process, wait_until};
use crate::support::recording::{Recording, fragprof};
use crate::support::{LIMIT, bpf};

/// The permissions that the chart gives the agent, as podman's options.
pub const LEAST: [&str; 9] = [
    "--cap-drop=ALL",
    "--cap-add=BPF",
    "--cap-add=PERFMON",
    "--cap-add=SYS_PTRACE",
    "--cap-add=DAC_READ_SEARCH",
    "--security-opt=no-new-privileges",
    "--read-only",
    "--read-only-tmpfs=false",
    "--pid=host",
];

/// Bytes that `container_heap` holds: every second of 40960 blocks of 1000 bytes.
const LIVE_BYTES: u64 = 20480 * 1000;

fn census(pid: u32) -> Value {
    let done = fragprof().args(["census", "--json", &pid.to_string()]).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    serde_json::from_slice(&done.stdout).unwrap()
}

/// The live bytes of the first heap, with the allocator's rounding at most 2 % and a few pages of the libc's own above the truth.
fn assert_live(census: &Value) {
    let live = census["heaps"][0]["live_bytes"].as_u64().unwrap_or_else(|| panic!("no heap: {census}"));
    assert!((LIVE_BYTES..LIVE_BYTES * 103 / 100 + 65536).contains(&live), "{live} of {LIVE_BYTES}");
}

#[test]
fn a_process_in_a_container_has_its_id_its_limit_and_its_census() {
    let Some(podman) = Podman::new() else { return };
    for link in [Link::Dynamic, Link::StaticMusl, Link::Jemalloc] {
        let image = format!("heap-{link:?}").to_lowercase();
        podman.image(&image, &[(&holder(link), "/usr/bin/holder")]);
        let container = podman.run(&["--memory=100m"], &image, &["/usr/bin/holder"]);
        let pid = container.pid();
        wait_until_paused(pid);
        let census = census(pid);
        assert_eq!(census["container"]["id"], container.id.as_str(), "{link:?}");
        assert_eq!(census["container"]["engine"], "podman", "{link:?}");
        assert_eq!(census["cgroup_memory"]["limit_bytes"], 100 << 20, "{link:?}");
        let usage = census["cgroup_memory"]["usage_bytes"].as_u64().unwrap();
        assert!((LIVE_BYTES..100 << 20).contains(&usage), "{usage}");
        if link != Link::StaticMusl {
            // musl's own heap, from before mallocng or static without symbols, may not be readable; its recordings are.
            assert_live(&census);
        }
        container.remove();
    }
}

#[test]
fn the_text_says_how_much_of_the_limit_is_live() {
    let Some(podman) = Podman::new() else { return };
    podman.image("heap", &[(&holder(Link::Dynamic), "/usr/bin/holder")]);
    let container = podman.run(&["--memory=100m"], "heap", &["/usr/bin/holder"]);
    wait_until_paused(container.pid());
    let done = fragprof().args(["explain", &container.pid().to_string()]).output().unwrap();
    let text = String::from_utf8(done.stdout).unwrap();
    assert!(text.contains(&format!("in podman {}", &container.id[..12])), "{text}");
    assert!(text.contains("used of a 100 MiB limit: ") && text.contains(" live, ") && text.contains(" trimmable"), "{text}");
}

#[test]
fn a_container_with_the_capabilities_of_the_daemon_set_sees_and_records_other_containers() {
    let Some(_bpf) = bpf() else { return };
    let Some(podman) = Podman::new() else { return };
    podman.agent_image();
    for link in [Link::Dynamic, Link::StaticMusl, Link::Jemalloc] {
        let image = format!("heap-{link:?}").to_lowercase();
        podman.image(&image, &[(&holder(link), "/usr/bin/holder")]);
        let target = podman.run(&["--memory=100m"], &image, &["/usr/bin/holder"]);
        let pid = target.pid().to_string();
        wait_until_paused(target.pid());
        let least: Vec<&str> = LEAST.to_vec();
        let (good, text) = podman.run_to_end(&least, "fragprof", &["/usr/bin/fragprof", "census", "--json", &pid]);
        assert!(good, "{text}");
        let seen: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
        assert_eq!(seen["container"]["id"], target.id.as_str(), "{link:?}");
        assert_eq!(seen["cgroup_memory"]["limit_bytes"], 100 << 20, "{link:?}: {text}");
        // A recording, with the profile in a volume.
        let out = tempfile::tempdir().unwrap();
        let mut command = podman.command("run");
        command.args(["--rm", "--network=none", "--runtime=runc", "--log-driver=none", "--security-opt=seccomp=unconfined"]);
        command.args(["--ulimit=nofile=20000:20000", "--ulimit=nproc=4096:4096"]).args(LEAST);
        command.arg(format!("--volume={}:/out", out.path().display()));
        command.args(["localhost/fragprof", "/usr/bin/fragprof", "record", "--duration=2s", "-o", "/out/p.pb.gz", "-p", &pid]);
        let mut recorder = Process::start(&mut command);
        let said = recorder.err.wait_for(LIMIT, |line| line.to_lowercase().contains("recording"));
        assert!(said.is_some(), "{link:?}: {} {}", recorder.out, recorder.err);
        rustix::process::kill_process(rustix::process::Pid::from_raw(target.pid() as i32).unwrap(), rustix::process::Signal::USR1).unwrap();
        assert!(recorder.wait(LIMIT).success(), "{link:?}: {}", recorder.err);
        let report = crate::support::report::Report::read(&out.path().join("p.pb.gz"));
        let site = report.by_site(target.pid())["site_more"];
        assert_eq!((site.inuse_bytes, site.inuse_allocations), (500_000, 100), "{link:?}");
        target.remove();
    }
}

#[test]
fn a_container_that_is_removed_while_it_is_recorded_ends_the_recording_and_leaves_no_probe() {
    let Some(_bpf) = bpf() else { return };
    let Some(podman) = Podman::new() else { return };
    podman.image("heap", &[(&holder(Link::Dynamic), "/usr/bin/holder")]);
    let target = podman.run(&[], "heap", &["/usr/bin/holder"]);
    let pid = target.pid();
    wait_until_paused(pid);
    let recording = Recording::attach(&[pid]);
    target.remove();
    let _ = recording.finish();
    wait_until("the process to be gone", || !std::path::Path::new(&format!("/proc/{pid}")).exists());
}
