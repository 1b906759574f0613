//! OpenTelemetry: `Export` of the profiles service, `v1development`. A profile there has one kind of value, so each measured kind becomes a
//! profile; stacks, locations, functions and strings are shared in the request's dictionary. Pure.
//!
//! Since the field for it was removed, only the duration shows whether values add up over time: allocations have the duration of their
//! interval, the heap's state refers to a point in time and has no duration.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

use opentelemetry_proto::tonic::collector::profiles::v1development::ExportProfilesServiceRequest;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value::Value};
use opentelemetry_proto::tonic::profiles::v1development::{
    Function, KeyValueAndUnit, Line, Link, Location, Mapping, Profile as OtlpProfile, ProfilesDictionary, ResourceProfiles, Sample,
    ScopeProfiles, Stack, ValueType,
};
use opentelemetry_proto::tonic::resource::v1::Resource;
use prost::Message;

use super::interval::Interval;
use crate::model::sample::ProcessSample;
use crate::process::workload::Kind;
use crate::profile::{Frame, Profile, ValueKind};

/// The path of the same request as an HTTP POST, with its content type (opentelemetry-specification, protocol/otlp.md).
pub(super) const HTTP_PATH: &str = "/v1development/profiles";
pub(super) const CONTENT_TYPE: &str = "application/x-protobuf";
/// The attribute of a mapping that has its GNU build id in hexadecimal digits (semantic conventions, attributes-registry/process).
const BUILD_ID: &str = "process.executable.build_id.gnu";
/// The method.
pub(super) const METHOD: &str = "/opentelemetry.proto.collector.profiles.v1development.ProfilesService/Export";

/// A table of the dictionary: each entry once, the first one is the empty entry.
struct Table<T> {
    entries: Vec<T>,
    known: HashMap<T, i32>,
}

impl<T: Clone + Eq + Hash + Default> Table<T> {
    fn new() -> Self {
        Self { entries: vec![T::default()], known: HashMap::from([(T::default(), 0)]) }
    }

    fn index(&mut self, entry: T) -> i32 {
        if let Some(&index) = self.known.get(&entry) {
            return index;
        }
        // A profile has at most some 100,000 frames.
        let index = i32::try_from(self.entries.len()).unwrap_or(0);
        self.entries.push(entry.clone());
        self.known.insert(entry, index);
        index
    }
}

/// A location as (mapping, address, function, line).
type Place = (i32, u64, i32, i64);

struct Dictionary {
    strings: Table<String>,
    functions: Table<Function>,
    mappings: Table<Mapping>,
    places: Table<Place>,
    stacks: Table<Stack>,
    /// Build ids of mappings, as the attributes' index less one.
    build_ids: Vec<String>,
}

impl Dictionary {
    fn new() -> Self {
        Self {
            strings: Table::new(),
            functions: Table::new(),
            mappings: Table::new(),
            places: Table::new(),
            stacks: Table::new(),
            build_ids: Vec::new(),
        }
    }

    fn string(&mut self, text: &str) -> i32 {
        self.strings.index(text.to_owned())
    }

    fn location(&mut self, frame: &Frame) -> i32 {
        let name = self.string(&frame.function);
        let file = self.string(&frame.file);
        let function = self.functions.index(Function { name_strindex: name, filename_strindex: file, ..Function::default() });
        let module = self.string(&frame.module);
        let attribute_indices = self.build_id(&frame.build_id).into_iter().collect();
        let mapping = Mapping { filename_strindex: module, attribute_indices, ..Mapping::default() };
        let mapping = if module == 0 { 0 } else { self.mappings.index(mapping) };
        self.places.index((mapping, frame.address, function, i64::from(frame.line)))
    }

    /// The index of the attribute with a build id, by which a server finds symbols; `None` if it is not known.
    fn build_id(&mut self, build_id: &str) -> Option<i32> {
        if build_id.is_empty() {
            return None;
        }
        let known = self.build_ids.iter().position(|one| one == build_id);
        let at = known.unwrap_or_else(|| {
            self.build_ids.push(build_id.to_owned());
            self.build_ids.len() - 1
        });
        i32::try_from(at + 1).ok()
    }

    fn finish(mut self) -> ProfilesDictionary {
        let key_strindex = if self.build_ids.is_empty() { 0 } else { self.string(BUILD_ID) };
        let with_id = |id: String| KeyValueAndUnit {
            key_strindex,
            value: Some(AnyValue { value: Some(Value::StringValue(id)) }),
            ..KeyValueAndUnit::default()
        };
        let attributes = std::mem::take(&mut self.build_ids).into_iter().map(with_id);
        let location = |(mapping_index, address, function_index, line): Place| {
            let lines = if function_index == 0 { Vec::new() } else { vec![Line { function_index, line, column: 0 }] };
            Location { mapping_index, address, lines, attribute_indices: Vec::new() }
        };
        ProfilesDictionary {
            mapping_table: self.mappings.entries,
            location_table: self.places.entries.into_iter().map(location).collect(),
            function_table: self.functions.entries,
            link_table: vec![Link::default()],
            string_table: self.strings.entries,
            attribute_table: std::iter::once(KeyValueAndUnit::default()).chain(attributes).collect(),
            stack_table: self.stacks.entries,
        }
    }
}

/// The message for an interval of a process's profile.
pub(super) fn request(process: &ProcessSample, profile: &Profile, interval: &Interval, labels: &BTreeMap<String, String>) -> Vec<u8> {
    let mut dictionary = Dictionary::new();
    let stacks: Vec<i32> = profile
        .stacks()
        .iter()
        .map(|stack| {
            let location_indices = profile.frames_of(stack).map(|frame| dictionary.location(frame)).collect();
            dictionary.stacks.index(Stack { location_indices })
        })
        .collect();
    let profiles = profile.meta.kinds.iter().map(|kind| of_kind(&mut dictionary, process, interval, &stacks, kind)).collect();
    let scope =
        InstrumentationScope { name: "fragprof".into(), version: env!("CARGO_PKG_VERSION").into(), ..InstrumentationScope::default() };
    let scope_profiles = vec![ScopeProfiles { scope: Some(scope), profiles, ..ScopeProfiles::default() }];
    let resource = Resource { attributes: attributes(process, labels), ..Resource::default() };
    ExportProfilesServiceRequest {
        resource_profiles: vec![ResourceProfiles { resource: Some(resource), scope_profiles, ..ResourceProfiles::default() }],
        dictionary: Some(dictionary.finish()),
    }
    .encode_to_vec()
}

fn of_kind(dictionary: &mut Dictionary, process: &ProcessSample, interval: &Interval, stacks: &[i32], kind: ValueKind) -> OtlpProfile {
    let samples = interval
        .rows
        .iter()
        .zip(stacks)
        .filter(|(row, _)| row.get(kind) > 0)
        .map(|(row, &stack_index)| {
            let value = i64::try_from(row.get(kind)).unwrap_or(i64::MAX);
            Sample { stack_index, values: vec![value], ..Sample::default() }
        })
        .collect();
    // With a duration, the time is its start: the profile covers the range from the time to the time plus the duration.
    let (time_unix_nano, duration_nano) =
        if kind.adds_up_over_time() { (interval.start_unix_ns(), interval.duration_ns) } else { (interval.end_unix_ns, 0) };
    let identity = process.identity.process;
    // Sixteen bytes that differ between any two profiles in a collector: process, time and kind.
    let id = [u64::from(identity.pid.0) << 32 | kind.index() as u64, interval.end_unix_ns ^ identity.start_ticks.rotate_left(32)];
    OtlpProfile {
        sample_type: Some(ValueType { type_strindex: dictionary.string(kind.name()), unit_strindex: dictionary.string(kind.unit()) }),
        samples,
        time_unix_nano,
        duration_nano,
        profile_id: id.map(u64::to_be_bytes).concat(),
        ..OtlpProfile::default()
    }
}

/// Names from the semantic conventions if available; the configured labels are unchanged.
fn attributes(process: &ProcessSample, labels: &BTreeMap<String, String>) -> Vec<KeyValue> {
    let pid = i64::from(process.identity.process.pid.0);
    let text = |value: &str| Value::StringValue(value.to_owned());
    let mut all = vec![
        ("service.name", text(&process.workload.service_name)),
        ("process.pid", Value::IntValue(pid)),
        ("process.executable.name", text(&process.comm)),
    ];
    for (name, value) in labels {
        let name = match name.as_str() {
            "pid" | "comm" | "service_name" => continue,
            "service_version" => "service.version",
            "namespace" => "k8s.namespace.name",
            "pod" => "k8s.pod.name",
            "container" => "k8s.container.name",
            "workload" => workload_key(process.workload.kind),
            "workload_kind" => "fragprof.workload_kind",
            "tier" => "fragprof.tier",
            name => name,
        };
        all.push((name, text(value)));
    }
    let pair =
        |(key, value): (&str, Value)| KeyValue { key: key.to_owned(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() };
    all.into_iter().map(pair).collect()
}

/// The attribute with the name of a workload.
fn workload_key(kind: Kind) -> &'static str {
    match kind {
        Kind::Deployment => "k8s.deployment.name",
        Kind::StatefulSet => "k8s.statefulset.name",
        Kind::DaemonSet => "k8s.daemonset.name",
        Kind::CronJob => "k8s.cronjob.name",
        Kind::Job => "k8s.job.name",
        Kind::Rollout | Kind::StaticPod | Kind::Pod | Kind::Container | Kind::Systemd | Kind::Command => "fragprof.workload",
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use super::super::{PushProtocol, testing};
    use super::*;
    use crate::profile::testing::shop;

    #[test]
    fn every_kind_of_value_arrives_with_its_stacks() {
        let (url, requests) = testing::grpc_server(&[0]);
        let pusher = testing::pusher(&url, PushProtocol::Otlp);
        let got = requests.recv_timeout(Duration::from_secs(20)).unwrap();
        pusher.stop();
        assert_eq!(got.path, METHOD);
        let request = ExportProfilesServiceRequest::decode(got.message.as_slice()).unwrap();
        let dictionary = request.dictionary.unwrap();
        let text = |index: i32| dictionary.string_table[usize::try_from(index).unwrap()].as_str();
        let of_process = &request.resource_profiles[0];
        let attributes = &of_process.resource.as_ref().unwrap().attributes;
        let names: Vec<&str> = attributes.iter().map(|one| one.key.as_str()).collect();
        let labels = ["cluster", "fragprof.tier", "fragprof.workload", "fragprof.workload_kind"];
        assert_eq!(names, [["service.name", "process.pid", "process.executable.name"].as_slice(), &labels].concat());
        let expected = shop();
        let profiles = &of_process.scope_profiles[0].profiles;
        assert_eq!(profiles.len(), expected.meta.kinds.iter().count());
        for (profile, kind) in profiles.iter().zip(expected.meta.kinds.iter()) {
            let kind_of = profile.sample_type.unwrap();
            assert_eq!((text(kind_of.type_strindex), text(kind_of.unit_strindex)), (kind.name(), kind.unit()));
            let interval = if kind.name().starts_with("alloc_") {
                (testing::END_UNIX_NS as u64 - 10_250_000_000, 10_250_000_000)
            } else {
                (testing::END_UNIX_NS as u64, 0)
            };
            assert_eq!((profile.time_unix_nano, profile.duration_nano), interval, "{}", kind.name());
            // Values by the names of a stack's functions, leaf first.
            let mut shown: Vec<(Vec<String>, i64)> = Vec::new();
            for sample in &profile.samples {
                let stack = &dictionary.stack_table[usize::try_from(sample.stack_index).unwrap()];
                let name = |&index: &i32| {
                    let location = &dictionary.location_table[usize::try_from(index).unwrap()];
                    let function = &dictionary.function_table[usize::try_from(location.lines[0].function_index).unwrap()];
                    text(function.name_strindex).to_owned()
                };
                shown.push((stack.location_indices.iter().map(name).collect(), sample.values[0]));
            }
            let mut wanted: Vec<(Vec<String>, i64)> = Vec::new();
            for stack in expected.stacks().iter().filter(|stack| stack.values.get(kind) > 0) {
                let names = expected.frames_of(stack).map(|frame| frame.function.to_string()).collect();
                wanted.push((names, i64::try_from(stack.values.get(kind)).unwrap()));
            }
            shown.sort();
            wanted.sort();
            assert_eq!(shown, wanted, "{}", kind.name());
        }
        // Every file has its build id.
        let of_file = |name: &str| {
            let file = dictionary.mapping_table.iter().find(|one| text(one.filename_strindex).ends_with(name)).unwrap();
            let attribute = &dictionary.attribute_table[usize::try_from(file.attribute_indices[0]).unwrap()];
            (text(attribute.key_strindex).to_owned(), attribute.value.clone().unwrap().value.unwrap())
        };
        assert_eq!(of_file("libc.so.6"), ("process.executable.build_id.gnu".to_owned(), Value::StringValue("beef".into())));
        // The first entry of every table is the empty entry.
        assert_eq!(dictionary.string_table[0], "");
        assert_eq!(dictionary.mapping_table[0], Mapping::default());
        assert_eq!(dictionary.stack_table[0], Stack::default());
    }

    #[test]
    fn the_same_message_is_posted_over_http() {
        let (url, requests) = testing::http_server(&[200]);
        let pusher = testing::pusher(&url, PushProtocol::OtlpHttp);
        let (head, body) = requests.recv_timeout(Duration::from_secs(20)).unwrap();
        pusher.stop();
        assert!(head.starts_with("post /v1development/profiles http/1.1\r\n"), "{head}");
        assert!(head.contains("content-type: application/x-protobuf"), "{head}");
        let request = ExportProfilesServiceRequest::decode(body.as_slice()).unwrap();
        assert_eq!(request.resource_profiles[0].scope_profiles[0].profiles.len(), shop().meta.kinds.iter().count());
    }
}
