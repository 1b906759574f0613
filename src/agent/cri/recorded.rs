//! The lists of runtimes under a kubelet, as text (the form of `crictl pods -o json` and `crictl ps -o json`, without what is not read), and
//! the workloads in them. containerd keeps the kubelet's labels as they are; CRI-O adds the name of the pause container.
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;

use serde_json::Value;

use super::messages::{
    Container, ContainerMetadata, ImageSpec, ListContainersResponse, ListImagesResponse, ListPodSandboxResponse, PodSandbox,
    PodSandboxMetadata,
};
use super::names::{CONTAINERS_MAX, Directory};
use crate::process::container::{CgroupFile, ContainerId};
use crate::process::workload::Workload;

const CONTAINERD: &str = r#"{"items": [
 {"id": "a1", "metadata": {"name": "checkout-6c8f7d5b9-x2k4q", "namespace": "shop", "uid": "u1", "attempt": 0}, "state": "SANDBOX_READY",
  "labels": {"app": "checkout", "app.kubernetes.io/name": "checkout", "app.kubernetes.io/version": "1.27.3", "io.kubernetes.pod.name":
   "checkout-6c8f7d5b9-x2k4q", "io.kubernetes.pod.namespace": "shop", "io.kubernetes.pod.uid": "u1", "pod-template-hash": "6c8f7d5b9"},
  "annotations": {"kubernetes.io/config.seen": "2026-11-20T08:00:00.1Z", "kubernetes.io/config.source": "api"}},
 {"id": "a2", "metadata": {"name": "kube-proxy-x7c9p", "namespace": "kube-system", "uid": "u2"},
  "labels": {"controller-revision-hash": "5b8d9", "k8s-app": "kube-proxy", "pod-template-generation": "1"},
  "annotations": {"kubernetes.io/config.source": "api"}},
 {"id": "a3", "metadata": {"name": "etcd-control-plane", "namespace": "kube-system", "uid": "u3"},
  "labels": {"component": "etcd", "tier": "control-plane"}, "annotations": {"kubernetes.io/config.hash": "1b0c", "kubernetes.io/config.source": "file"}},
 {"id": "a4", "metadata": {"name": "nameless", "namespace": "default", "uid": "u4"}, "labels": {}, "annotations": {}}],
"containers": [
 {"id": "c1", "podSandboxId": "a1", "metadata": {"name": "checkout"}, "image": {"image": "sha256:77", "userSpecifiedImage": "registry:5000/shop/checkout:1.27.3-rc1"}},
 {"id": "c2", "podSandboxId": "a2", "metadata": {"name": "kube-proxy"}, "image": {"userSpecifiedImage": "registry.k8s.io/kube-proxy:v1.33.1"}},
 {"id": "c3", "podSandboxId": "a3", "metadata": {"name": "etcd"}, "image": {"userSpecifiedImage": "registry.k8s.io/etcd:3.5.21-0"}},
 {"id": "c4", "podSandboxId": "a4", "metadata": {"name": "main"}, "image": {"image": "sha256:12"}}]}"#;

const CRIO: &str = r#"{"items": [
 {"id": "a1", "metadata": {"name": "db-0", "namespace": "shop", "uid": "u1"},
  "labels": {"app.kubernetes.io/name": "postgresql", "apps.kubernetes.io/pod-index": "0", "controller-revision-hash": "db-7f9c",
   "io.kubernetes.container.name": "POD", "statefulset.kubernetes.io/pod-name": "db-0"}, "annotations": {"kubernetes.io/config.source": "api"}},
 {"id": "a2", "metadata": {"name": "report-29384756-q5v7z", "namespace": "shop", "uid": "u2"},
  "labels": {"batch.kubernetes.io/controller-uid": "u9", "batch.kubernetes.io/job-name": "report-29384756", "controller-uid": "u9",
   "io.kubernetes.container.name": "POD", "job-name": "report-29384756"}, "annotations": {"resource.opentelemetry.io/service.name": "reports"}}],
"containers": [
 {"id": "c1", "podSandboxId": "a1", "metadata": {"name": "db"}, "image": {"image": "quay.io/sclorg/postgresql-16-c9s@sha256:abababababababab"}},
 {"id": "c2", "podSandboxId": "a2", "metadata": {"name": "report"}, "image": {"image": "localhost/report:2024.11"}}]}"#;

fn id(short: &str) -> String {
    format!("{short}{}", "0".repeat(64 - short.len()))
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn map(value: &Value) -> HashMap<String, String> {
    value.as_object().unwrap().iter().map(|(key, value)| (key.clone(), text(value))).collect()
}

fn directory(recorded: &str, runtime: &str) -> Directory {
    let lists: Value = serde_json::from_str(recorded).unwrap();
    let pod = |one: &Value| {
        let of = &one["metadata"];
        let metadata = PodSandboxMetadata { name: text(&of["name"]), uid: text(&of["uid"]), namespace: text(&of["namespace"]) };
        let (labels, annotations) = (map(&one["labels"]), map(&one["annotations"]));
        PodSandbox { id: id(&text(&one["id"])), metadata: Some(metadata), labels, annotations }
    };
    let container = |one: &Value| Container {
        id: id(&text(&one["id"])),
        pod_sandbox_id: id(&text(&one["podSandboxId"])),
        metadata: Some(ContainerMetadata { name: text(&one["metadata"]["name"]) }),
        image: Some(ImageSpec { image: text(&one["image"]["image"]), user_specified_image: text(&one["image"]["userSpecifiedImage"]) }),
        ..Container::default()
    };
    let pods = ListPodSandboxResponse { items: lists["items"].as_array().unwrap().iter().map(pod).collect() };
    let containers = ListContainersResponse { containers: lists["containers"].as_array().unwrap().iter().map(container).collect() };
    Directory::new(pods, containers, &ListImagesResponse::default(), runtime)
}

fn labels(listed: &Directory, container: &str) -> Vec<(&'static str, String)> {
    let found = crate::process::container::Container { id: ContainerId::new(&id(container)), ..Default::default() };
    let workload = Workload::of("main", listed.named(&found).as_ref(), &CgroupFile::default(), None);
    workload.labels().into_iter().map(|(name, value)| (name, value.to_owned())).collect()
}

#[test]
fn each_recorded_container_has_its_workload() {
    let both = [(directory(CONTAINERD, "containerd"), 4), (directory(CRIO, "cri-o"), 2)];
    let wanted: [&[[&str; 5]]; 2] = [
        &[
            ["shop", "deployment", "checkout", "checkout", "1.27.3"],
            ["kube-system", "daemonset", "kube-proxy", "kube-proxy", "v1.33.1"],
            ["kube-system", "staticpod", "etcd", "etcd", "3.5.21-0"],
            ["default", "pod", "nameless", "nameless", ""],
        ],
        &[["shop", "statefulset", "db", "postgresql", "abababababab"], ["shop", "cronjob", "report", "reports", "2024.11"]],
    ];
    for ((listed, containers), wanted) in both.iter().zip(wanted) {
        assert_eq!(*containers, wanted.len());
        for (number, wanted) in wanted.iter().enumerate() {
            let names = ["namespace", "workload_kind", "workload", "service_name", "service_version"];
            let wanted: Vec<_> = names
                .into_iter()
                .zip(wanted)
                .filter(|(_, value)| !value.is_empty())
                .map(|(name, value)| (name, (*value).to_owned()))
                .collect();
            assert_eq!(labels(listed, &format!("c{}", number + 1)), wanted);
        }
    }
}

#[test]
fn ten_thousand_pods_are_listed_and_no_more() {
    let pod = |number: usize| PodSandbox {
        id: format!("{number:064x}"),
        metadata: Some(PodSandboxMetadata { name: format!("web-5d9-{number}"), uid: number.to_string(), namespace: "shop".into() }),
        labels: HashMap::from([("pod-template-hash".to_owned(), "5d9".to_owned())]),
        annotations: HashMap::new(),
    };
    let pods = ListPodSandboxResponse { items: (0..CONTAINERS_MAX + 7).map(pod).collect() };
    let listed = Directory::new(pods, ListContainersResponse::default(), &ListImagesResponse::default(), "containerd");
    assert_eq!((listed.len(), listed.refused), (CONTAINERS_MAX, 7));
}
