//! The table `[symbols]`: where the debug information of files without symbols is fetched from, and where it is kept.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::sections::first_of;
use super::{ConfigError, read_file};
use crate::symbol::debuginfod::{self, CACHE_DIRECTORY_DEFAULT, CACHE_MIB_DEFAULT, OPEN_MIB_DEFAULT, SERVERS_MAX};

/// Names of functions of files without symbols. Read at the start only.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SymbolsConfig {
    /// debuginfod servers, in the order in which they are asked. Empty = none; without the key, those of `DEBUGINFOD_URLS`.
    pub debuginfod_urls: Option<Vec<String>>,
    /// File with the certificates of the only trusted authorities, for `https` servers. Without it those of the system are trusted.
    pub ca_file: Option<PathBuf>,
    /// Directory for fetched files. Without one: `debuginfod` in systemd's `$STATE_DIRECTORY`, and without that in `/var/cache/fragprof`.
    pub cache_directory: Option<PathBuf>,
    /// Its limit, MiB.
    pub cache_mib_max: u64,
    /// Limit of the debug information that is open at a time, MiB with its sections decompressed.
    pub open_mib_max: u64,
}

impl Default for SymbolsConfig {
    fn default() -> Self {
        Self {
            debuginfod_urls: None,
            ca_file: None,
            cache_directory: None,
            cache_mib_max: CACHE_MIB_DEFAULT,
            open_mib_max: OPEN_MIB_DEFAULT,
        }
    }
}

impl SymbolsConfig {
    /// The servers, and notes on those that are not used. `from_environment` is the value of `DEBUGINFOD_URLS`.
    #[must_use]
    pub fn urls(&self, from_environment: Option<&str>) -> (Vec<String>, Vec<String>) {
        match &self.debuginfod_urls {
            Some(urls) => (urls.clone(), Vec::new()),
            None => debuginfod::words(from_environment.unwrap_or_default()),
        }
    }

    /// Directory for fetched files. `state_directory` is systemd's `$STATE_DIRECTORY`, the first of several.
    #[must_use]
    pub fn cache(&self, state_directory: Option<&str>) -> PathBuf {
        let of_service = || first_of(state_directory).map(|directory| directory.join("debuginfod"));
        self.cache_directory.clone().or_else(of_service).unwrap_or_else(|| CACHE_DIRECTORY_DEFAULT.into())
    }

    /// The authorities' certificates, if a file is named.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn authorities(&self) -> Result<Option<Vec<u8>>, ConfigError> {
        self.ca_file.as_deref().map(|path| read_file("symbols.ca_file", path)).transpose()
    }

    /// Checks addresses and paths.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let refuse = |key, reason: String| Err(ConfigError::Setting { key, reason });
        let urls = self.debuginfod_urls.as_deref().unwrap_or_default();
        if urls.len() > SERVERS_MAX {
            return refuse("symbols.debuginfod_urls", format!("at most {SERVERS_MAX} servers are asked"));
        }
        if let Some(error) = urls.iter().find_map(|url| debuginfod::check_url(url).err()) {
            return refuse("symbols.debuginfod_urls", error.to_string());
        }
        for (key, path) in [("symbols.ca_file", &self.ca_file), ("symbols.cache_directory", &self.cache_directory)] {
            if path.as_deref().is_some_and(Path::is_relative) {
                return refuse(key, "an absolute path is needed".to_owned());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_comes_before_the_environment_and_an_empty_list_turns_it_off() {
        let urls = |configured: Option<&[&str]>, environment| {
            let debuginfod_urls = configured.map(|urls| urls.iter().map(ToString::to_string).collect());
            SymbolsConfig { debuginfod_urls, ..SymbolsConfig::default() }.urls(environment).0
        };
        assert_eq!(urls(None, None), Vec::<String>::new());
        assert_eq!(urls(None, Some("http://a http://b")), ["http://a", "http://b"]);
        assert_eq!(urls(Some(&["http://c"]), Some("http://a")), ["http://c"]);
        assert_eq!(urls(Some(&[]), Some("http://a")), Vec::<String>::new());
    }

    #[test]
    fn the_cache_is_in_the_state_directory_unless_it_is_configured() {
        let default = SymbolsConfig::default();
        assert_eq!(default.cache(Some("/var/lib/fragprof:/var/lib/other")), Path::new("/var/lib/fragprof/debuginfod"));
        assert_eq!(default.cache(None), Path::new("/var/cache/fragprof/debuginfod"));
        let configured = SymbolsConfig { cache_directory: Some("/x".into()), ..default };
        assert_eq!(configured.cache(Some("/var/lib/fragprof")), Path::new("/x"));
    }
}
