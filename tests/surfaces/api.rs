//! The API of a running agent, compared with its other surfaces, and with invalid and extreme requests.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::Value;

use crate::agent::daemon::{Daemon, watching};
use crate::agent::metrics::{fragmented, fragments};
use crate::support::process::{Process, wait_until};

pub fn json(daemon: &Daemon, path: &str) -> Value {
    let answer = daemon.get(path);
    assert_eq!(answer.status, 200, "{path}: {}", answer.body);
    serde_json::from_str(&answer.body).unwrap()
}

/// An agent that has taken a full census of a fragmented program, and takes others rarely, so that its results stay the same.
pub fn settled(name: &str, rest: &str) -> (Daemon, Process) {
    let target = fragmented(&fragments(name), &["16"]);
    let config = watching(&[name], rest)
        .replace("top_interval_s = 1", "top_interval_s = 3600")
        .replace("full_interval_s = 2", "full_interval_s = 3600");
    let daemon = Daemon::start(&config);
    daemon.metrics_with("fragprof_heap_live_bytes", &format!("pid=\"{}\"", target.pid()));
    (daemon, target)
}

#[test]
fn the_picture_of_the_address_space_adds_up_to_the_ladder_at_every_zoom() {
    let (daemon, target) = settled("surfaces-map", "");
    let path = format!("/api/v1/processes/{}", target.pid());
    let whole = json(&daemon, &format!("{path}/map?cells=16384"));
    let heap = &json(&daemon, &format!("{path}/heap"))["heaps"][0];
    let total = |map: &Value, column: &str| {
        let at = map["columns"].as_array().unwrap().iter().position(|name| name == column).unwrap();
        map["totals"][at].as_u64().unwrap()
    };
    assert_eq!(whole["cell_bytes"], 4096);
    for column in ["pinned_bytes", "trimmable_bytes", "kept_bytes", "resident_bytes"] {
        assert_eq!(Some(total(&whole, column)), heap[column].as_u64(), "{column}");
    }
    assert_eq!(Some(total(&whole, "live_bytes")), heap["occupancy"]["live_resident_bytes"].as_u64());
    assert!(total(&whole, "pinned_bytes") > 10 << 20);
    // A coarser picture has the same sums; a part of it has a part of them.
    let coarse = json(&daemon, &format!("{path}/map?cells=50"));
    assert_eq!((&coarse["totals"], coarse["at_unix_s"].as_f64()), (&whole["totals"], whole["at_unix_s"].as_f64()));
    assert!(coarse["cell_bytes"].as_u64().unwrap() > 4096);
    let pieces = whole["pieces"].as_array().unwrap();
    let largest = pieces.iter().max_by_key(|piece| piece["cells"].as_array().unwrap().len()).unwrap();
    let address = |key: &str| u64::from_str_radix(largest[key].as_str().unwrap().trim_start_matches("0x"), 16).unwrap();
    let (start, end) = (address("start"), address("end"));
    let middle = (start + (end - start) / 2) & !0xfff;
    let halves =
        [(0, middle), (middle, u64::MAX)].map(|(from, to)| json(&daemon, &format!("{path}/map?from={from:#x}&to={to}&cells=16384")));
    let sum = halves.iter().map(|half| total(half, "pinned_bytes")).sum::<u64>();
    assert_eq!(sum, total(&whole, "pinned_bytes"));
}

#[test]
fn a_verdict_is_the_same_in_the_api_the_metrics_and_the_history() {
    let (daemon, target) = settled("surfaces-judge", "[history]\nsample_interval_s = 1");
    let path = format!("/api/v1/processes/{}", target.pid());
    let explained = json(&daemon, &format!("{path}/explain"));
    let verdict = explained["verdict"].as_str().unwrap().to_owned();
    let one = json(&daemon, &path);
    assert_eq!(one["verdict"]["verdict"], explained["verdict"]);
    assert_eq!(one["verdict"]["summary"], explained["summary"]);
    let text = daemon.metrics();
    let of = |kind: &str| {
        crate::agent::daemon::value(
            &text,
            "fragprof_process_verdict",
            &format!("pid=\"{}\",comm=\"surfaces-judge\",verdict=\"{kind}\"", target.pid()),
        )
    };
    assert_eq!((of(&verdict), of("leak")), (Some(1.0), Some(0.0)));
    let mut history = Value::Null;
    wait_until("a sample in the history", || {
        let answer = daemon.get(&format!("{path}/history"));
        history = serde_json::from_str(&answer.body).unwrap_or_default();
        history["at_unix_s"].as_array().is_some_and(|at| !at.is_empty())
    });
    assert_eq!(history["verdict"][0].as_str(), Some(verdict.as_str()));
    assert_eq!(history["pinned_bytes"][0], one["ladder"]["pinned_bytes"]);
    assert_eq!(history["live_bytes"][0], one["ladder"]["live_bytes"]);
}

#[test]
fn a_recording_on_request_is_refused_unless_allowed() {
    let (daemon, target) = settled("surfaces-record", "");
    let path = format!("/api/v1/processes/{}/profile", target.pid());
    assert_eq!(daemon.get(&format!("{path}?seconds=1")).status, 403);
    let none = daemon.get(&path);
    assert!(none.status == 404 && none.body.contains("no tier that knows stacks"), "{}", none.body);
    assert_eq!(json(&daemon, "/api/v1/agent")["profile_seconds_max"], Value::Null);
}

#[test]
fn no_request_makes_the_agent_fail() {
    let (daemon, target) = settled("surfaces-fuzz", "");
    let document = json(&daemon, "/api/v1/openapi.json");
    let paths: Vec<String> = document["paths"].as_object().unwrap().keys().cloned().collect();
    for path in &paths {
        let path = path.replace("{pid}", &target.pid().to_string()).replace("{id}", "1");
        let status = daemon.get(&path).status;
        assert!(matches!(status, 200 | 400 | 404), "{path}: {status}");
    }
    let names: Vec<String> = document["paths"]
        .as_object()
        .unwrap()
        .values()
        .flat_map(|one| one["get"]["parameters"].as_array().unwrap())
        .filter(|one| one["in"] == "query" && one["name"] != "seconds")
        .map(|one| one["name"].as_str().unwrap().to_owned())
        .collect();
    let value = "-?[0-9]{0,25}|0x[0-9a-f]{0,20}|nan|inf|-inf|1e400|live|pinned|pprof|tree|folded|%00|%ff|[a-z%&=+]{0,12}";
    let request = (
        proptest::sample::select(paths),
        proptest::sample::select(vec![target.pid().to_string(), "0".into(), "-1".into(), "99999999999".into(), "x".into()]),
        proptest::collection::vec((proptest::sample::select(names), value), 0..4),
    );
    let mut runner = TestRunner::new(Config { cases: 200, failure_persistence: None, ..Config::default() });
    let done = runner.run(&request, |(path, id, query)| {
        let query: Vec<String> = query.into_iter().map(|(name, value)| format!("{name}={value}")).collect();
        let path = format!("{}?{}", path.replace("{pid}", &id).replace("{id}", &id), query.join("&"));
        let answer = daemon.get(&path);
        // A busy agent responds with 429 or 503; 0 would be a closed connection.
        prop_assert!(matches!(answer.status, 200 | 400 | 404 | 422 | 429), "{path}: {} {}", answer.status, answer.body);
        Ok(())
    });
    done.unwrap();
    assert_eq!(daemon.get("/healthz").status, 200);
}
