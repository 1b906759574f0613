//! The messages of NRI (nri.pkg.api.v1alpha1, containerd/nri's `api.proto`), of ttrpc and of containerd's snapshot service that are used, with
//! the fields that are used. Unknown fields are skipped, as protobuf requires; a test compares the numbers with bytes written by hand.

use std::collections::HashMap;

/// `ttrpc.Request`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Request {
    /// Name of the service.
    #[prost(string, tag = "1")]
    pub service: String,
    /// Name of the method.
    #[prost(string, tag = "2")]
    pub method: String,
    /// The method's own message.
    #[prost(bytes = "vec", tag = "3")]
    pub payload: Vec<u8>,
    /// Time for which the caller waits, nanoseconds.
    #[prost(int64, tag = "4")]
    pub timeout_ns: i64,
}

/// `ttrpc.Response`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Response {
    /// An error; absent = none.
    #[prost(message, optional, tag = "1")]
    pub status: Option<Status>,
    /// The method's own message.
    #[prost(bytes = "vec", tag = "2")]
    pub payload: Vec<u8>,
}

/// `google.rpc.Status`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Status {
    /// A code of gRPC, 0 = none.
    #[prost(int32, tag = "1")]
    pub code: i32,
    /// What happened.
    #[prost(string, tag = "2")]
    pub message: String,
}

/// `RegisterPluginRequest`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RegisterPluginRequest {
    /// The plugin's name.
    #[prost(string, tag = "1")]
    pub plugin_name: String,
    /// Two digits: plugins are called in ascending order.
    #[prost(string, tag = "2")]
    pub plugin_idx: String,
}

/// `ConfigureRequest`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ConfigureRequest {
    /// The runtime: `containerd`, `cri-o`.
    #[prost(string, tag = "2")]
    pub runtime_name: String,
    /// Its version.
    #[prost(string, tag = "3")]
    pub runtime_version: String,
    /// Time that it waits for an answer, milliseconds; 0 from runtimes that do not say.
    #[prost(int64, tag = "5")]
    pub request_timeout_ms: i64,
}

/// `ConfigureResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ConfigureResponse {
    /// The events that are wanted: bit 0 is the first.
    #[prost(int32, tag = "2")]
    pub events: i32,
}

/// `SynchronizeRequest`, without its pods and containers: those that run are left alone.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SynchronizeRequest {
    /// Whether more follow.
    #[prost(bool, tag = "3")]
    pub more: bool,
}

/// `SynchronizeResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SynchronizeResponse {
    /// Whether more can be taken.
    #[prost(bool, tag = "2")]
    pub more: bool,
}

/// `CreateContainerRequest`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CreateContainerRequest {
    /// The container's pod.
    #[prost(message, optional, tag = "1")]
    pub pod: Option<PodSandbox>,
    /// The container.
    #[prost(message, optional, tag = "2")]
    pub container: Option<Container>,
}

/// `PodSandbox`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PodSandbox {
    /// The pod's name.
    #[prost(string, tag = "2")]
    pub name: String,
    /// Its namespace.
    #[prost(string, tag = "4")]
    pub namespace: String,
    /// Its labels.
    #[prost(map = "string, string", tag = "5")]
    pub labels: HashMap<String, String>,
}

/// `Container`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Container {
    /// Its id.
    #[prost(string, tag = "1")]
    pub id: String,
    /// Its name in the pod.
    #[prost(string, tag = "3")]
    pub name: String,
    /// The command line.
    #[prost(string, repeated, tag = "7")]
    pub args: Vec<String>,
    /// The environment, `NAME=value`.
    #[prost(string, repeated, tag = "8")]
    pub env: Vec<String>,
    /// Its mounts.
    #[prost(message, repeated, tag = "9")]
    pub mounts: Vec<Mount>,
}

/// `Mount`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Mount {
    /// The path in the container.
    #[prost(string, tag = "1")]
    pub destination: String,
    /// `bind`, or a file system.
    #[prost(string, tag = "2")]
    pub kind: String,
    /// The path on the node.
    #[prost(string, tag = "3")]
    pub source: String,
    /// As for mount(8).
    #[prost(string, repeated, tag = "4")]
    pub options: Vec<String>,
}

/// `CreateContainerResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct CreateContainerResponse {
    /// What is changed; absent = nothing.
    #[prost(message, optional, tag = "1")]
    pub adjust: Option<ContainerAdjustment>,
}

/// `ContainerAdjustment`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerAdjustment {
    /// Mounts to add.
    #[prost(message, repeated, tag = "3")]
    pub mounts: Vec<Mount>,
    /// Variables to set. A name that begins with `-` is removed first.
    #[prost(message, repeated, tag = "4")]
    pub env: Vec<KeyValue>,
}

/// `KeyValue`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct KeyValue {
    /// Name.
    #[prost(string, tag = "1")]
    pub key: String,
    /// Value.
    #[prost(string, tag = "2")]
    pub value: String,
}

/// `containerd.services.snapshots.v1.MountsRequest`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MountsRequest {
    /// The snapshotter.
    #[prost(string, tag = "1")]
    pub snapshotter: String,
    /// The snapshot: a container's id.
    #[prost(string, tag = "2")]
    pub key: String,
}

/// `containerd.services.snapshots.v1.MountsResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct MountsResponse {
    /// How its root directory will be mounted.
    #[prost(message, repeated, tag = "1")]
    pub mounts: Vec<SnapshotMount>,
}

/// `containerd.types.Mount`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SnapshotMount {
    /// `overlay`, `bind`, or another.
    #[prost(string, tag = "1")]
    pub kind: String,
    /// The path on the node.
    #[prost(string, tag = "2")]
    pub source: String,
    /// As for mount(8).
    #[prost(string, repeated, tag = "4")]
    pub options: Vec<String>,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use prost::Message as _;

    use super::*;
    use crate::agent::cri::messages::tests::field;

    #[test]
    fn the_field_numbers_are_those_of_nri() {
        let label = [field(1, b"k"), field(2, b"v")].concat();
        let pod =
            [field(1, b"sandbox"), field(2, b"web-1"), field(3, b"uid"), field(4, b"shop"), field(5, &label), field(7, b"runc")].concat();
        let mount = [field(1, b"/data"), field(2, b"bind"), field(3, b"/host"), field(4, b"ro")].concat();
        let container = [
            field(1, b"id"),
            field(2, b"sandbox"),
            field(3, b"web"),
            field(7, b"/app"),
            field(8, b"A=1"),
            field(9, &mount),
            vec![12 << 3, 1],
        ]
        .concat();
        let decoded = CreateContainerRequest::decode([field(1, &pod), field(2, &container)].concat().as_slice()).unwrap();
        let pod = decoded.pod.unwrap();
        assert_eq!((pod.name.as_str(), pod.namespace.as_str(), pod.labels["k"].as_str()), ("web-1", "shop", "v"));
        let container = decoded.container.unwrap();
        assert_eq!((container.id.as_str(), container.name.as_str()), ("id", "web"));
        assert_eq!((container.args, container.env), (vec!["/app".to_owned()], vec!["A=1".to_owned()]));
        let expected = Mount { destination: "/data".into(), kind: "bind".into(), source: "/host".into(), options: vec!["ro".into()] };
        assert_eq!(container.mounts, std::slice::from_ref(&expected));
        let adjust = ContainerAdjustment { mounts: vec![expected], env: vec![KeyValue { key: "A".into(), value: "2".into() }] };
        let encoded = CreateContainerResponse { adjust: Some(adjust) }.encode_to_vec();
        assert_eq!(encoded, field(1, &[field(3, &mount), field(4, &[field(1, b"A"), field(2, b"2")].concat())].concat()));
        assert_eq!(ConfigureResponse { events: 8 }.encode_to_vec(), [2 << 3, 8]);
        let register = RegisterPluginRequest { plugin_name: "fragprof".into(), plugin_idx: "90".into() };
        assert_eq!(register.encode_to_vec(), [field(1, b"fragprof"), field(2, b"90")].concat());
        let request = [field(1, b"s"), field(2, b"m"), field(3, b"p"), vec![4 << 3, 9], field(5, b"")].concat();
        let expected = Request { service: "s".into(), method: "m".into(), payload: b"p".to_vec(), timeout_ns: 9 };
        assert_eq!(Request::decode(request.as_slice()).unwrap(), expected);
        let snapshot = field(1, &[field(1, b"overlay"), field(2, b"overlay"), field(3, b""), field(4, b"lowerdir=/a")].concat());
        let decoded = MountsResponse::decode(snapshot.as_slice()).unwrap();
        assert_eq!((decoded.mounts[0].kind.as_str(), decoded.mounts[0].options[0].as_str()), ("overlay", "lowerdir=/a"));
    }
}
