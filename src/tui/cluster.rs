//! The workloads of a cluster, from the HTTP API of a Prometheus (or a compatible server) that scrapes the agents. Pure: queries, the reading
//! of answers, and text.
//!
//! One query gives everything: of the series that the project's recording rules write (deploy/prometheus), or, where there are none, of the
//! agents' own series, without the comparison with a day ago.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

use crate::sanitize::terminal;
use crate::units::HumanBytes;

/// Most workloads shown; those with the most free bytes are kept, the others counted.
const WORKLOADS_MAX: usize = 10_000;
/// Characters of a label: an agent writes at most 253.
const LABEL_CHARS_MAX: usize = 300;
/// A version is called worse if it needs this many times the bytes per process of those before it, and so many bytes more in total.
const WORSE_RATIO_MIN: f64 = 1.1;
const WORSE_BYTES_MIN: f64 = (1 << 20) as f64;

/// The labels of a workload in the series.
const LABELS: &str = "cluster, namespace, workload_kind, workload, service_name, service_version";

/// The query of recorded series.
pub const RECORDED: &str =
    "{__name__=~\"workload:fragprof_(bytes:sum|bytes:vs_before|nodes:count|processes:sum|live_growth_bytes_per_second:deriv1h)\"}";

/// The query of the agents' series: the label `figure` says what each one is.
#[must_use]
pub fn unrecorded() -> String {
    let sum = |figure: &str, aggregate: &str, metric: &str| {
        format!("label_replace({aggregate} by ({LABELS}) (fragprof_workload_{metric}), \"figure\", \"{figure}\", \"\", \"\")")
    };
    let bytes = ["resident", "live", "pinned", "trimmable"].map(|figure| sum(figure, "sum", &format!("{figure}_bytes")));
    let counts = [sum("nodes", "count", "resident_bytes"), sum("processes", "sum", "processes")];
    bytes.into_iter().chain(counts).collect::<Vec<_>>().join(" or ")
}

/// The path of an instant query.
#[must_use]
pub fn path(query: &str) -> String {
    let encoded = query.bytes().map(|byte| match byte {
        byte if byte.is_ascii_alphanumeric() => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    });
    format!("/api/v1/query?query={}", encoded.collect::<String>())
}

/// One version of one workload, on all nodes.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct WorkloadRow {
    /// The label `cluster` that the scraper adds; empty without one.
    pub cluster: String,
    /// Its namespace; empty outside pods.
    pub namespace: String,
    /// Its kind.
    pub workload_kind: String,
    /// Its name.
    pub workload: String,
    /// The service.
    pub service_name: String,
    /// The version; empty = not known.
    pub service_version: String,
    /// Nodes on which it has a heap.
    pub nodes: Option<f64>,
    /// Watched processes.
    pub processes: Option<f64>,
    /// Resident bytes of the heaps.
    pub resident_bytes: Option<f64>,
    /// Live bytes.
    pub live_bytes: Option<f64>,
    /// Pinned bytes.
    pub pinned_bytes: Option<f64>,
    /// Trimmable bytes.
    pub trimmable_bytes: Option<f64>,
    /// Slope of the live bytes over an hour; null without recording rules.
    pub live_growth_bytes_per_s: Option<f64>,
    /// Bytes per process against those of the versions that ran a day ago, by figure; empty without recording rules.
    pub vs_before_ratio: BTreeMap<String, f64>,
    /// The figure in which it is worse than the versions before it, by the most bytes; null = in none.
    pub worse: Option<String>,
    /// The bytes that it needs more for that on all nodes.
    pub worse_bytes: Option<f64>,
}

/// All workloads.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct ClusterView {
    /// Whether they are from recorded series, with growth and comparisons.
    pub recorded: bool,
    /// Versions that are worse than those before come first, then those with the most free bytes.
    pub workloads: Vec<WorkloadRow>,
    /// Workloads left out because there are too many.
    pub workloads_dropped: u64,
}

#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    error: Option<String>,
    #[serde(default)]
    data: Option<Data>,
}

#[derive(Deserialize)]
struct Data {
    #[serde(rename = "resultType")]
    kind: String,
    result: serde_json::Value,
}

#[derive(Deserialize)]
struct Series {
    metric: HashMap<String, String>,
    value: (f64, String),
}

/// Reads the answer to [`RECORDED`] or [`unrecorded`].
///
/// # Errors
/// What is wrong with it, as text.
pub fn read(body: &[u8], recorded: bool) -> Result<ClusterView, String> {
    let answer: Answer = serde_json::from_slice(body).map_err(|error| format!("the answer is not that of a Prometheus: {error}"))?;
    if let Some(error) = answer.error {
        return Err(short(&error));
    }
    let data = answer.data.ok_or("the answer is not that of a Prometheus: it has no data")?;
    if data.kind != "vector" {
        return Err(format!("the answer is not that of a Prometheus: it is a {}, not a vector", short(&data.kind)));
    }
    let series: Vec<Series> =
        serde_json::from_value(data.result).map_err(|error| format!("the answer is not that of a Prometheus: {error}"))?;
    let mut rows: BTreeMap<[String; 6], WorkloadRow> = BTreeMap::new();
    for one in &series {
        let label = |name: &str| one.metric.get(name).map(|value| short(value)).unwrap_or_default();
        let key = ["cluster", "namespace", "workload_kind", "workload", "service_name", "service_version"].map(label);
        let Some(value) = one.value.1.parse::<f64>().ok().filter(|value| value.is_finite()) else { continue };
        let row = rows.entry(key.clone()).or_insert_with(|| {
            let [cluster, namespace, workload_kind, workload, service_name, service_version] = key;
            WorkloadRow { cluster, namespace, workload_kind, workload, service_name, service_version, ..WorkloadRow::default() }
        });
        let name = one.metric.get("__name__").map_or("", |name| name.trim_start_matches("workload:fragprof_"));
        row.set(name, one.metric.get("figure").map_or("", String::as_str), value);
    }
    let mut workloads: Vec<WorkloadRow> = rows.into_values().collect();
    workloads.iter_mut().for_each(WorkloadRow::judge);
    workloads.sort_by(|a, b| {
        let order = |row: &WorkloadRow| (row.worse_bytes.unwrap_or(0.0), row.held_bytes());
        order(b).0.total_cmp(&order(a).0).then(order(b).1.total_cmp(&order(a).1))
    });
    let workloads_dropped = workloads.len().saturating_sub(WORKLOADS_MAX) as u64;
    workloads.truncate(WORKLOADS_MAX);
    Ok(ClusterView { recorded, workloads, workloads_dropped })
}

/// Why the server refused a query, if its answer is that of a Prometheus.
#[must_use]
pub fn refusal(body: &[u8]) -> Option<String> {
    serde_json::from_slice::<Answer>(body).ok()?.error.map(|error| short(&error))
}

/// A text of a server that can be shown.
fn short(text: &str) -> String {
    terminal(&text.chars().take(LABEL_CHARS_MAX).collect::<String>()).into_owned()
}

impl WorkloadRow {
    fn set(&mut self, name: &str, figure: &str, value: f64) {
        let place = match (name, figure) {
            ("bytes:vs_before", "resident" | "live" | "pinned" | "trimmable") => {
                self.vs_before_ratio.insert(figure.to_owned(), value);
                return;
            }
            ("nodes:count", _) | ("", "nodes") => &mut self.nodes,
            ("processes:sum", _) | ("", "processes") => &mut self.processes,
            ("live_growth_bytes_per_second:deriv1h", _) => &mut self.live_growth_bytes_per_s,
            ("bytes:sum" | "", "resident") => &mut self.resident_bytes,
            ("bytes:sum" | "", "live") => &mut self.live_bytes,
            ("bytes:sum" | "", "pinned") => &mut self.pinned_bytes,
            ("bytes:sum" | "", "trimmable") => &mut self.trimmable_bytes,
            _ => return,
        };
        *place = Some(value);
    }

    /// Free bytes that its allocators hold.
    fn held_bytes(&self) -> f64 {
        self.pinned_bytes.unwrap_or(0.0) + self.trimmable_bytes.unwrap_or(0.0)
    }

    /// Finds the figure in which it is worse than the versions before it.
    fn judge(&mut self) {
        let figures = [
            ("resident", self.resident_bytes),
            ("live", self.live_bytes),
            ("pinned", self.pinned_bytes),
            ("trimmable", self.trimmable_bytes),
        ];
        let more = figures.into_iter().filter_map(|(figure, bytes)| {
            let ratio = *self.vs_before_ratio.get(figure)?;
            let more = bytes? * (1.0 - 1.0 / ratio.max(1.0));
            (ratio >= WORSE_RATIO_MIN && more >= WORSE_BYTES_MIN).then_some((figure, more))
        });
        if let Some((figure, more)) = more.max_by(|a, b| a.1.total_cmp(&b.1)) {
            (self.worse, self.worse_bytes) = (Some(figure.to_owned()), Some(more));
        }
    }
}

/// The columns, right-aligned; workload and version follow.
const HEADS: [(&str, usize); 8] = [
    ("NODES", 6),
    ("PROCS", 6),
    ("RESIDENT", 10),
    ("LIVE", 10),
    ("PINNED", 10),
    ("TRIMMABLE", 10),
    ("GROWTH/H", 11),
    ("AGAINST BEFORE", 16),
];

/// The table as plain text, at most `rows_max` workloads.
#[must_use]
pub fn page(view: &ClusterView, rows_max: usize) -> String {
    let bytes = |value: Option<f64>| value.map_or_else(|| "?".to_owned(), |value| HumanBytes(value.max(0.0) as u64).to_string());
    let count = |value: Option<f64>| value.map_or_else(|| "?".to_owned(), |value| format!("{value:.0}"));
    let line = |cells: [String; HEADS.len()], name: &str, version: &str| {
        let cells: String = HEADS.iter().zip(cells).map(|((_, width), cell)| format!("{cell:>width$} ")).collect();
        format!("{cells}{name:<32} {version}").trim_end().to_owned() + "\n"
    };
    let mut text = line(HEADS.map(|(head, _)| head.to_owned()), "WORKLOAD", "VERSION");
    for row in view.workloads.iter().take(rows_max) {
        let growth = row.live_growth_bytes_per_s.map(|rate| {
            let sign = if rate < 0.0 { "-" } else { "+" };
            format!("{sign}{}", HumanBytes((rate.abs() * 3600.0) as u64))
        });
        let against =
            row.worse.as_ref().and_then(|figure| Some(format!("{figure} {:+.0} %", (row.vs_before_ratio.get(figure)? - 1.0) * 100.0)));
        let place = [&row.cluster, &row.namespace, &row.workload].into_iter().filter(|part| !part.is_empty()).cloned();
        let cells = [
            count(row.nodes),
            count(row.processes),
            bytes(row.resident_bytes),
            bytes(row.live_bytes),
            bytes(row.pinned_bytes),
            bytes(row.trimmable_bytes),
            growth.unwrap_or_else(|| "?".to_owned()),
            against.unwrap_or_else(|| if row.vs_before_ratio.is_empty() { "?".to_owned() } else { "-".to_owned() }),
        ];
        text.push_str(&line(cells, &place.collect::<Vec<_>>().join("/"), &row.service_version));
    }
    let hidden = view.workloads.len().saturating_sub(rows_max) as u64 + view.workloads_dropped;
    if hidden > 0 {
        text.push_str(&format!("{hidden} more\n"));
    }
    if view.workloads.is_empty() {
        text.push_str("no workloads: the server has no series of fragprof's agents (fragprof_workload_*)\n");
    } else if !view.recorded {
        text.push_str("growth and comparisons need the recording rules (deploy/prometheus/fragprof.rules.yml)\n");
    }
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn series(name: &str, figure: &str, version: &str, value: f64) -> Value {
        let metric = json!({ "__name__": format!("workload:fragprof_{name}"), "figure": figure, "namespace": "shop", "workload": "web",
            "workload_kind": "deployment", "service_name": "web", "service_version": version });
        json!({ "metric": metric, "value": [1.5, value.to_string()] })
    }

    fn answer(result: &[Value]) -> Vec<u8> {
        json!({ "status": "success", "data": { "resultType": "vector", "result": result } }).to_string().into_bytes()
    }

    #[test]
    fn a_version_that_is_worse_than_the_one_before_comes_first() {
        let mib = f64::from(1 << 20);
        let mut result = Vec::new();
        for (version, pinned, ratio) in [("1.0", 900.0, 1.0), ("1.1", 130.0, 1.3)] {
            result.push(series("bytes:sum", "pinned", version, pinned * mib));
            result.push(series("bytes:sum", "resident", version, 2.0 * pinned * mib));
            result.push(series("bytes:vs_before", "pinned", version, ratio));
            result.push(series("bytes:vs_before", "resident", version, 1.05));
            result.push(series("processes:sum", "", version, 4.0));
        }
        let view = read(&answer(&result), true).unwrap();
        assert_eq!(view.workloads.iter().map(|row| row.service_version.as_str()).collect::<Vec<_>>(), ["1.1", "1.0"]);
        let first = &view.workloads[0];
        assert_eq!((first.worse.as_deref(), first.worse_bytes.unwrap().round()), (Some("pinned"), (30.0 * mib).round()));
        let page = page(&view, 1);
        let line = page.lines().nth(1).unwrap();
        assert!(line.contains("pinned +30 %") && line.ends_with("shop/web                         1.1"), "{page}");
        assert!(page.ends_with("1 more\n"), "{page}");
    }

    #[test]
    fn answers_that_are_none_say_what_they_are() {
        for (body, said) in [
            ("<html>", "not that of a Prometheus"),
            ("{}", "no data"),
            (r#"{"status":"error","error":"parse error\u001b[2J"}"#, "parse error\\u{1b}"),
            (r#"{"data":{"resultType":"matrix","result":[]}}"#, "matrix"),
            (r#"{"data":{"resultType":"vector","result":[{"metric":{},"value":[1]}]}}"#, "not that of a Prometheus"),
        ] {
            let error = read(body.as_bytes(), true).unwrap_err();
            assert!(error.contains(said), "{body}: {error}");
        }
        let odd = r#"{"data":{"resultType":"vector","result":[{"metric":{"figure":"pinned"},"value":[1,"NaN"]}]}}"#;
        assert!(page(&read(odd.as_bytes(), false).unwrap(), 9).contains("no series of fragprof's agents"));
    }

    #[test]
    fn a_query_is_encoded_and_asks_for_every_figure() {
        assert_eq!(path("a{b=\"c\"}"), "/api/v1/query?query=a%7Bb%3D%22c%22%7D");
        let query = unrecorded();
        for figure in ["resident", "live", "pinned", "trimmable", "nodes", "processes"] {
            assert!(query.contains(&format!("\"figure\", \"{figure}\"")), "{query}");
        }
    }

    proptest! {
        #[test]
        fn any_answer_is_read_without_a_panic(text in "\\PC{0,200}", name in "\\PC{0,20}", value in "\\PC{0,8}") {
            let _ = read(text.as_bytes(), true);
            let one = json!({ "metric": { "__name__": name, "workload": text, "figure": "live" }, "value": [0, value] });
            let view = read(&answer(&[one]), false).unwrap();
            prop_assert!(page(&view, 5).starts_with(" NODES"));
        }
    }
}
