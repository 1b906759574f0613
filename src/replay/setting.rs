//! What a trace is replayed under: an allocator, its settings, and the environment that chooses both.

use std::ffi::OsString;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use crate::allocator::{Allocator, Choice, SettingForm};
use crate::process::elf::Elf;
use crate::trace::{End, Header};

/// Where libraries are looked for, for names without a directory.
const DIRECTORIES: [&str; 8] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/local/lib",
    "/usr/lib64",
    "/usr/lib",
    "/lib64",
];
/// The variable with which the loader is told to load a library first.
const PRELOAD: &str = "LD_PRELOAD";

/// An allocator with its settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// As it is written on the command line, and shown.
    pub label: String,
    /// The variables that choose it.
    pub environment: Vec<(OsString, OsString)>,
    /// The allocator, if it is a known one.
    pub allocator: Option<Allocator>,
    /// What must be installed before it can be replayed.
    pub missing: Option<&'static str>,
}

/// Why a setting is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SettingError {
    /// No such allocator.
    #[error("{0:?} is neither an allocator ({known}) nor the path of a library", known = names())]
    Unknown(String),
    /// No such file.
    #[error("there is no library {0}")]
    NoFile(String),
    /// A setting without its value, or with characters that separate settings.
    #[error("{0:?} is not of the form key=value")]
    NotASetting(String),
    /// A setting that the allocator would ignore.
    #[error("{allocator} has no setting {key:?}: {file} does not know the name")]
    NoSuchSetting {
        /// The allocator.
        allocator: &'static str,
        /// The setting's name.
        key: String,
        /// The file with the names of its settings.
        file: String,
    },
    /// A value that the allocator would ignore.
    #[error("the value of {0:?} is not a whole number: {1} would ignore it")]
    NotANumber(String, &'static str),
    /// A file that replaces no allocator.
    #[error("{0} is no library with a malloc of its own: with it preloaded nothing would change")]
    NotAnAllocator(String),
}

fn names() -> String {
    let names = Allocator::known().filter(|allocator| allocator.row().choice.is_some()).map(Allocator::name);
    names.collect::<Vec<_>>().join(", ")
}

/// The first of these files on this machine.
fn find(names: &[&str]) -> Option<PathBuf> {
    let mut paths = names.iter().flat_map(|name| DIRECTORIES.iter().map(move |directory| Path::new(directory).join(name)));
    paths.find(|path| path.exists())
}

/// The library of an allocator on this machine; `None` if it is not installed, or needs none.
fn installed(choice: &Choice) -> Option<PathBuf> {
    find(choice.preload)
}

/// Largest library whose text is searched.
const LIBRARY_BYTES_MAX: u64 = 64 << 20;

/// Refuses settings that the allocator would ignore: its library on this machine does not have their names, or cannot read the values.
fn check(allocator: Allocator, choice: &Choice, pairs: &[(&str, &str)]) -> Result<(), SettingError> {
    let is_number = |value: &str| value.strip_prefix("0x").map_or_else(|| value.parse::<u64>(), |hex| u64::from_str_radix(hex, 16)).is_ok();
    if let Some((key, value)) = pairs.iter().find(|(_, value)| choice.is_numeric && !is_number(value)) {
        return Err(SettingError::NotANumber(format!("{key}={value}"), allocator.name()));
    }
    let names = if choice.named_in.is_empty() { choice.preload } else { choice.named_in };
    // What is not installed is not replayed; what cannot be read is not judged.
    let Some(path) = find(names).filter(|_| !pairs.is_empty()) else { return Ok(()) };
    let mut text = Vec::new();
    let read = File::open(&path).and_then(|file| file.take(LIBRARY_BYTES_MAX).read_to_end(&mut text));
    let has = |name: String| text.windows(name.len() + 1).any(|window| window.strip_suffix(b"\0") == Some(name.as_bytes()));
    let is_known = |key: &str| match choice.form {
        SettingForm::List { prefix, .. } => has(format!("{prefix}{key}")),
        SettingForm::Each { prefix } => has(format!("{prefix}{}", key.to_ascii_uppercase())) || has(key.to_ascii_lowercase()),
    };
    match pairs.iter().find(|(key, _)| read.is_ok() && !is_known(key)) {
        Some((key, _)) => {
            Err(SettingError::NoSuchSetting { allocator: allocator.name(), key: (*key).to_owned(), file: path.display().to_string() })
        }
        None => Ok(()),
    }
}

/// Whether a library has a malloc that replaces the C library's when it is preloaded.
fn replaces_malloc(path: &Path) -> bool {
    let Some(elf) = File::open(path).ok().and_then(|file| Elf::parse(file).ok()) else { return false };
    let mut found = false;
    elf.for_each_function(|function| found |= function.exported && function.name == b"malloc");
    found
}

impl Setting {
    /// Reads `NAME`, `NAME:key=value,key=value` or `/path/lib.so`. `cpus`: what the recorded process could use.
    ///
    /// # Errors
    /// If it names nothing that can be replayed.
    pub fn parse(text: &str, cpus: u32) -> Result<Self, SettingError> {
        if text.contains('/') {
            let path = std::fs::canonicalize(text).map_err(|_| SettingError::NoFile(text.to_owned()))?;
            if !replaces_malloc(&path) {
                return Err(SettingError::NotAnAllocator(text.to_owned()));
            }
            let environment = vec![(PRELOAD.into(), path.into_os_string())];
            return Ok(Self { label: text.to_owned(), environment, allocator: None, missing: None });
        }
        let (name, settings) = text.split_once(':').unwrap_or((text, ""));
        let allocator = Allocator::known().find(|allocator| allocator.name() == name);
        match allocator.and_then(|allocator| Some((allocator, allocator.row().choice.as_ref()?))) {
            Some((allocator, choice)) => {
                check(allocator, choice, &pairs(settings)?)?;
                Self::of(allocator, choice, settings, cpus)
            }
            None => Err(SettingError::Unknown(name.to_owned())),
        }
    }

    fn of(allocator: Allocator, choice: &Choice, settings: &str, cpus: u32) -> Result<Self, SettingError> {
        let mut environment: Vec<(OsString, OsString)> = Vec::new();
        let mut missing = None;
        if !choice.preload.is_empty() {
            match installed(choice) {
                Some(path) => environment.push((PRELOAD.into(), path.into_os_string())),
                None => missing = Some(choice.package),
            }
        }
        environment.extend(variables(choice, &pairs(settings)?, cpus));
        let label = if settings.is_empty() { allocator.name().to_owned() } else { format!("{}:{settings}", allocator.name()) };
        Ok(Self { label, environment, allocator: Some(allocator), missing })
    }

    /// All that are tried by default.
    #[must_use]
    pub fn trials(cpus: u32) -> Vec<Self> {
        let choices = Allocator::known().filter_map(|allocator| Some((allocator, allocator.row().choice.as_ref()?)));
        let trials = choices.flat_map(|(allocator, choice)| choice.trials.iter().map(move |settings| (allocator, choice, settings)));
        trials.filter_map(|(allocator, choice, settings)| Self::of(allocator, choice, settings, cpus).ok()).collect()
    }

    /// The recorded process's own, and what is not the same here.
    #[must_use]
    pub fn today(header: &Header, end: Option<&End>, cpus: u32) -> (Self, Vec<String>) {
        let mut notes = Vec::new();
        let recorded = end.map(|end| &end.allocators).filter(|found| !found.is_empty()).unwrap_or(&header.allocators);
        // "name in file"; the C library's gives way to any other.
        let of_entry = |entry: &String| {
            let (name, file) = entry.split_once(" in ").unwrap_or((entry, ""));
            Some((Allocator::of_name(name)?, file.to_owned()))
        };
        let mut found: Vec<(Allocator, String)> = recorded.iter().filter_map(of_entry).collect();
        found.sort_by_key(|(allocator, _)| allocator.row().gives_way);
        let preloaded = header.environment.iter().filter(|(name, _)| name == PRELOAD).flat_map(|(_, value)| value.split([' ', ':']));
        let preloaded = preloaded.filter_map(|path| {
            let name = Path::new(path).file_name()?.to_str()?;
            Some((Allocator::of_library(name)?, path.to_owned()))
        });
        let (allocator, file) = preloaded.into_iter().next().or_else(|| found.into_iter().next()).unwrap_or_default();
        let Some(choice) = allocator.row().choice.as_ref() else {
            notes.push(format!("the recorded allocator ({}) cannot be replayed: \"today\" is the C library's", allocator.name()));
            let environment = vec![];
            return (Self { label: "today".into(), environment, allocator: None, missing: None }, notes);
        };
        let mut environment: Vec<(OsString, OsString)> = Vec::new();
        if !choice.preload.is_empty() {
            let name = Path::new(&file).file_name().and_then(|name| name.to_str()).unwrap_or("");
            let is_its_library = Allocator::of_library(name) == Some(allocator);
            match Some(PathBuf::from(&file)).filter(|path| is_its_library && path.exists()).or_else(|| installed(choice)) {
                Some(path) => {
                    if !is_its_library {
                        notes.push(format!(
                            "the recorded {} is part of {file}; it is replayed with {}, whose size classes and defaults may differ",
                            allocator.name(),
                            path.display()
                        ));
                    }
                    environment.push((PRELOAD.into(), path.into_os_string()));
                }
                None => notes.push(format!(
                    "the recorded {} is not installed here (package {}): \"today\" is the C library's",
                    allocator.name(),
                    choice.package
                )),
            }
        }
        let own = header.environment.iter().filter(|(name, _)| name != PRELOAD);
        environment.extend(own.map(|(name, value)| (name.into(), value.into())));
        if !is_set(&environment, choice) {
            environment.extend(variables(choice, &[], cpus));
        }
        (Self { label: format!("today ({})", allocator.name()), environment, allocator: Some(allocator), missing: None }, notes)
    }

    /// The lines that set it, for a shell or a unit file.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let line = |(name, value): &(OsString, OsString)| format!("{}={}", name.to_string_lossy(), value.to_string_lossy());
        self.environment.iter().map(line).collect()
    }
}

/// Settings and their values.
fn pairs(settings: &str) -> Result<Vec<(&str, &str)>, SettingError> {
    let valid = |part: &str| !part.is_empty() && !part.contains([':', '=', '\0']);
    let pair = |setting| str::split_once(setting, '=').filter(|(key, value)| valid(key) && valid(value));
    let all = settings.split(',').filter(|setting| !setting.is_empty());
    all.map(|setting| pair(setting).ok_or_else(|| SettingError::NotASetting(setting.to_owned()))).collect()
}

/// Whether the variable of an allocator's settings is set.
fn is_set(environment: &[(OsString, OsString)], choice: &Choice) -> bool {
    match choice.form {
        SettingForm::List { variable, .. } => environment.iter().any(|(name, _)| name == variable),
        SettingForm::Each { .. } => false,
    }
}

/// Settings as variables. If this machine has another number of CPUs than the recorded one, the number of arenas is set to what it was
/// there.
fn variables(choice: &Choice, pairs: &[(&str, &str)], cpus: u32) -> Vec<(OsString, OsString)> {
    let here = std::thread::available_parallelism().map_or(0, |here| u32::try_from(here.get()).unwrap_or(0));
    let arenas = choice.arenas.filter(|(key, _)| cpus > 0 && cpus != here && pairs.iter().all(|pair| pair.0 != *key));
    let arenas = arenas.map(|(key, each)| (key.to_owned(), each.saturating_mul(cpus).to_string()));
    let pairs = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).chain(arenas);
    match choice.form {
        SettingForm::List { variable, prefix, assign, separator } => {
            let texts: Vec<String> = pairs.map(|(key, value)| format!("{prefix}{key}{assign}{value}")).collect();
            if texts.is_empty() { Vec::new() } else { vec![(variable.into(), texts.join(&separator.to_string()).into())] }
        }
        SettingForm::Each { prefix } => {
            pairs.map(|(key, value)| (format!("{prefix}{}", key.to_ascii_uppercase()).into(), value.into())).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn here() -> u32 {
        std::thread::available_parallelism().unwrap().get() as u32
    }

    /// Whatever the library on this machine knows.
    fn set(text: &str, cpus: u32) -> Vec<String> {
        let (name, settings) = text.split_once(':').unwrap_or((text, ""));
        let allocator = Allocator::of_name(name).unwrap();
        let lines = Setting::of(allocator, allocator.row().choice.as_ref().unwrap(), settings, cpus).unwrap().lines();
        lines.into_iter().filter(|line| !line.starts_with(PRELOAD)).collect()
    }

    #[test]
    fn settings_are_written_as_each_allocator_reads_them() {
        assert_eq!(
            set("glibc:arena_max=2,tcache_count=0", here()),
            ["GLIBC_TUNABLES=glibc.malloc.arena_max=2:glibc.malloc.tcache_count=0"]
        );
        assert_eq!(set("jemalloc:dirty_decay_ms=0,narenas=4", here()), ["MALLOC_CONF=dirty_decay_ms:0,narenas:4"]);
        assert_eq!(set("mimalloc:purge_delay=0", here()), ["MIMALLOC_PURGE_DELAY=0"]);
        assert!(set("glibc", here()).is_empty());
    }

    #[test]
    fn arenas_are_as_many_as_on_the_recorded_machine_unless_they_are_set() {
        let other = here() + 1;
        assert_eq!(set("glibc", other), [format!("GLIBC_TUNABLES=glibc.malloc.arena_max={}", 8 * other)]);
        assert_eq!(set("glibc:arena_max=3", other), ["GLIBC_TUNABLES=glibc.malloc.arena_max=3"]);
    }

    #[test]
    fn what_is_no_setting_is_refused() {
        assert!(matches!(Setting::parse("phkmalloc", 1), Err(SettingError::Unknown(_))));
        assert!(matches!(Setting::parse("musl", 1), Err(SettingError::Unknown(_))));
        assert!(matches!(Setting::parse("/no/such/lib.so", 1), Err(SettingError::NoFile(_))));
        for text in ["glibc:arena_max", "glibc:arena_max=", "glibc:=2", "glibc:a=b=c", "glibc:arena_max=1:glibc.rtld.nns=9"] {
            assert!(matches!(Setting::parse(text, 1), Err(SettingError::NotASetting(_))), "{text}");
        }
    }

    #[test]
    fn what_the_allocator_would_ignore_is_refused_by_name() {
        let refused = |text: &str| Setting::parse(text, here()).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(refused("glibc:arena_maxx=2").contains("glibc has no setting \"arena_maxx\""), "{}", refused("glibc:arena_maxx=2"));
        assert!(refused("glibc:arena_max=banana").contains("not a whole number"));
        assert_eq!((refused("glibc:arena_max=2,tcache_count=0"), refused("glibc:mmap_threshold=0x20000")), (String::new(), String::new()));
        for file in ["/etc/passwd", "/proc/self/exe"] {
            assert!(refused(file).contains("no library with a malloc of its own"), "{file}: {}", refused(file));
        }
    }

    #[test]
    fn today_is_what_the_process_had() {
        let environment = vec![("GLIBC_TUNABLES".to_owned(), "glibc.malloc.arena_max=2".to_owned())];
        let header = Header { allocators: vec!["glibc in /lib/libc.so.6".into()], environment, ..Header::default() };
        let (today, notes) = Setting::today(&header, None, here());
        assert_eq!((today.lines(), today.allocator), (vec!["GLIBC_TUNABLES=glibc.malloc.arena_max=2".to_owned()], Some(Allocator::Glibc)));
        assert!(notes.is_empty());
        let end = End { allocators: vec!["musl in /lib/ld-musl-x86_64.so.1".into()], ..End::default() };
        let (today, notes) = Setting::today(&header, Some(&end), here());
        assert!(today.allocator.is_none() && notes.len() == 1, "{notes:?}");
    }

    #[test]
    fn every_trial_of_the_registry_is_valid() {
        let expected: usize = Allocator::known().filter_map(|allocator| allocator.row().choice).map(|choice| choice.trials.len()).sum();
        assert_eq!(Setting::trials(here()).len(), expected);
    }
}
