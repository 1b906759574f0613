//! Pyroscope's `push.v1.PusherService/Push` (Grafana Pyroscope's `api/push/v1/push.proto`): gzipped pprof with labels, by the Connect protocol,
//! whose unary requests are plain HTTP posts of a message. Pure.
//!
//! The server splits a file by its sample types: a series' profile type is `memory:inuse_space:bytes::`, for example. `__delta__=false` says
//! that values are those of the interval already: without it the server takes types that it knows from Go for sums since the process's start.

use std::collections::BTreeMap;

use prost::Message;

/// The method's path.
pub(super) const PATH: &str = "/push.v1.PusherService/Push";
/// The body is one message of protobuf.
pub(super) const CONTENT_TYPE: &str = "application/proto";
/// Name of the profile: together with its sample types it names the series.
const NAME: &str = "memory";

/// `PushRequest`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct PushRequest {
    #[prost(message, repeated, tag = "1")]
    pub series: Vec<RawProfileSeries>,
}

/// `RawProfileSeries`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct RawProfileSeries {
    #[prost(message, repeated, tag = "1")]
    pub labels: Vec<LabelPair>,
    #[prost(message, repeated, tag = "2")]
    pub samples: Vec<RawSample>,
}

/// `types.v1.LabelPair`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct LabelPair {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub value: String,
}

/// `RawSample`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct RawSample {
    #[prost(bytes = "vec", tag = "1")]
    pub raw_profile: Vec<u8>,
}

/// The message for a file with these labels; `service_name` is among them.
pub(super) fn request(labels: &BTreeMap<String, String>, raw_profile: Vec<u8>) -> Vec<u8> {
    let own = [("__delta__", "false"), ("__name__", NAME)];
    let all = own.into_iter().chain(labels.iter().map(|(name, value)| (name.as_str(), value.as_str())));
    let labels = all.map(|(name, value)| LabelPair { name: name.to_owned(), value: value.to_owned() }).collect();
    PushRequest { series: vec![RawProfileSeries { labels, samples: vec![RawSample { raw_profile }] }] }.encode_to_vec()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use super::super::{PushProtocol, testing};
    use super::*;
    use crate::profile::testing::shop;

    #[test]
    fn a_profile_arrives_with_its_labels_and_values() {
        let (url, requests) = testing::http_server(&[200]);
        let pusher = testing::pusher(&format!("{url}/base"), PushProtocol::PyroscopePush);
        let (head, body) = requests.recv_timeout(Duration::from_secs(20)).unwrap();
        pusher.stop();
        assert!(head.starts_with("post /base/push.v1.pusherservice/push http/1.1"), "{head}");
        assert!(head.contains("content-type: application/proto"), "{head}");
        let series = PushRequest::decode(body.as_slice()).unwrap().series;
        let labels: BTreeMap<&str, &str> = series[0].labels.iter().map(|pair| (pair.name.as_str(), pair.value.as_str())).collect();
        for (name, value) in
            [("__name__", "memory"), ("__delta__", "false"), ("service_name", "sh{o}p"), ("cluster", "a"), ("pid", "42"), ("tier", "exact")]
        {
            assert_eq!(labels.get(name), Some(&value), "{labels:?}");
        }
        let file = testing::pprof(&series[0].samples[0].raw_profile);
        let wanted: Vec<_> = shop().meta.kinds.iter().map(|kind| (kind.name().to_owned(), testing::sum(&shop(), kind))).collect();
        assert_eq!(testing::totals(&file), wanted);
    }
}
