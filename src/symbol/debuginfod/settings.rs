//! The settings' defaults and forms: `DEBUGINFOD_URLS`, and where the cache is.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use super::{SERVERS_MAX, ServerError};
use crate::client::Address;

/// Addresses of servers, separated by blanks (debuginfod(8)).
pub const URLS_VARIABLE: &str = "DEBUGINFOD_URLS";
/// Limit of the cache, MiB.
pub const CACHE_MIB_DEFAULT: u64 = 1024;
/// Limit of the agent's debug files that are open at a time, MiB with their sections decompressed: they take up to 190 MiB of the 512 that its
/// service and its pod have.
pub const OPEN_MIB_DEFAULT: u64 = 128;
/// The agent's cache, if it has no state directory.
pub const CACHE_DIRECTORY_DEFAULT: &str = "/var/cache/fragprof/debuginfod";

/// A policy on signatures in `DEBUGINFOD_URLS`, for the servers after it. Signatures (IMA) are not checked here.
const POLICY: &str = "ima:";
/// The policy that requires a signature.
const ENFORCING: &str = "ima:enforcing";

/// The servers in `DEBUGINFOD_URLS`, and a note for each that is not used.
#[must_use]
pub fn words(text: &str) -> (Vec<String>, Vec<String>) {
    let (mut urls, mut notes, mut needs_signature) = (Vec::new(), Vec::new(), false);
    for word in text.split_ascii_whitespace() {
        if word.starts_with(POLICY) {
            needs_signature = word == ENFORCING;
        } else if let Err(error) = check_url(word) {
            notes.push(format!("{URLS_VARIABLE}: {error}"));
        } else if needs_signature {
            notes.push(format!("{URLS_VARIABLE}: {word} is not used: signatures, which {ENFORCING} requires, are not checked"));
        } else if urls.len() >= SERVERS_MAX {
            notes.push(format!("{URLS_VARIABLE}: {word} is not used: at most {SERVERS_MAX} servers are asked"));
        } else {
            urls.push(word.to_owned());
        }
    }
    (urls, notes)
}

/// Checks the address of a server.
///
/// # Errors
/// If it does not begin with `http://` or `https://`, or is not an address.
pub fn check_url(url: &str) -> Result<(), ServerError> {
    parse_url(url).map(drop)
}

/// The address of a server, which is not a unix socket.
pub(super) fn parse_url(url: &str) -> Result<Address, ServerError> {
    if url.starts_with("unix:") {
        return Err(ServerError::Local(url.to_owned()));
    }
    Address::parse(url).map_err(|error| ServerError::Address(error.to_string()))
}

/// The cache of a command: in `$XDG_CACHE_HOME`, or in `.cache` of `$HOME` (XDG Base Directory Specification: relative paths are ignored).
#[must_use]
pub fn user_cache(xdg_cache_home: Option<&OsStr>, home: Option<&OsStr>) -> Option<PathBuf> {
    let absolute = |path: Option<&OsStr>| path.map(Path::new).filter(|path| path.is_absolute()).map(Path::to_path_buf);
    let caches = absolute(xdg_cache_home).or_else(|| absolute(home).map(|home| home.join(".cache")))?;
    Some(caches.join("fragprof").join("debuginfod"))
}
