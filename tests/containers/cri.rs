//! Names from a real containerd, and the agent's behaviour when the socket is missing or broken.

use std::io::Write;
use std::os::unix::net::UnixListener;
use std::process::Command;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::containerd::Containerd;
use super::podman::wait_until_paused;
use crate::agent::daemon::{Daemon, value, watching};
use crate::support::bpf;
use crate::support::build::tool;
use crate::support::process::{Process, run, wait_until};

const UID: &str = "6f3b4c1e-2a77-4f0b-9d0a-3f1c2b7d8e90";

fn asking(socket: &std::path::Path) -> String {
    format!("[containers]\ncri = {socket:?}")
}

fn process(daemon: &Daemon, pid: u32) -> Value {
    let body = daemon.get(&format!("/api/v1/processes/{pid}")).body;
    serde_json::from_str(&body).unwrap_or_else(|e| panic!("{e}: {body}"))
}

#[test]
fn a_pod_s_names_are_on_metrics_and_api_and_go_with_it() {
    let Some(containerd) = Containerd::start() else { return };
    let daemon = Daemon::start(&watching(&["holder"], &asking(&containerd.socket())));
    // The pod is made while the agent runs: the agent requests names because it finds a container without one.
    let pod = containerd.pod("shop", "web-1", UID, "heap");
    let pid = containerd.pid(&pod.container);
    wait_until_paused(pid);
    let labels = format!("{{pid=\"{pid}\",comm=\"holder\",namespace=\"shop\",pod=\"web-1\",container=\"heap\"");
    let text = daemon.metrics_with("fragprof_process_resident_bytes", &labels);
    let info = format!("{labels},container_id=\"{}\",engine=\"containerd\",image=\"localhost/fragprof-test/heap:1\"", pod.container);
    assert!(value(&text, "fragprof_process_container_info", &info).is_some(), "{text}");
    assert_eq!(value(&text, "fragprof_cri_up", ""), Some(1.0));
    let workload = format!("{labels},workload_kind=\"statefulset\",workload=\"web\",service_name=\"shop-web\",service_version=\"2.1\"}}");
    assert_eq!(value(&text, "fragprof_process_workload_info", &workload), Some(1.0), "{text}");
    let limit = daemon.metrics_with("fragprof_cgroup_memory_limit_bytes", &labels);
    assert_eq!(value(&limit, "fragprof_cgroup_memory_limit_bytes", &labels), Some((64 << 20) as f64));
    let api = process(&daemon, pid);
    assert_eq!(api["container"]["pod_uid"], UID);
    assert_eq!(api["container"]["namespace"], "shop");
    assert_eq!(api["workload"]["kind"], "statefulset");
    assert_eq!(api["workload"]["service_version"], "2.1");
    // The pause container is identified by its pod.
    let pause = containerd.pid(&pod.sandbox);
    daemon.metrics_with(
        "fragprof_process_resident_bytes",
        &format!("{{pid=\"{pause}\",comm=\"holder\",namespace=\"shop\",pod=\"web-1\",container="),
    );
    containerd.remove(&pod.sandbox);
    wait_until("the removed pod's series to end", || !daemon.metrics().contains("web-1"));
}

#[test]
fn a_container_recreated_in_its_pod_keeps_its_name_and_gets_another_id() {
    let Some(containerd) = Containerd::start() else { return };
    let daemon = Daemon::start(&watching(&["holder"], &asking(&containerd.socket())));
    let first = containerd.pod("shop", "web-2", UID, "heap");
    daemon.metrics_with("fragprof_process_container_info", &first.container);
    containerd.remove(&first.sandbox);
    let second = containerd.pod("shop", "web-2", UID, "heap");
    // Until the runtime has answered, the id is shown instead of the name.
    let named = format!("pod=\"web-2\",container=\"heap\",container_id=\"{}\"", second.container);
    daemon.metrics_with("fragprof_process_container_info", &named);
    wait_until("the first container's series to end", || !daemon.metrics().contains(&first.container));
}

#[test]
fn a_served_profile_has_the_names_of_the_pod_as_labels() {
    let Some(_bpf) = bpf() else { return };
    let Some(go) = tool("go") else { return };
    let Some(containerd) = Containerd::start() else { return };
    let config = format!("{}\n[profile]\non_demand = true\nseconds_max = 20", asking(&containerd.socket()));
    let daemon = Daemon::start(&watching(&["holder"], &config));
    let pod = containerd.pod("shop", "web-3", UID, "heap");
    let pid = containerd.pid(&pod.container);
    wait_until_paused(pid);
    daemon.metrics_with("fragprof_process_container_info", &format!("pid=\"{pid}\",comm=\"holder\",namespace=\"shop\""));
    // Until the recording ends, it allocates again and again, though not so often that its limit is reached.
    let answer = std::thread::scope(|scope| {
        let asked = scope.spawn(|| daemon.get(&format!("/api/v1/processes/{pid}/profile?seconds=5")));
        let mut polls = 0;
        wait_until("the recording to end", || {
            if polls % 80 == 0 {
                kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::USR1).unwrap();
            }
            polls += 1;
            asked.is_finished()
        });
        asked.join().unwrap()
    });
    assert_eq!(answer.status, 200, "{}", answer.body);
    let url = format!("http://{}/debug/pprof/heap?pid={pid}", daemon.address);
    let tags =
        run(Command::new(go).args(["tool", "pprof", "-sample_index=alloc_space", "-tags", &url]).env("PPROF_TMPDIR", daemon.directory()));
    for (label, wanted) in [
        ("namespace", "shop"),
        ("pod", "web-3"),
        ("container", "heap"),
        ("comm", "holder"),
        ("workload", "web"),
        ("service_version", "2.1"),
    ] {
        let of_label = tags.out.split(&format!("{label}: Total")).nth(1).unwrap_or_else(|| panic!("no {label}: {} {}", tags.out, tags.err));
        assert!(of_label.lines().nth(1).is_some_and(|line| line.ends_with(wanted)), "{label}: {}", tags.out);
    }
}

/// The agent still takes censuses: a new process gets its figures.
fn assert_works(daemon: &Daemon) {
    let cat = Process::start_piped(&mut std::process::Command::new("cat"));
    daemon.metrics_with("fragprof_heap_extent_bytes", &format!("pid=\"{}\"", cat.pid()));
}

#[test]
fn a_missing_socket_costs_only_names() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(&watching(&["cat"], &asking(&directory.path().join("no.sock"))));
    assert_works(&daemon);
    let text = daemon.metrics_with("fragprof_cri_up", "");
    assert_eq!(value(&text, "fragprof_cri_up", ""), Some(0.0));
    assert!(value(&text, "fragprof_cri_requests_total", "result=\"error\"").unwrap() >= 1.0);
}

#[test]
fn a_socket_that_never_answers_costs_only_names() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("slow.sock");
    // Connections are queued by the kernel and never accepted.
    let _listener = UnixListener::bind(&path).unwrap();
    let daemon = Daemon::start(&watching(&["cat"], &asking(&path)));
    assert_works(&daemon);
    let text = daemon.metrics_with("fragprof_cri_up", "");
    assert_eq!(value(&text, "fragprof_cri_up", ""), Some(0.0));
    assert_eq!(daemon.get("/healthz").status, 200);
}

#[test]
fn a_socket_that_answers_garbage_costs_only_names() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nonsense.sock");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut stream = stream;
            let _ = stream.set_write_timeout(Some(Duration::from_secs(1)));
            // An endless header is not HTTP/2.
            while stream.write_all(b"HTTP/1.1 200 OK\r\nX: \x00\xff").is_ok() {}
        }
    });
    let daemon = Daemon::start(&watching(&["cat"], &asking(&path)));
    assert_works(&daemon);
    let text = daemon.metrics_with("fragprof_cri_up", "");
    assert_eq!(value(&text, "fragprof_cri_up", ""), Some(0.0));
}
