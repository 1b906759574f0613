//! The table `[push]`: where profiles are sent, and how server and client authenticate to each other.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;

use super::sections::first_of;
use super::{ConfigError, read_file, secret, secret_line};
use crate::client::{Access, AccessError, Address, Credentials, Identity};

/// Maximum length of a tenant: the limit of servers that have tenants.
const TENANT_CHARS_MAX: usize = 150;

/// The protocol of a profile server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PushProtocol {
    /// Pyroscope's `POST /ingest`, which other servers accept too.
    #[default]
    Pyroscope,
    /// Pyroscope's `push.v1.PusherService`, by Connect over HTTP.
    #[serde(rename = "pyroscope-push")]
    PyroscopePush,
    /// Parca's `WriteRaw`, over gRPC.
    Parca,
    /// OpenTelemetry's profiles, over gRPC.
    #[cfg(feature = "otlp")]
    Otlp,
    /// OpenTelemetry's profiles, as binary protobuf over HTTP.
    #[cfg(feature = "otlp")]
    #[serde(rename = "otlp-http")]
    OtlpHttp,
}

impl PushProtocol {
    /// Whether it is over gRPC, rather than plain HTTP.
    #[must_use]
    pub fn is_grpc(self) -> bool {
        match self {
            Self::Parca => true,
            #[cfg(feature = "otlp")]
            Self::Otlp => true,
            _ => false,
        }
    }

    /// Its name in the configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pyroscope => "pyroscope",
            Self::PyroscopePush => "pyroscope-push",
            Self::Parca => "parca",
            #[cfg(feature = "otlp")]
            Self::Otlp => "otlp",
            #[cfg(feature = "otlp")]
            Self::OtlpHttp => "otlp-http",
        }
    }
}

/// Sends profiles to a server. The files are read at the start, and again with each push: their content may change at any time.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PushConfig {
    /// `http://HOST:PORT[/PREFIX]` or `https://HOST:PORT[/PREFIX]` of the server; without it nothing is sent. gRPC servers have no prefix.
    pub url: Option<String>,
    /// The protocol of the server.
    pub protocol: PushProtocol,
    /// Seconds between two rounds.
    pub interval_s: u64,
    /// Stacks of a push, those with the largest shares; the rest is summed in one row.
    pub stacks_max: usize,
    /// Directory for profiles that wait. Without one: `push` in systemd's `$STATE_DIRECTORY`, and without that they wait in memory.
    pub spool_directory: Option<PathBuf>,
    /// MiB sent a day, above which rounds become rarer. 0 = no limit.
    pub mib_per_day_max: u64,
    /// File whose first line is the bearer token.
    pub token_file: Option<PathBuf>,
    /// User name of basic authentication.
    pub basic_auth_user: Option<String>,
    /// File whose first line is that user's password.
    pub basic_auth_password_file: Option<PathBuf>,
    /// Tenant on a server that has several, sent as `X-Scope-OrgID`.
    pub tenant: Option<String>,
    /// For an `https` server.
    pub tls: PushTlsConfig,
    /// Labels that every profile gets.
    pub labels: BTreeMap<String, String>,
}

/// Trusted authorities and client certificate for a server with TLS.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PushTlsConfig {
    /// File with the certificates of the only trusted authorities. Without it those of the system are trusted.
    pub ca_file: Option<PathBuf>,
    /// File with the client's certificate, followed by those up to its authority.
    pub cert_file: Option<PathBuf>,
    /// File with its key.
    pub key_file: Option<PathBuf>,
}

impl Default for PushConfig {
    fn default() -> Self {
        Self {
            url: None,
            protocol: PushProtocol::Pyroscope,
            interval_s: 60,
            stacks_max: 100,
            mib_per_day_max: 4,
            spool_directory: None,
            token_file: None,
            basic_auth_user: None,
            basic_auth_password_file: None,
            tenant: None,
            tls: PushTlsConfig::default(),
            labels: BTreeMap::new(),
        }
    }
}

impl PushConfig {
    /// The server's address, if there is one.
    ///
    /// # Errors
    /// If the URL is not valid.
    pub fn address(&self) -> Result<Option<Address>, ConfigError> {
        let address = self.url.as_deref().map(Address::parse).transpose();
        address.map_err(|error| ConfigError::Setting { key: "push.url", reason: error.to_string() })
    }

    /// Directory for profiles that wait; `None` = in memory. `state_directory` is systemd's `$STATE_DIRECTORY`, the first of several.
    #[must_use]
    pub fn spool(&self, state_directory: Option<&str>) -> Option<PathBuf> {
        self.spool_directory.clone().or_else(|| first_of(state_directory).map(|directory| directory.join("push")))
    }

    /// Checks what can be checked without the files.
    ///
    /// # Errors
    /// The first key that cannot be used, or that requires another key.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let refuse = |key, reason: &str| Err(ConfigError::Setting { key, reason: reason.to_owned() });
        let with_tls = [
            ("push.tls.ca_file", self.tls.ca_file.is_some()),
            ("push.tls.cert_file", self.tls.cert_file.is_some()),
            ("push.tls.key_file", self.tls.key_file.is_some()),
        ];
        if let Some(address) = self.address()?.filter(|address| !address.is_tls())
            && let Some((key, _)) = with_tls.into_iter().find(|(_, is_set)| *is_set)
        {
            return refuse(key, &format!("it is for https, and push.url is {}", address.url()));
        }
        match (&self.tls.cert_file, &self.tls.key_file) {
            (Some(_), None) => return refuse("push.tls.cert_file", "it needs push.tls.key_file, the certificate's key"),
            (None, Some(_)) => return refuse("push.tls.key_file", "it needs push.tls.cert_file, the key's certificate"),
            _ => {}
        }
        match (&self.basic_auth_user, &self.basic_auth_password_file) {
            (Some(_), None) => return refuse("push.basic_auth_user", "it needs push.basic_auth_password_file"),
            (None, Some(_)) => return refuse("push.basic_auth_password_file", "it needs push.basic_auth_user"),
            (Some(_), Some(_)) if self.token_file.is_some() => {
                return refuse("push.token_file", "a request carries either a token or push.basic_auth_user, not both");
            }
            (Some(user), _) if user.is_empty() || user.contains(':') || user.contains(char::is_control) => {
                return refuse("push.basic_auth_user", "it is empty, or has a colon or control characters");
            }
            _ => {}
        }
        if let Some(tenant) = &self.tenant
            && (!(1..=TENANT_CHARS_MAX).contains(&tenant.len()) || !tenant.bytes().all(|byte| byte.is_ascii_graphic()))
        {
            return refuse("push.tenant", "it has 1 to 150 printable ASCII characters and no blanks");
        }
        let is_name = |name: &str| {
            name.starts_with(|first: char| first.is_ascii_alphabetic() || first == '_')
                && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.'))
        };
        if let Some(name) = self.labels.keys().find(|name| !is_name(name)) {
            // Servers reject every profile with such a label.
            return Err(ConfigError::Range { key: "push.labels", value: name.clone(), allowed: "names of letters, digits, _ and ." });
        }
        Ok(())
    }

    /// The access to the server, with the current content of its files.
    ///
    /// # Errors
    /// If a file cannot be read, or every user may read a secret.
    pub fn access(&self) -> Result<Access, ConfigError> {
        let credentials = match (&self.token_file, &self.basic_auth_user, &self.basic_auth_password_file) {
            (Some(path), _, _) => Credentials::Token(secret_line("push.token_file", path)?),
            (None, Some(user), Some(path)) => {
                Credentials::Basic { user: user.clone(), password: secret_line("push.basic_auth_password_file", path)? }
            }
            _ => Credentials::None,
        };
        let identity = match (&self.tls.cert_file, &self.tls.key_file) {
            (Some(certificate), Some(key)) => {
                Some(Identity { certificates: read_file("push.tls.cert_file", certificate)?, key: secret("push.tls.key_file", key)? })
            }
            _ => None,
        };
        let authorities = self.tls.ca_file.as_deref().map(|path| read_file("push.tls.ca_file", path)).transpose()?;
        Ok(Access { credentials, tenant: self.tenant.clone(), authorities, identity })
    }

    /// The key of the file that cannot be used.
    pub(in crate::agent) fn explain(&self, error: &AccessError) -> ConfigError {
        let (key, path) = match error {
            AccessError::Credentials(_) if self.token_file.is_some() => ("push.token_file", &self.token_file),
            AccessError::Credentials(_) => ("push.basic_auth_password_file", &self.basic_auth_password_file),
            AccessError::Tenant(_) => ("push.tenant", &None),
            AccessError::Authorities(_) => ("push.tls.ca_file", &self.tls.ca_file),
            AccessError::NoRoots(_) => ("push.tls.ca_file", &None),
            AccessError::Certificate(_) => ("push.tls.cert_file", &self.tls.cert_file),
            AccessError::Key(_) => ("push.tls.key_file", &self.tls.key_file),
        };
        match path {
            Some(path) => ConfigError::File { key, path: path.clone(), reason: error.to_string() },
            None => ConfigError::Setting { key, reason: error.to_string() },
        }
    }
}
