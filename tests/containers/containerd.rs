//! A containerd of the test's own, with its CRI plugin, and pods made through the CRI socket.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use fragprof::agent::cri::{Client, CriError};
use tempfile::TempDir;

use super::podman::{Podman, holder};
use crate::support::build::{Link, tool};
use crate::support::process::{Process, wait_until};

/// The image that is pause container and program in one.
const IMAGE: &str = "localhost/fragprof-test/heap:1";

pub struct Containerd {
    /// Its directory of programs, if it is not the machine's own.
    programs: Option<PathBuf>,
    _process: Process,
    directory: TempDir,
    pods: std::cell::RefCell<Vec<String>>,
}

/// What a pod is made of.
pub struct Wanted<'a> {
    pub namespace: &'a str,
    pub name: &'a str,
    pub uid: &'a str,
    pub container: &'a str,
    pub labels: &'a [(&'a str, &'a str)],
    pub image: &'a str,
    pub command: &'a [&'a str],
    pub env: &'a [(&'a str, &'a str)],
}

/// A container made through the CRI.
pub struct Pod {
    pub sandbox: String,
    pub container: String,
}

impl Containerd {
    /// Starts one with the image in it. `None` where containerd, runc or podman is not installed.
    pub fn start() -> Option<Self> {
        for name in ["containerd", "ctr"] {
            tool(name)?;
        }
        Self::start_with(None, "", |_| {})
    }

    /// Starts the one of `make test-deps` that calls plugins (NRI, since 1.7), with further images in it.
    pub fn start_with_plugins(images: impl Fn(&Podman)) -> Option<Self> {
        let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/containerd/usr/bin");
        if !programs.join("containerd").exists() {
            // It is not a package of this machine's suite, and may not be to be had where the tests run.
            println!("not run: there is no containerd with NRI: make test-deps");
            return None;
        }
        let plugins = "[plugins.'io.containerd.nri.v1.nri']\ndisable = false\nsocket_path = 'DIRECTORY/nri.sock'\nplugin_path = '/nonexistent'\n\
                       plugin_config_path = '/nonexistent'\nplugin_request_timeout = '1500ms'\n";
        Self::start_with(Some(programs), plugins, images)
    }

    fn start_with(programs: Option<PathBuf>, more: &str, images: impl Fn(&Podman)) -> Option<Self> {
        tool("runc")?;
        let podman = Podman::new()?;
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let config = format!(
            "version = 2\nroot = {:?}\nstate = {:?}\n[grpc]\naddress = {:?}\n[plugins.'io.containerd.grpc.v1.cri']\nsandbox_image = {IMAGE:?}\n\
             restrict_oom_score_adj = true\ndisable_apparmor = true\nenable_unprivileged_ports = false\n\
             [plugins.'io.containerd.grpc.v1.cri'.cni]\nbin_dir = '/nonexistent'\nconf_dir = '/nonexistent'\n{}",
            at("root"),
            at("state"),
            at("containerd.sock"),
            more.replace("DIRECTORY", &directory.path().display().to_string())
        );
        std::fs::write(at("config.toml"), config).unwrap();
        podman.image_that("fragprof-test/heap:1", &[(&holder(Link::StaticMusl), "/holder")], &["/holder", "pause"]);
        images(&podman);
        let names = podman.done(podman.command("images").args(["--format", "{{.Repository}}:{{.Tag}}"]));
        podman.done(
            podman
                .command("save")
                .args(["--quiet", "--multi-image-archive", "--format=docker-archive", "-o"])
                .arg(at("image.tar"))
                .args(names.lines()),
        );
        let mut command = Command::new(programs.as_deref().map_or("containerd".into(), |programs| programs.join("containerd")));
        if let Some(programs) = &programs {
            // Its shim lies beside it.
            command.env(
                "PATH",
                std::env::join_paths([programs.as_path()].into_iter().chain(["/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(Path::new)))
                    .unwrap(),
            );
        }
        let process = Process::start(command.arg("--config").arg(at("config.toml")));
        let started = Self { programs, _process: process, directory, pods: Vec::new().into() };
        wait_until("containerd to answer", || started.ctr(&["version"]).output().unwrap().status.success());
        let imported = started.ctr(&["images", "import"]).arg(started.directory.path().join("image.tar")).output().unwrap();
        assert!(imported.status.success(), "{}", String::from_utf8_lossy(&imported.stderr));
        Some(started)
    }

    fn ctr(&self, words: &[&str]) -> Command {
        let mut command = Command::new(self.programs.as_deref().map_or("ctr".into(), |programs| programs.join("ctr")));
        command.arg("--address").arg(self.socket()).args(["--namespace", "k8s.io"]).args(words);
        command
    }

    /// Where plugins connect.
    pub fn plugins(&self) -> PathBuf {
        self.directory.path().join("nri.sock")
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("containerd.sock")
    }

    fn call<Question, Answer>(&self, method: &'static str, question: Question) -> Result<Answer, CriError>
    where
        Question: prost::Message + 'static,
        Answer: prost::Message + Default + 'static,
    {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let socket = self.socket();
        runtime.block_on(async move { Client::connect(&socket).await?.call(method, question).await })
    }

    /// Makes a pod with one container that holds memory, in the machine's network.
    pub fn pod(&self, namespace: &str, name: &str, uid: &str, container: &str) -> Pod {
        self.pod_of(&Wanted { namespace, name, uid, container, labels: &[], image: IMAGE, command: &["/holder"], env: &[] })
    }

    /// Makes a pod with one container.
    pub fn pod_of(&self, wanted: &Wanted<'_>) -> Pod {
        let Wanted { namespace, name, uid, container, labels, image, command, env } = *wanted;
        let owned = |pairs: &[(&str, &str)]| -> HashMap<String, String> {
            pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
        };
        let metadata = PodSandboxMetadata { name: name.into(), uid: uid.into(), namespace: namespace.into(), attempt: 0 };
        let node = NamespaceOption { network: 2, pid: 1, ipc: 0 };
        let security = LinuxSandboxSecurityContext { namespace_options: Some(node) };
        let linux = LinuxPodSandboxConfig { cgroup_parent: format!("/kubepods/burstable/pod{uid}"), security_context: Some(security) };
        let config = PodSandboxConfig {
            metadata: Some(metadata),
            log_directory: self.directory.path().join("logs").display().to_string(),
            labels: pod_labels(name).into_iter().chain(owned(labels)).collect(),
            linux: Some(linux),
        };
        let run = RunPodSandboxRequest { config: Some(config.clone()) };
        let Id { id: sandbox } = self.call("/runtime.v1.RuntimeService/RunPodSandbox", run).unwrap();
        self.pods.borrow_mut().push(sandbox.clone());
        let wanted = ContainerConfig {
            metadata: Some(ContainerMetadata { name: container.into() }),
            image: Some(ImageSpec { image: image.into() }),
            command: command.iter().map(ToString::to_string).collect(),
            envs: env.iter().map(|(key, value)| KeyValue { key: (*key).into(), value: (*value).into() }).collect(),
            log_path: format!("{container}.log"),
            linux: Some(LinuxContainerConfig { resources: Some(LinuxContainerResources { memory_limit_in_bytes: 64 << 20 }) }),
        };
        let create = CreateContainerRequest { pod_sandbox_id: sandbox.clone(), config: Some(wanted), sandbox_config: Some(config) };
        let Id { id: container } = self.call("/runtime.v1.RuntimeService/CreateContainer", create).unwrap();
        let _: Nothing = self.call("/runtime.v1.RuntimeService/StartContainer", Id { id: container.clone() }).unwrap();
        Pod { sandbox, container }
    }

    /// The pid of a container's process.
    pub fn pid(&self, container: &str) -> u32 {
        let done = self.ctr(&["tasks", "ls"]).output().unwrap();
        let text = String::from_utf8(done.stdout).unwrap();
        let line = text.lines().find(|line| line.starts_with(container)).unwrap_or_else(|| panic!("{container}: {text}"));
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    pub fn remove(&self, sandbox: &str) {
        for method in ["/runtime.v1.RuntimeService/StopPodSandbox", "/runtime.v1.RuntimeService/RemovePodSandbox"] {
            let _: Result<Nothing, _> = self.call(method, Id { id: sandbox.to_owned() });
        }
    }
}

/// What a StatefulSet, and who wrote it, put on a pod.
fn pod_labels(pod: &str) -> HashMap<String, String> {
    let labels = [
        ("statefulset.kubernetes.io/pod-name", pod),
        ("controller-revision-hash", "web-6f7d9"),
        ("app.kubernetes.io/name", "shop-web"),
        ("app.kubernetes.io/version", "2.1"),
    ];
    labels.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

impl Drop for Containerd {
    fn drop(&mut self) {
        for sandbox in self.pods.borrow().iter() {
            self.remove(sandbox);
        }
        // Mounts left by a failed removal would keep the directory from being removed.
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let below = |point: &&str| Path::new(point).starts_with(self.directory.path());
        let points: Vec<&str> = mounts.lines().filter_map(|line| line.split(' ').nth(1)).filter(below).collect();
        for point in points.into_iter().rev() {
            let _ = Command::new("umount").arg("--lazy").arg(point).output();
        }
    }
}

// The messages that make pods: runtime.v1 of k8s.io/cri-api, the fields used.

#[derive(Clone, PartialEq, prost::Message)]
struct Nothing {}

/// Several requests and answers have an id as their first field.
#[derive(Clone, PartialEq, prost::Message)]
struct Id {
    #[prost(string, tag = "1")]
    id: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PodSandboxMetadata {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    uid: String,
    #[prost(string, tag = "3")]
    namespace: String,
    #[prost(uint32, tag = "4")]
    attempt: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
struct NamespaceOption {
    #[prost(int32, tag = "1")]
    network: i32,
    #[prost(int32, tag = "2")]
    pid: i32,
    #[prost(int32, tag = "3")]
    ipc: i32,
}

#[derive(Clone, PartialEq, prost::Message)]
struct LinuxSandboxSecurityContext {
    #[prost(message, optional, tag = "1")]
    namespace_options: Option<NamespaceOption>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct LinuxPodSandboxConfig {
    #[prost(string, tag = "1")]
    cgroup_parent: String,
    #[prost(message, optional, tag = "2")]
    security_context: Option<LinuxSandboxSecurityContext>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PodSandboxConfig {
    #[prost(message, optional, tag = "1")]
    metadata: Option<PodSandboxMetadata>,
    #[prost(string, tag = "3")]
    log_directory: String,
    #[prost(map = "string, string", tag = "6")]
    labels: HashMap<String, String>,
    #[prost(message, optional, tag = "8")]
    linux: Option<LinuxPodSandboxConfig>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct RunPodSandboxRequest {
    #[prost(message, optional, tag = "1")]
    config: Option<PodSandboxConfig>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ContainerMetadata {
    #[prost(string, tag = "1")]
    name: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ImageSpec {
    #[prost(string, tag = "1")]
    image: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct LinuxContainerResources {
    #[prost(int64, tag = "4")]
    memory_limit_in_bytes: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct LinuxContainerConfig {
    #[prost(message, optional, tag = "1")]
    resources: Option<LinuxContainerResources>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct KeyValue {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(string, tag = "2")]
    value: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct ContainerConfig {
    #[prost(message, optional, tag = "1")]
    metadata: Option<ContainerMetadata>,
    #[prost(message, optional, tag = "2")]
    image: Option<ImageSpec>,
    #[prost(string, repeated, tag = "3")]
    command: Vec<String>,
    #[prost(message, repeated, tag = "6")]
    envs: Vec<KeyValue>,
    #[prost(string, tag = "11")]
    log_path: String,
    #[prost(message, optional, tag = "15")]
    linux: Option<LinuxContainerConfig>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct CreateContainerRequest {
    #[prost(string, tag = "1")]
    pod_sandbox_id: String,
    #[prost(message, optional, tag = "2")]
    config: Option<ContainerConfig>,
    #[prost(message, optional, tag = "3")]
    sandbox_config: Option<PodSandboxConfig>,
}
