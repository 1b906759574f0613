//! Tests the content of a server after an hour of pushes. The receiver stores what Parca stores of a profile
//! (`pkg/normalizer/normalizer.go`, `MetaFromPprof`): a row for each sample and type, with the profile's time and duration; and answers
//! queries as Parca does (`pkg/parcacol/querier.go`): sums over a range of the rows with a duration, and the rows without one at their
//! time.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use prost::Message;

use super::parca::WriteRawRequest;
use super::{PushProtocol, testing};
use crate::model::snapshot::Published;
use crate::profile::testing::frame;
use crate::profile::{Metadata, Mode, Profile, ValueKind, Values};

const SECOND_NS: i64 = 1_000_000_000;
const MINUTE_NS: i64 = 60 * SECOND_NS;
const START_NS: i64 = 1_795_257_600 * SECOND_NS;

#[derive(Debug)]
struct Row {
    kind: String,
    function: String,
    time_ns: i64,
    duration_ns: i64,
    value: i64,
}

#[derive(Default)]
struct Store(Vec<Row>);

impl Store {
    fn take(&mut self, message: &[u8]) {
        for series in WriteRawRequest::decode(message).unwrap().series {
            for raw in series.samples {
                let profile = testing::pprof(&raw.raw_profile);
                let text = |index: i64| profile.string_table[usize::try_from(index).unwrap()].clone();
                for sample in &profile.sample {
                    let location = profile.location.iter().find(|one| one.id == sample.location_id[0]).unwrap();
                    let function = profile.function.iter().find(|one| one.id == location.line[0].function_id).unwrap();
                    for (kind, &value) in profile.sample_type.iter().zip(&sample.value).filter(|(_, value)| **value != 0) {
                        let (kind, function) = (text(kind.r#type), text(function.name));
                        let (time_ns, duration_ns) = (profile.time_nanos, profile.duration_nanos);
                        self.0.push(Row { kind, function, time_ns, duration_ns, value });
                    }
                }
            }
        }
    }

    /// A query of `memory:KIND:…:delta` over a range, by function.
    fn delta(&self, kind: &str, span: std::ops::RangeInclusive<i64>) -> BTreeMap<&str, i64> {
        let rows = self.0.iter().filter(|row| row.kind == kind && row.duration_ns != 0 && span.contains(&row.time_ns));
        let mut sums = BTreeMap::new();
        rows.for_each(|row| *sums.entry(row.function.as_str()).or_default() += row.value);
        sums
    }

    /// A query of `memory:KIND:…` over everything: the sum at each time.
    fn gauge(&self, kind: &str) -> BTreeMap<i64, i64> {
        let mut sums = BTreeMap::new();
        self.0
            .iter()
            .filter(|row| row.kind == kind && row.duration_ns == 0)
            .for_each(|row| *sums.entry(row.time_ns).or_default() += row.value);
        sums
    }
}

/// The profile, at a given minute, of a process that has been watched since `since`.
fn profile(since: i64, minute: i64) -> Profile {
    let watched = u64::try_from(minute - since).unwrap();
    let kinds = [ValueKind::AllocObjects, ValueKind::AllocSpace, ValueKind::InuseSpace, ValueKind::PinnedSpace, ValueKind::GrowthSpace];
    let mut profile = Profile::new(Metadata {
        mode: Mode::Governed,
        start_unix_ns: u64::try_from(START_NS + since * MINUTE_NS).unwrap(),
        duration_s: watched as f64 * 60.0,
        kinds: kinds.into_iter().collect(),
        ..Metadata::default()
    });
    let row = |allocated, live, pinned| {
        Values::default()
            .with(ValueKind::AllocObjects, allocated / 10)
            .with(ValueKind::AllocSpace, allocated)
            .with(ValueKind::InuseSpace, live)
            .with(ValueKind::PinnedSpace, pinned)
            .with(ValueKind::GrowthSpace, 4096)
    };
    let minute = u64::try_from(minute).unwrap();
    profile.add(42, &[frame("steady", 1)], None, &row(1000 * watched, 500, 40_795_504));
    profile.add(42, &[frame("quadratic", 2)], None, &row(7 * watched * watched, minute, 17));
    if watched % 2 == 1 {
        // Present only in every second profile: its allocations fall back to zero.
        profile.add(42, &[frame("now and then", 3)], None, &row(10, 1, 0));
    }
    profile
}

#[test]
fn an_hour_of_pushes_adds_up_to_what_was_allocated_and_has_the_heap_at_each_minute() {
    // The twentieth push is rejected permanently, and once the server is unavailable.
    static STATUSES: [u8; 61] = {
        let mut statuses = [0; 61];
        statuses[19] = 3;
        statuses[39] = 14;
        statuses
    };
    let (url, requests) = testing::grpc_server(&STATUSES);
    let published = Arc::new(Published::new(Instant::now()));
    let pusher = testing::start(&url, PushProtocol::Parca, Duration::from_millis(1), Arc::clone(&published));
    let mut store = Store::default();
    for minute in 1..=60 {
        // Released in between, and watched again.
        let since = if minute <= 25 { 0 } else { 25 };
        testing::publish(&published, profile(since, minute), START_NS + minute * MINUTE_NS);
        let mut got = requests.recv_timeout(Duration::from_secs(20)).unwrap();
        if minute == 40 {
            got = requests.recv_timeout(Duration::from_secs(20)).unwrap();
        }
        if minute != 20 {
            store.take(&got.message);
        }
    }
    pusher.stop();
    assert_eq!((pusher.counters.refused.load(Ordering::Relaxed), pusher.counters.failures.load(Ordering::Relaxed)), (1, 1));
    let all = START_NS..=START_NS + 60 * MINUTE_NS;
    let sums = store.delta("alloc_space", all.clone());
    // 25 minutes and 35 minutes of it.
    assert_eq!(sums["steady"], 60_000);
    assert_eq!(sums["quadratic"], 7 * (25 * 25 + 35 * 35), "reductions because of falling estimates are made up for");
    let highest = |minutes: i64| 1000 * minutes + 7 * minutes * minutes + 10 * (minutes % 2);
    assert_eq!(sums.values().sum::<i64>(), highest(25) + highest(35));
    assert_eq!(store.delta("alloc_objects", all.clone()).values().sum::<i64>(), (highest(25) + highest(35)) / 10 - 1);
    // The minute after the rejected one has both.
    let at = |minute: i64| START_NS + minute * MINUTE_NS;
    assert_eq!(store.delta("alloc_space", at(20)..=at(20)).values().sum::<i64>(), 0);
    assert_eq!(store.delta("alloc_space", at(21)..=at(21)).values().sum::<i64>(), highest(21) - highest(19));
    let row = store.0.iter().find(|row| row.time_ns == at(21) && row.duration_ns != 0).unwrap();
    assert_eq!(row.duration_ns, 2 * MINUTE_NS);
    // The last minute is the last push.
    assert_eq!(store.delta("alloc_space", at(59) + 1..=at(60)).values().sum::<i64>(), highest(35) - highest(34));
    for kind in ["inuse_space", "pinned_space", "growth_space"] {
        assert!(store.delta(kind, all.clone()).is_empty(), "{kind} would be added up");
        let gauge = store.gauge(kind);
        assert_eq!(gauge.len(), 59, "{kind}");
        for (time_ns, value) in gauge {
            let minute = (time_ns - START_NS) / MINUTE_NS;
            let since = if minute <= 25 { 0 } else { 25 };
            let whole = profile(since, minute);
            let kind = ValueKind::ALL.into_iter().find(|one| one.name() == kind).unwrap();
            assert_eq!(u64::try_from(value).unwrap(), testing::sum(&whole, kind), "{} at minute {minute}", kind.name());
        }
    }
    assert!(store.gauge("alloc_space").is_empty());
}
