//! The agent's configuration: what is watched, what it may cost, where it is served. TOML; an unknown key is an error.
//!
//! `deploy/agent.toml` is the documented example; its values are the defaults (a test holds the two together).

mod discovery;
mod push;
mod sections;
mod symbols;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use thiserror::Error;

use crate::sampler::{SAMPLE_BYTES_MAX, SAMPLE_BYTES_MIN};

pub use discovery::{DiscoveryConfig, WorkloadRule};
pub use push::{PushConfig, PushProtocol, PushTlsConfig};
pub use sections::{
    AttachConfig, BudgetRule, CensusConfig, ContainersConfig, CriSocket, DeliveryConfig, FlightConfig, GovernedConfig, HistoryConfig,
    LeaksConfig, ListeningConfig, MetricsConfig, PerProcess, ProcessRule, ProfileConfig, ReclaimConfig, ServerConfig,
};
pub use symbols::SymbolsConfig;

/// The configuration file that is read if none is named.
pub const DEFAULT_PATH: &str = "/etc/fragprof/agent.toml";
/// Bytes read of a configuration, a secret or a bundle of certificates: a page of settings has a few KiB, all authorities of a system 200.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Shortest token that is accepted: 16 characters of base64 are 96 bits.
const TOKEN_CHARS_MIN: usize = 16;

/// Why a configuration cannot be used.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {path} ({key}): {source}")]
    Read {
        /// What names it.
        key: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Not TOML, an unknown key, or a value of the wrong kind.
    #[error("{path} is not a configuration of the agent: {reason}")]
    Syntax {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        reason: String,
    },
    /// A value out of its range.
    #[error("{key} = {value} is out of range: {allowed}")]
    Range {
        /// The key with its table.
        key: &'static str,
        /// The value given.
        value: String,
        /// What is allowed.
        allowed: &'static str,
    },
    /// A value that is not valid, or contradicts another one.
    #[error("{key}: {reason}")]
    Setting {
        /// The key with its table.
        key: &'static str,
        /// Why.
        reason: String,
    },
    /// A file with invalid content.
    #[error("{path} ({key}) cannot be used: {reason}")]
    File {
        /// The key with its table.
        key: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Listening beyond loopback without a token.
    #[error(
        "server.listen = {listen} is reachable from other machines, so server.token_file must name a file with a bearer token (or listen on 127.0.0.1)"
    )]
    NoToken {
        /// The address.
        listen: SocketAddr,
    },
    /// An invalid token.
    #[error("the token in {path} is not usable: {reason}")]
    Token {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A secret that every user of the machine may read.
    #[error("every user may read the secret in {path} ({key}, mode {mode:04o}): chmod 600, or defaultMode 0400 where a Secret is mounted")]
    SecretMode {
        /// The key with its table.
        key: &'static str,
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
}

/// Everything that can be set.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Which processes.
    pub discovery: DiscoveryConfig,
    /// How often and at what cost.
    pub census: CensusConfig,
    /// Names of containers.
    pub containers: ContainersConfig,
    /// Attribution of allocations to call stacks, and its cost.
    pub governed: GovernedConfig,
    /// Listening to emitters in processes.
    pub listening: ListeningConfig,
    /// Scans for blocks to which nothing points.
    pub leaks: LeaksConfig,
    /// Giving free memory back.
    pub reclaim: ReclaimConfig,
    /// To which running processes the sampler is brought.
    pub attach: AttachConfig,
    /// Which containers are started with the sampler.
    pub delivery: DeliveryConfig,
    /// What `/metrics` shows.
    pub metrics: MetricsConfig,
    /// The history.
    pub history: HistoryConfig,
    /// Flight records of processes that end.
    pub flight: FlightConfig,
    /// Recordings on request.
    pub profile: ProfileConfig,
    /// Pushing profiles to a server.
    pub push: PushConfig,
    /// Names of functions of files without symbols.
    pub symbols: SymbolsConfig,
    /// Where it is served.
    pub server: ServerConfig,
}

impl Config {
    /// Reads and checks a file. `None`: the default file if it is there, else the defaults.
    ///
    /// # Errors
    /// [`ConfigError`] names the file and the key.
    pub fn load(path: Option<&Path>) -> Result<Self, ConfigError> {
        let default = Path::new(DEFAULT_PATH);
        let path = match path {
            Some(path) => path,
            None if default.exists() => default,
            None => return Ok(Self::default()),
        };
        let text = read_text("--config", path)?;
        let config = Self::parse(&text, path)?;
        config.check()?;
        Ok(config)
    }

    /// Parses a configuration; `path` is for the message.
    ///
    /// # Errors
    /// If the text is not TOML, has an unknown key or a value of the wrong kind.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        toml::from_str(text).map_err(|error| ConfigError::Syntax { path: path.to_owned(), reason: error.to_string() })
    }

    /// Checks ranges, and that nothing listens beyond loopback without a token.
    ///
    /// # Errors
    /// The first value that is out of its range.
    pub fn check(&self) -> Result<(), ConfigError> {
        let seconds = "from 1 to 86400";
        let range = |key, value: u64, least: u64, most: u64, allowed| {
            let error = ConfigError::Range { key, value: value.to_string(), allowed };
            if (least..=most).contains(&value) { Ok(()) } else { Err(error) }
        };
        range("discovery.scan_interval_s", self.discovery.scan_interval_s, 1, 86400, seconds)?;
        range("discovery.rss_min_mib", self.discovery.rss_min_mib, 0, 1 << 24, "from 0 to 16777216")?;
        range("discovery.growth_min_mib", self.discovery.growth_min_mib, 0, 1 << 24, "from 0 to 16777216")?;
        range("discovery.processes_max", self.discovery.processes_max as u64, 1, 10_000, "from 1 to 10000")?;
        range("census.start_credit_ms", self.census.start_credit_ms, 0, 600_000, "from 0 to 600000")?;
        range("census.top_interval_s", self.census.top_interval_s, 1, 86400, seconds)?;
        range("census.full_interval_s", self.census.full_interval_s, 1, 86400, seconds)?;
        range("census.full_growth_percent", self.census.full_growth_percent, 1, 10_000, "from 1 to 10000")?;
        range("census.duration_max_s", self.census.duration_max_s, 1, 30, "from 1 to 30")?;
        range("census.pause_per_mib_us", self.census.pause_per_mib_us, 0, 1_000_000, "from 0 to 1000000")?;
        range("census.walk_memory_mib", self.census.walk_memory_mib, 1, 65536, "from 1 to 65536")?;
        range("census.memory_max_mib", self.census.memory_max_mib, 32, 1 << 20, "from 32 to 1048576")?;
        range("metrics.processes_max", self.metrics.processes_max as u64, 1, 10_000, "from 1 to 10000")?;
        range("metrics.workload_series_max", self.metrics.workload_series_max as u64, 40, 100_000, "from 40 to 100000")?;
        range("history.sample_interval_s", self.history.sample_interval_s, 1, 86400, seconds)?;
        range("history.profile_interval_s", self.history.profile_interval_s, 1, 86400, seconds)?;
        range("history.size_max_mib", self.history.size_max_mib, 1, 1 << 20, "from 1 to 1048576")?;
        range("history.memory_max_mib", self.history.memory_max_mib, 1, 65536, "from 1 to 65536")?;
        range("history.age_max_days", self.history.age_max_days, 1, 3650, "from 1 to 3650")?;
        range("flight.exit_rss_min_mib", self.flight.exit_rss_min_mib, 0, 1 << 24, "from 0 to 16777216")?;
        range("push.interval_s", self.push.interval_s, 1, 86400, seconds)?;
        range("push.stacks_max", self.push.stacks_max as u64, 1, 100_000, "from 1 to 100000")?;
        range("push.mib_per_day_max", self.push.mib_per_day_max, 0, 1 << 20, "from 0 to 1048576")?;
        self.push.check()?;
        range("symbols.cache_mib_max", self.symbols.cache_mib_max, 1, 1 << 20, "from 1 to 1048576")?;
        range("symbols.open_mib_max", self.symbols.open_mib_max, 1, 65536, "from 1 to 65536")?;
        self.symbols.check()?;
        range("profile.seconds_max", self.profile.seconds_max, 1, 300, "from 1 to 300")?;
        range("server.connections_max", self.server.connections_max as u64, 1, 4096, "from 1 to 4096")?;
        range("governed.targets_max", self.governed.targets_max as u64, 1, 256, "from 1 to 256")?;
        range("governed.tables_mib", self.governed.tables_mib.into(), 1, 4096, "from 1 to 4096")?;
        range("governed.ring_mib", self.governed.ring_mib.into(), 1, 1024, "from 1 to 1024")?;
        range("listening.targets_max", self.listening.targets_max as u64, 1, 512, "from 1 to 512")?;
        range("listening.profile_interval_s", self.listening.profile_interval_s, 1, 86400, seconds)?;
        range("listening.census_interval_s", self.listening.census_interval_s, 1, 86400, seconds)?;
        range("listening.tables_mib", self.listening.tables_mib.into(), 1, 4096, "from 1 to 4096")?;
        range("listening.ring_mib", self.listening.ring_mib.into(), 1, 1024, "from 1 to 1024")?;
        range("leaks.interval_s", self.leaks.interval_s, 60, 31_536_000, "from a minute to a year")?;
        range("leaks.looks", self.leaks.looks.into(), 2, 20, "from 2 to 20")?;
        range("leaks.look_interval_s", self.leaks.look_interval_s, 1, 3600, "from a second to an hour")?;
        range("leaks.heap_max_mib", self.leaks.heap_max_mib, 1, 1 << 20, "from 1 MiB to 1 TiB")?;
        range("leaks.memory_mib", self.leaks.memory_mib, 1, 1 << 20, "from 1 MiB to 1 TiB")?;
        range("leaks.pause_per_mib_us", self.leaks.pause_per_mib_us, 0, 1_000_000, "up to a second")?;
        range("reclaim.trimmable_min_mib", self.reclaim.trimmable_min_mib, 1, 1 << 24, "from 1 MiB to 16 TiB")?;
        range("reclaim.quiet_s", self.reclaim.quiet_s, 0, 86400, "from 0 to 86400")?;
        range("reclaim.interval_s", self.reclaim.interval_s, 1, 31_536_000, "from a second to a year")?;
        range("reclaim.calls_per_hour_max", self.reclaim.calls_per_hour_max.into(), 1, 3600, "from 1 to 3600")?;
        range("reclaim.max_stall_ms", self.reclaim.max_stall_ms, 1, 600_000, "from 1 to 600000")?;
        range("reclaim.pause_per_mib_us", self.reclaim.pause_per_mib_us, 0, 1_000_000, "up to a second")?;
        let percents = [
            ("reclaim.trimmable_min_percent", self.reclaim.trimmable_min_percent),
            ("reclaim.pressure_min_percent", self.reclaim.pressure_min_percent),
            ("reclaim.limit_min_percent", self.reclaim.limit_min_percent),
        ];
        for (key, percent) in percents {
            if !(percent.is_finite() && (0.0..=100.0).contains(&percent)) {
                return Err(ConfigError::Range { key, value: percent.to_string(), allowed: "from 0 to 100 percent" });
            }
        }
        range("attach.processes_max", self.attach.processes_max as u64, 1, 1000, "from 1 to 1000")?;
        range("attach.after_s", self.attach.after_s, 0, 86400, "from 0 to 86400")?;
        range("attach.again_s", self.attach.again_s, 10, 86400, "from 10 to 86400")?;
        range("attach.sample_bytes", self.attach.sample_bytes, SAMPLE_BYTES_MIN, SAMPLE_BYTES_MAX, "from a byte to a TiB")?;
        range("delivery.sample_bytes", self.delivery.sample_bytes, SAMPLE_BYTES_MIN, SAMPLE_BYTES_MAX, "from a byte to a TiB")?;
        self.delivery.check()?;
        if self.delivery.enabled && self.containers.cri == CriSocket::Off {
            let reason = "the files of a container are looked up through the runtime's socket (containers.cri), which is off".into();
            return Err(ConfigError::Setting { key: "delivery.enabled", reason });
        }
        let names_nothing = |rule: &ProcessRule| rule.command.is_none() && rule.cgroup.is_none() && rule.workload.is_none();
        for (key, rules) in [("reclaim.rules", &self.reclaim.rules), ("attach.rules", &self.attach.rules)] {
            if !rules.iter().any(names_nothing) {
                continue;
            }
            return Err(ConfigError::Setting { key, reason: "a rule must name a command, a cgroup or a workload".into() });
        }
        self.discovery.check()?;
        if self.governed.overrides.iter().any(|rule| rule.command.is_none() && rule.workload.is_none()) {
            return Err(ConfigError::Setting { key: "governed.overrides", reason: "a rule must name a command or a workload".into() });
        }
        let overrides = self.governed.overrides.iter().map(|rule| ("governed.overrides.budget_percent", rule.budget_percent));
        let shares = [
            ("governed.budget_percent", self.governed.budget_percent),
            ("governed.node_budget_percent", self.governed.node_budget_percent),
            ("governed.cpu_percent", self.governed.cpu_percent),
            ("listening.cpu_percent", self.listening.cpu_percent),
            ("leaks.cpu_percent", self.leaks.cpu_percent),
        ];
        for (key, percent) in shares.into_iter().chain(overrides) {
            if !(percent.is_finite() && (0.01..=100.0).contains(&percent)) {
                return Err(ConfigError::Range { key, value: percent.to_string(), allowed: "from 0.01 to 100 percent" });
            }
        }
        let budget = self.census.budget_percent;
        if !(budget.is_finite() && (0.01..=100.0).contains(&budget)) {
            let allowed = "from 0.01 to 100, in percent of one core";
            return Err(ConfigError::Range { key: "census.budget_percent", value: budget.to_string(), allowed });
        }
        if !self.server.listen.ip().is_loopback() && self.server.token_file.is_none() {
            return Err(ConfigError::NoToken { listen: self.server.listen });
        }
        Ok(())
    }

    /// The bearer token, if one is configured.
    ///
    /// # Errors
    /// If the file cannot be read or holds no usable token.
    pub fn token(&self) -> Result<Option<String>, ConfigError> {
        let Some(path) = &self.server.token_file else { return Ok(None) };
        let token = secret_line("server.token_file", path)?;
        let refuse = |reason| Err(ConfigError::Token { path: path.clone(), reason });
        if token.len() < TOKEN_CHARS_MIN {
            return refuse("it has fewer than 16 characters; make one with `openssl rand -base64 32`");
        }
        if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return refuse("it has characters other than printable ASCII");
        }
        Ok(Some(token))
    }
}

/// The first line of a file that contains a secret.
fn secret_line(key: &'static str, path: &Path) -> Result<String, ConfigError> {
    Ok(text(key, path, secret(key, path)?)?.lines().next().unwrap_or_default().trim().to_owned())
}

/// The content of a file that contains a secret.
fn secret(key: &'static str, path: &Path) -> Result<Vec<u8>, ConfigError> {
    use std::os::unix::fs::PermissionsExt as _;
    let bytes = read_file(key, path)?;
    let metadata = std::fs::metadata(path).map_err(|source| ConfigError::Read { key, path: path.to_owned(), source })?;
    let mode = metadata.permissions().mode() & 0o7777;
    // The group may read it: that is how a service's user gets access.
    if mode & 0o007 != 0 {
        return Err(ConfigError::SecretMode { key, path: path.to_owned(), mode });
    }
    Ok(bytes)
}

fn read_text(key: &'static str, path: &Path) -> Result<String, ConfigError> {
    text(key, path, read_file(key, path)?)
}

fn text(key: &'static str, path: &Path, bytes: Vec<u8>) -> Result<String, ConfigError> {
    String::from_utf8(bytes).map_err(|_| ConfigError::File { key, path: path.to_owned(), reason: "it is not UTF-8".into() })
}

fn read_file(key: &'static str, path: &Path) -> Result<Vec<u8>, ConfigError> {
    let read = crate::process::handle::read_bounded(path, FILE_BYTES_MAX + 1);
    let bytes = read.map_err(|source| ConfigError::Read { key, path: path.to_owned(), source })?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(ConfigError::File { key, path: path.to_owned(), reason: format!("it is larger than {} MiB", FILE_BYTES_MAX >> 20) });
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn parse(text: &str) -> Result<Config, ConfigError> {
        let config = Config::parse(text, Path::new("agent.toml"))?;
        config.check().map(|()| config)
    }

    #[test]
    fn the_documented_example_has_the_defaults() {
        assert_eq!(parse(include_str!("../../deploy/agent.toml")).unwrap(), Config::default());
    }

    #[test]
    fn an_unknown_key_is_refused_by_name() {
        let error = parse("[census]\nbudget_procent = 2\n").unwrap_err().to_string();
        assert!(error.contains("agent.toml") && error.contains("budget_procent"), "{error}");
    }

    #[test]
    fn values_out_of_range_are_refused_by_key() {
        for (text, key) in [
            ("[census]\nbudget_percent = 0.0", "census.budget_percent"),
            ("[census]\nbudget_percent = nan", "census.budget_percent"),
            ("[census]\ntop_interval_s = 0", "census.top_interval_s"),
            ("[discovery]\nprocesses_max = 0", "discovery.processes_max"),
            ("[reclaim]\nmax_stall_ms = 0", "reclaim.max_stall_ms"),
            ("[reclaim]\nlimit_min_percent = 101.0", "reclaim.limit_min_percent"),
            ("[[reclaim.rules]]", "reclaim.rules"),
            ("[attach]\nprocesses_max = 0", "attach.processes_max"),
            ("[attach]\nsample_bytes = 0", "attach.sample_bytes"),
            ("[[attach.rules]]", "attach.rules"),
            ("[[discovery.workloads]]\nname = \"a\"", "discovery.workloads"),
            ("[[discovery.workloads]]\ncommand = \"a\"", "discovery.workloads"),
            ("[[discovery.workloads]]\ncommand = \"a\"\nname = \"b\\u001b\"", "discovery.workloads"),
            ("[[governed.overrides]]\nbudget_percent = 1.0", "governed.overrides"),
            ("[delivery]\nsample_bytes = 0", "delivery.sample_bytes"),
            ("[delivery]\nlabel = ''", "delivery.label"),
            ("[delivery]\ndirectory = '/a b'", "delivery.directory"),
            ("[delivery]\ndirectory = 'a'", "delivery.directory"),
            ("[metrics]\nprocesses_max = 100000", "metrics.processes_max"),
            ("[symbols]\ncache_mib_max = 0", "symbols.cache_mib_max"),
            ("[symbols]\nopen_mib_max = 0", "symbols.open_mib_max"),
            ("[symbols]\ncache_directory = 'x'", "symbols.cache_directory"),
            ("[symbols]\nca_file = 'x'", "symbols.ca_file"),
            ("[symbols]\ndebuginfod_urls = ['unix:/x']", "symbols.debuginfod_urls"),
            ("[symbols]\ndebuginfod_urls = ['http://a', 'h:1']", "symbols.debuginfod_urls"),
            (
                "[symbols]\ndebuginfod_urls = ['http://a','http://a','http://a','http://a','http://a','http://a','http://a','http://a','http://a']",
                "symbols.debuginfod_urls",
            ),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.starts_with(key), "{text}: {error}");
        }
    }

    #[test]
    fn nothing_listens_beyond_loopback_without_a_token() {
        for listen in ["0.0.0.0:1", "[::]:1", "10.0.0.1:1"] {
            assert!(matches!(parse(&format!("[server]\nlisten = '{listen}'")), Err(ConfigError::NoToken { .. })), "{listen}");
            assert!(parse(&format!("[server]\nlisten = '{listen}'\ntoken_file = '/x'")).is_ok());
        }
        assert!(parse("[server]\nlisten = '127.0.0.53:1'").is_ok());
        assert!(parse("[server]\nlisten = '[::1]:1'").is_ok());
    }

    #[test]
    fn a_short_or_unprintable_token_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let mut config = Config::default();
        assert_eq!(config.token().unwrap(), None);
        config.server.token_file = Some(path.clone());
        assert!(matches!(config.token(), Err(ConfigError::Read { .. })));
        let chmod = |mode| std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        for bad in ["", "short\n", "0123456789abcdef\u{1b}[0m\n"] {
            std::fs::write(&path, bad).unwrap();
            chmod(0o640);
            assert!(matches!(config.token(), Err(ConfigError::Token { .. })), "{bad:?}");
        }
        std::fs::write(&path, "0123456789abcdef\nsecond line\n").unwrap();
        assert_eq!(config.token().unwrap().as_deref(), Some("0123456789abcdef"));
        for mode in [0o644, 0o604, 0o602] {
            chmod(mode);
            let error = config.token().unwrap_err().to_string();
            assert!(error.contains(&format!("mode {mode:04o}")) && error.contains("chmod 600"), "{error}");
            config.push.token_file = Some(path.clone());
            assert!(matches!(config.push.access(), Err(ConfigError::SecretMode { key: "push.token_file", .. })));
        }
    }

    #[test]
    fn a_label_that_no_server_accepts_is_refused() {
        assert!(parse("[push.labels]\ncluster = 'a b'\n'_k8s.node' = 'x'").is_ok());
        for name in ["a-b", "'a b'", "1a", "''", "'ä'"] {
            let error = parse(&format!("[push.labels]\n{name} = 'x'")).unwrap_err().to_string();
            assert!(error.starts_with("push.labels"), "{error}");
        }
    }
}
