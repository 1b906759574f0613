//! Which process gives memory back next. Pure.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::agent::config::{ReclaimConfig, ReclaimRule};
use crate::agent::rules::glob;
use crate::process::ProcessId;

/// A call that gave back less than this share of what was predicted, or took this many times longer, was a disappointment.
const GIVEN_BACK_RATIO_MIN: f64 = 0.8;
const TOOK_RATIO_MAX: f64 = 2.0;
/// What a call may take beyond that without being called slow: its thread may have to wait for a processor.
const TOOK_SLACK: Duration = Duration::from_millis(20);
/// The window in which calls are counted.
const HOUR: Duration = Duration::from_secs(3600);

/// What the policy knows of a process.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Candidate<'a> {
    /// Its name.
    pub comm: &'a str,
    /// Its cgroups' paths.
    pub cgroups: Vec<&'a str>,
    /// The names of its workload and service, and of its container, or of the pod.
    pub workloads: Vec<String>,
    /// Bytes that a trim would give back, by the last full census.
    pub trimmable_bytes: u64,
    /// Resident bytes of its heaps.
    pub resident_bytes: u64,
    /// Use of its memory limit; `None` without one.
    pub limit_ratio: Option<f64>,
    /// Memory pressure of its cgroup, or of the machine: share of the last ten seconds in which a task waited for memory, in percent.
    pub pressure_percent: f64,
}

/// Whether a rule covers a process: everything that the rule names must fit, and it must name something.
fn covers(rule: &ReclaimRule, one: &Candidate<'_>) -> bool {
    let is_named = rule.command.is_some() || rule.cgroup.is_some() || rule.workload.is_some();
    let fits =
        |pattern: &Option<String>, texts: &[&str]| pattern.as_ref().is_none_or(|pattern| texts.iter().any(|text| glob(pattern, text)));
    let workload: Vec<&str> = one.workloads.iter().map(String::as_str).collect();
    is_named && fits(&rule.command, &[one.comm]) && fits(&rule.cgroup, &one.cgroups) && fits(&rule.workload, &workload)
}

/// Whether a rule covers it and the thresholds are passed.
#[must_use]
pub fn is_wanted(config: &ReclaimConfig, one: &Candidate<'_>) -> bool {
    config.rules.iter().any(|rule| covers(rule, one))
        && one.trimmable_bytes >= config.trimmable_min_mib << 20
        && one.trimmable_bytes as f64 * 100.0 >= one.resident_bytes as f64 * config.trimmable_min_percent
        && one.pressure_percent >= config.pressure_min_percent
        && (config.limit_min_percent <= 0.0 || one.limit_ratio.is_some_and(|ratio| ratio * 100.0 >= config.limit_min_percent))
}

/// What was done to a process so far.
#[derive(Debug, Clone, Copy, Default)]
struct Past {
    /// Since when it has been wanted without a break.
    wanted_since: Option<Instant>,
    /// The last call, or attempt.
    last: Option<Instant>,
    is_put_aside: bool,
}

/// The state of the policy.
#[derive(Debug, Default)]
pub struct Policy {
    past: BTreeMap<ProcessId, Past>,
    /// Calls of the last hour.
    calls: Vec<Instant>,
}

impl Policy {
    /// Chooses, of the processes that may give something back now, the one that gives back the most. Forgets those that are not listed.
    pub fn choose<'a>(
        &mut self,
        config: &ReclaimConfig,
        now: Instant,
        candidates: impl Iterator<Item = (ProcessId, Candidate<'a>)>,
    ) -> Option<ProcessId> {
        let mut past = std::mem::take(&mut self.past);
        let mut best: Option<(u64, ProcessId)> = None;
        let has_passed = |since: Instant, seconds: u64| now.saturating_duration_since(since) >= Duration::from_secs(seconds);
        for (process, one) in candidates {
            let mut known = past.remove(&process).unwrap_or_default();
            known.wanted_since = is_wanted(config, &one).then(|| known.wanted_since.unwrap_or(now));
            self.past.insert(process, known);
            let is_quiet = known.wanted_since.is_some_and(|since| has_passed(since, config.quiet_s));
            let is_due = known.last.is_none_or(|last| has_passed(last, config.interval_s));
            if is_quiet && is_due && !known.is_put_aside && best.is_none_or(|(bytes, _)| one.trimmable_bytes > bytes) {
                best = Some((one.trimmable_bytes, process));
            }
        }
        self.calls.retain(|call| now.saturating_duration_since(*call) < HOUR);
        let is_full = self.calls.len() >= config.calls_per_hour_max as usize;
        best.filter(|_| !is_full).map(|(_, process)| process)
    }

    /// Notes that a process was tried, whether a call was made or not.
    pub fn tried(&mut self, process: ProcessId, now: Instant, is_made: bool) {
        self.past.entry(process).or_default().last = Some(now);
        if is_made {
            self.calls.push(now);
        }
    }

    /// Leaves a process alone from now on.
    pub fn put_aside(&mut self, process: ProcessId) {
        self.past.entry(process).or_default().is_put_aside = true;
    }

    /// Number of processes that are left alone.
    #[must_use]
    pub fn aside(&self) -> usize {
        self.past.values().filter(|past| past.is_put_aside).count()
    }
}

/// Why a process is left alone after a call; `None` if the call did what was predicted.
#[must_use]
pub fn disappointment(predicted_bytes: u64, given_back_bytes: Option<u64>, predicted: Duration, took: Duration) -> Option<String> {
    let given = given_back_bytes? as f64;
    if given < predicted_bytes as f64 * GIVEN_BACK_RATIO_MIN {
        return Some(format!("it gave back {:.0} % of what was predicted", given * 100.0 / predicted_bytes.max(1) as f64));
    }
    (took > predicted.mul_f64(TOOK_RATIO_MAX) + TOOK_SLACK).then(|| format!("the call took {took:.0?} instead of {predicted:.0?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Pid;

    fn config() -> ReclaimConfig {
        let rule = ReclaimRule { command: Some("shop*".into()), ..ReclaimRule::default() };
        ReclaimConfig { enabled: true, rules: vec![rule], quiet_s: 10, interval_s: 100, ..ReclaimConfig::default() }
    }

    fn candidate(mib: u64) -> Candidate<'static> {
        Candidate { comm: "shopd", trimmable_bytes: mib << 20, resident_bytes: 2 * (mib << 20), ..Candidate::default() }
    }

    fn id(pid: u32) -> ProcessId {
        ProcessId { pid: Pid(pid), start_ticks: 1 }
    }

    #[test]
    fn a_process_needs_a_rule_that_names_it_and_every_threshold() {
        let config = config();
        assert!(is_wanted(&config, &candidate(100)));
        assert!(!is_wanted(&config, &candidate(63)), "too few bytes");
        assert!(!is_wanted(&config, &Candidate { comm: "nginx", ..candidate(100) }));
        assert!(!is_wanted(&config, &Candidate { resident_bytes: 1000 << 20, ..candidate(100) }), "too small a share");
        let near = ReclaimConfig { limit_min_percent: 80.0, ..config.clone() };
        assert!(!is_wanted(&near, &candidate(100)), "no limit");
        assert!(is_wanted(&near, &Candidate { limit_ratio: Some(0.9), ..candidate(100) }));
        let pressed = ReclaimConfig { pressure_min_percent: 5.0, ..config.clone() };
        assert!(!is_wanted(&pressed, &candidate(100)) && is_wanted(&pressed, &Candidate { pressure_percent: 6.0, ..candidate(100) }));
        for rules in [vec![], vec![ReclaimRule::default()]] {
            assert!(!is_wanted(&ReclaimConfig { rules, ..config.clone() }, &candidate(100)), "a rule that names nothing covers nothing");
        }
        let rule = ReclaimRule { command: Some("shop*".into()), cgroup: Some("/pods/*".into()), workload: Some("web".into()) };
        let narrow = ReclaimConfig { rules: vec![rule], ..config };
        assert!(!is_wanted(&narrow, &candidate(100)));
        assert!(is_wanted(&narrow, &Candidate { cgroups: vec!["/pods/a"], workloads: vec!["web".into()], ..candidate(100) }));
    }

    #[test]
    fn the_largest_that_has_been_quiet_is_chosen_and_then_not_again_within_the_interval() {
        let (config, start) = (config(), Instant::now());
        let at = |s: u64| start + Duration::from_secs(s);
        let mut policy = Policy::default();
        let both = || [(id(1), candidate(100)), (id(2), candidate(300))].into_iter();
        assert_eq!(policy.choose(&config, at(0), both()), None, "not quiet yet");
        assert_eq!(policy.choose(&config, at(10), both()), Some(id(2)));
        policy.tried(id(2), at(10), true);
        assert_eq!(policy.choose(&config, at(11), both()), Some(id(1)));
        policy.tried(id(1), at(11), true);
        assert_eq!(policy.choose(&config, at(12), both()), None);
        assert_eq!(policy.choose(&config, at(110), both()), Some(id(2)));
        policy.put_aside(id(2));
        assert_eq!((policy.choose(&config, at(112), both()), policy.aside()), (Some(id(1)), 1));
        let passing = [(id(1), candidate(1))].into_iter();
        assert_eq!(policy.choose(&config, at(220), passing), None);
        assert_eq!(policy.choose(&config, at(221), [(id(1), candidate(100))].into_iter()), None, "its quiet time begins again");
    }

    #[test]
    fn calls_per_hour_are_limited_on_the_whole_node() {
        let config = ReclaimConfig { calls_per_hour_max: 2, quiet_s: 0, interval_s: 1, ..config() };
        let start = Instant::now();
        let mut policy = Policy::default();
        let mut choose = |now: Instant| {
            let chosen = policy.choose(&config, now, [(id(1), candidate(100))].into_iter());
            chosen.into_iter().for_each(|process| policy.tried(process, now, true));
            chosen.is_some()
        };
        let made = (0..10).filter(|&minute| choose(start + Duration::from_secs(minute * 60)));
        assert_eq!(made.count(), 2);
        assert!(choose(start + HOUR));
    }

    #[test]
    fn a_call_that_gives_back_too_little_or_takes_too_long_is_a_disappointment() {
        let ms = Duration::from_millis;
        assert_eq!(disappointment(1000, Some(900), ms(100), ms(150)), None);
        assert_eq!(disappointment(1000, None, ms(100), ms(900)), None, "nothing is known");
        assert!(disappointment(1000, Some(700), ms(100), ms(100)).is_some_and(|why| why.contains("70 %")));
        assert!(disappointment(1000, Some(1000), ms(100), ms(300)).is_some_and(|why| why.contains("300ms")));
    }
}
