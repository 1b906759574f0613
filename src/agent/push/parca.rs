//! Parca: `WriteRaw` of `parca.profilestore.v1alpha1.ProfileStoreService` (parca's `profilestore.proto`), which takes gzipped pprof. Pure.
//!
//! In Parca a profile with a duration is a delta, whose values are added up over time and divided by the duration, and a profile without
//! one is the state at its time (`pkg/parcacol/querier.go`, `QueryToFilterExprs`: the suffix `:delta` selects `duration != 0`). So each
//! push contains both.

use std::collections::BTreeMap;

use prost::Message;

/// The method.
pub(super) const METHOD: &str = "/parca.profilestore.v1alpha1.ProfileStoreService/WriteRaw";
/// Name of the profile: together with its sample types it names the series.
const NAME: &str = "memory";

/// `WriteRawRequest`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct WriteRawRequest {
    #[prost(message, repeated, tag = "2")]
    pub series: Vec<RawProfileSeries>,
    /// Addresses are relative to the files.
    #[prost(bool, tag = "3")]
    pub normalized: bool,
}

/// `RawProfileSeries`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct RawProfileSeries {
    #[prost(message, optional, tag = "1")]
    pub labels: Option<LabelSet>,
    #[prost(message, repeated, tag = "2")]
    pub samples: Vec<RawSample>,
}

/// `LabelSet`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct LabelSet {
    #[prost(message, repeated, tag = "1")]
    pub labels: Vec<Label>,
}

/// `Label`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Label {
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

/// The message for files with these labels.
pub(super) fn request(labels: &BTreeMap<String, String>, files: impl Iterator<Item = Vec<u8>>) -> Vec<u8> {
    let named = std::iter::once(("__name__", NAME)).chain(labels.iter().map(|(name, value)| (name.as_str(), value.as_str())));
    let labels = named.map(|(name, value)| Label { name: name.to_owned(), value: value.to_owned() }).collect();
    let samples = files.map(|raw_profile| RawSample { raw_profile }).collect();
    let series = RawProfileSeries { labels: Some(LabelSet { labels }), samples };
    WriteRawRequest { series: vec![series], normalized: false }.encode_to_vec()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::atomic::Ordering;
    use std::time::Duration;

    use super::super::{PushProtocol, testing};
    use super::*;
    use crate::profile::ValueKind;
    use crate::profile::testing::shop;

    const WITHIN: Duration = Duration::from_secs(20);

    #[test]
    fn a_profile_arrives_whole_with_its_labels_after_the_server_was_away_once() {
        // UNAVAILABLE, then OK.
        let (url, requests) = testing::grpc_server(&[14, 0]);
        let pusher = testing::pusher(&url, PushProtocol::Parca);
        let (first, second) = (requests.recv_timeout(WITHIN).unwrap(), requests.recv_timeout(WITHIN).unwrap());
        assert_eq!(first.message, second.message);
        assert_eq!(second.path, METHOD);
        let request = WriteRawRequest::decode(second.message.as_slice()).unwrap();
        let series = &request.series[0];
        let labels: Vec<_> = series.labels.as_ref().unwrap().labels.iter().map(|one| (one.name.as_str(), one.value.as_str())).collect();
        let of_process = [("comm", "sh{o}p"), ("pid", "42"), ("service_name", "sh{o}p"), ("tier", "exact")];
        let of_workload = [("workload", "sh{o}p"), ("workload_kind", "command")];
        assert_eq!(labels, [&[("__name__", "memory"), ("cluster", "a")], of_process.as_slice(), &of_workload].concat());
        let (sums, gauges) = (testing::pprof(&series.samples[0].raw_profile), testing::pprof(&series.samples[1].raw_profile));
        assert_eq!((sums.time_nanos, gauges.time_nanos), (testing::END_UNIX_NS, testing::END_UNIX_NS));
        assert_eq!((sums.duration_nanos, gauges.duration_nanos), (10_250_000_000, 0));
        for (message, kinds) in [(&sums, &ValueKind::ALL[..2]), (&gauges, &ValueKind::ALL[2..9])] {
            let wanted: Vec<_> = kinds.iter().map(|&kind| (kind.name().to_owned(), testing::sum(&shop(), kind))).collect();
            assert_eq!(testing::totals(message), wanted);
        }
        assert_eq!(pusher.counters.failures.load(Ordering::Relaxed), 1);
        pusher.stop();
    }

    #[test]
    fn a_profile_that_is_refused_is_not_sent_again() {
        // INVALID_ARGUMENT.
        let (url, requests) = testing::grpc_server(&[3, 0]);
        let pusher = testing::pusher(&url, PushProtocol::Parca);
        requests.recv_timeout(WITHIN).unwrap();
        let deadline = std::time::Instant::now() + WITHIN;
        while pusher.counters.refused.load(Ordering::Relaxed) == 0 && std::time::Instant::now() < deadline {
            std::thread::yield_now();
        }
        assert_eq!(pusher.counters.refused.load(Ordering::Relaxed), 1);
        assert!(requests.try_recv().is_err());
        pusher.stop();
    }

    #[test]
    fn the_fields_have_the_numbers_of_the_published_description() {
        // Encoded by hand: series = field 2, labels = 1, label = 1, name = 1, value = 2; samples = 2, raw_profile = 1.
        let bytes = request(&BTreeMap::new(), std::iter::once(vec![0xaa]));
        let label = [&[0x0a, 8][..], b"__name__", &[0x12, 6], b"memory"].concat();
        let labels = [&[0x0a, u8::try_from(label.len()).unwrap()][..], &label].concat();
        let series = [&[0x0a, u8::try_from(labels.len()).unwrap()][..], &labels, &[0x12, 3, 0x0a, 1, 0xaa]].concat();
        assert_eq!(bytes, [&[0x12, u8::try_from(series.len()).unwrap()][..], &series].concat());
    }
}
