//! The tables of the configuration, with their defaults.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

use super::ConfigError;
use crate::sampler::SAMPLE_BYTES_DEFAULT;

/// How often a census is taken and what it may cost.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CensusConfig {
    /// Share of one core that the census thread may use, in percent.
    pub budget_percent: f64,
    /// CPU time that may be spent at once at the start, for the first censuses, in milliseconds.
    pub start_credit_ms: u64,
    /// Seconds between two censuses of a process at level top, budget allowing.
    pub top_interval_s: u64,
    /// Seconds between two full censuses of a process, budget allowing.
    pub full_interval_s: u64,
    /// A heap whose extent changed by this much since its last full census gets one early, in percent.
    pub full_growth_percent: u64,
    /// Longest time one census may take, in seconds; the rest then counts as unread.
    pub duration_max_s: u64,
    /// Pause after each MiB read, in microseconds: keeps the target's locks free in between.
    pub pause_per_mib_us: u64,
    /// Memory for the table of chunks of one full census, in MiB; a heap that may need more is sampled instead.
    pub walk_memory_mib: u64,
    /// The agent's own resident memory in MiB above which it samples instead of walking.
    pub memory_max_mib: u64,
}

impl Default for CensusConfig {
    fn default() -> Self {
        Self {
            budget_percent: 0.5,
            start_credit_ms: 1000,
            top_interval_s: 15,
            full_interval_s: 300,
            full_growth_percent: 20,
            duration_max_s: 20,
            pause_per_mib_us: 200,
            walk_memory_mib: 64,
            memory_max_mib: 256,
        }
    }
}

/// Where the names of pods and containers come from.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ContainersConfig {
    /// The socket of the container runtime.
    pub cri: CriSocket,
}

/// The socket of the container runtime (CRI).
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(from = "String")]
pub enum CriSocket {
    /// The first default socket that exists.
    #[default]
    Auto,
    /// No runtime is queried; containers are identified by their ids.
    Off,
    /// This socket.
    Path(PathBuf),
}

impl From<String> for CriSocket {
    fn from(text: String) -> Self {
        match text.as_str() {
            "auto" => Self::Auto,
            "off" => Self::Off,
            _ => Self::Path(text.into()),
        }
    }
}

/// Attribution of allocations to call stacks in windows, and its cost.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GovernedConfig {
    /// Whether it is enabled, where the permissions for BPF are available.
    pub enabled: bool,
    /// Share of its time that a process may lose, in percent.
    pub budget_percent: f64,
    /// Time that all attributed processes together may lose, in percent of one core.
    pub node_budget_percent: f64,
    /// Maximum number of processes attributed at a time, those with the greatest need first; the others get only the census.
    pub targets_max: usize,
    /// Share of one core that the governor's thread may use, in percent of the last minute; above it the number of targets is halved.
    pub cpu_percent: f64,
    /// Kernel memory for unwind tables, MiB. All recordings share them: the larger of `governed.tables_mib` and `listening.tables_mib`
    /// counts, as it was at the start.
    pub tables_mib: u32,
    /// Kernel memory for the ring buffer, MiB.
    pub ring_mib: u32,
    /// Whether blocks above 1 KiB are tracked all the time, in addition to the windows, where that fits the budget.
    pub large_blocks: bool,
    /// Budgets by command or workload; the first rule that matches applies.
    pub overrides: Vec<BudgetRule>,
}

/// A budget for certain processes: all that is given must fit. `*` and `?` stand for any text and any character.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BudgetRule {
    /// Command name.
    pub command: Option<String>,
    /// Name of the workload (`web`, or `shop/web` with its namespace), or of the service.
    pub workload: Option<String>,
    /// Share of its time that such a process may lose, in percent.
    pub budget_percent: f64,
}

impl Default for GovernedConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            budget_percent: 1.0,
            node_budget_percent: 10.0,
            targets_max: 8,
            cpu_percent: 0.4,
            tables_mib: 64,
            ring_mib: 8,
            large_blocks: true,
            overrides: Vec::new(),
        }
    }
}

impl GovernedConfig {
    /// Share of its time that a process may lose, 1 = all of it.
    #[must_use]
    pub fn budget_ratio(&self) -> f64 {
        self.budget_percent / 100.0
    }

    /// Time that all processes together may lose, 1 = a core.
    #[must_use]
    pub fn node_budget_ratio(&self) -> f64 {
        self.node_budget_percent / 100.0
    }
}

/// Listening to processes that report a sample of their own allocations (`otel_memory` and `ddheap` probes).
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ListeningConfig {
    /// Whether it is enabled, where the permissions for BPF are available.
    pub enabled: bool,
    /// Maximum number of processes listened to at a time, the largest first; the others are counted.
    pub targets_max: usize,
    /// Seconds between two profiles of a process.
    pub profile_interval_s: u64,
    /// Seconds between two censuses of a process with which its profile is joined.
    pub census_interval_s: u64,
    /// Share of one core that the listener's thread may use, in percent; above it profiles and censuses become rarer.
    pub cpu_percent: f64,
    /// Kernel memory for unwind tables, MiB. All recordings share them: the larger of `governed.tables_mib` and `listening.tables_mib`
    /// counts, as it was at the start.
    pub tables_mib: u32,
    /// Kernel memory for the ring buffer, MiB.
    pub ring_mib: u32,
}

impl Default for ListeningConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            targets_max: 64,
            profile_interval_s: 15,
            census_interval_s: 120,
            cpu_percent: 1.0,
            tables_mib: 64,
            ring_mib: 4,
        }
    }
}

/// Scans for blocks to which nothing points: each scan reads all memory that a process can write.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LeaksConfig {
    /// Whether it is enabled.
    pub enabled: bool,
    /// Seconds between two rounds of scans of one process.
    pub interval_s: u64,
    /// Number of scans in a round after the first one.
    pub looks: u32,
    /// Seconds before each of them.
    pub look_interval_s: u64,
    /// Share of one core that the thread may use, in percent; above it processes are scanned less often.
    pub cpu_percent: f64,
    /// Pause after each MiB read, in microseconds.
    pub pause_per_mib_us: u64,
    /// Processes with a larger resident heap are not scanned, MiB.
    pub heap_max_mib: u64,
    /// Memory for the blocks of one process during a scan, MiB; processes with more blocks are not scanned.
    pub memory_mib: u64,
}

impl Default for LeaksConfig {
    fn default() -> Self {
        Self {
            enabled: false,
            interval_s: 86_400,
            looks: 4,
            look_interval_s: 10,
            cpu_percent: 0.1,
            pause_per_mib_us: 500,
            heap_max_mib: 2048,
            memory_mib: 64,
        }
    }
}

/// Giving free memory back: one process at a time.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReclaimConfig {
    /// Whether it is done.
    pub enabled: bool,
    /// Only count and report what would be done.
    pub dry_run: bool,
    /// Processes with fewer trimmable MiB are left alone.
    pub trimmable_min_mib: u64,
    /// So are those of whose resident heap less can be given back, in percent.
    pub trimmable_min_percent: f64,
    /// Only under at least this memory pressure: `some avg10` of the process's cgroup, or of the machine, in percent.
    pub pressure_min_percent: f64,
    /// Only processes that use at least this much of their memory limit, in percent; 0 = also those without a limit.
    pub limit_min_percent: f64,
    /// Seconds for which the thresholds must have been passed without a break.
    pub quiet_s: u64,
    /// Seconds between two calls, or attempts, in one process.
    pub interval_s: u64,
    /// Calls in all processes within an hour.
    pub calls_per_hour_max: u32,
    /// Longest predicted stall, in milliseconds.
    pub max_stall_ms: u64,
    /// Pause after each MiB read for a prediction, in microseconds.
    pub pause_per_mib_us: u64,
    /// Processes that may be trimmed; without a rule none is.
    pub rules: Vec<ProcessRule>,
}

/// Processes in which something may be done: all that is given must fit. `*` and `?` stand for any text and any character.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ProcessRule {
    /// Command name.
    pub command: Option<String>,
    /// Cgroup, as a path from the root of the cgroup file system.
    pub cgroup: Option<String>,
    /// Name of the workload (`web`, or `shop/web` with its namespace), the service, the container, or the pod if that is not known.
    pub workload: Option<String>,
}

impl Default for ReclaimConfig {
    fn default() -> Self {
        Self {
            enabled: false,
            dry_run: false,
            trimmable_min_mib: 64,
            trimmable_min_percent: 20.0,
            pressure_min_percent: 0.0,
            limit_min_percent: 0.0,
            quiet_s: 600,
            interval_s: 3600,
            calls_per_hour_max: 12,
            max_stall_ms: 100,
            pause_per_mib_us: 0,
            rules: Vec::new(),
        }
    }
}

/// Which containers are started with the sampler.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DeliveryConfig {
    /// Whether it is done.
    pub enabled: bool,
    /// The runtime's NRI socket.
    pub socket: PathBuf,
    /// The label of pods that asks for it, with the value `true`; `false` declines.
    pub label: String,
    /// Namespaces whose pods have it without a label.
    pub namespaces: Vec<String>,
    /// The directory of the node that is mounted into containers, by the same path here.
    pub directory: PathBuf,
    /// containerd's snapshotter, in which containers' files are looked up.
    pub snapshotter: String,
    /// Mean distance of samples, bytes.
    pub sample_bytes: u64,
}

impl Default for DeliveryConfig {
    fn default() -> Self {
        Self {
            enabled: false,
            socket: "/run/nri/nri.sock".into(),
            label: "fragprof.io/sampler".to_owned(),
            namespaces: Vec::new(),
            directory: "/var/lib/fragprof-sampler".into(),
            snapshotter: "overlayfs".to_owned(),
            sample_bytes: SAMPLE_BYTES_DEFAULT,
        }
    }
}

impl DeliveryConfig {
    /// Checks names and paths.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let wrong = |key, reason: &str| Err(ConfigError::Setting { key, reason: reason.to_owned() });
        for (key, path) in [("delivery.socket", &self.socket), ("delivery.directory", &self.directory)] {
            if !path.is_absolute() || path.as_os_str().as_encoded_bytes().iter().any(|byte| b" :\t\n".contains(byte)) {
                return wrong(key, "an absolute path without blanks and colons is needed");
            }
        }
        for (key, text) in [("delivery.label", &self.label), ("delivery.snapshotter", &self.snapshotter)] {
            if text.is_empty() || text.len() > 317 || text.chars().any(|character| character.is_whitespace() || character.is_control()) {
                return wrong(key, "it must be a name without blanks");
            }
        }
        if self.namespaces.iter().any(String::is_empty) {
            return wrong("delivery.namespaces", "a namespace has no name");
        }
        Ok(())
    }
}

/// To which running processes the sampler is brought.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AttachConfig {
    /// Whether it is done.
    pub enabled: bool,
    /// Processes to which it is attached at a time.
    pub processes_max: usize,
    /// Seconds that a process must have run: what it does at its start is not disturbed.
    pub after_s: u64,
    /// Seconds after which a process that loads libraries gets another pass.
    pub again_s: u64,
    /// Mean distance of samples, bytes.
    pub sample_bytes: u64,
    /// The library, by its path in the processes' own root directories; without it, one that the agent writes.
    pub library: Option<PathBuf>,
    /// Processes to which it may be attached; without a rule it is to none.
    pub rules: Vec<ProcessRule>,
}

impl Default for AttachConfig {
    fn default() -> Self {
        Self {
            enabled: false,
            processes_max: 16,
            after_s: 30,
            again_s: 600,
            sample_bytes: SAMPLE_BYTES_DEFAULT,
            library: None,
            rules: Vec::new(),
        }
    }
}

/// Which processes have series of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PerProcess {
    /// Those with the most resident memory, `processes_max` of them.
    #[default]
    Top,
    /// All.
    All,
    /// None: workloads only.
    None,
}

/// What `/metrics` shows.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetricsConfig {
    /// Which processes have series of their own.
    pub per_process: PerProcess,
    /// With `per_process = "top"`, the maximum number of these processes; the others are summed in `pid="other"`.
    pub processes_max: usize,
    /// Maximum number of series by workload; the workloads with the least resident memory are summed in `workload="other"`.
    pub workload_series_max: usize,
}

impl Default for MetricsConfig {
    fn default() -> Self {
        Self { per_process: PerProcess::Top, processes_max: 200, workload_series_max: 300 }
    }
}

impl MetricsConfig {
    /// Maximum number of processes with series of their own; 0 = processes have no series.
    #[must_use]
    pub fn series_of_processes(&self) -> usize {
        match self.per_process {
            PerProcess::Top => self.processes_max,
            PerProcess::All => usize::MAX,
            PerProcess::None => 0,
        }
    }
}

/// The history.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HistoryConfig {
    /// Directory of the history. Without one: systemd's `$STATE_DIRECTORY`, and without that the history is kept in memory and ends with
    /// the agent.
    pub directory: Option<PathBuf>,
    /// Seconds between two samples of a process.
    pub sample_interval_s: u64,
    /// Seconds between two profiles of a process.
    pub profile_interval_s: u64,
    /// Maximum size of the history, MiB; above it old samples are thinned further, and finally removed.
    pub size_max_mib: u64,
    /// Maximum size of a history that is kept in memory, MiB.
    pub memory_max_mib: u64,
    /// Days after which samples are removed.
    pub age_max_days: u64,
}

impl Default for HistoryConfig {
    fn default() -> Self {
        Self { directory: None, sample_interval_s: 30, profile_interval_s: 7200, size_max_mib: 500, memory_max_mib: 16, age_max_days: 30 }
    }
}

/// Flight records of processes that end.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FlightConfig {
    /// Exits of processes with fewer resident MiB are only counted. Kills for lack of memory are always recorded.
    pub exit_rss_min_mib: u64,
}

impl Default for FlightConfig {
    fn default() -> Self {
        Self { exit_rss_min_mib: 64 }
    }
}

/// Recordings on request: they cost the target about 2 µs per allocation while they run.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ProfileConfig {
    /// Whether `profile?seconds=N` records.
    pub on_demand: bool,
    /// Maximum length of one recording, in seconds.
    pub seconds_max: u64,
}

impl Default for ProfileConfig {
    fn default() -> Self {
        Self { on_demand: false, seconds_max: 30 }
    }
}

/// Where it is served.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ServerConfig {
    /// Address and port. If it is not a loopback address, a token is required.
    pub listen: SocketAddr,
    /// A second address for `/metrics`, `/healthz` and `/readyz` alone, which need no token: for a scraper and probes from outside while
    /// everything else stays on loopback.
    pub metrics_listen: Option<SocketAddr>,
    /// File whose first line is the bearer token for everything but `/metrics`, `/healthz` and `/readyz`.
    pub token_file: Option<PathBuf>,
    /// A unix socket for everything, without a token: its file's mode admits only the agent's own user. Without a path: systemd's
    /// `$RUNTIME_DIRECTORY/agent.sock`, and none without that.
    pub socket: Option<PathBuf>,
    /// Maximum number of open connections. A further one replaces an idle one, or is closed if there is none; both are counted.
    pub connections_max: usize,
}

impl Default for ServerConfig {
    fn default() -> Self {
        let listen = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9746);
        Self { listen, metrics_listen: None, token_file: None, socket: None, connections_max: 64 }
    }
}

impl ServerConfig {
    /// Path of the unix socket; `None` = there is none. `runtime_directory` is systemd's `$RUNTIME_DIRECTORY`, the first of several.
    #[must_use]
    pub fn socket(&self, runtime_directory: Option<&str>) -> Option<PathBuf> {
        let of_service = first_of(runtime_directory).map(|directory| directory.join("agent.sock"));
        self.socket.clone().or(of_service)
    }
}

/// The first directory of a list that systemd passes to a service.
pub(super) fn first_of(list: Option<&str>) -> Option<PathBuf> {
    list.and_then(|list| list.split(':').next()).filter(|path| !path.is_empty()).map(PathBuf::from)
}

impl HistoryConfig {
    /// Its directory; `None` = in memory. `state_directory` is systemd's `$STATE_DIRECTORY`, the first of several.
    #[must_use]
    pub fn place(&self, state_directory: Option<&str>) -> Option<PathBuf> {
        self.directory.clone().or_else(|| first_of(state_directory))
    }
}

impl CensusConfig {
    /// Share of one core, 1 = all of it.
    #[must_use]
    pub fn budget_ratio(&self) -> f64 {
        self.budget_percent / 100.0
    }

    /// Time between two censuses at level top.
    #[must_use]
    pub fn top_interval(&self) -> Duration {
        Duration::from_secs(self.top_interval_s)
    }

    /// Time between two full censuses.
    #[must_use]
    pub fn full_interval(&self) -> Duration {
        Duration::from_secs(self.full_interval_s)
    }
}
