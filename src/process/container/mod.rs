//! The container and pod of a process, and the memory limit that applies to it.
//!
//! ```text
//! /proc/PID/cgroup ─→ cgroup (which paths) ─→ identity (container, pod: by pattern)
//!                                       └──→ hierarchy (the directory) ─→ memory (limit, usage)
//! ```
//!
//! [`cgroup`], [`identity`] and the parsers of [`memory`] are pure; [`hierarchy`] locates the directories, even from inside a container.
//! Names come from the CRI socket (src/agent/cri); without it the ids are still known.

pub mod cgroup;
pub mod hierarchy;
pub mod identity;
pub mod memory;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde::Serialize;

pub use cgroup::CgroupFile;
pub use hierarchy::Hierarchies;
pub use identity::{ContainerId, Engine, Membership};
pub use memory::CgroupMemory;

use super::workload::PodInfo;
use crate::process::handle::read_bounded;
use crate::units::Pid;

/// A container, and the pod it belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Container {
    /// The runtime's id. `None` for a process of a pod that is in none of its containers.
    pub id: Option<ContainerId>,
    /// The engine that created it.
    pub engine: Engine,
    /// The pod's uid. `None` outside pods.
    pub pod_uid: Option<String>,
    /// The pod's namespace. `None` = not known: no CRI socket, or not a pod.
    pub namespace: Option<String>,
    /// The pod's name. `None` = not known.
    pub pod: Option<String>,
    /// The container's name in the pod. `None` = not known.
    pub name: Option<String>,
    /// The image as named in the pod. `None` = not known.
    pub image: Option<String>,
    /// What the pod's labels say. `None` = not known. It is shown as the [`Workload`](super::workload::Workload).
    #[serde(skip)]
    pub info: Option<Arc<PodInfo>>,
}

impl Container {
    /// What the cgroup paths of a process show. `None` outside containers and pods.
    #[must_use]
    pub fn of(file: &CgroupFile) -> Option<Self> {
        let membership = Membership::of_paths(file.paths())?;
        let (id, engine) = match membership.container {
            Some((id, engine)) => (Some(id), engine),
            None => (None, Engine::Unknown),
        };
        if id.is_none() && membership.pod_uid.is_none() {
            return None;
        }
        Some(Self { id, engine, pod_uid: membership.pod_uid, ..Self::default() })
    }

    /// The labels `namespace`, `pod` and `container` as far as known. Without names the pod is given by its uid and the container by the
    /// first twelve digits of its id.
    #[must_use]
    pub fn labels(&self) -> Vec<(&'static str, &str)> {
        let pod = self.pod.as_deref().or(self.pod_uid.as_deref());
        let name = self.name.as_deref().or(self.id.as_ref().map(ContainerId::short));
        let all = [("namespace", self.namespace.as_deref()), ("pod", pod), ("container", name)];
        all.into_iter().filter_map(|(label, value)| Some((label, value?))).collect()
    }

    /// [`Container::labels`], as owned values.
    #[must_use]
    pub fn label_map(&self) -> BTreeMap<String, String> {
        self.labels().into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    }

    /// A short title of the container: `shop/web-7d9f (nginx)`, or ids if names are not known.
    #[must_use]
    pub fn title(&self) -> String {
        let place = match (&self.namespace, &self.pod, &self.pod_uid) {
            (Some(namespace), Some(pod), _) => Some(format!("{namespace}/{pod}")),
            (_, Some(pod), _) => Some(pod.clone()),
            (_, None, Some(uid)) => Some(format!("pod {uid}")),
            _ => None,
        };
        let name = self.name.as_deref().or(self.id.as_ref().map(ContainerId::short));
        match (place, name) {
            (Some(place), Some(name)) => format!("{place} ({name})"),
            (Some(place), None) => place,
            (None, name) => format!("{} {}", self.engine.name(), name.unwrap_or("?")),
        }
    }
}

/// The container and cgroups of a process. All `None` on a plain host.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Surroundings {
    /// Its container.
    pub container: Option<Arc<Container>>,
    /// The memory figures of its container's cgroup, or of its own outside containers. `None` in the root cgroup.
    pub memory: Option<CgroupMemory>,
    /// Its cgroups, by which the memory figures can be read after the process has ended.
    pub cgroup: Arc<CgroupFile>,
}

impl Surroundings {
    /// Examines a process. Never fails: what cannot be read is not known.
    #[must_use]
    pub fn of(pid: Pid, hierarchies: &Hierarchies) -> Self {
        let file = read(pid);
        Self { container: Container::of(&file).map(Arc::new), memory: hierarchies.memory(&file), cgroup: Arc::new(file) }
    }

    /// The sentence on the limit, if there is a limit or a container: for a plain process without a limit it would not say anything.
    #[must_use]
    pub fn sentence(&self, live_bytes: Option<u64>, trimmable_bytes: Option<u64>) -> Option<String> {
        let memory = self.memory.filter(|memory| self.container.is_some() || memory.limit_bytes.is_some())?;
        Some(memory.sentence(live_bytes, trimmable_bytes))
    }
}

/// The cgroup paths of a process; none if it has ended.
#[must_use]
pub fn read(pid: Pid) -> CgroupFile {
    let path = format!("/proc/{pid}/cgroup");
    CgroupFile::parse(&read_bounded(Path::new(&path), cgroup::FILE_BYTES_MAX).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const ID: &str = "8a0e1c5b2b9a4f34be6e0c7c2d5ac7a3f4f0a9d2b8f34c7a9c1d2e3f40516273";

    #[test]
    fn without_names_ids_are_the_labels() {
        let file = CgroupFile::parse(format!("0::/kubepods/pod6f3b4c1e-2a77-4f0b-9d0a-3f1c2b7d8e90/{ID}\n").as_bytes());
        let mut container = Container::of(&file).unwrap();
        assert_eq!(container.labels(), [("pod", "6f3b4c1e-2a77-4f0b-9d0a-3f1c2b7d8e90"), ("container", "8a0e1c5b2b9a")]);
        assert_eq!(container.title(), "pod 6f3b4c1e-2a77-4f0b-9d0a-3f1c2b7d8e90 (8a0e1c5b2b9a)");
        container.namespace = Some("shop".into());
        container.pod = Some("web-1".into());
        container.name = Some("nginx".into());
        assert_eq!(container.labels(), [("namespace", "shop"), ("pod", "web-1"), ("container", "nginx")]);
        assert_eq!(container.title(), "shop/web-1 (nginx)");
    }

    #[test]
    fn a_plain_process_has_no_container() {
        assert_eq!(Container::of(&CgroupFile::parse(b"0::/system.slice/redis.service\n")), None);
        assert_eq!(Container::of(&CgroupFile::default()), None);
    }
}
