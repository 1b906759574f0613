//! Pyroscope and compatible servers: `POST /ingest`, multipart with the pprof file in the field `profile` and a description of its sample
//! types in `sample_type_config`. Pure.
//!
//! The parameter `format` is omitted: with `format=pprof` the server takes the whole body, including boundaries, for the file
//! (`pkg/ingester/pyroscope/ingest_handler.go`).

use std::collections::BTreeMap;

use serde_json::json;

use super::interval::Interval;
use crate::profile::{KindSet, ValueKind};

/// Separates the fields of a request. It is extremely unlikely to occur at the start of a line in a gzipped pprof file.
pub(super) const BOUNDARY: &str = "fragprof-6b1f0c7e9a2d4835";

/// The body's content type.
pub(super) fn content_type() -> String {
    format!("multipart/form-data; boundary={BOUNDARY}")
}

/// The query of an ingestion: the service name with its labels in braces, and the interval.
pub(super) fn path(service: &str, interval: &Interval, labels: &BTreeMap<String, String>) -> String {
    // Braces, commas and equals signs separate labels, so a value must not contain them.
    let clean = |text: &str| -> String {
        text.chars().map(|c| if c.is_control() || matches!(c, '{' | '}' | ',' | '=' | '"') { '_' } else { c }).collect()
    };
    // The name is the service's label.
    let others = labels.iter().filter(|(name, _)| *name != "service_name");
    let list: Vec<String> = others.map(|(name, value)| format!("{name}={}", clean(value))).collect();
    let name = format!("{}{{{}}}", service_name(service), list.join(","));
    let seconds = |unix_ns: u64| unix_ns / 1_000_000_000;
    let (from, until) = (seconds(interval.start_unix_ns()), seconds(interval.end_unix_ns));
    format!("/ingest?name={}&from={from}&until={until}&spyName=fragprof", percent(&name))
}

/// A name with only the characters allowed in a service name (`api/model/labelset/validate.go`); the server rejects profiles with others.
fn service_name(command: &str) -> String {
    let allowed = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-' | '/') { c } else { '_' };
    let name: String = command.chars().map(allowed).collect();
    if name.is_empty() { "unknown".to_owned() } else { name }
}

/// The description of the sample types: whether values of several profiles are summed or averaged, and that none is cumulative or to be
/// scaled. Without it a server that knows `alloc_space` takes each value for the sum since the process started.
fn sample_type_config(kinds: KindSet) -> String {
    let of_kind = |kind: ValueKind| {
        let units = if kind.unit() == "bytes" { "bytes" } else { "objects" };
        let aggregation = if kind.adds_up_over_time() { "sum" } else { "average" };
        let config =
            json!({ "units": units, "aggregation": aggregation, "display-name": kind.name(), "cumulative": false, "sampled": false });
        (kind.name().to_owned(), config)
    };
    serde_json::Value::Object(kinds.iter().map(of_kind).collect()).to_string()
}

/// Percent-encoding of RFC 3986 for a query value.
fn percent(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => encoded.push(char::from(byte)),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

/// The body: the file, and the description of its sample types.
pub(super) fn multipart(profile: &[u8], kinds: KindSet) -> Vec<u8> {
    let config = sample_type_config(kinds);
    let mut body = Vec::new();
    for (field, file, content) in [("sample_type_config", "config.json", config.as_bytes()), ("profile", "profile.pprof", profile)] {
        let head = format!(
            "--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"{field}\"; filename=\"{file}\"\r\nContent-Type: application/octet-stream\r\n\r\n"
        );
        body.extend_from_slice(head.as_bytes());
        body.extend_from_slice(content);
        body.extend_from_slice(b"\r\n");
    }
    body.extend_from_slice(format!("--{BOUNDARY}--\r\n").as_bytes());
    body
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_has_a_name_that_servers_accept() {
        for (command, name) in
            [("nginx: worker", "nginx__worker"), ("a-b.c/d_e", "a-b.c/d_e"), ("Web Content", "Web_Content"), ("", "unknown")]
        {
            assert_eq!(service_name(command), name);
        }
    }

    #[test]
    fn allocations_are_added_up_and_the_state_of_the_heap_is_averaged() {
        let config = sample_type_config([ValueKind::AllocObjects, ValueKind::InuseSpace].into_iter().collect());
        let config: serde_json::Value = serde_json::from_str(&config).unwrap_or_default();
        let expected = json!({
            "alloc_objects": { "units": "objects", "aggregation": "sum", "display-name": "alloc_objects", "cumulative": false, "sampled": false },
            "inuse_space": { "units": "bytes", "aggregation": "average", "display-name": "inuse_space", "cumulative": false, "sampled": false },
        });
        assert_eq!(config, expected);
    }
}
