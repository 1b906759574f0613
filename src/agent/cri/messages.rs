//! The few messages of the CRI that are used (runtime.v1, k8s.io/cri-api's `api.proto`), with the fields that are used. Unknown fields
//! are skipped, as protobuf requires; a test compares the numbers with bytes written by hand.

use std::collections::HashMap;

/// `ListPodSandboxRequest`, without a filter.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ListPodSandboxRequest {}

/// `ListPodSandboxResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ListPodSandboxResponse {
    /// The pods.
    #[prost(message, repeated, tag = "1")]
    pub items: Vec<PodSandbox>,
}

/// `PodSandbox`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PodSandbox {
    /// Id of the sandbox, which is also that of its pause container.
    #[prost(string, tag = "1")]
    pub id: String,
    /// Its identity.
    #[prost(message, optional, tag = "2")]
    pub metadata: Option<PodSandboxMetadata>,
    /// Labels: the pod's own, and its identity.
    #[prost(map = "string, string", tag = "5")]
    pub labels: HashMap<String, String>,
    /// Annotations: the pod's own, and the kubelet's.
    #[prost(map = "string, string", tag = "6")]
    pub annotations: HashMap<String, String>,
}

/// `PodSandboxMetadata`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PodSandboxMetadata {
    /// The pod's name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The pod's uid.
    #[prost(string, tag = "2")]
    pub uid: String,
    /// The pod's namespace.
    #[prost(string, tag = "3")]
    pub namespace: String,
}

/// `ListContainersRequest`, without a filter.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ListContainersRequest {}

/// `ListContainersResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ListContainersResponse {
    /// The containers, pause containers apart.
    #[prost(message, repeated, tag = "1")]
    pub containers: Vec<Container>,
}

/// `Container`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Container {
    /// Its id.
    #[prost(string, tag = "1")]
    pub id: String,
    /// Its pod's sandbox.
    #[prost(string, tag = "2")]
    pub pod_sandbox_id: String,
    /// Its identity.
    #[prost(message, optional, tag = "3")]
    pub metadata: Option<ContainerMetadata>,
    /// Its image as requested.
    #[prost(message, optional, tag = "4")]
    pub image: Option<ImageSpec>,
    /// Its image as the runtime found it.
    #[prost(string, tag = "5")]
    pub image_ref: String,
    /// Labels; those of a kubelet repeat the pod's identity.
    #[prost(map = "string, string", tag = "8")]
    pub labels: HashMap<String, String>,
}

/// `ContainerMetadata`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerMetadata {
    /// The container's name in the pod.
    #[prost(string, tag = "1")]
    pub name: String,
}

/// `ImageSpec`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ImageSpec {
    /// A name, or the digest to which the kubelet resolved it.
    #[prost(string, tag = "1")]
    pub image: String,
    /// The name in the pod's manifest (kubelet 1.28 and later).
    #[prost(string, tag = "18")]
    pub user_specified_image: String,
}

/// `VersionRequest`; what it requests is left to the runtime.
#[derive(Clone, PartialEq, prost::Message)]
pub struct VersionRequest {}

/// `VersionResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct VersionResponse {
    /// The runtime's name: `containerd`, `cri-o`, `docker`.
    #[prost(string, tag = "2")]
    pub runtime_name: String,
}

/// `ListImagesRequest`, without a filter.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ListImagesRequest {}

/// `ListImagesResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ListImagesResponse {
    /// The images.
    #[prost(message, repeated, tag = "1")]
    pub images: Vec<Image>,
}

/// `Image`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Image {
    /// Its id, the digest of its configuration.
    #[prost(string, tag = "1")]
    pub id: String,
    /// Its names, `repository:tag`.
    #[prost(string, repeated, tag = "2")]
    pub repo_tags: Vec<String>,
    /// Its digests, `repository@sha256:…`.
    #[prost(string, repeated, tag = "3")]
    pub repo_digests: Vec<String>,
}

#[cfg(test)]
pub(in crate::agent) mod tests {
    #![allow(clippy::unwrap_used)]
    use prost::Message as _;

    use super::*;

    /// A length-delimited field: key (number << 3 | 2), length, bytes.
    pub(in crate::agent) fn field(number: u32, bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        prost::encoding::encode_varint(u64::from(number << 3 | 2), &mut out);
        prost::encoding::encode_varint(bytes.len() as u64, &mut out);
        out.extend_from_slice(bytes);
        out
    }

    #[test]
    fn the_field_numbers_are_those_of_the_cri() {
        let metadata = [field(1, b"web-1"), field(2, b"uid-1"), field(3, b"shop"), vec![4 << 3, 7]].concat();
        let label = [field(1, b"k"), field(2, b"v")].concat();
        let sandbox = [
            field(1, b"sandbox"),
            field(2, &metadata),
            vec![3 << 3, 1],
            field(5, &label),
            field(6, &[field(1, b"a"), field(2, b"b")].concat()),
            field(7, b"runc"),
        ];
        let pods = field(1, &sandbox.concat());
        let decoded = ListPodSandboxResponse::decode(pods.as_slice()).unwrap();
        let expected = PodSandboxMetadata { name: "web-1".into(), uid: "uid-1".into(), namespace: "shop".into() };
        let map = |key: &str, value: &str| HashMap::from([(key.to_owned(), value.to_owned())]);
        let expected = PodSandbox { id: "sandbox".into(), metadata: Some(expected), labels: map("k", "v"), annotations: map("a", "b") };
        assert_eq!(decoded.items, [expected]);
        let image = [field(1, b"sha256:0"), field(18, b"nginx:1"), field(19, b"")].concat();
        let container =
            [field(1, b"id"), field(2, b"sandbox"), field(3, &field(1, b"nginx")), field(4, &image), field(5, b"ref"), field(8, &label)]
                .concat();
        let decoded = ListContainersResponse::decode(field(1, &container).as_slice()).unwrap();
        let [one] = decoded.containers.as_slice() else { panic!() };
        assert_eq!((one.id.as_str(), one.pod_sandbox_id.as_str(), one.image_ref.as_str()), ("id", "sandbox", "ref"));
        assert_eq!(one.metadata.as_ref().unwrap().name, "nginx");
        assert_eq!(one.image.as_ref().unwrap().user_specified_image, "nginx:1");
        assert_eq!(one.labels["k"], "v");
        let image = [field(1, b"sha256:0"), field(2, b"nginx:1"), field(3, b"nginx@sha256:9"), vec![4 << 3, 7]].concat();
        let decoded = ListImagesResponse::decode(field(1, &image).as_slice()).unwrap();
        let expected = Image { id: "sha256:0".into(), repo_tags: vec!["nginx:1".into()], repo_digests: vec!["nginx@sha256:9".into()] };
        assert_eq!(decoded.images, [expected]);
        let version = [field(1, b"0.1.0"), field(2, b"containerd"), field(3, b"v2"), field(4, b"v1")].concat();
        assert_eq!(VersionResponse::decode(version.as_slice()).unwrap().runtime_name, "containerd");
    }
}
