//! Debug information from the servers in `DEBUGINFOD_URLS`, for commands that name functions.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::output::say;
use super::progress;
use crate::sanitize::terminal;
use crate::symbol::debuginfod::{self, CACHE_MIB_DEFAULT, Debuginfod, OPEN_BYTES_DEFAULT, Patience, Settings};
use crate::units::{HumanBytes, counted};

/// Longest wait for files, in all: a profile with fewer names is worth more than a command that seems to hang.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// Lets this command look for debug information if there are servers of it. With `waits` it waits for files that are not in the cache; the
/// flag is set meanwhile, and clearing it ends the wait.
pub fn look(waits: Option<Arc<AtomicBool>>) {
    let Ok(words) = std::env::var(debuginfod::URLS_VARIABLE) else { return };
    let (urls, notes) = debuginfod::words(&words);
    notes.iter().for_each(|note| say!("fragprof: {}", terminal(note)));
    if urls.is_empty() {
        return;
    }
    let variable = |name| std::env::var_os(name);
    let Some(cache_directory) = debuginfod::user_cache(variable("XDG_CACHE_HOME").as_deref(), variable("HOME").as_deref()) else {
        say!("fragprof: no debug information is fetched: neither XDG_CACHE_HOME nor HOME says where to keep it");
        return;
    };
    let patience = waits.map(|waits| Patience { time_max: WAIT_MAX, waits, say: told });
    let settings = Settings {
        urls,
        authorities: None,
        cache_directory,
        cache_bytes_max: CACHE_MIB_DEFAULT << 20,
        open_bytes_max: OPEN_BYTES_DEFAULT,
        patience,
    };
    match Debuginfod::new(settings) {
        Ok(debuginfod) => debuginfod::install(Arc::new(debuginfod)),
        Err(error) => say!("fragprof: no debug information is fetched: {}", terminal(&error.to_string())),
    }
}

/// Says what was waited for, below which there is room for the progress line.
fn told(text: &str) {
    progress::make_room();
    say!("fragprof: {}", terminal(text));
}

/// Says what became of the files that were looked for, and ends fetching.
pub fn conclude() {
    let Some(debuginfod) = debuginfod::installed() else { return };
    debuginfod.abandon();
    let sums = debuginfod.counted();
    let parts = [
        (sums.fetched, format!("{} fetched ({})", counted(sums.fetched, "file"), HumanBytes(sums.bytes))),
        (sums.cached, format!("{} in the cache", sums.cached)),
        (sums.not_known, format!("{} not known", sums.not_known)),
        (sums.wrong, format!("{} wrong", sums.wrong)),
        (sums.too_large, format!("{} too large", sums.too_large)),
        (sums.failed, format!("{} failed", sums.failed)),
        (sums.put_off, format!("{} put off", sums.put_off)),
        (sums.waiting, format!("{} given up", sums.waiting)),
    ];
    let parts: Vec<String> = parts.into_iter().filter(|(count, _)| *count > 0).map(|(_, text)| text).collect();
    if !parts.is_empty() {
        say!("fragprof: debug information: {}", parts.join(", "));
    }
}
