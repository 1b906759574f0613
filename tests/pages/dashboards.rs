//! The Grafana dashboards are well-formed, and each of their queries returns data from a real Prometheus that scraped a real agent.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::fully_measured;
use super::prometheus::Prometheus;
use crate::agent::daemon::{Daemon, watching};
use crate::agent::metrics::{fragmented, fragments};
use crate::support::process::{Process, run, wait_until};

/// Width of Grafana's grid.
const GRID: u64 = 24;
/// Panel types that the dashboards use and Grafana 10 and later have built in.
const PANELS: [&str; 6] = ["row", "stat", "timeseries", "bargauge", "table", "text"];

pub fn dashboards() -> Vec<(PathBuf, Value)> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/grafana");
    let files = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let mut all: Vec<(PathBuf, Value)> = files
        .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
        .map(|path| (path.clone(), serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap()))
        .collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

pub fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value[key].as_array().map_or(&[], Vec::as_slice)
}

pub fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

/// Names of `$name` and `${name}` in a text.
fn variables_in(text: &str) -> BTreeSet<String> {
    let parts = text.split('$').skip(1).map(|rest| rest.trim_start_matches('{'));
    parts.map(|rest| rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()).collect()
}

/// The expression with all variables set to All.
pub fn filled(expression: &str) -> String {
    let mut text = expression.replace("$__rate_interval", "20s").replace("$figure", "pinned").replace("$price", "3");
    for name in ["instance", "namespace", "pod", "container", "process", "pid", "workload"] {
        text = text.replace(&format!("\"${name}\""), "\".*\"");
    }
    text
}

#[test]
fn dashboards_are_well_formed() {
    let all = dashboards();
    assert!(all.len() >= 3);
    let uids: BTreeSet<&str> = all.iter().map(|(_, board)| text(board, "uid")).collect();
    assert_eq!(uids.len(), all.len(), "uids must differ");
    for (path, board) in &all {
        let name = path.display();
        assert!(!text(board, "title").is_empty() && board["schemaVersion"].as_u64() >= Some(36) && board["id"].is_null(), "{name}");
        let variables = list(&board["templating"], "list");
        let known: BTreeSet<String> = variables.iter().map(|variable| text(variable, "name").to_owned()).collect();
        for variable in variables.iter().filter(|variable| text(variable, "type") == "query") {
            // All must also match series without the label: there are no pods outside Kubernetes.
            assert_eq!((text(variable, "allValue"), &variable["includeAll"]), (".*", &Value::Bool(true)), "{name}: {variable}");
        }
        let mut ids = BTreeSet::new();
        let mut taken: Vec<[u64; 4]> = Vec::new();
        for panel in list(board, "panels") {
            let title = text(panel, "title");
            assert!(ids.insert(panel["id"].as_u64().unwrap()), "{name}: {title}: its id is taken");
            assert!(PANELS.contains(&text(panel, "type")), "{name}: {title}: {}", panel["type"]);
            let [x, y, w, h] = ["x", "y", "w", "h"].map(|key| panel["gridPos"][key].as_u64().unwrap());
            assert!(w > 0 && h > 0 && x + w <= GRID, "{name}: {title} is outside the grid");
            let over = taken.iter().find(|[ox, oy, ow, oh]| x < ox + ow && *ox < x + w && y < oy + oh && *oy < y + h);
            assert!(over.is_none(), "{name}: {title} lies over another panel");
            taken.push([x, y, w, h]);
            let targets = list(panel, "targets");
            assert_eq!(targets.is_empty(), ["row", "text"].contains(&text(panel, "type")), "{name}: {title}: queries");
            let refs: BTreeSet<&str> = targets.iter().map(|target| text(target, "refId")).collect();
            assert_eq!(refs.len(), targets.len(), "{name}: {title}: two queries of one name");
            for target in targets {
                assert_eq!(text(&target["datasource"], "uid"), "${datasource}", "{name}: {title}");
                let mut used = variables_in(text(target, "expr"));
                used.retain(|name| !name.starts_with("__"));
                assert!(used.is_subset(&known), "{name}: {title}: {used:?} of {known:?}");
            }
            if !["row", "text"].contains(&text(panel, "type")) {
                assert!(panel["fieldConfig"]["defaults"]["unit"].is_string(), "{name}: {title} has no unit");
            }
        }
    }
}

#[test]
fn every_query_returns_data_from_a_real_agent() {
    let program = fragments("fragments-graf");
    let processes: Vec<Process> = ["2", "16", "1000"].iter().map(|keep| fragmented(&program, &[keep])).collect();
    let daemon = Daemon::start(&watching(&["fragments-graf"], ""));
    let Some(prometheus) = Prometheus::start(daemon.address) else { return };
    let list_of_processes = fully_measured(&daemon, processes.len());
    // Rates need two scrapes with values of full censuses.
    let ready = "count(count_over_time(fragprof_heap_pinned_bytes[1m]) >= 3) == 3";
    wait_until("scrapes of all", || prometheus.query(ready).is_ok_and(|series| !series.is_empty()));
    wait_until("a rate of censuses", || {
        prometheus.query("sum by (level) (rate(fragprof_agent_censuses_total[20s])) > 0").is_ok_and(|series| series.len() >= 2)
    });
    let mut queries = 0;
    for (path, board) in dashboards() {
        let own = list(&board["templating"], "list").iter().filter(|variable| text(variable, "type") == "query");
        for variable in own {
            let (metric, label) =
                text(variable, "definition").trim_start_matches("label_values(").trim_end_matches(')').rsplit_once(", ").unwrap();
            let values = prometheus.label_values(&filled(metric), label);
            let may_be_empty = ["namespace", "pod", "container"].contains(&text(variable, "name"));
            assert!(may_be_empty || !values.is_empty(), "{}: no values of {label}", path.display());
        }
        for panel in list(&board, "panels") {
            for target in list(panel, "targets") {
                let expression = filled(text(target, "expr"));
                // On a busy machine scrapes are late, and a rate needs two of them.
                wait_until(&format!("{}: {}: data for {expression}", path.display(), panel["title"]), || {
                    !prometheus.query(&expression).unwrap_or_else(|error| panic!("{expression}: {error}")).is_empty()
                });
                queries += 1;
            }
        }
    }
    println!("{queries} queries of dashboards returned data");
    top_shows_the_workload(&prometheus);
    // The value on the dashboard equals the one in the API.
    let all = list(&list_of_processes, "processes");
    let pinned: u64 = all.iter().map(|one| one["heaps"][0]["pinned_bytes"].as_u64().unwrap()).sum();
    let board = dashboards().into_iter().find(|(path, _)| path.ends_with("node.json")).unwrap().1;
    let panel = list(&board, "panels").iter().find(|panel| panel["title"] == "Pinned").unwrap();
    let expression = filled(text(&panel["targets"][0], "expr"));
    let pinned = pinned.to_string();
    wait_until("the API's value on the dashboard", || {
        let series = prometheus.query(&expression).unwrap();
        series.first().is_some_and(|one| one["value"][1].as_str() == Some(&pinned))
    });
}

/// `fragprof top --prometheus` has the figures of the recorded series.
fn top_shows_the_workload(prometheus: &Prometheus) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fragprof"));
    let done = run(command.args(["top", "--once", "--json", "--prometheus", &prometheus.url()]));
    assert!(done.status.success(), "{}", done.err);
    let view: Value = serde_json::from_str(&done.out).unwrap();
    assert_eq!(view["recorded"], true, "{view}");
    // Outside containers and services a process's workload is its command; the test itself may run in a service.
    let rows = list(&view, "workloads");
    assert!(rows.iter().any(|row| row["processes"] == 3.0 && row["pinned_bytes"].as_f64() > Some((10 << 20) as f64)), "{view}");
    let wrong =
        run(Command::new(env!("CARGO_BIN_EXE_fragprof")).args(["top", "--once", "--prometheus", &format!("{}/no", prometheus.url())]));
    assert!(!wrong.status.success() && wrong.err.contains("404"), "{}", wrong.err);
}
