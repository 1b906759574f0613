//! The agent as the rendered manifest would run it: exactly its security context, mounts and arguments, by podman.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::manifests::{daemon_set, documents};
use super::podman::{Container, Podman, holder, wait_until_paused};
use super::targets::LEAST;
use crate::agent::daemon::{Daemon, value, watching};
use crate::support::build::{Link, program};
use crate::support::process::wait_until;
use crate::support::rendezvous::Target;
use crate::support::{LIMIT, bpf, text};

/// Sends a request to a port of a container's loopback. 0 = no answer.
fn get(container: &Container<'_>, port: u16, path: &str) -> (u16, String) {
    let (pid, path) = (container.pid(), path.to_owned());
    // A thread of its own enters the container's network and ends with it.
    std::thread::spawn(move || ask(pid, port, &path)).join().unwrap().unwrap_or_default()
}

/// Sends a request in the network of a process; the calling thread stays there.
fn ask(pid: u32, port: u16, path: &str) -> std::io::Result<(u16, String)> {
    let network = std::fs::File::open(format!("/proc/{pid}/ns/net"))?;
    rustix::thread::move_into_link_name_space(std::os::fd::AsFd::as_fd(&network), Some(rustix::thread::LinkNameSpaceType::Network))?;
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").as_bytes())?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (head, body) = text.split_once("\r\n\r\n").ok_or(std::io::ErrorKind::UnexpectedEof)?;
    Ok((head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0), body.to_owned()))
}

/// The pod of the manifest as options and words of podman. Volumes lie in `directory`.
fn as_podman(pod: &Value, config: &Value, directory: &Path) -> (Vec<String>, Vec<String>) {
    let container = &pod["containers"][0];
    let security = &container["securityContext"];
    let list = |value: &Value| value.as_array().unwrap().iter().map(|one| one.as_str().unwrap().to_owned()).collect::<Vec<_>>();
    let mut options: Vec<String> = list(&security["capabilities"]["drop"]).iter().map(|one| format!("--cap-drop={one}")).collect();
    options.extend(list(&security["capabilities"]["add"]).iter().map(|one| format!("--cap-add={one}")));
    assert_eq!(security["privileged"], false);
    if security["readOnlyRootFilesystem"] == true {
        options.extend(["--read-only".into(), "--read-only-tmpfs=false".into()]);
    }
    if security["allowPrivilegeEscalation"] == false {
        options.push("--security-opt=no-new-privileges".into());
    }
    if pod["hostPID"] == true {
        options.push("--pid=host".into());
    }
    options.push(format!("--user={}:{}", security["runAsUser"], security["runAsGroup"]));
    for variable in container["env"].as_array().into_iter().flatten() {
        options.push(format!("--env={}={}", variable["name"].as_str().unwrap(), variable["value"].as_str().unwrap()));
    }
    for mount in container["volumeMounts"].as_array().unwrap() {
        let name = mount["name"].as_str().unwrap();
        let at = directory.join(name);
        std::fs::create_dir_all(&at).unwrap();
        let volume = pod["volumes"].as_array().unwrap().iter().find(|one| one["name"] == name).unwrap();
        if volume["configMap"].is_object() {
            for (file, text) in config["data"].as_object().unwrap() {
                // One more setting: the other processes of a busy machine must not use up the budget.
                let text = text.as_str().unwrap().replace("[discovery]", "[discovery]\ninclude = ['holder']");
                std::fs::write(at.join(file), text).unwrap();
            }
        }
        let read_only = if mount["readOnly"] == true { ":ro" } else { "" };
        options.push(format!("--volume={}:{}{read_only}", at.display(), mount["mountPath"].as_str().unwrap()));
    }
    let mut words = vec!["/usr/bin/fragprof".to_owned()];
    words.extend(list(&container["args"]));
    (options, words)
}

#[test]
fn the_container_of_the_manifest_profiles_other_containers_with_the_fewest_capabilities() {
    let Some(podman) = Podman::new() else { return };
    podman.agent_image();
    let mut targets = Vec::new();
    for link in [Link::Dynamic, Link::Jemalloc] {
        let image = format!("heap-{link:?}").to_lowercase();
        podman.image(&image, &[(&holder(link), "/usr/bin/holder")]);
        let target = podman.run(&["--memory=200m"], &image, &["/usr/bin/holder"]);
        wait_until_paused(target.pid());
        targets.push(target);
    }
    let all = documents();
    let pod = &daemon_set(&all)["spec"]["template"]["spec"];
    let config = all.iter().find(|one| one["kind"] == "ConfigMap").unwrap();
    let directory = tempfile::tempdir().unwrap();
    let (options, words) = as_podman(pod, config, directory.path());
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let agent = podman.run(&options, "fragprof", &words);
    wait_until("the agent to be ready", || get(&agent, 9747, "/readyz").0 == 200);
    assert_eq!(get(&agent, 9747, "/healthz").0, 200);
    assert_eq!(value(&get(&agent, 9747, "/metrics").1, "fragprof_history_on_disk", ""), Some(1.0), "it outlives the pod");
    // Nothing but metrics and health on the address that other pods reach.
    assert_eq!(get(&agent, 9747, "/api/v1/processes").0, 404);
    let status = std::fs::read_to_string(format!("/proc/{}/status", agent.pid())).unwrap();
    // DAC_READ_SEARCH 2, SYS_PTRACE 19, PERFMON 38, BPF 39.
    let four = format!("{:016x}", 1u64 << 2 | 1 << 19 | 1 << 38 | 1 << 39);
    for line in [format!("CapEff:\t{four}"), format!("CapPrm:\t{four}"), format!("CapBnd:\t{four}"), "NoNewPrivs:\t1".into()] {
        assert!(status.contains(&line), "{line}: {status}");
    }
    for target in &targets {
        let pid = target.pid();
        let labels = format!("{{pid=\"{pid}\",comm=\"holder\",container=\"{}\"", &target.id[..12]);
        let mut text = String::new();
        wait_until(&format!("live bytes of {labels}"), || {
            text = get(&agent, 9747, "/metrics").1;
            value(&text, "fragprof_heap_live_bytes", &labels).is_some()
        });
        let live = value(&text, "fragprof_heap_live_bytes", &labels).unwrap();
        assert!((20_480_000.0..20_480_000.0 * 1.03 + 65536.0).contains(&live), "{live}");
        assert_eq!(value(&text, "fragprof_cgroup_memory_limit_bytes", &labels), Some((200 << 20) as f64));
        let (_, body) = get(&agent, 9746, &format!("/api/v1/processes/{pid}"));
        let api: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(api["container"]["id"], target.id.as_str());
        let sentence = api["cgroup_memory_sentence"].as_str().unwrap();
        assert!(sentence.contains("of a 200 MiB limit: ") && sentence.contains("live"), "{sentence}");
    }
}

#[test]
fn an_upgrade_and_a_rollback_in_the_middle_of_a_recording_leave_no_probe_behind() {
    let Some(_bpf) = bpf() else { return };
    let Some(podman) = Podman::new() else { return };
    podman.agent_image();
    let mut target = Target::start(&mut Command::new(program("realloc_forms", Link::Dynamic)));
    let pid = target.pid();
    let libc = text::libc_of(pid).unwrap();
    let is_probed = || text::is_probed(pid, &libc, "malloc") == Some(true);
    let directory = tempfile::tempdir().unwrap();
    let config = watching(&["realloc_forms-d"], "[profile]\non_demand = true\nseconds_max = 60").replace("127.0.0.1:0", "127.0.0.1:9746");
    std::fs::write(directory.path().join("agent.toml"), config).unwrap();
    let volume = format!("--volume={}:/etc/fragprof:ro", directory.path().display());
    let options: Vec<&str> = LEAST.into_iter().chain([volume.as_str()]).collect();
    for version in ["the old one", "the new one", "the old one again"] {
        let agent = podman.run(&options, "fragprof", &["/usr/bin/fragprof", "agent"]);
        wait_until(&format!("{version} to know the target"), || get(&agent, 9746, &format!("/api/v1/processes/{pid}")).0 == 200);
        let asked = {
            let path = format!("/api/v1/processes/{pid}/profile?seconds=60");
            let namespace = agent.pid();
            std::thread::spawn(move || ask(namespace, 9746, &path))
        };
        wait_until(&format!("{version} to probe the target"), is_probed);
        agent.remove();
        wait_until(&format!("the probes of {version} to be gone"), || !is_probed());
        assert!(asked.join().unwrap().is_err(), "{version} answered although it was removed");
    }
    // It continues unchanged.
    target.go_to("done");
}

#[test]
fn doctor_in_the_container_of_the_manifest_finds_everything_that_is_needed_and_names_the_rest() {
    let Some(_bpf) = bpf() else { return };
    let Some(podman) = Podman::new() else { return };
    podman.agent_image();
    let (good, text) = podman.run_to_end(&LEAST, "fragprof", &["/usr/bin/fragprof", "doctor"]);
    assert!(good && text.contains("probes are attached by uprobe_multi"), "{text}");
    let line = |name: &str| text.lines().find(|line| line.trim_start().starts_with(name)).unwrap_or_else(|| panic!("{name}: {text}"));
    assert!(line("CAP_SYS_PTRACE").ends_with("yes"));
    assert!(line("CAP_CHECKPOINT_RESTORE").contains("libraries that were replaced"));
    let less: Vec<&str> = LEAST.iter().copied().filter(|option| !option.contains("PERFMON")).collect();
    let (_, text) = podman.run_to_end(&less, "fragprof", &["/usr/bin/fragprof", "doctor"]);
    assert!(text.contains("nothing can be recorded") && text.contains("CAP_PERFMON            no: no recordings"), "{text}");
}

#[test]
fn an_oom_kill_in_a_container_is_counted_and_the_agent_keeps_running() {
    let Some(podman) = Podman::new() else { return };
    podman.image("heap", &[(&holder(Link::Dynamic), "/usr/bin/holder")]);
    let daemon = Daemon::start(&watching(&["holder"], ""));
    let target = podman.run(&["--memory=80m", "--memory-swap=80m"], "heap", &["/usr/bin/holder", "grow"]);
    let parent = target.pid();
    wait_until_paused(parent);
    let of_parent = format!("pid=\"{parent}\"");
    let text = daemon.metrics_with("fragprof_cgroup_oom_kills_total", &of_parent);
    assert_eq!(value(&text, "fragprof_cgroup_oom_kills_total", &of_parent), Some(0.0));
    let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap();
    let child: i32 = children.trim().parse().unwrap();
    daemon.metrics_with("fragprof_process_resident_bytes", &format!("pid=\"{child}\""));
    rustix::process::kill_process(rustix::process::Pid::from_raw(child).unwrap(), rustix::process::Signal::USR1).unwrap();
    wait_until("the kill to be counted", || {
        value(&daemon.metrics(), "fragprof_cgroup_oom_kills_total", &of_parent).is_some_and(|kills| kills >= 1.0)
    });
    wait_until("the killed process's series to end", || !daemon.metrics().contains(&format!("pid=\"{child}\"")));
    assert_eq!(daemon.get("/healthz").status, 200);
}
