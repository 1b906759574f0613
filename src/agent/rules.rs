//! Which processes are watched. Pure.

use std::collections::HashMap;

use super::config::{DiscoveryConfig, ProcessRule, WorkloadRule};
use crate::model::sample::ProcessSample;
use crate::process::workload::Workload;

impl ProcessRule {
    /// Whether it covers a process: everything that the rule names must fit, and it must name something.
    /// `workloads` are the names by which its workload may be given.
    #[must_use]
    pub fn covers(&self, comm: &str, cgroups: &[&str], workloads: &[String]) -> bool {
        let is_named = self.command.is_some() || self.cgroup.is_some() || self.workload.is_some();
        let fits =
            |pattern: &Option<String>, texts: &[&str]| pattern.as_ref().is_none_or(|pattern| texts.iter().any(|text| glob(pattern, text)));
        let workloads: Vec<&str> = workloads.iter().map(String::as_str).collect();
        is_named && fits(&self.command, &[comm]) && fits(&self.cgroup, cgroups) && fits(&self.workload, &workloads)
    }
}

/// A workload with the names that the first rule which matches gives; `one` is the process, of which `found` was found.
#[must_use]
pub fn renamed(rules: &[WorkloadRule], one: &ProcessSample, found: Workload) -> Workload {
    if rules.is_empty() {
        return found;
    }
    let cgroups: Vec<&str> = one.surroundings.cgroup.as_ref().paths().collect();
    let workloads: Vec<String> = found.names().into_iter().chain(one.container_name()).collect();
    let fits = |rule: &&WorkloadRule| {
        let patterns = ProcessRule { command: rule.command.clone(), cgroup: rule.cgroup.clone(), workload: rule.workload.clone() };
        patterns.covers(&one.comm, &cgroups, &workloads)
    };
    let Some(rule) = rules.iter().find(fits) else { return found };
    Workload {
        name: rule.name.clone().unwrap_or(found.name),
        service_name: rule.service_name.clone().or_else(|| rule.name.clone()).unwrap_or(found.service_name),
        service_version: rule.service_version.clone().or(found.service_version),
        ..found
    }
}

/// The rules of a configuration, users resolved to numbers.
#[derive(Debug, Clone, Default)]
pub struct Rules {
    rss_min_bytes: u64,
    /// `None` = processes are not selected by growth.
    growth_min_bytes: Option<u64>,
    include: Vec<String>,
    exclude: Vec<String>,
    users: Option<Vec<u32>>,
    exclude_users: Vec<u32>,
    cgroups: Vec<String>,
    exclude_cgroups: Vec<String>,
    /// Names of users that are not in `passwd`: they match no process.
    pub unknown_users: Vec<String>,
}

impl Rules {
    /// Resolves the users of a configuration with the text of `/etc/passwd` (passwd(5): name, password, uid, …, by colons).
    #[must_use]
    pub fn new(config: &DiscoveryConfig, passwd: &str) -> Self {
        let by_name: HashMap<&str, u32> = passwd
            .lines()
            .filter_map(|line| {
                let mut fields = line.split(':');
                let name = fields.next()?;
                Some((name, fields.nth(1)?.parse().ok()?))
            })
            .collect();
        let mut unknown_users = Vec::new();
        let mut resolve = |names: &[String]| -> Vec<u32> {
            let mut uids = Vec::new();
            for name in names {
                match name.parse().ok().or_else(|| by_name.get(name.as_str()).copied()) {
                    Some(uid) => uids.push(uid),
                    None => unknown_users.push(name.clone()),
                }
            }
            uids
        };
        let users = resolve(&config.users);
        let exclude_users = resolve(&config.exclude_users);
        Self {
            rss_min_bytes: config.rss_min_mib << 20,
            growth_min_bytes: (config.growth_min_mib > 0).then_some(config.growth_min_mib << 20),
            include: config.include.clone(),
            exclude: config.exclude.clone(),
            // A list of only unknown names allows no user, not all.
            users: (!config.users.is_empty()).then_some(users),
            exclude_users,
            cgroups: config.cgroups.clone(),
            exclude_cgroups: config.exclude_cgroups.clone(),
            unknown_users,
        }
    }

    /// Whether the rules can select a process of this name; checked before the user, which costs more.
    #[must_use]
    pub fn allow_name(&self, comm: &str) -> bool {
        allow(&self.include, &self.exclude, &[comm])
    }

    /// Whether a process is large enough, or has grown enough since it was first seen.
    #[must_use]
    pub fn allow_size(&self, rss_bytes: u64, grown_bytes: u64) -> bool {
        rss_bytes >= self.rss_min_bytes || self.growth_min_bytes.is_some_and(|least| grown_bytes >= least)
    }

    /// Whether growth matters, so that sizes of small processes must be kept.
    #[must_use]
    pub fn asks_for_growth(&self) -> bool {
        self.growth_min_bytes.is_some()
    }

    /// Whether the rules depend on cgroups.
    #[must_use]
    pub fn asks_for_cgroup(&self) -> bool {
        !self.cgroups.is_empty() || !self.exclude_cgroups.is_empty()
    }

    /// Whether processes of a cgroup are watched. `paths`: its paths in the hierarchies that it is in.
    #[must_use]
    pub fn allow_cgroup(&self, paths: &[&str]) -> bool {
        allow(&self.cgroups, &self.exclude_cgroups, paths)
    }

    /// Whether processes of this user are watched.
    #[must_use]
    pub fn allow_user(&self, uid: u32) -> bool {
        self.users.as_ref().is_none_or(|users| users.contains(&uid)) && !self.exclude_users.contains(&uid)
    }
}

/// Whether one of the texts is included, and none excluded. An empty list includes everything.
fn allow(include: &[String], exclude: &[String], texts: &[&str]) -> bool {
    let any = |patterns: &[String]| patterns.iter().any(|pattern| texts.iter().any(|text| glob(pattern, text)));
    (include.is_empty() || any(include)) && !any(exclude)
}

/// Whether `text` matches `pattern`: `*` is any text, `?` any character. Backtracks only to the last `*`, so it takes at most pattern ×
/// text steps.
pub fn glob(pattern: &str, text: &str) -> bool {
    let pattern: Vec<char> = pattern.chars().collect();
    let text: Vec<char> = text.chars().collect();
    let (mut p, mut t) = (0, 0);
    let mut back: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some('*') => {
                back = Some((p, t));
                p += 1;
            }
            Some(&c) if c == '?' || text.get(t) == Some(&c) => {
                p += 1;
                t += 1;
            }
            _ => {
                let Some((star, from)) = back else { return false };
                back = Some((star, from + 1));
                p = star + 1;
                t = from + 1;
            }
        }
    }
    pattern.iter().skip(p).all(|&c| c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nbroken line\nwww-data:x:33:33::/var/www:/bin/false\n";

    fn list(names: &[&str]) -> Vec<String> {
        names.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_first_rule_that_matches_names_a_workload() {
        use crate::model::sample::Identity;
        use crate::process::ProcessId;
        use crate::units::Pid;
        let process = ProcessId { pid: Pid(7), start_ticks: 1 };
        let one = ProcessSample::new(Identity { process, stack: 0 }, "java".into(), 0, 0);
        let text = |text: &str| Some(text.to_owned());
        let rules = [
            WorkloadRule { command: text("java"), cgroup: text("/other/*"), name: text("no"), ..WorkloadRule::default() },
            WorkloadRule { workload: text("ja*"), name: text("shop"), service_version: text("2.0"), ..WorkloadRule::default() },
            WorkloadRule { command: text("java"), name: text("late"), ..WorkloadRule::default() },
        ];
        let named = renamed(&rules, &one, (*one.workload).clone());
        assert_eq!((named.name.as_str(), named.service_name.as_str(), named.service_version.as_deref()), ("shop", "shop", Some("2.0")));
        let only_service = [WorkloadRule { command: text("java"), service_name: text("cart"), ..WorkloadRule::default() }];
        let named = renamed(&only_service, &one, (*one.workload).clone());
        assert_eq!((named.name.as_str(), named.service_name.as_str(), named.service_version), ("java", "cart", None));
        assert_eq!(renamed(&rules[..1], &one, (*one.workload).clone()), *one.workload);
    }

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, text, expected) in [
            ("redis-*", "redis-server", true),
            ("redis", "redis-server", false),
            ("*", "", true),
            ("?", "é", true),
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "aXbYbZ", false),
            ("*a*a*a*a*a*b", "aaaaaaaaaaaaaaa", false),
            ("", "x", false),
        ] {
            assert_eq!(glob(pattern, text), expected, "{pattern} {text}");
        }
    }

    #[test]
    fn exclude_beats_include_and_small_processes_are_left_out() {
        let config =
            DiscoveryConfig { rss_min_mib: 16, include: list(&["java", "re*"]), exclude: list(&["redis-cli"]), ..Default::default() };
        let rules = Rules::new(&config, PASSWD);
        assert!(rules.allow_name("java") && rules.allow_name("redis-server"));
        assert!(!rules.allow_name("redis-cli") && !rules.allow_name("nginx"));
        assert!(rules.allow_size(16 << 20, 0) && !rules.allow_size((16 << 20) - 1, u64::MAX));
    }

    #[test]
    fn a_small_process_is_watched_once_it_has_grown_enough() {
        let rules = Rules::new(&DiscoveryConfig { rss_min_mib: 64, growth_min_mib: 8, ..Default::default() }, PASSWD);
        assert!(rules.allow_size(10 << 20, 8 << 20) && rules.allow_size(64 << 20, 0));
        assert!(!rules.allow_size(63 << 20, (8 << 20) - 1));
    }

    #[test]
    fn cgroups_are_matched_by_patterns_of_their_paths() {
        let config = DiscoveryConfig {
            cgroups: list(&["/kubepods*", "*/nginx.service"]),
            exclude_cgroups: list(&["*besteffort*"]),
            ..Default::default()
        };
        let rules = Rules::new(&config, PASSWD);
        assert!(rules.asks_for_cgroup() && !Rules::default().asks_for_cgroup());
        assert!(rules.allow_cgroup(&["/kubepods/burstable/pod1/c"]) && rules.allow_cgroup(&["/", "/system.slice/nginx.service"]));
        assert!(!rules.allow_cgroup(&["/kubepods/besteffort/pod2/c"]) && !rules.allow_cgroup(&["/user.slice"]) && !rules.allow_cgroup(&[]));
    }

    #[test]
    fn users_are_given_by_name_or_number() {
        let config = DiscoveryConfig { users: list(&["www-data", "1000"]), exclude_users: list(&["root"]), ..Default::default() };
        let rules = Rules::new(&config, PASSWD);
        assert!(rules.allow_user(33) && rules.allow_user(1000) && !rules.allow_user(0) && !rules.allow_user(5));
        let nobody = Rules::new(&DiscoveryConfig { users: list(&["nosuch"]), ..Default::default() }, PASSWD);
        assert!(!nobody.allow_user(0) && !nobody.allow_user(33));
        assert_eq!(nobody.unknown_users, ["nosuch"]);
    }
}
