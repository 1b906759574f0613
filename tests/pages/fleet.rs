//! A thousand simulated agents, scraped by a real Prometheus at the interval of production: what the cluster dashboard and
//! `fragprof top --prometheus` cost there, and whether a planted regression is named first.
//!
//! The history of a day before is written into Prometheus' storage, as the recording rules would have recorded it.

use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::Value;

use super::dashboards::{dashboards, filled, list, text};
use super::prometheus::Prometheus;
use crate::support::process::run;

const AGENTS: usize = 1000;
/// Workloads of a node.
const WORKLOADS: usize = 50;
/// The workload of which a quarter of the nodes have a new version, which pins 30 % more.
const WORSE: usize = 17;
const MIB: u64 = 1 << 20;
const DAY_S: u64 = 86_400;
/// Interval of the recorded samples of the day before: less than the five minutes for which Prometheus takes a sample as current.
const STEP_S: u64 = 240;

fn version(node: usize, workload: usize) -> &'static str {
    if workload == WORSE && node.is_multiple_of(4) { "2.0" } else { "1.0" }
}

fn labels(workload: usize, version: &str) -> String {
    format!(
        "namespace=\"shop\",workload_kind=\"deployment\",workload=\"web-{workload:02}\",service_name=\"web-{workload:02}\",service_version=\"{version}\""
    )
}

/// Bytes of a process: extent, resident, live, pinned, trimmable.
fn bytes(workload: usize, version: &str) -> [u64; 5] {
    let base = (20 + 7 * workload as u64) * MIB;
    let pinned = if version == "2.0" { base * 13 / 10 } else { base };
    [10 * base, 5 * base + pinned, 4 * base, pinned, base / 2]
}

const FIGURES: [&str; 5] = ["extent", "resident", "live", "pinned", "trimmable"];

/// The workload set of a node at a time. Pods come and go: the number of processes differs from node to node and from minute to minute.
fn exposition(node: usize, minute: u64) -> String {
    let mut page = String::new();
    for workload in 0..WORKLOADS {
        let version = version(node, workload);
        let labels = labels(workload, version);
        let processes = 1 + (node as u64 + workload as u64 + minute) % 3;
        for (figure, bytes) in FIGURES.iter().zip(bytes(workload, version)) {
            let _ = writeln!(page, "fragprof_workload_{figure}_bytes{{{labels}}} {}", bytes * processes);
        }
        let _ = writeln!(page, "fragprof_workload_processes{{{labels},verdict=\"fragmentation\"}} {processes}");
    }
    assert!(page.lines().count() <= 300);
    page + "fragprof_agent_info{version=\"0\"} 1\n"
}

fn serve() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let started = Instant::now();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { continue };
            // One request per connection; the next one waits.
            let mut head = [0; 4096];
            let Ok(got) = stream.read(&mut head) else { continue };
            let node = String::from_utf8_lossy(&head[..got]).split([' ', '/']).filter_map(|part| part.parse().ok()).next().unwrap_or(0);
            let body = exposition(node, started.elapsed().as_secs() / 60);
            answer(&mut stream, &body);
        }
    });
    address
}

fn answer(stream: &mut TcpStream, body: &str) {
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes()));
}

/// What the rules would have recorded between 26 and 2 hours ago: later blocks belong to the running server.
fn recorded(now_s: u64) -> String {
    let mut page = String::new();
    let times = || (0..(DAY_S / STEP_S)).map(|step| now_s - DAY_S - 7200 + step * STEP_S);
    let replicas = 2 * AGENTS as u64;
    let mut family = |name: &str, series: &mut dyn FnMut(usize) -> Vec<(String, f64)>| {
        let _ = writeln!(page, "# TYPE {name} gauge");
        for workload in 0..WORKLOADS {
            for (labels, value) in series(workload) {
                for at in times() {
                    let _ = writeln!(page, "{name}{{{labels}}} {value} {at}");
                }
            }
        }
    };
    let figures = |workload: usize, factor: u64| {
        let each = FIGURES.iter().zip(bytes(workload, "1.0"));
        each.map(|(figure, bytes)| (format!("{},figure=\"{figure}\"", labels(workload, "1.0")), (bytes * factor) as f64))
            .collect::<Vec<_>>()
    };
    family("workload:fragprof_bytes:sum", &mut |workload| figures(workload, replicas));
    family("workload:fragprof_bytes:per_process", &mut |workload| figures(workload, 1));
    family("workload:fragprof_processes:sum", &mut |workload| vec![(labels(workload, "1.0"), replicas as f64)]);
    family("workload:fragprof_nodes:count", &mut |workload| vec![(labels(workload, "1.0"), AGENTS as f64)]);
    family("workload:fragprof_live_growth_bytes_per_second:deriv1h", &mut |workload| vec![(labels(workload, "1.0"), 0.0)]);
    page + "# EOF\n"
}

/// Waits for up to five minutes, without keeping Prometheus busy.
fn patiently(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(300);
    while !condition() {
        assert!(Instant::now() < deadline, "timed out: {what}");
        std::thread::park_timeout(Duration::from_secs(1));
    }
}

#[test]
#[ignore = "takes about five minutes: make bench-fleet"]
fn a_thousand_agents_are_seen_in_a_second_and_a_worse_version_comes_first() {
    let address = serve();
    let mut targets = String::from("[{job_name: fragprof, static_configs: [");
    for node in 0..AGENTS {
        let _ = write!(targets, "{{targets: ['{address}'], labels: {{__metrics_path__: /{node}/metrics, instance: n{node}}}}},");
    }
    targets.push_str("]}]");
    let now_s = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let backfill = |data: &Path| {
        let file = data.with_file_name("recorded.om");
        std::fs::write(&file, recorded(now_s())).unwrap();
        let mut promtool = Command::new("promtool");
        let done = run(promtool.args(["tsdb", "create-blocks-from", "openmetrics"]).arg(&file).arg(data));
        assert!(done.status.success(), "{}", done.err);
    };
    let Some(prometheus) = Prometheus::start_with("60s", "30s", &targets, backfill) else { return };
    let is = |query: &str| prometheus.query(query).is_ok_and(|series| !series.is_empty());
    patiently("a scrape of every agent", || is(&format!("count(fragprof_agent_info) == {AGENTS}")));
    patiently("the recorded comparison", || is("workload:fragprof_bytes:vs_before{service_version=\"2.0\", figure=\"pinned\"} > 1.2"));
    patiently("growth", || is("workload:fragprof_live_growth_bytes_per_second:deriv1h"));

    let samples = prometheus.query("max(scrape_samples_scraped)").unwrap();
    println!("series of a node: {}", samples[0]["value"][1]);
    let board = dashboards().into_iter().find(|(path, _)| path.ends_with("cluster.json")).unwrap().1;
    let mut slowest = (Duration::ZERO, String::new());
    for target in list(&board, "panels").iter().flat_map(|panel| list(panel, "targets")) {
        let expression = filled(text(target, "expr"));
        let asked = Instant::now();
        let found = if target["instant"] == true {
            prometheus.query(&expression).map(|series| series.len())
        } else {
            prometheus.query_range(&expression, DAY_S, 120, now_s())
        };
        assert!(found.as_ref().is_ok_and(|count| *count > 0), "{expression}: {found:?}");
        slowest = slowest.max((asked.elapsed(), expression));
    }
    println!("slowest query of the dashboard over 24 h: {:.3} s (goal 2): {}", slowest.0.as_secs_f64(), slowest.1);

    let top = || run(Command::new(env!("CARGO_BIN_EXE_fragprof")).args(["top", "--once", "--json", "--prometheus", &prometheus.url()]));
    let asked = Instant::now();
    let done = top();
    let took = asked.elapsed();
    println!("fragprof top --prometheus: {:.3} s (goal 1)", took.as_secs_f64());
    let view: Value = serde_json::from_str(&done.out).unwrap_or_else(|error| panic!("{error}: {}", done.err));
    let first = &view["workloads"][0];
    assert_eq!(
        (&first["workload"], &first["service_version"], &first["worse"]),
        (&"web-17".into(), &"2.0".into(), &"pinned".into()),
        "{first}"
    );
    assert!(slowest.0 < Duration::from_secs(2) && took < Duration::from_secs(1), "{slowest:?} {took:?}");
}
