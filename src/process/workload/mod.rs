//! What a process belongs to: the workload that is deployed as a whole, and its service and version. They are the same for all of its
//! replicas on all nodes, and live longer than pids, containers and pods. Pure, except for [`environment::of_process`].
//!
//! | where | workload | service | version |
//! |---|---|---|---|
//! | a pod whose names are known | its owner ([`owner`]) | `app.kubernetes.io/name`, the image's name, the owner's name | `app.kubernetes.io/version`, the image's tag or digest |
//! | another container | the image's name, else the command | the same | the image's tag or digest |
//! | a systemd service | its unit | the same | not known |
//! | anything else | the command | the same | not known |
//!
//! A pod's annotations `resource.opentelemetry.io/service.name` and `service.version` come before its labels, and what the process's
//! environment names ([`environment`], if it may be read) comes before both.

pub mod environment;
pub mod owner;

use std::collections::HashMap;

use serde::Serialize;

use super::container::{CgroupFile, Container};
use crate::sanitize::terminal;
use environment::Named;

/// Characters of a name or version: DNS names, which names of objects are, have at most 253; labels' values 63.
const TEXT_CHARS_MAX: usize = 253;
/// Digits of an image's digest that are its version.
const DIGEST_DIGITS: usize = 12;

/// The kind of a workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A Deployment, through one of its ReplicaSets.
    Deployment,
    /// An Argo Rollout.
    Rollout,
    /// A StatefulSet.
    StatefulSet,
    /// A DaemonSet.
    DaemonSet,
    /// A CronJob, through one of its Jobs.
    CronJob,
    /// A Job.
    Job,
    /// A pod that a kubelet made from a file.
    StaticPod,
    /// A pod without a known owner; its name is without a random suffix.
    Pod,
    /// A container outside pods.
    Container,
    /// A systemd service.
    Systemd,
    /// A process in none of these, by its command.
    Command,
}

impl Kind {
    /// Its name in metrics and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Deployment => "deployment",
            Self::Rollout => "rollout",
            Self::StatefulSet => "statefulset",
            Self::DaemonSet => "daemonset",
            Self::CronJob => "cronjob",
            Self::Job => "job",
            Self::StaticPod => "staticpod",
            Self::Pod => "pod",
            Self::Container => "container",
            Self::Systemd => "systemd",
            Self::Command => "command",
        }
    }
}

/// The owner of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// Its kind.
    pub kind: Kind,
    /// Its name.
    pub name: String,
}

/// What a pod's labels and annotations say about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodInfo {
    /// Who made it.
    pub owner: Owner,
    /// The service that they name.
    pub service_name: Option<String>,
    /// Its version.
    pub service_version: Option<String>,
}

impl PodInfo {
    /// Of the pod with this name; `None` without a name.
    #[must_use]
    pub fn of(pod: &str, labels: &HashMap<String, String>, annotations: &HashMap<String, String>) -> Option<Self> {
        let owner = owner::of_pod(pod, labels, annotations);
        let said = |annotation: &str, label: &str| {
            let value = annotations.get(annotation).and_then(|value| text(value));
            value.or_else(|| labels.get(label).and_then(|value| text(value)))
        };
        Some(Self {
            owner: Owner { name: text(&owner.name)?, ..owner },
            service_name: said("resource.opentelemetry.io/service.name", "app.kubernetes.io/name"),
            service_version: said("resource.opentelemetry.io/service.version", "app.kubernetes.io/version"),
        })
    }
}

/// What a process belongs to. All texts are bounded and free of control characters.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct Workload {
    /// The namespace in the cluster. `None` outside pods, or if it is not known.
    pub namespace: Option<String>,
    /// What kind of workload it is.
    pub kind: Kind,
    /// Its name.
    pub name: String,
    /// The service.
    pub service_name: String,
    /// Its version. `None` = not known.
    pub service_version: Option<String>,
}

impl Workload {
    /// The workload of a process.
    #[must_use]
    pub fn of(comm: &str, container: Option<&Container>, cgroup: &CgroupFile, environment: Option<&Named>) -> Self {
        let named = match container {
            Some(container) => Self::of_container(comm, container),
            None => match unit(cgroup) {
                Some(unit) => Self::plain(Kind::Systemd, unit),
                None => Self::plain(Kind::Command, command(comm)),
            },
        };
        let Some(environment) = environment else { return named };
        Self {
            service_name: environment.service_name.clone().unwrap_or(named.service_name),
            service_version: environment.service_version.clone().or(named.service_version),
            ..named
        }
    }

    /// A workload that is only known by its name.
    fn plain(kind: Kind, name: String) -> Self {
        Self { namespace: None, kind, service_name: name.clone(), name, service_version: None }
    }

    fn of_container(comm: &str, container: &Container) -> Self {
        let (image, tag) = container.image.as_deref().map(image).unwrap_or_default();
        let Some(info) = container.info.as_deref() else {
            // Uids of pods and ids of containers change with each restart: what is in them is named instead.
            let kind = if container.pod_uid.is_some() { Kind::Pod } else { Kind::Container };
            let plain = Self::plain(kind, image.unwrap_or_else(|| command(comm)));
            return Self { namespace: container.namespace.clone(), service_version: tag, ..plain };
        };
        Self {
            namespace: container.namespace.clone(),
            kind: info.owner.kind,
            name: info.owner.name.clone(),
            service_name: info.service_name.clone().or(image).unwrap_or_else(|| info.owner.name.clone()),
            service_version: info.service_version.clone().or(tag),
        }
    }

    /// The labels of its profiles and series, as far as known.
    #[must_use]
    pub fn labels(&self) -> Vec<(&'static str, &str)> {
        let all = [
            ("namespace", self.namespace.as_deref()),
            ("workload_kind", Some(self.kind.name())),
            ("workload", Some(self.name.as_str())),
            ("service_name", Some(self.service_name.as_str())),
            ("service_version", self.service_version.as_deref()),
        ];
        all.into_iter().filter_map(|(label, value)| Some((label, value?))).collect()
    }

    /// The texts that a rule's `workload` may name: `web`, `shop/web`, and the service.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        let with_namespace = self.namespace.as_ref().map(|namespace| format!("{namespace}/{}", self.name));
        with_namespace.into_iter().chain([self.name.clone(), self.service_name.clone()]).collect()
    }

    /// A short title: `shop/web 1.27`.
    #[must_use]
    pub fn title(&self) -> String {
        let place = self.namespace.as_ref().map(|namespace| format!("{namespace}/")).unwrap_or_default();
        let version = self.service_version.as_ref().map(|version| format!(" {version}")).unwrap_or_default();
        format!("{place}{}{version}", self.name)
    }
}

/// A text that can be shown, bounded; `None` if it is empty.
fn text(raw: &str) -> Option<String> {
    let short: String = raw.chars().take(TEXT_CHARS_MAX).collect();
    (!short.trim().is_empty()).then(|| terminal(&short).into_owned())
}

/// A command's name, which may be empty.
fn command(comm: &str) -> String {
    text(comm).unwrap_or_else(|| "unknown".to_owned())
}

/// The last part of an image's name, and its tag, or the first digits of its digest.
fn image(image: &str) -> (Option<String>, Option<String>) {
    let (name, digest) = image.split_once('@').unwrap_or((image, ""));
    if name.starts_with("sha256:") {
        return (None, None);
    }
    let last = name.rsplit('/').next().unwrap_or(name);
    let (last, tag) = last.split_once(':').unwrap_or((last, ""));
    let digits = digest.split_once(':').and_then(|(_, digits)| digits.get(..DIGEST_DIGITS));
    (text(last), text(tag).or_else(|| digits.and_then(text)))
}

/// The systemd service that a process is in, without `.service`. Sessions and a user's own manager are none.
fn unit(cgroup: &CgroupFile) -> Option<String> {
    let of_path = |path: &str| {
        let parts = path.split('/').filter_map(|part| part.strip_suffix(".service"));
        let mut units = parts.filter(|unit| !unit.is_empty() && !unit.starts_with("user@"));
        units.next_back().and_then(|unit| text(&unescaped(unit)))
    };
    let paths = [&cgroup.systemd, &cgroup.unified, &cgroup.memory, &cgroup.other];
    paths.into_iter().flatten().find_map(|path| of_path(path))
}

/// Undoes systemd's escapes, `\x2d` (systemd-escape(1)).
fn unescaped(unit: &str) -> String {
    let mut parts = unit.split("\\x");
    let mut plain = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let code = part.get(..2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
        match code.zip(part.get(2..)) {
            Some((byte, rest)) => {
                plain.push(byte);
                plain.extend_from_slice(rest.as_bytes());
            }
            None => {
                plain.extend_from_slice(b"\\x");
                plain.extend_from_slice(part.as_bytes());
            }
        }
    }
    String::from_utf8_lossy(&plain).into_owned()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Arc;

    use super::*;

    fn pod(image: Option<&str>, labels: &[(&str, &str)]) -> Container {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let info = PodInfo::of("web-5d9-x2k4q", &labels, &HashMap::new()).map(Arc::new);
        let (namespace, image) = (Some("shop".to_owned()), image.map(str::to_owned));
        Container { namespace, image, info, pod_uid: Some("u".into()), ..Container::default() }
    }

    fn of(container: &Container) -> Workload {
        Workload::of("nginx", Some(container), &CgroupFile::default(), None)
    }

    #[test]
    fn labels_come_before_the_image_and_the_image_before_the_owner() {
        let labels = [("pod-template-hash", "5d9"), ("app.kubernetes.io/name", "shop-web"), ("app.kubernetes.io/version", "2.0")];
        let told = of(&pod(Some("registry:5000/team/nginx:1.27"), &labels));
        let expected = [
            ("namespace", "shop"),
            ("workload_kind", "deployment"),
            ("workload", "web"),
            ("service_name", "shop-web"),
            ("service_version", "2.0"),
        ];
        assert_eq!(told.labels(), expected);
        assert_eq!(told.title(), "shop/web 2.0");
        assert_eq!(told.names(), ["shop/web", "web", "shop-web"]);
        let from_image = of(&pod(Some("registry:5000/team/nginx:1.27"), &[("pod-template-hash", "5d9")]));
        assert_eq!((from_image.service_name.as_str(), from_image.service_version.as_deref()), ("nginx", Some("1.27")));
        let bare = of(&pod(Some("sha256:12"), &[]));
        assert_eq!((bare.kind, bare.name.as_str(), bare.service_name.as_str()), (Kind::Pod, "web-5d9", "web-5d9"));
        assert_eq!(bare.service_version, None);
    }

    #[test]
    fn the_environment_comes_before_everything_else() {
        let named = Named { service_name: Some("checkout".into()), service_version: None };
        let told = Workload::of("nginx", Some(&pod(Some("nginx:1.27"), &[])), &CgroupFile::default(), Some(&named));
        assert_eq!((told.service_name.as_str(), told.service_version.as_deref()), ("checkout", Some("1.27")));
    }

    #[test]
    fn ids_that_change_with_each_restart_name_no_workload() {
        let unlisted = Container { pod_uid: Some("6f3b".into()), ..Container::default() };
        let told = of(&unlisted);
        assert_eq!((told.kind, told.name.as_str(), told.namespace), (Kind::Pod, "nginx", None));
        assert_eq!(of(&Container::default()).kind, Kind::Container);
    }

    #[test]
    fn images_are_split_into_name_and_version() {
        let digest = format!("sha256:{}", "ab".repeat(32));
        let of_digest = format!("quay.io/a/b@{digest}");
        for (full, name, tag) in [
            ("nginx", Some("nginx"), None),
            ("docker.io/library/nginx:1.27", Some("nginx"), Some("1.27")),
            ("registry:5000/nginx", Some("nginx"), None),
            (of_digest.as_str(), Some("b"), Some("abababababab")),
            (digest.as_str(), None, None),
            ("", None, None),
            ("a/:", None, None),
        ] {
            let (found, version) = image(full);
            assert_eq!((found.as_deref(), version.as_deref()), (name, tag), "{full}");
        }
    }

    #[test]
    fn a_plain_process_is_named_by_its_unit_or_its_command() {
        let of_path = |path: &str| {
            let file = CgroupFile { unified: Some(path.to_owned()), ..CgroupFile::default() };
            let told = Workload::of("redis-server", None, &file, None);
            (told.kind, told.name)
        };
        for (path, kind, name) in [
            ("/system.slice/redis.service", Kind::Systemd, "redis"),
            ("/system.slice/system-getty.slice/getty@tty1.service", Kind::Systemd, "getty@tty1"),
            ("/system.slice/my\\x2dapp.service/worker", Kind::Systemd, "my-app"),
            ("/user.slice/user-0.slice/user@0.service/app.slice/app-x.service", Kind::Systemd, "app-x"),
            ("/user.slice/user-0.slice/user@0.service/init.scope", Kind::Command, "redis-server"),
            ("/user.slice/user-0.slice/session-1.scope", Kind::Command, "redis-server"),
            ("/", Kind::Command, "redis-server"),
        ] {
            assert_eq!(of_path(path), (kind, name.to_owned()), "{path}");
        }
        assert_eq!(Workload::of("", None, &CgroupFile::default(), None).name, "unknown");
    }

    #[test]
    fn hostile_texts_are_cut_and_cleaned() {
        let long = format!("a\u{1b}[2J\n{}", "x".repeat(100_000));
        let told = of(&pod(None, &[("app.kubernetes.io/name", &long), ("app.kubernetes.io/version", &long)]));
        for text in [&told.service_name, told.service_version.as_ref().unwrap()] {
            assert!(text.len() < 300 && !text.contains(['\u{1b}', '\n']), "{text}");
        }
        assert_eq!(unescaped("a\\xzz\\x2"), "a\\xzz\\x2");
        assert_eq!(unescaped("a\\xff"), "a\u{fffd}");
    }
}
