//! The plain manifests: their structure, and that the chart and the agent agree with them.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;
use serde_json::Value;

use crate::support::recording::fragprof;

fn path(of: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(of)
}

fn parse(text: &str) -> Vec<Value> {
    let documents = serde_yaml_ng::Deserializer::from_str(text).map(|one| Value::deserialize(one).unwrap());
    documents.filter(|one| !one.is_null()).collect()
}

/// The objects of the plain manifests.
pub fn documents() -> Vec<Value> {
    parse(&std::fs::read_to_string(path("deploy/kubernetes/fragprof.yaml")).unwrap())
}

/// The DaemonSet among them.
pub fn daemon_set(all: &[Value]) -> &Value {
    all.iter().find(|one| one["kind"] == "DaemonSet").unwrap()
}

#[test]
fn every_object_has_kind_name_namespace_and_labels() {
    let all = documents();
    let mut kinds: Vec<&str> = all.iter().map(|one| one["kind"].as_str().unwrap()).collect();
    kinds.sort_unstable();
    assert_eq!(kinds, ["ConfigMap", "DaemonSet", "NetworkPolicy", "ServiceAccount"]);
    for one in &all {
        assert!(one["apiVersion"].is_string() && one["metadata"]["name"].is_string(), "{one}");
        assert_eq!(one["metadata"]["namespace"], "fragprof");
        assert_eq!(one["metadata"]["labels"]["app.kubernetes.io/name"], "fragprof");
    }
}

#[test]
fn the_pod_has_the_capabilities_it_needs_and_no_others() {
    let all = documents();
    let set = daemon_set(&all);
    let pod = &set["spec"]["template"]["spec"];
    assert_eq!((&pod["hostPID"], &pod["hostNetwork"], &pod["hostIPC"]), (&Value::Bool(true), &Value::Null, &Value::Null));
    assert_eq!(pod["automountServiceAccountToken"], false);
    let security = &pod["containers"][0]["securityContext"];
    assert_eq!(security["capabilities"]["add"], serde_json::json!(["BPF", "PERFMON", "SYS_PTRACE", "DAC_READ_SEARCH"]));
    assert_eq!(security["capabilities"]["drop"], serde_json::json!(["ALL"]));
    assert_eq!((&security["privileged"], &security["readOnlyRootFilesystem"]), (&Value::Bool(false), &Value::Bool(true)));
    assert_eq!(security["allowPrivilegeEscalation"], false);
    let volumes = pod["volumes"].as_array().unwrap();
    let of_node: Vec<&Value> = volumes.iter().map(|volume| &volume["hostPath"]["path"]).filter(|path| !path.is_null()).collect();
    assert_eq!(of_node, ["/var/lib/fragprof"], "no path of the node but the history's");
}

#[test]
fn selectors_volumes_ports_and_the_account_fit_together() {
    let all = documents();
    let set = daemon_set(&all);
    let template = &set["spec"]["template"];
    for (label, value) in set["spec"]["selector"]["matchLabels"].as_object().unwrap() {
        assert_eq!(&template["metadata"]["labels"][label], value);
    }
    let policy = all.iter().find(|one| one["kind"] == "NetworkPolicy").unwrap();
    assert_eq!(policy["spec"]["podSelector"], set["spec"]["selector"]);
    let pod = &template["spec"];
    let container = &pod["containers"][0];
    for mount in container["volumeMounts"].as_array().unwrap() {
        assert!(pod["volumes"].as_array().unwrap().iter().any(|volume| volume["name"] == mount["name"]), "{mount}");
    }
    let port = &container["ports"][0];
    for probe in ["livenessProbe", "readinessProbe"] {
        assert_eq!(container[probe]["httpGet"]["port"], port["name"], "{probe}");
    }
    assert_eq!(template["metadata"]["annotations"]["prometheus.io/port"], port["containerPort"].to_string());
    let account = all.iter().find(|one| one["kind"] == "ServiceAccount").unwrap();
    assert_eq!(pod["serviceAccountName"], account["metadata"]["name"]);
    assert!(container["resources"]["limits"]["memory"].is_string() && container["resources"]["limits"]["cpu"].is_string());
    let config = all.iter().find(|one| one["kind"] == "ConfigMap").unwrap();
    assert!(pod["volumes"].as_array().unwrap().iter().any(|volume| volume["configMap"]["name"] == config["metadata"]["name"]));
}

#[test]
fn the_agent_accepts_the_rendered_configuration() {
    let all = documents();
    let config = all.iter().find(|one| one["kind"] == "ConfigMap").unwrap();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("agent.toml");
    std::fs::write(&file, config["data"]["agent.toml"].as_str().unwrap()).unwrap();
    let done = fragprof().args(["agent", "--check", "--config"]).arg(&file).output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

#[test]
fn chart_version_and_image_are_those_of_the_program() {
    let chart = &parse(&std::fs::read_to_string(path("deploy/helm/fragprof/Chart.yaml")).unwrap())[0];
    assert_eq!(chart["appVersion"], env!("CARGO_PKG_VERSION"));
    let all = documents();
    let image = &daemon_set(&all)["spec"]["template"]["spec"]["containers"][0]["image"];
    assert_eq!(image, concat!("localhost/fragprof:", env!("CARGO_PKG_VERSION")));
}

#[test]
fn every_value_is_allowed_by_the_schema_and_documented() {
    let text = std::fs::read_to_string(path("deploy/helm/fragprof/values.yaml")).unwrap();
    let values = &parse(&text)[0];
    let schema = std::fs::read_to_string(path("deploy/helm/fragprof/values.schema.json")).unwrap();
    // helm's regular expressions (RE2) do not have this escape, and it refuses the whole chart.
    assert!(!schema.contains(r"\\u"), "a pattern with \\u");
    let schema: Value = serde_json::from_str(&schema).unwrap();
    let page = std::fs::read_to_string(path("docs/kubernetes.md")).unwrap();
    for key in values.as_object().unwrap().keys() {
        assert!(schema["properties"][key].is_object(), "{key} is not in the schema");
        assert!(page.contains(&format!("`{key}")), "{key} is not in docs/kubernetes.md");
    }
}

/// Values that the schema allows for one setting: the ends of its range, each of its choices, texts that are hard to write.
fn samples(schema: &Value, token_file: &Path) -> Vec<Value> {
    let hard = "a \"b\" \\ \t\u{7} \u{2028} <&>{}=#[x]' \u{e9}";
    let printable = || hard.replace(['\t', '\u{7}'], "");
    if schema["$ref"] == "#/definitions/workloadName" {
        return vec![printable().into()];
    }
    if schema["$ref"] == "#/definitions/percent" {
        return vec![0.01.into(), 100.into(), "0.25".into(), 33.3.into()];
    }
    if let Some(choices) = schema["enum"].as_array() {
        return choices.clone();
    }
    match schema["type"].as_str() {
        Some("boolean") => vec![true.into(), false.into()],
        Some("integer" | "number") => vec![schema["minimum"].clone(), schema["maximum"].clone()],
        Some("string") => match schema["pattern"].as_str() {
            Some(pattern) if pattern.starts_with("^http") => vec!["http://10.0.0.1:4040".into(), "https://pyroscope.m/a/b".into()],
            Some("^/.+") => vec![token_file.to_str().unwrap().into()],
            Some("^/[^ :\\t\\n]+$") => vec!["/var/lib/fragprof-sampler".into()],
            Some(r"^[^:\x00-\x1f\x7f]+$") => vec![printable().into(), "Aladdin".into()],
            Some("^[!-~]{1,150}$") => vec!["team-a".into()],
            Some("^[A-Za-z0-9./_-]{1,317}$") => vec!["a.b/c-d_e".into()],
            Some(other) => panic!("no sample for {other}"),
            None => vec![hard.into(), "".into()],
        },
        Some("array") => vec![Value::Array(Vec::new()), Value::Array(samples(&schema["items"], token_file))],
        Some("object") if schema["properties"].is_object() => {
            let fields = schema["properties"].as_object().unwrap();
            let of_field = |at: usize| {
                let one = |(name, schema): (&String, &Value)| {
                    let all = samples(schema, token_file);
                    (name.clone(), all[at % all.len()].clone())
                };
                Value::Object(fields.iter().map(one).collect())
            };
            (0..4).map(of_field).collect()
        }
        Some("object") => vec![serde_json::json!({}), serde_json::json!({ "cluster": "a", "shard": 1, "k8s.node": hard, "on": true })],
        other => panic!("no sample for the type {other:?}"),
    }
}

#[test]
fn the_agent_accepts_all_settings_that_the_schema_allows() {
    // Only where helm is installed.
    if Command::new("helm").arg("version").output().is_err() {
        println!("not tried: helm is not installed");
        return;
    }
    let chart = path("deploy/helm/fragprof");
    let schema: Value = serde_json::from_str(&std::fs::read_to_string(chart.join("values.schema.json")).unwrap()).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let token = directory.path().join("to ken");
    std::fs::write(&token, "0123456789abcdef").unwrap();
    std::fs::set_permissions(&token, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let files = [directory.path().join("values.json"), directory.path().join("agent.toml")];
    for (at, mut config) in samples(&schema["properties"]["config"], &token).into_iter().enumerate() {
        // A request carries one of two secrets, and the file with the token is no certificate.
        let push = config["push"].as_object_mut().unwrap();
        push.remove("tls");
        let others: &[&str] = if at % 2 == 0 { &["token_file"] } else { &["basic_auth_user", "basic_auth_password_file"] };
        push.retain(|key, _| !others.contains(&key.as_str()));
        std::fs::write(&files[0], serde_json::json!({ "config": config }).to_string()).unwrap();
        let mut helm = Command::new("helm");
        helm.args(["template", "fragprof", "--kube-version", "1.30.0", "--show-only", "templates/configmap.yaml", "--values"])
            .args([&files[0], &chart]);
        let done = helm.output().unwrap();
        assert!(done.status.success(), "{config}\n{}", String::from_utf8_lossy(&done.stderr));
        let rendered = &parse(&String::from_utf8(done.stdout).unwrap())[0];
        let text = rendered["data"]["agent.toml"].as_str().unwrap();
        std::fs::write(&files[1], text).unwrap();
        let done = fragprof().args(["agent", "--check", "--config"]).arg(&files[1]).output().unwrap();
        assert!(done.status.success(), "{config}\n{text}\n{}", String::from_utf8_lossy(&done.stderr));
    }
}

#[test]
fn every_setting_of_the_agent_is_in_the_charts_schema() {
    let schema: Value = serde_json::from_str(&std::fs::read_to_string(path("deploy/helm/fragprof/values.schema.json")).unwrap()).unwrap();
    let example: toml::Table = toml::from_str(&std::fs::read_to_string(path("deploy/agent.toml")).unwrap()).unwrap();
    for (table, keys) in example.iter().filter(|(table, _)| !["server", "containers"].contains(&table.as_str())) {
        let known = &schema["properties"]["config"]["properties"][table]["properties"];
        for key in keys.as_table().unwrap().keys() {
            assert!(known[key].is_object(), "[{table}] {key}");
        }
    }
}

#[test]
fn the_plain_manifests_are_rendered_from_the_chart_as_it_is() {
    // Only where helm is: it is in no distribution's packages. `make charts` installs it.
    if Command::new("helm").arg("version").output().is_err() {
        println!("not tried: helm is not installed");
        return;
    }
    let done = Command::new(path("scripts/render-manifests.sh")).arg("--check").output().unwrap();
    assert!(done.status.success(), "run scripts/render-manifests.sh:\n{}", String::from_utf8_lossy(&done.stdout));
}

/// A stand-in for another version of helm: prints the manifests as they are, changed by a sed script.
fn check_with_helm_that_changes(script: &str) -> bool {
    let folder = tempfile::tempdir().unwrap();
    let helm = folder.path().join("helm");
    let manifests = path("deploy/kubernetes/fragprof.yaml");
    std::fs::write(&helm, format!("#!/bin/sh\nexec sed -e 1d -e '{script}' {}\n", manifests.display())).unwrap();
    std::fs::set_permissions(&helm, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let path_with_it = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    Command::new(path("scripts/render-manifests.sh")).arg("--check").env("PATH", path_with_it).output().unwrap().status.success()
}

#[test]
fn the_manifests_are_the_same_for_each_version_of_helm() {
    // Blank lines change the checksum of the configuration, too.
    assert!(check_with_helm_that_changes("/^kind:/G; s|checksum/config: .*|checksum/config: 0|; s|^# Source: .*|# Source: x|"));
    assert!(!check_with_helm_that_changes("s/name: fragprof$/name: other/"));
}
