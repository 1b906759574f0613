//! Names by container id and by pod uid, from a runtime's lists. Pure.
//!
//! The runtime's answers are untrusted: names are cut to a length, control characters removed, and at most [`CONTAINERS_MAX`] are kept.

use std::collections::HashMap;
use std::sync::Arc;

use super::messages;
use crate::process::container::{Container, ContainerId, Engine};
use crate::process::workload::PodInfo;
use crate::sanitize::terminal;

/// Most containers and pods kept: a node has 110 pods by default, and at most about 500; ended containers are listed too. About 500 bytes
/// each.
pub const CONTAINERS_MAX: usize = 10_000;
/// Characters of a name: DNS names, which names of pods are, have at most 253.
const NAME_CHARS_MAX: usize = 253;
/// Most images read for names; a kubelet removes unused ones, and a node has some hundred.
const IMAGES_MAX: usize = 10_000;
/// Characters of an image's name: a repository has at most 255, a digest 71.
const IMAGE_CHARS_MAX: usize = 512;

/// Labels with which a kubelet names a container's pod (k8s.io/kubernetes, pkg/kubelet/types/labels.go).
const LABEL_NAME: &str = "io.kubernetes.container.name";
const LABEL_POD: &str = "io.kubernetes.pod.name";
const LABEL_NAMESPACE: &str = "io.kubernetes.pod.namespace";
const LABEL_UID: &str = "io.kubernetes.pod.uid";

/// A pod's names.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Pod {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    info: Option<Arc<PodInfo>>,
}

/// A container's names.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Names {
    pod: Arc<Pod>,
    name: Option<String>,
    image: Option<String>,
}

/// The names from a runtime's lists.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Directory {
    containers: HashMap<ContainerId, Names>,
    pods: HashMap<String, Arc<Pod>>,
    /// The runtime that was asked.
    engine: Engine,
    /// Containers and pods that were ignored: beyond [`CONTAINERS_MAX`], or without a valid id.
    pub refused: u64,
}

impl Directory {
    /// Joins pods, containers and images; `runtime` is the runtime's own name.
    #[must_use]
    pub fn new(
        pods: messages::ListPodSandboxResponse,
        containers: messages::ListContainersResponse,
        images: &messages::ListImagesResponse,
        runtime: &str,
    ) -> Self {
        let mut directory = Self { engine: Engine::of_runtime(runtime), ..Self::default() };
        let tags = tags(images);
        let mut by_sandbox: HashMap<String, Arc<Pod>> = HashMap::new();
        for (number, sandbox) in pods.items.into_iter().enumerate() {
            let metadata = sandbox.metadata.unwrap_or_default();
            let info = PodInfo::of(&metadata.name, &sandbox.labels, &sandbox.annotations).map(Arc::new);
            let pod = Pod { name: name(&metadata.name), namespace: name(&metadata.namespace), uid: name(&metadata.uid), info };
            let pod = Arc::new(pod);
            let Some(id) = ContainerId::new(&sandbox.id).filter(|_| number < CONTAINERS_MAX) else {
                directory.refused += 1;
                continue;
            };
            if let Some(uid) = &pod.uid {
                directory.pods.insert(uid.clone(), Arc::clone(&pod));
            }
            // The pause container has the sandbox's id, and is in no list of containers.
            directory.containers.insert(id, Names { pod: Arc::clone(&pod), name: None, image: None });
            by_sandbox.insert(sandbox.id, pod);
        }
        for (number, container) in containers.containers.into_iter().enumerate() {
            let Some(id) = ContainerId::new(&container.id).filter(|_| number < CONTAINERS_MAX) else {
                directory.refused += 1;
                continue;
            };
            let label = |key: &str| container.labels.get(key).and_then(|value| name(value));
            // Its pod's own labels are not among them.
            let of_labels = || Pod { name: label(LABEL_POD), namespace: label(LABEL_NAMESPACE), uid: label(LABEL_UID), info: None };
            let pod = by_sandbox.get(&container.pod_sandbox_id).cloned().unwrap_or_else(|| Arc::new(of_labels()));
            let own = container.metadata.as_ref().and_then(|metadata| name(&metadata.name)).or_else(|| label(LABEL_NAME));
            directory.containers.insert(id, Names { pod, name: own, image: image(container.image.as_ref(), &container.image_ref, &tags) });
        }
        directory
    }

    /// Containers that have names.
    #[must_use]
    pub fn len(&self) -> usize {
        self.containers.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.containers.is_empty()
    }

    /// The container with its names, as far as they are listed; by its id, else by its pod's uid. `None` if neither is listed.
    #[must_use]
    pub fn named(&self, container: &Container) -> Option<Container> {
        let names = container.id.as_ref().and_then(|id| self.containers.get(id));
        let pod = names.map(|names| &names.pod).or_else(|| self.pods.get(container.pod_uid.as_ref()?))?;
        // The cgroupfs driver's paths have only the id: the runtime that lists it created it.
        let is_listed = names.is_some() && container.engine == Engine::Unknown;
        Some(Container {
            id: container.id.clone(),
            engine: if is_listed { self.engine } else { container.engine },
            // The path takes precedence: it is from the kernel.
            pod_uid: container.pod_uid.clone().or_else(|| pod.uid.clone()),
            namespace: pod.namespace.clone(),
            pod: pod.name.clone(),
            name: names.and_then(|names| names.name.clone()),
            image: names.and_then(|names| names.image.clone()),
            info: pod.info.clone(),
        })
    }
}

/// A name that can be shown; `None` if it is empty.
fn name(text: &str) -> Option<String> {
    cut(text, NAME_CHARS_MAX)
}

/// Whether a container's image is given by digests only: its name is then in the list of images.
#[must_use]
pub fn lacks_image_name(container: &messages::Container) -> bool {
    spoken(container.image.as_ref()).is_none()
}

/// The image's name as requested, unless that is a digest.
fn spoken(spec: Option<&messages::ImageSpec>) -> Option<&str> {
    let spec = spec?;
    let written = Some(spec.user_specified_image.as_str()).filter(|text| !text.is_empty() && !text.starts_with("sha256:"));
    written
        .or_else(|| Some(spec.image.as_str()).filter(|text| !text.is_empty() && !text.starts_with("sha256:") && !text.contains("@sha256:")))
}

/// The first `repository:tag` of each image, by its id and its digests.
fn tags(images: &messages::ListImagesResponse) -> HashMap<&str, &str> {
    let mut tags = HashMap::new();
    for image in images.images.iter().take(IMAGES_MAX) {
        let Some(tag) = image.repo_tags.first() else { continue };
        let names = image.repo_digests.iter().chain([&image.id]);
        tags.extend(names.filter(|name| !name.is_empty()).map(|name| (name.as_str(), tag.as_str())));
    }
    tags
}

/// The image's readable name: as in the manifest, else its repository and tag, else any that is not a bare digest.
fn image(spec: Option<&messages::ImageSpec>, reference: &str, tags: &HashMap<&str, &str>) -> Option<String> {
    let resolved = spec.map_or("", |spec| spec.image.as_str());
    let tag = || [resolved, reference].into_iter().find_map(|name| tags.get(name).copied());
    let all = [resolved, reference];
    let named = || all.into_iter().find(|text| !text.is_empty() && !text.starts_with("sha256:"));
    let any = || all.into_iter().find(|text| !text.is_empty());
    spoken(spec).or_else(tag).or_else(named).or_else(any).and_then(|text| cut(text, IMAGE_CHARS_MAX))
}

fn cut(text: &str, chars_max: usize) -> Option<String> {
    let short: String = text.chars().take(chars_max).collect();
    (!short.is_empty()).then(|| terminal(&short).into_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;
    use prost::Message as _;

    use super::*;

    fn id(digit: char) -> String {
        digit.to_string().repeat(64)
    }

    fn sandbox(digit: char, name: &str, uid: &str) -> messages::PodSandbox {
        let metadata = messages::PodSandboxMetadata { name: name.into(), uid: uid.into(), namespace: "shop".into() };
        messages::PodSandbox { id: id(digit), metadata: Some(metadata), ..messages::PodSandbox::default() }
    }

    fn container(digit: char, sandbox: char, name: &str) -> messages::Container {
        let image = messages::ImageSpec { image: "sha256:12".into(), user_specified_image: "nginx:1.27".into() };
        let metadata = messages::ContainerMetadata { name: name.into() };
        messages::Container {
            id: id(digit),
            pod_sandbox_id: id(sandbox),
            metadata: Some(metadata),
            image: Some(image),
            image_ref: "sha256:34".into(),
            ..messages::Container::default()
        }
    }

    fn directory(pods: Vec<messages::PodSandbox>, containers: Vec<messages::Container>) -> Directory {
        let images = messages::ListImagesResponse::default();
        Directory::new(messages::ListPodSandboxResponse { items: pods }, messages::ListContainersResponse { containers }, &images, "")
    }

    fn by_id(digit: char) -> Container {
        Container { id: ContainerId::new(&id(digit)), ..Container::default() }
    }

    #[test]
    fn a_container_gets_the_names_of_its_pod() {
        let listed = directory(vec![sandbox('a', "web-1", "u1")], vec![container('c', 'a', "nginx")]);
        let named = listed.named(&by_id('c')).unwrap();
        assert_eq!(named.labels(), [("namespace", "shop"), ("pod", "web-1"), ("container", "nginx")]);
        assert_eq!(named.image.as_deref(), Some("nginx:1.27"));
        let pause = listed.named(&by_id('a')).unwrap();
        assert_eq!(pause.pod.as_deref(), Some("web-1"));
        assert_eq!(pause.name, None);
        assert_eq!(listed.named(&by_id('f')), None);
    }

    #[test]
    fn an_image_given_by_digest_has_its_tag_and_the_engine_is_the_one_that_answers() {
        let digested = |image: &str, image_ref: &str| {
            let image = messages::ImageSpec { image: image.into(), user_specified_image: String::new() };
            messages::Container { image: Some(image), image_ref: image_ref.into(), ..container('c', 'a', "nginx") }
        };
        let images = messages::ListImagesResponse {
            images: vec![messages::Image {
                id: "sha256:12".into(),
                repo_tags: vec!["docker.io/library/nginx:1.27".into()],
                repo_digests: vec!["docker.io/library/nginx@sha256:77".into()],
            }],
        };
        let named = |one: messages::Container, container: &Container| {
            assert!(lacks_image_name(&one));
            let pods = messages::ListPodSandboxResponse { items: vec![sandbox('a', "web-1", "u1")] };
            let containers = messages::ListContainersResponse { containers: vec![one] };
            Directory::new(pods, containers, &images, "cri-o").named(container).unwrap()
        };
        for (image, image_ref) in
            [("sha256:12", "sha256:12"), ("", "docker.io/library/nginx@sha256:77"), ("docker.io/library/nginx@sha256:77", "")]
        {
            assert_eq!(named(digested(image, image_ref), &by_id('c')).image.as_deref(), Some("docker.io/library/nginx:1.27"), "{image}");
        }
        let unlisted = named(digested("docker.io/library/redis@sha256:5", "sha256:6"), &by_id('c'));
        assert_eq!((unlisted.image.as_deref(), unlisted.engine), (Some("docker.io/library/redis@sha256:5"), Engine::Crio));
        let told = Container { engine: Engine::Containerd, ..by_id('c') };
        assert_eq!(named(digested("sha256:12", ""), &told).engine, Engine::Containerd, "the path takes precedence");
    }

    #[test]
    fn a_process_of_a_pod_without_a_container_gets_the_pod_s_names() {
        let listed = directory(vec![sandbox('a', "web-1", "u1")], vec![]);
        let monitor = Container { pod_uid: Some("u1".into()), ..Container::default() };
        assert_eq!(listed.named(&monitor).unwrap().pod.as_deref(), Some("web-1"));
    }

    #[test]
    fn a_container_whose_pod_is_not_listed_is_named_by_its_labels() {
        let mut one = container('c', 'b', "");
        one.metadata = None;
        for (key, value) in [(LABEL_NAME, "nginx"), (LABEL_POD, "web-2"), (LABEL_NAMESPACE, "shop")] {
            one.labels.insert(key.into(), value.into());
        }
        let named = directory(vec![], vec![one]).named(&by_id('c')).unwrap();
        assert_eq!(named.title(), "shop/web-2 (nginx)");
    }

    #[test]
    fn hostile_names_are_truncated_and_cleaned_and_the_rest_is_counted() {
        let long = format!("a\u{1b}[2J\n{}", "x".repeat(100_000));
        let listed = directory(vec![sandbox('a', &long, "u1")], vec![container('c', 'a', "ok")]);
        let pod = listed.named(&by_id('c')).unwrap().pod.unwrap();
        assert!(pod.len() < 300 && !pod.contains(['\u{1b}', '\n']), "{pod}");
        let mut nameless = container('c', 'a', "ok");
        nameless.id = "../../etc".into();
        assert_eq!(directory(vec![], vec![nameless]).refused, 1);
        let many = vec![container('d', 'a', "x"); CONTAINERS_MAX + 5];
        assert_eq!(directory(vec![], many).refused, 5);
    }

    proptest! {
        #[test]
        fn any_answer_is_parsed_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let pods = messages::ListPodSandboxResponse::decode(bytes.as_slice()).unwrap_or_default();
            let containers = messages::ListContainersResponse::decode(bytes.as_slice()).unwrap_or_default();
            let images = messages::ListImagesResponse::decode(bytes.as_slice()).unwrap_or_default();
            let listed = Directory::new(pods, containers, &images, &String::from_utf8_lossy(&bytes));
            prop_assert!(listed.len() <= 2 * CONTAINERS_MAX);
        }
    }
}
