//! The table `[discovery]`: which processes are watched, and what they belong to.

use serde::Deserialize;

use super::ConfigError;

/// Characters of a name or version that a rule gives: names of Kubernetes' objects have at most 253.
const NAME_CHARS_MAX: usize = 253;

/// Which processes are watched.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DiscoveryConfig {
    /// Seconds between two scans of the process list.
    pub scan_interval_s: u64,
    /// Processes with fewer resident MiB are not watched.
    pub rss_min_mib: u64,
    /// A smaller process is watched once it has grown by this many resident MiB since it was first seen. 0 = never.
    pub growth_min_mib: u64,
    /// Command names that are watched, `*` and `?` stand for any text and any character. Empty = all.
    pub include: Vec<String>,
    /// Command names that are not watched, whatever `include` says.
    pub exclude: Vec<String>,
    /// Users whose processes are watched, by name or number. Empty = all.
    pub users: Vec<String>,
    /// Users whose processes are not watched.
    pub exclude_users: Vec<String>,
    /// Cgroups whose processes are watched, as paths from the root of the cgroup file system; `*` is any text, `/` too. Empty = all.
    pub cgroups: Vec<String>,
    /// Cgroups whose processes are not watched.
    pub exclude_cgroups: Vec<String>,
    /// Maximum number of watched processes, the largest first; the others are counted.
    pub processes_max: usize,
    /// Whether the name and version of a service are read from the environment of its process (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES).
    pub read_environment: bool,
    /// Names for processes whose workload or service cannot be found out, or is to be called otherwise; the first rule that matches applies.
    pub workloads: Vec<WorkloadRule>,
}

impl Default for DiscoveryConfig {
    fn default() -> Self {
        Self {
            scan_interval_s: 5,
            rss_min_mib: 16,
            growth_min_mib: 0,
            include: Vec::new(),
            exclude: Vec::new(),
            users: Vec::new(),
            exclude_users: Vec::new(),
            cgroups: Vec::new(),
            exclude_cgroups: Vec::new(),
            processes_max: 1000,
            read_environment: false,
            workloads: Vec::new(),
        }
    }
}

/// Names what some processes belong to: all patterns that are given must fit. `*` and `?` stand for any text and any character.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WorkloadRule {
    /// Pattern of the command name.
    pub command: Option<String>,
    /// Pattern of the cgroup, as a path from the root of the cgroup file system.
    pub cgroup: Option<String>,
    /// Pattern of the workload or service as it was found (`web`, or `shop/web` with its namespace), the container, or the pod.
    pub workload: Option<String>,
    /// The workload's name. Without it the one that was found stays; the same holds for the others.
    pub name: Option<String>,
    /// The service's name.
    pub service_name: Option<String>,
    /// The service's version.
    pub service_version: Option<String>,
}

impl DiscoveryConfig {
    /// Checks the rules.
    ///
    /// # Errors
    /// What cannot be used.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let refuse = |reason: &str| Err(ConfigError::Setting { key: "discovery.workloads", reason: reason.to_owned() });
        for rule in &self.workloads {
            if rule.command.is_none() && rule.cgroup.is_none() && rule.workload.is_none() {
                return refuse("a rule must name a command, a cgroup or a workload");
            }
            let given = [&rule.name, &rule.service_name, &rule.service_version];
            let mut given = given.into_iter().flatten().peekable();
            if given.peek().is_none() {
                return refuse("a rule must give a name, a service_name or a service_version");
            }
            let is_name =
                |name: &String| !name.trim().is_empty() && name.chars().count() <= NAME_CHARS_MAX && !name.contains(char::is_control);
            if !given.all(is_name) {
                return refuse("a name or version has 1 to 253 characters, and no control characters");
            }
        }
        Ok(())
    }
}
