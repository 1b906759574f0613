//! What owns a pod, by the labels that the controllers set and the names that they give. Pure; no API server is asked.
//!
//! | who made the pod | label or annotation | pod's name |
//! |---|---|---|
//! | Deployment, through its ReplicaSet | `pod-template-hash` = HASH | `NAME-HASH-xxxxx` |
//! | Argo Rollout | `rollouts-pod-template-hash` = HASH | `NAME-HASH-xxxxx` |
//! | StatefulSet | `statefulset.kubernetes.io/pod-name` | `NAME-ORDINAL` |
//! | DaemonSet | `controller-revision-hash` | `NAME-xxxxx` |
//! | Job | `batch.kubernetes.io/job-name`, `job-name` before 1.27 | `NAME-xxxxx` |
//! | CronJob, through its Job | the same, `NAME-MINUTES` (since 1970) | `NAME-MINUTES-xxxxx` |
//! | a kubelet, from a file | annotation `kubernetes.io/config.source` = `file` | `NAME-NODE` |
//! | another controller, a ReplicaSet alone | none | `NAME-xxxxx` |
//!
//! `xxxxx` are five random characters (k8s.io/apiserver, pkg/storage/names), before which a name is cut to 58 characters.

use std::collections::HashMap;

use super::{Kind, Owner};

/// The characters of a random suffix (k8s.io/apimachinery, pkg/util/rand: no vowels, and no 0, 1 and 3).
const SUFFIX_CHARS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
/// Their number.
const SUFFIX_LENGTH: usize = 5;
/// Length of a generated name, before which the base is cut.
const GENERATED_MAX: usize = 63;
/// Digits of a CronJob's minutes since 1970: 8 until 2160.
const MINUTES_DIGITS: std::ops::RangeInclusive<usize> = 8..=9;

/// Labels that name a pod's program, for pods whose name ends with something else.
const NAMES: [&str; 4] = ["app.kubernetes.io/name", "component", "k8s-app", "app"];

/// The owner of a pod of this name.
#[must_use]
pub fn of_pod(pod: &str, labels: &HashMap<String, String>, annotations: &HashMap<String, String>) -> Owner {
    let label = |key: &str| labels.get(key).map(String::as_str).filter(|value| !value.is_empty());
    let owner = |kind, name: &str| Owner { kind, name: name.to_owned() };
    if let Some(hash) = label("rollouts-pod-template-hash") {
        return owner(Kind::Rollout, without_hash(pod, hash));
    }
    if let Some(hash) = label("pod-template-hash") {
        return owner(Kind::Deployment, without_hash(pod, hash));
    }
    if let Some(job) = label("batch.kubernetes.io/job-name").or_else(|| label("job-name")) {
        return match job.rsplit_once('-') {
            Some((name, minutes)) if !name.is_empty() && is_number(minutes) && MINUTES_DIGITS.contains(&minutes.len()) => {
                owner(Kind::CronJob, name)
            }
            _ => owner(Kind::Job, job),
        };
    }
    let ordinal = pod.rsplit_once('-').filter(|(name, ordinal)| !name.is_empty() && is_number(ordinal));
    let has_revision = label("controller-revision-hash").is_some();
    match ordinal {
        Some((name, _)) if has_revision || label("statefulset.kubernetes.io/pod-name").is_some() => {
            return owner(Kind::StatefulSet, name);
        }
        _ if has_revision => return owner(Kind::DaemonSet, without_suffix(pod)),
        _ => {}
    }
    if annotations.get("kubernetes.io/config.source").is_some_and(|source| source != "api") {
        let named = |key: &&str| label(key).filter(|name| pod.strip_prefix(name).is_some_and(|rest| rest.starts_with('-')));
        return owner(Kind::StaticPod, NAMES.iter().find_map(named).unwrap_or(pod));
    }
    owner(Kind::Pod, without_suffix(pod))
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// The name before a random suffix; the whole name without one.
fn without_suffix(pod: &str) -> &str {
    let at = pod.len().saturating_sub(SUFFIX_LENGTH);
    let Some((base, suffix)) = pod.split_at_checked(at) else { return pod };
    if suffix.len() < SUFFIX_LENGTH || !suffix.bytes().all(|byte| SUFFIX_CHARS.contains(&byte)) {
        return pod;
    }
    // A base that was cut has no hyphen at its end.
    let name = if pod.len() >= GENERATED_MAX { Some(base) } else { base.strip_suffix('-') };
    name.map(|name| name.trim_end_matches('-')).filter(|name| !name.is_empty()).unwrap_or(pod)
}

/// The name before a template's hash and a random suffix; of a name that was cut, before what is left of the hash.
fn without_hash<'a>(pod: &'a str, hash: &str) -> &'a str {
    let base = without_suffix(pod);
    let hyphened = format!("-{hash}");
    let lengths = if pod.len() >= GENERATED_MAX { (1..=hyphened.len()).rev().collect() } else { vec![hyphened.len()] };
    let cut = lengths.into_iter().filter_map(|length| hyphened.get(..length)).find_map(|part| base.strip_suffix(part));
    cut.filter(|name| !name.is_empty()).unwrap_or(base)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn map(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn each_controller_is_recognised_by_its_labels_and_names() {
        let long = "a-name-of-a-deployment-that-is-so-long-that-it-does-not-";
        let long = format!("{}x", long.trim_end_matches('-'));
        let cut = format!("{long}-c6tq8h");
        for (pod, labels, kind, name) in [
            ("web-7d9f8b6c5d-x2k4q", vec![("app", "web"), ("pod-template-hash", "7d9f8b6c5d")], Kind::Deployment, "web"),
            ("my-web-7d9f8b6c5d-x2k4q", vec![("pod-template-hash", "7d9f8b6c5d")], Kind::Deployment, "my-web"),
            ("web-7d9f8b6c5d-x2k4q", vec![("pod-template-hash", "other")], Kind::Deployment, "web-7d9f8b6c5d"),
            ("api-5c4-b2c4d", vec![("rollouts-pod-template-hash", "5c4")], Kind::Rollout, "api"),
            ("db-0", vec![("statefulset.kubernetes.io/pod-name", "db-0"), ("controller-revision-hash", "db-6f7")], Kind::StatefulSet, "db"),
            ("db-12", vec![("controller-revision-hash", "db-6f7"), ("apps.kubernetes.io/pod-index", "12")], Kind::StatefulSet, "db"),
            ("kube-proxy-x7c9p", vec![("controller-revision-hash", "6b"), ("pod-template-generation", "1")], Kind::DaemonSet, "kube-proxy"),
            ("migrate-b8xkq", vec![("batch.kubernetes.io/job-name", "migrate"), ("job-name", "migrate")], Kind::Job, "migrate"),
            ("report-29384756-q5v7z", vec![("job-name", "report-29384756")], Kind::CronJob, "report"),
            ("load-2024-q5v7z", vec![("job-name", "load-2024")], Kind::Job, "load-2024"),
            ("debug", vec![], Kind::Pod, "debug"),
            ("runner-b8xkq", vec![], Kind::Pod, "runner"),
            ("runner-apple", vec![], Kind::Pod, "runner-apple"),
            ("-b8xkq", vec![], Kind::Pod, "-b8xkq"),
            ("b8xkq", vec![], Kind::Pod, "b8xkq"),
            (cut.as_str(), vec![("pod-template-hash", "c7d8")], Kind::Deployment, long.as_str()),
        ] {
            let owner = of_pod(pod, &map(&labels), &HashMap::new());
            assert_eq!((owner.kind, owner.name.as_str()), (kind, name), "{pod}");
        }
    }

    #[test]
    fn a_static_pod_is_named_without_its_node_where_a_label_says_how() {
        let source = map(&[("kubernetes.io/config.source", "file"), ("kubernetes.io/config.hash", "1b0c")]);
        let owner = of_pod("etcd-node-3", &map(&[("component", "etcd"), ("tier", "control-plane")]), &source);
        assert_eq!((owner.kind, owner.name.as_str()), (Kind::StaticPod, "etcd"));
        assert_eq!(of_pod("proxy-node-3", &HashMap::new(), &source).name, "proxy-node-3");
        let of_api = map(&[("kubernetes.io/config.source", "api")]);
        assert_eq!(of_pod("web", &HashMap::new(), &of_api).kind, Kind::Pod);
    }

    proptest! {
        #[test]
        fn any_name_and_label_give_a_part_of_the_name(pod in "\\PC{0,80}", hash in "\\PC{0,12}", key in 0usize..4) {
            let keys = ["pod-template-hash", "rollouts-pod-template-hash", "controller-revision-hash", "statefulset.kubernetes.io/pod-name"];
            let owner = of_pod(&pod, &map(&[(keys[key], &hash)]), &HashMap::new());
            prop_assert!(pod.starts_with(&owner.name));
            prop_assert_eq!(owner.name.is_empty(), pod.is_empty());
        }
    }
}
