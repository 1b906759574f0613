//! Pyroscope, and whatever takes the same: `POST /ingest`, multipart with the pprof file in the field `profile`. Pure.

use std::collections::BTreeMap;

use super::labels;
use crate::agent::sample::ProcessSample;
use crate::profile::Profile;

/// Parts the fields of a request; no pprof file begins a line with it, because it is gzipped and longer than chance.
pub(super) const BOUNDARY: &str = "fragprof-6b1f0c7e9a2d4835";

/// The body's content type.
pub(super) fn content_type() -> String {
    format!("multipart/form-data; boundary={BOUNDARY}")
}

/// The query of an ingestion: the name with its labels in braces.
pub(super) fn path(process: &ProcessSample, profile: &Profile, at_unix_s: f64, more: &BTreeMap<String, String>) -> String {
    let all = labels(process, profile, more);
    // Braces, commas and equals signs part labels: none may stand in a value.
    let clean = |text: &str| -> String {
        text.chars().map(|c| if c.is_control() || matches!(c, '{' | '}' | ',' | '=' | '"') { '_' } else { c }).collect()
    };
    let list: Vec<String> = all.iter().map(|(name, value)| format!("{name}={}", clean(value))).collect();
    let name = format!("{}.memory{{{}}}", clean(&process.comm), list.join(","));
    let until = at_unix_s;
    let from = until - profile.meta.duration_s.max(1.0);
    format!("/ingest?name={}&from={}&until={}&format=pprof&spyName=fragprof", percent(&name), from as u64, until as u64)
}

/// Percent-encoding of RFC 3986 for a query's value.
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

pub(super) fn multipart(profile: &[u8]) -> Vec<u8> {
    let mut body = format!(
        "--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"profile\"; filename=\"profile.pprof\"\r\nContent-Type: application/octet-stream\r\n\r\n"
    )
    .into_bytes();
    body.extend_from_slice(profile);
    body.extend_from_slice(format!("\r\n--{BOUNDARY}--\r\n").as_bytes());
    body
}
