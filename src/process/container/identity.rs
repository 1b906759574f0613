//! The container and pod that a cgroup path belongs to. Pure.
//!
//! Every component of a path is compared with the names that runtimes use, at any position: the leading components depend on the
//! distribution, the runtime's settings, nesting (kind), and the reader's namespace.
//!
//! | who | names a container's cgroup |
//! |---|---|
//! | docker, cgroupfs / systemd | `docker/ID` / `docker-ID.scope` |
//! | containerd's CRI, cgroupfs / systemd | `ID` below the pod / `cri-containerd-ID.scope` |
//! | the same, systemd's form with the cgroupfs driver | `kubepods-….slice:cri-containerd:ID` |
//! | CRI-O, cgroupfs / systemd | `crio-ID` / `crio-ID.scope`; its monitor `crio-conmon-ID.scope` |
//! | podman, cgroupfs / systemd | `libpod-ID` / `libpod-ID.scope`; its monitor `libpod-conmon-ID.scope` |
//! | ctr, nerdctl | `NAMESPACE/ID` / `nerdctl-ID.scope` |
//!
//! | who | names a pod's cgroup |
//! |---|---|
//! | kubelet, cgroupfs | `podUID`, UID as in the API, or 32 hex digits for a static pod |
//! | kubelet, systemd | `kubepods[-QOS]-podUID.slice` with `_` for `-`; kind has `kubelet-` before it |
//!
//! ID is 64 hex digits. A monitor belongs to the pod's cgroup, but not to the container.

use std::fmt;

use serde::{Serialize, Serializer};

/// Maximum number of components of a path: three nested containers have about 30.
const PARTS_MAX: usize = 64;
/// Hex digits of a container's id in all of these runtimes.
const ID_DIGITS: usize = 64;
/// Digits of the short form that tools show.
const SHORT_DIGITS: usize = 12;

/// A container's id: 64 lower-case hex digits.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ContainerId(String);

impl ContainerId {
    /// `None` if the text is not 64 lower-case hex digits.
    #[must_use]
    pub fn new(text: &str) -> Option<Self> {
        (text.len() == ID_DIGITS && is_hex(text)).then(|| Self(text.to_owned()))
    }

    /// All 64 digits.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The first twelve digits, as tools show them.
    #[must_use]
    pub fn short(&self) -> &str {
        self.0.get(..SHORT_DIGITS).unwrap_or(&self.0)
    }
}

impl fmt::Display for ContainerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Serialize for ContainerId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

/// The engine that created the container, as far as the path shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Engine {
    /// Docker.
    Docker,
    /// containerd, through its CRI plugin or directly.
    Containerd,
    /// CRI-O.
    Crio,
    /// Podman.
    Podman,
    /// The path has only the id (a runtime under a kubelet with the cgroupfs driver), and no runtime was queried.
    #[default]
    Unknown,
}

impl Engine {
    /// The engine with this name of its own (`runtime_name` of the CRI's `VersionResponse`).
    #[must_use]
    pub fn of_runtime(name: &str) -> Self {
        match name {
            "docker" => Self::Docker,
            "containerd" => Self::Containerd,
            "cri-o" => Self::Crio,
            _ => Self::Unknown,
        }
    }

    /// Its name, as in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Docker => "docker",
            Self::Containerd => "containerd",
            Self::Crio => "crio",
            Self::Podman => "podman",
            Self::Unknown => "unknown",
        }
    }
}

/// What a path shows about a process.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Membership {
    /// The container: in a pod the one created by the kubelet, otherwise the innermost.
    pub container: Option<(ContainerId, Engine)>,
    /// The innermost pod's uid in the API's form.
    pub pod_uid: Option<String>,
    /// The path up to the container's own cgroup, or the whole path without a container.
    pub path: String,
}

impl Membership {
    /// Parses one path.
    #[must_use]
    pub fn of(path: &str) -> Self {
        let mut found = Self { path: path.to_owned(), ..Self::default() };
        let mut end = 0;
        let mut before = "";
        for part in path.split('/').take(PARTS_MAX) {
            // Each component is followed by a slash, except the last.
            end += part.len() + 1;
            let (pod, container) = part_of(part, before);
            before = part;
            if pod.is_some() {
                found.pod_uid = pod;
                found.container = None;
            }
            // Containers that a pod's container runs inside itself belong to it: the cluster knows only the outer one.
            if let Some(container) = container.filter(|_| found.pod_uid.is_none() || found.container.is_none()) {
                found.container = Some(container);
                found.path = path.get(..end - 1).unwrap_or(path).to_owned();
            }
        }
        found
    }

    /// The first of several paths that has a container, otherwise the first with a pod, otherwise the first.
    #[must_use]
    pub fn of_paths<'a>(paths: impl Iterator<Item = &'a str>) -> Option<Self> {
        let all: Vec<Self> = paths.map(Self::of).collect();
        let best = |wanted: fn(&&Self) -> bool| all.iter().find(wanted);
        best(|one| one.container.is_some()).or_else(|| best(|one| one.pod_uid.is_some())).or(all.first()).cloned()
    }
}

type Identified = (Option<String>, Option<(ContainerId, Engine)>);

/// What one component of a path names; `before` is the preceding component.
fn part_of(part: &str, before: &str) -> Identified {
    // runc's form for systemd, slice:prefix:name, used as a plain name by the cgroupfs driver.
    if let Some((slice, rest)) = part.split_once(':') {
        let container = rest.split_once(':').and_then(|(prefix, id)| Some((ContainerId::new(id)?, engine_of(prefix)?)));
        return (pod_of(slice), container);
    }
    if let Some(pod) = pod_of(part) {
        return (Some(pod), None);
    }
    if let Some(id) = ContainerId::new(part) {
        let engine = match before {
            "docker" => Engine::Docker,
            "k8s.io" | "moby" | "default" => Engine::Containerd,
            _ => Engine::Unknown,
        };
        return (None, Some((id, engine)));
    }
    let name = part.strip_suffix(".scope").unwrap_or(part);
    let container = name.rsplit_once('-').and_then(|(prefix, id)| Some((ContainerId::new(id)?, engine_of(prefix)?)));
    (None, container)
}

/// The engine that uses this prefix before an id. `None` for monitors (`crio-conmon`, `libpod-conmon`), which do not belong to the
/// container, and for unknown prefixes.
fn engine_of(prefix: &str) -> Option<Engine> {
    Some(match prefix {
        "docker" => Engine::Docker,
        "cri-containerd" | "nerdctl" | "containerd" => Engine::Containerd,
        "crio" => Engine::Crio,
        "libpod" => Engine::Podman,
        _ => return None,
    })
}

/// The uid in the name of a pod's cgroup.
fn pod_of(part: &str) -> Option<String> {
    let uid = match part.strip_suffix(".slice") {
        Some(slice) => {
            let (parent, uid) = slice.rsplit_once("-pod")?;
            // kubepods, kubepods-burstable, kubepods-besteffort, with kubelet- before it in kind; matched by words, not by the start of the
            // name.
            if !parent.split('-').any(|word| word == "kubepods") {
                return None;
            }
            uid.replace('_', "-")
        }
        None => part.strip_prefix("pod")?.to_owned(),
    };
    is_uid(&uid).then_some(uid)
}

/// A uid in the API's form (RFC 4122: 8-4-4-4-12 hex digits), or a static pod's: 32 hex digits (the MD5 of its manifest).
fn is_uid(text: &str) -> bool {
    if text.len() == 32 {
        return is_hex(text);
    }
    let lengths = [8, 4, 4, 4, 12];
    let parts: Vec<&str> = text.split('-').collect();
    parts.len() == lengths.len() && parts.iter().zip(lengths).all(|(part, length)| part.len() == length && is_hex(part))
}

fn is_hex(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    const A: &str = "8a0e1c5b2b9a4f34be6e0c7c2d5ac7a3f4f0a9d2b8f34c7a9c1d2e3f40516273";
    const B: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
    const UID: &str = "6f3b4c1e-2a77-4f0b-9d0a-3f1c2b7d8e90";

    fn found(path: &str) -> (Option<String>, Option<(String, Engine)>, String) {
        let one = Membership::of(path);
        (one.pod_uid, one.container.map(|(id, engine)| (id.as_str().to_owned(), engine)), one.path)
    }

    #[test]
    fn each_runtime_and_driver_is_recognised_at_any_position() {
        let dashes = UID;
        let lines = UID.replace('-', "_");
        for (path, pod, id, engine) in [
            (format!("/docker/{A}"), None, A, Engine::Docker),
            (format!("/system.slice/docker-{A}.scope"), None, A, Engine::Docker),
            (format!("/kubepods/burstable/pod{dashes}/{A}"), Some(UID), A, Engine::Unknown),
            (format!("/kubepods/pod{dashes}/{A}"), Some(UID), A, Engine::Unknown),
            (
                format!("/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{lines}.slice/cri-containerd-{A}.scope"),
                Some(UID),
                A,
                Engine::Containerd,
            ),
            (format!("/kubepods.slice/kubepods-pod{lines}.slice/crio-{A}.scope"), Some(UID), A, Engine::Crio),
            (format!("/kubepods/besteffort/pod{dashes}/crio-{A}"), Some(UID), A, Engine::Crio),
            (
                format!("/system.slice/containerd.service/kubepods-burstable-pod{lines}.slice:cri-containerd:{A}"),
                Some(UID),
                A,
                Engine::Containerd,
            ),
            (format!("/machine.slice/libpod-{A}.scope/container"), None, A, Engine::Podman),
            (format!("/libpod_parent/libpod-{A}"), None, A, Engine::Podman),
            (format!("/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{A}.scope"), None, A, Engine::Podman),
            (format!("/k8s.io/{A}"), None, A, Engine::Containerd),
            // A kind node is itself a container; the pod inside it counts.
            (
                format!(
                    "/docker/{B}/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod{lines}.slice/cri-containerd-{A}.scope"
                ),
                Some(UID),
                A,
                Engine::Containerd,
            ),
            (format!("/docker/{B}/kubelet/kubepods/besteffort/pod{dashes}/{A}"), Some(UID), A, Engine::Unknown),
            // From a private cgroup namespace.
            (format!("/../../pod{dashes}/{A}"), Some(UID), A, Engine::Unknown),
            (format!("/../cri-containerd-{A}.scope"), None, A, Engine::Containerd),
            // A container in a pod that runs docker itself: the cluster knows the outer one.
            (format!("/kubepods/pod{dashes}/{A}/docker/{B}"), Some(UID), A, Engine::Unknown),
            // A container that runs systemd.
            (format!("/docker/{A}/system.slice/nginx.service"), None, A, Engine::Docker),
            // Docker in docker: the innermost.
            (format!("/docker/{B}/docker/{A}"), None, A, Engine::Docker),
        ] {
            let (pod_uid, container, own) = found(&path);
            assert_eq!(pod_uid.as_deref(), pod, "{path}");
            assert_eq!(container, Some((id.to_owned(), engine)), "{path}");
            assert!(path.starts_with(&own) && own.contains(id), "{path}: {own}");
        }
    }

    #[test]
    fn a_static_pod_has_the_hash_of_its_manifest() {
        let hash = "1b0c3f3f9a2e4d5c8b7a6978695a4b3c";
        assert_eq!(found(&format!("/kubepods/burstable/pod{hash}/{A}")).0.as_deref(), Some(hash));
        assert_eq!(
            found(&format!("/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{hash}.slice/crio-{A}.scope")).0.as_deref(),
            Some(hash)
        );
    }

    #[test]
    fn the_containers_own_cgroup_is_the_path_up_to_its_id() {
        assert_eq!(found(&format!("/docker/{A}/system.slice/nginx.service")).2, format!("/docker/{A}"));
        assert_eq!(found(&format!("/machine.slice/libpod-{A}.scope/container")).2, format!("/machine.slice/libpod-{A}.scope"));
        assert_eq!(found("/system.slice/redis.service").2, "/system.slice/redis.service");
    }

    #[test]
    fn a_monitor_is_in_the_pod_but_in_no_container() {
        let lines = UID.replace('-', "_");
        let (pod, container, _) = found(&format!("/kubepods.slice/kubepods-pod{lines}.slice/crio-conmon-{A}.scope"));
        assert_eq!((pod.as_deref(), container), (Some(UID), None));
        assert_eq!(found(&format!("/machine.slice/libpod-conmon-{A}.scope")).1, None);
    }

    #[test]
    fn similar_names_are_not_recognised() {
        for path in [
            "/".to_owned(),
            "/../..".to_owned(),
            "/user.slice/user-0.slice/session-1.scope".to_owned(),
            format!("/docker/{}", &A[1..]),
            format!("/docker/{}g", &A[1..]),
            format!("/docker/{}", A.to_uppercase()),
            format!("/x-{A}.scope"),
            format!("/docker-{A}.slice"),
            "/podman/podcast".to_owned(),
            "/pod00000000-0000-0000-0000-00000000000g".to_owned(),
            format!("/other-pod{}.slice", UID.replace('-', "_")),
        ] {
            let (pod, container, _) = found(&path);
            assert_eq!((pod, container), (None, None), "{path}");
        }
    }

    #[test]
    fn the_hierarchy_with_the_container_is_used() {
        let docker = format!("/docker/{A}");
        let one = Membership::of_paths(["/", "/", docker.as_str()].into_iter()).unwrap();
        assert_eq!(one.path, docker);
        assert_eq!(Membership::of_paths(["/a", "/b"].into_iter()).unwrap().path, "/a");
        assert!(Membership::of_paths(std::iter::empty()).is_none());
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_without_a_panic(path in ".{0,400}") {
            let one = Membership::of(&path);
            prop_assert!(path.starts_with(&one.path));
        }

        #[test]
        fn an_id_is_found_after_any_parts(parts in proptest::collection::vec("[a-z.:]{0,12}", 0..20)) {
            let path = format!("/{}/docker-{A}.scope", parts.join("/"));
            let (id, _) = Membership::of(&path).container.unwrap();
            prop_assert_eq!(id.as_str(), A);
        }
    }
}
