//! Containers started with the sampler, by a containerd that calls the agent as its plugin.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::containerd::{Containerd, Pod, Wanted};
use super::podman::{Podman, holder, wait_until_paused};
use crate::agent::daemon::{Daemon, value, watching};
use crate::support::bpf;
use crate::support::build::{Link, output_dir, script};
use crate::support::process::{run, wait_until};

const UID: &str = "7a1d6c55-0f0e-4d52-8b1e-52c7a3c1f0aa";
const GLIBC: &str = "localhost/fragprof-test/glibc:1";
const MUSL: &str = "localhost/fragprof-test/musl:1";
const STATIC: &str = "localhost/fragprof-test/heap:1";
const LABEL: (&str, &str) = ("fragprof.io/sampler", "true");
const IN_CONTAINER: &str = "/.fragprof/libfragprof_sampler.so";
/// The agent's own limit, and that of containerd in these tests.
const RUNTIME_GIVES_UP_AFTER: Duration = Duration::from_millis(1500);

/// The program with a musl that is loaded at its start.
fn musl_holder() -> PathBuf {
    let out = output_dir().join("container_heap-musl-dynamic");
    let flags = ["-O2", "-g", "-w", "-fno-builtin", "-pthread", "-std=gnu11"];
    let done = run(Command::new("musl-gcc").args(flags).arg(script("container_heap.c")).arg("-o").arg(&out));
    assert!(done.status.success(), "{}", done.err);
    out
}

fn images(podman: &Podman) {
    podman.image_that("fragprof-test/glibc:1", &[(&holder(Link::Dynamic), "/usr/bin/holder")], &[]);
    let linker = Path::new("/lib/ld-musl-x86_64.so.1");
    podman.image_that("fragprof-test/musl:1", &[(&musl_holder(), "/usr/bin/holder"), (linker, linker.to_str().unwrap())], &[]);
}

fn config(containerd: &Containerd, directory: &Path, enabled: bool) -> String {
    let (socket, plugins) = (containerd.socket(), containerd.plugins());
    watching(
        &["holder"],
        &format!(
            "[containers]\ncri = {socket:?}\n[delivery]\nenabled = {enabled}\nsocket = {plugins:?}\ndirectory = {directory:?}\n\
             namespaces = ['sampled']\nsample_bytes = 65536\n[listening]\nprofile_interval_s = 1\ncpu_percent = 100.0\n"
        ),
    )
}

fn connected(daemon: &Daemon) {
    wait_until("the runtime to accept the plugin", || value(&daemon.metrics(), "fragprof_delivery_connected", "") == Some(1.0));
}

fn glibc<'a>(name: &'a str, labels: &'a [(&'a str, &'a str)]) -> Wanted<'a> {
    Wanted { namespace: "shop", name, uid: UID, container: "heap", labels, image: GLIBC, command: &["holder"], env: &[] }
}

/// What the container's process preloads, and whether it has the library.
fn preload(containerd: &Containerd, pod: &Pod) -> (Option<String>, bool) {
    let pid = containerd.pid(&pod.container);
    wait_until_paused(pid);
    let of = |file: &str| String::from_utf8_lossy(&std::fs::read(format!("/proc/{pid}/{file}")).unwrap()).into_owned();
    let has_mount = of("mountinfo").lines().any(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        words[4] == "/.fragprof" && words[5].split(',').any(|option| option == "ro")
    });
    let preload = of("environ").split('\0').find_map(|line| line.strip_prefix("LD_PRELOAD=").map(str::to_owned));
    let has_library = of("maps").contains("/libfragprof_sampler.so");
    assert_eq!(has_mount, preload.as_deref().is_some_and(|value| value.contains("/.fragprof/")), "{}", of("mountinfo"));
    (preload, has_library)
}

fn delivered() -> (Option<String>, bool) {
    (Some(IN_CONTAINER.to_owned()), true)
}

#[test]
fn pods_that_ask_for_it_start_with_the_sampler_and_others_untouched() {
    let Some(containerd) = Containerd::start_with_plugins(images) else { return };
    let library = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(&config(&containerd, &library.path().join("library"), true));
    connected(&daemon);
    let asking = &[LABEL][..];

    assert_eq!(preload(&containerd, &containerd.pod_of(&glibc("plain", &[]))), (None, false));
    let labelled = containerd.pod_of(&glibc("labelled", asking));
    assert_eq!(preload(&containerd, &labelled), delivered());
    let musl = containerd.pod_of(&Wanted { image: MUSL, ..glibc("musl", asking) });
    assert_eq!(preload(&containerd, &musl), delivered());
    let named = containerd.pod_of(&Wanted { namespace: "sampled", ..glibc("named", &[]) });
    assert_eq!(preload(&containerd, &named), delivered());
    let declining = containerd.pod_of(&Wanted { namespace: "sampled", ..glibc("declining", &[("fragprof.io/sampler", "false")]) });
    assert_eq!(preload(&containerd, &declining), (None, false));
    // What it preloads by itself stays behind.
    let own = containerd.pod_of(&Wanted { env: &[("LD_PRELOAD", "/usr/lib/own.so"), ("X", "1")], ..glibc("own", asking) });
    assert_eq!(preload(&containerd, &own), (Some(format!("{IN_CONTAINER}:/usr/lib/own.so")), true));
    // Nothing can be preloaded into a static program.
    let still = containerd.pod_of(&Wanted { image: STATIC, command: &["/holder"], ..glibc("static", asking) });
    assert_eq!(preload(&containerd, &still), (None, false));
    let relative = containerd.pod_of(&Wanted { command: &["usr/bin/holder"], ..glibc("relative", asking) });
    assert_eq!(preload(&containerd, &relative), (None, false));

    let text = daemon.metrics();
    let count = |name: &str, label: &str| value(&text, name, label).unwrap_or(0.0);
    assert_eq!(count("fragprof_delivery_containers_total", "libc=\"glibc\""), 3.0, "{text}");
    assert_eq!(count("fragprof_delivery_containers_total", "libc=\"musl\""), 1.0, "{text}");
    assert_eq!(count("fragprof_delivery_refused_total", "reason=\"static\""), 1.0, "{text}");
    assert_eq!(count("fragprof_delivery_refused_total", "reason=\"relative_path\""), 1.0, "{text}");
    assert_eq!(count("fragprof_delivery_not_asked_total", ""), 2.0, "{text}");
    assert_eq!(count("fragprof_delivery_not_understood_total", ""), 0.0, "{text}");
    println!("longest answer: {} ms", count("fragprof_delivery_longest_seconds", "") * 1e3);
    // The reason is in the log, whatever its level.
    assert!(
        daemon
            .process
            .err
            .wait_for(Duration::from_secs(5), |line| line.contains("heap of shop/static starts untouched (static)"))
            .is_some()
    );
    assert!(
        daemon
            .process
            .err
            .wait_for(Duration::from_secs(5), |line| line.contains("heap of shop/musl starts with libfragprof_sampler.so"))
            .is_some()
    );
}

#[test]
fn a_container_that_was_started_with_the_sampler_is_listened_to_without_more_settings() {
    let Some(_bpf) = bpf() else { return };
    let Some(containerd) = Containerd::start_with_plugins(images) else { return };
    let library = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(&config(&containerd, &library.path().join("library"), true));
    connected(&daemon);
    for (name, image) in [("with-glibc", GLIBC), ("with-musl", MUSL)] {
        let pod = containerd.pod_of(&Wanted { image, ..glibc(name, &[LABEL]) });
        let pid = containerd.pid(&pod.container);
        wait_until_paused(pid);
        let labels = format!("pid=\"{pid}\"");
        daemon.metrics_with("fragprof_process_samples_total", &labels);
        let mut polls = 0;
        wait_until("a share of the live heap to be known", || {
            // It keeps what it allocates then, though not so often that its limit is reached.
            if polls % 80 == 0 {
                kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::USR1).unwrap();
            }
            polls += 1;
            let text = daemon.metrics();
            let share = text.lines().find(|line| line.starts_with("fragprof_attributed_ratio") && line.contains(&labels));
            share.is_some_and(|line| line.contains("mode=\"sampled\"") && !line.ends_with(" 0"))
        });
    }
}

#[test]
fn an_agent_that_stands_still_or_is_killed_keeps_no_pod_from_starting() {
    let Some(containerd) = Containerd::start_with_plugins(images) else { return };
    let library = tempfile::tempdir().unwrap();
    let directory = library.path().join("library");
    let mut daemon = Daemon::start(&config(&containerd, &directory, true));
    connected(&daemon);
    let asking = &[LABEL][..];
    let timed = |name: &str| {
        let start = Instant::now();
        let pod = containerd.pod_of(&glibc(name, asking));
        (start.elapsed(), preload(&containerd, &pod), pod)
    };
    let (usual, with, first) = timed("first");
    assert_eq!(with, delivered());

    daemon.process.signal(Signal::STOP);
    let (stopped, without, _) = timed("stopped");
    assert_eq!(without, (None, false));
    // It was dropped: the next pod waits for nobody.
    let (dropped, without, _) = timed("dropped");
    assert_eq!(without, (None, false));
    println!("a pod: {usual:?}, with an agent that stands still: {stopped:?}, the next one: {dropped:?}");
    assert!(stopped < usual + RUNTIME_GIVES_UP_AFTER + Duration::from_secs(3), "{stopped:?}, usually {usual:?}");
    daemon.process.signal(Signal::CONT);
    wait_until("the agent to notice", || {
        value(&daemon.metrics(), "fragprof_delivery_connections_lost_total", "").is_some_and(|lost| lost >= 1.0)
    });
    connected(&daemon);
    assert_eq!(timed("again").1, delivered());

    // Turned off, and on again.
    daemon.configure(&config(&containerd, &directory, false));
    daemon.process.signal(Signal::HUP);
    wait_until("the plugin to be gone", || value(&daemon.metrics(), "fragprof_delivery_connected", "") == Some(0.0));
    assert_eq!(timed("off").1, (None, false));
    daemon.configure(&config(&containerd, &directory, true));
    daemon.process.signal(Signal::HUP);
    connected(&daemon);
    assert_eq!(timed("on").1, delivered());

    daemon.process.signal(Signal::KILL);
    daemon.process.wait(Duration::from_secs(10));
    let (killed, without, _) = timed("killed");
    println!("with a killed agent: {killed:?}");
    assert_eq!(without, (None, false));
    // Containers that run are as they were.
    assert_eq!(preload(&containerd, &first), delivered());
    let daemon = Daemon::start(&config(&containerd, &directory, true));
    connected(&daemon);
    assert_eq!(timed("restarted").1, delivered());
}
