//! Starts systemd's services with the sampler: a drop-in beside the unit, and nothing else of it changed.
//!
//! ```text
//! name ─→ load: the unit's file and drop-ins, as systemd searches them ─→ examine: its programs ─→ drop_in: written, removed, listed
//! ```
//!
//! The files are read here and not asked of systemd, so that a template, which has no properties, and the root directory of an image are
//! treated as any other unit.

pub mod drop_in;
pub mod name;
pub mod syntax;

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use thiserror::Error;

pub use self::name::{NameError, UnitName};
use super::fit;
use super::image::{self, ImageUnfit};
use super::library::Flavour;
use super::root::{Root, RootError};
use crate::allocator::is_own_library;

/// Where system units are searched for, the first that has one wins (systemd.unit(5)).
const SEARCH: [&str; 13] = [
    "/etc/systemd/system.control",
    "/run/systemd/system.control",
    "/run/systemd/transient",
    "/run/systemd/generator.early",
    "/etc/systemd/system",
    "/etc/systemd/system.attached",
    "/run/systemd/system",
    "/run/systemd/system.attached",
    "/run/systemd/generator",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
    "/run/systemd/generator.late",
];
/// Where systemd looks for programs that are named without a path.
const PROGRAMS: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Bytes of a unit's or environment file.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Drop-ins of a unit.
const DROP_INS_MAX: usize = 1024;
/// The variable.
pub const PRELOAD: &str = "LD_PRELOAD";

/// Why a unit is not started with the sampler. Each message names what is wrong and what to do.
#[derive(Debug, Error)]
pub enum UnitRefusal {
    /// No such unit.
    #[error("there is no unit {0} (searched as systemd does; systemctl list-unit-files shows them)")]
    Unknown(UnitName),
    /// Linked to /dev/null.
    #[error("{0} is masked: systemctl unmask {0}")]
    Masked(UnitName),
    /// A file cannot be read.
    #[error("cannot read {path}: {reason}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// Too many drop-ins.
    #[error("{0} has more than {DROP_INS_MAX} drop-ins")]
    DropIns(UnitName),
    /// No program.
    #[error("{0} starts no program (ExecStart=)")]
    NoProgram(UnitName),
    /// A specifier that is not known here.
    #[error("{text} in {unit} has a specifier whose value is not known here")]
    Specifier {
        /// The unit.
        unit: UnitName,
        /// The program, or what is preloaded, as it is written.
        text: String,
    },
    /// One of its programs.
    #[error("{setting}= of {unit}: {unfit}")]
    Program {
        /// The unit.
        unit: UnitName,
        /// The setting that names it.
        setting: &'static str,
        /// The reason.
        unfit: ImageUnfit,
    },
    /// One of its programs, as its dynamic linker lists what it loads.
    #[error("ExecStart= of {unit}: {unfit}")]
    Loaded {
        /// The unit.
        unit: UnitName,
        /// The reason.
        unfit: fit::Unfit,
    },
    /// Another root directory.
    #[error(
        "{unit} has a root directory of its own ({setting}=), in which the library is not: install it there, with fragprof run --install, and set LD_PRELOAD in a drop-in"
    )]
    OtherRoot {
        /// The unit.
        unit: UnitName,
        /// The setting.
        setting: &'static str,
    },
    /// The variable is removed.
    #[error("{0} removes LD_PRELOAD from its environment (UnsetEnvironment=)")]
    Unset(UnitName),
    /// A drop-in that is read later.
    #[error("{path} is read after the drop-in of fragprof and sets the environment: rename it to something before {}", drop_in::FILE)]
    Later {
        /// The drop-in.
        path: PathBuf,
    },
    /// Somebody else's.
    #[error("{path} was not written by fragprof: it is left alone")]
    Foreign {
        /// The file.
        path: PathBuf,
    },
    /// Enabled the other way.
    #[error("{unit} is enabled by {path} already: fragprof sampler disable {unit} first")]
    Already {
        /// The unit.
        unit: UnitName,
        /// The drop-in.
        path: PathBuf,
    },
    /// Not enabled.
    #[error("{0} is not enabled: fragprof sampler status lists those that are")]
    NotEnabled(UnitName),
    /// A value that cannot be written into a drop-in.
    #[error("the LD_PRELOAD that {0} sets has a control character")]
    Control(UnitName),
    /// Writing failed.
    #[error("cannot write {path}: {source}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

impl UnitRefusal {
    /// Short, for scripts.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Unknown(_) => "unknown_unit",
            Self::Masked(_) => "masked",
            Self::Unreadable { .. } => "unreadable",
            Self::DropIns(_) => "drop_ins",
            Self::NoProgram(_) => "no_program",
            Self::Specifier { .. } => "specifier",
            Self::Program { unfit, .. } => unfit.name(),
            Self::Loaded { unfit, .. } => match unfit {
                fit::Unfit::Sanitizer { .. } => "sanitizer",
                _ => "unreadable",
            },
            Self::OtherRoot { .. } => "other_root",
            Self::Unset(_) => "unset",
            Self::Later { .. } => "later",
            Self::Foreign { .. } => "foreign",
            Self::Already { .. } => "already",
            Self::NotEnabled(_) => "not_enabled",
            Self::Control(_) => "control_character",
            Self::Write { .. } => "not_written",
        }
    }
}

/// What a unit's files say, without the drop-in of fragprof.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Commands, as they are written, by the setting that names them.
    commands: Vec<(&'static str, String)>,
    /// `Environment=`.
    environment: BTreeMap<String, String>,
    /// `EnvironmentFile=`, as written.
    environment_files: Vec<String>,
    unset: Vec<String>,
    /// An `LD_PRELOAD` with a specifier that is not known here.
    unknown: Option<String>,
    root_directory: bool,
    root_image: bool,
}

/// Settings with commands; only the first decides whether the unit can be sampled.
const COMMANDS: [&str; 7] = ["ExecStart", "ExecStartPre", "ExecStartPost", "ExecReload", "ExecStop", "ExecStopPost", "ExecCondition"];

impl Settings {
    /// Adds what a file of the unit says.
    fn add(&mut self, text: &str, name: &UnitName) {
        for (key, value) in syntax::assignments(text, "Service") {
            if let Some(key) = COMMANDS.into_iter().find(|command| *command == key) {
                if value.is_empty() {
                    self.commands.retain(|(own, _)| *own != key);
                } else {
                    self.commands.push((key, value));
                }
                continue;
            }
            match key {
                "Environment" if value.is_empty() => {
                    self.environment.clear();
                    self.unknown = None;
                }
                "Environment" => {
                    for word in syntax::words(&value) {
                        let Some((variable, value)) = word.split_once('=') else { continue };
                        let expanded = syntax::expanded(value, name);
                        if variable == PRELOAD {
                            self.unknown = expanded.is_none().then(|| value.to_owned());
                        }
                        self.environment.insert(variable.to_owned(), expanded.unwrap_or_else(|| value.to_owned()));
                    }
                }
                "EnvironmentFile" if value.is_empty() => self.environment_files.clear(),
                "EnvironmentFile" => self.environment_files.push(value),
                "UnsetEnvironment" if value.is_empty() => self.unset.clear(),
                "UnsetEnvironment" => self.unset.extend(syntax::words(&value)),
                "RootDirectory" => self.root_directory = !value.is_empty() && value != "/",
                "RootImage" => self.root_image = !value.is_empty(),
                _ => {}
            }
        }
    }
}

/// A unit as it is on disk.
#[derive(Debug, Clone)]
pub struct Unit {
    /// Its name.
    pub name: UnitName,
    /// The name for which its specifiers stand: another one if it is an alias.
    real: UnitName,
    /// Its file.
    pub file: PathBuf,
    settings: Settings,
    /// Drop-ins that are read after that of fragprof and set the environment.
    later: Option<PathBuf>,
}

/// What the drop-in has to say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The build of the library.
    pub flavour: Flavour,
    /// What the unit preloads by itself.
    pub preloaded: Option<String>,
    /// Whether it reads environment files, which count more than `Environment=`.
    pub has_files: bool,
    /// What will not be seen, or is not known, as sentences.
    pub doubts: Vec<String>,
}

impl Unit {
    /// Reads the unit's files in a root directory.
    ///
    /// # Errors
    /// If it is unknown, masked, or cannot be read.
    pub fn load(root: &Root, name: &UnitName) -> Result<Self, UnitRefusal> {
        let names = std::iter::once(name.clone()).chain(name.template());
        let mut places = names.flat_map(|name| SEARCH.map(|folder| Path::new(folder).join(name.as_str())));
        let mut found = None;
        let file = places.find(|path| {
            found = root.find(path).ok();
            found.is_some() || is_masked(root, path)
        });
        let file = file.ok_or_else(|| UnitRefusal::Unknown(name.clone()))?;
        if found.as_ref().is_none_or(|found| found.path == Path::new("/dev/null") || found.metadata.len() == 0) {
            return Err(UnitRefusal::Masked(name.clone()));
        }
        // By an alias, it is the unit of the file that the link leads to; drop-ins of both names apply.
        let resolved = found.and_then(|found| found.path.file_name().map(OsStr::to_owned));
        let real = resolved
            .filter(|resolved| Some(resolved.as_os_str()) != file.file_name())
            .and_then(|resolved| resolved.to_str()?.parse::<UnitName>().ok())
            .and_then(|other| other.of_instance(name.instance()))
            .unwrap_or_else(|| name.clone());
        let mut owners = name.drop_in_names();
        owners.extend(real.drop_in_names());
        let mut settings = Settings::default();
        settings.add(&read(root, &file)?, &real);
        let mut later = None;
        for path in drop_ins(root, name, &owners)? {
            let text = read(root, &path)?;
            settings.add(&text, &real);
            let is_later = path.file_name().is_some_and(|file| file > OsStr::new(drop_in::FILE));
            let sets = |key: &str| key == "Environment" || key == "EnvironmentFile";
            if is_later && syntax::assignments(&text, "Service").iter().any(|(key, _)| sets(key)) {
                later = Some(path);
            }
        }
        Ok(Self { name: name.clone(), real, file, settings, later })
    }

    /// Whether the unit can be started with the sampler, and what its drop-in has to say. `runs_here`: the root directory is this machine's,
    /// so that a program's dynamic linker may be asked what it loads.
    ///
    /// # Errors
    /// [`UnitRefusal`].
    pub fn examine(&self, root: &Root, runs_here: bool) -> Result<Plan, UnitRefusal> {
        let name = || self.name.clone();
        for (setting, is_set) in [("RootDirectory", self.settings.root_directory), ("RootImage", self.settings.root_image)] {
            if is_set {
                return Err(UnitRefusal::OtherRoot { unit: name(), setting });
            }
        }
        if let Some(text) = &self.settings.unknown {
            return Err(UnitRefusal::Specifier { unit: name(), text: text.clone() });
        }
        if self.settings.unset.iter().any(|word| word == PRELOAD || word.starts_with("LD_PRELOAD=")) {
            return Err(UnitRefusal::Unset(name()));
        }
        if let Some(path) = &self.later {
            return Err(UnitRefusal::Later { path: path.clone() });
        }
        let mut plan = Plan { flavour: Flavour::Standard, preloaded: None, has_files: false, doubts: Vec::new() };
        let mut programs = 0;
        for (setting, value) in &self.settings.commands {
            let command = self.command(value)?;
            let examined = image::examine(root, &command, PROGRAMS);
            if *setting != "ExecStart" {
                // Any other reason only means that the helper is not sampled.
                if let Err(unfit @ ImageUnfit::Sanitizer { .. }) = examined {
                    return Err(UnitRefusal::Program { unit: name(), setting, unfit });
                }
                continue;
            }
            programs += 1;
            let fit = examined.map_err(|unfit| UnitRefusal::Program { unit: name(), setting, unfit })?;
            if fit.flavour == Flavour::Jemalloc {
                plan.flavour = Flavour::Jemalloc;
            }
            plan.doubts.extend(fit.doubts);
            if runs_here {
                let loaded = fit::examine(&[fit.program.into_os_string()]).map_err(|unfit| UnitRefusal::Loaded { unit: name(), unfit })?;
                if loaded.flavour == Flavour::Jemalloc {
                    plan.flavour = Flavour::Jemalloc;
                }
            }
        }
        if programs == 0 {
            return Err(UnitRefusal::NoProgram(name()));
        }
        self.environment(root, &mut plan)?;
        plan.doubts.dedup();
        Ok(plan)
    }

    /// The words of a command, without the prefixes of its program (systemd.service(5)).
    fn command(&self, value: &str) -> Result<Vec<OsString>, UnitRefusal> {
        let mut words = syntax::words(value);
        let Some(first) = words.first_mut() else { return Ok(Vec::new()) };
        let program = first.trim_start_matches(['@', '-', ':', '+', '!', '|']);
        let has_name = first.get(..first.len() - program.len()).is_some_and(|prefixes| prefixes.contains('@'));
        let expanded = syntax::expanded(program, &self.real);
        let program = expanded.ok_or_else(|| UnitRefusal::Specifier { unit: self.name.clone(), text: program.to_owned() })?;
        *first = program;
        if has_name && words.len() > 1 {
            words.remove(1);
        }
        Ok(words.into_iter().map(OsString::from).collect())
    }

    /// What is preloaded already: environment files count more than settings.
    fn environment(&self, root: &Root, plan: &mut Plan) -> Result<(), UnitRefusal> {
        plan.preloaded = self.settings.environment.get(PRELOAD).cloned();
        for file in &self.settings.environment_files {
            plan.has_files = true;
            let (path, is_optional) = file.strip_prefix('-').map_or((file.as_str(), false), |path| (path, true));
            let Some(path) = syntax::expanded(path, &self.real).filter(|path| !path.contains(['*', '?', '['])) else {
                plan.doubts.push(format!("LD_PRELOAD in {path} would not be kept: which file that is is not known here"));
                continue;
            };
            match read(root, Path::new(&path)) {
                Ok(text) => plan.preloaded = syntax::variable_of_file(&text, PRELOAD).or(plan.preloaded.take()),
                Err(_) if is_optional => {}
                Err(error) => plan.doubts.push(format!("LD_PRELOAD in {path} would not be kept: {error}")),
            }
        }
        let is_sanitizer = |entry: &str| {
            let name = entry.rsplit('/').next().unwrap_or(entry);
            fit::SANITIZER_LIBRARIES.iter().any(|start| name.starts_with(start))
        };
        let Some(preloaded) = &plan.preloaded else { return Ok(()) };
        if preloaded.chars().any(char::is_control) {
            return Err(UnitRefusal::Control(self.name.clone()));
        }
        let mut entries = preloaded.split([':', ' ']).filter(|entry| !is_own_library(entry.as_bytes()));
        if let Some(name) = entries.clone().find(|entry| is_sanitizer(entry)) {
            let unfit = ImageUnfit::Sanitizer { path: self.file.clone(), name: name.to_owned() };
            return Err(UnitRefusal::Program { unit: self.name.clone(), setting: "Environment", unfit });
        }
        if entries.any(|entry| entry.contains("libjemalloc.")) {
            plan.flavour = Flavour::Jemalloc;
        }
        Ok(())
    }
}

/// The unit's drop-ins without that of fragprof, in the order in which systemd reads them: by file name, whatever their directories.
fn drop_ins(root: &Root, name: &UnitName, owners: &[String]) -> Result<Vec<PathBuf>, UnitRefusal> {
    let mut found: BTreeMap<OsString, PathBuf> = BTreeMap::new();
    for owner in owners {
        for folder in SEARCH {
            let folder = Path::new(folder).join(format!("{owner}.d"));
            let Ok(there) = root.find(&folder) else { continue };
            let Ok(entries) = std::fs::read_dir(&there.here) else { continue };
            for entry in entries.flatten().take(DROP_INS_MAX + 1) {
                let file = entry.file_name();
                if !file.as_bytes().ends_with(b".conf") || file == drop_in::FILE {
                    continue;
                }
                // One of the same name in a more specific or earlier directory replaces it.
                found.entry(file.clone()).or_insert_with(|| folder.join(file));
            }
        }
    }
    if found.len() > DROP_INS_MAX {
        return Err(UnitRefusal::DropIns(name.clone()));
    }
    // A link to /dev/null hides those of its name.
    Ok(found.into_values().filter(|path| !is_masked(root, path)).collect())
}

fn is_masked(root: &Root, path: &Path) -> bool {
    let Some((folder, name)) = path.parent().zip(path.file_name()) else { return false };
    let Ok(folder) = root.find(folder) else { return false };
    std::fs::read_link(folder.here.join(name)).is_ok_and(|target| target == Path::new("/dev/null"))
}

fn read(root: &Root, path: &Path) -> Result<String, UnitRefusal> {
    let failed = |reason: String| UnitRefusal::Unreadable { path: path.to_owned(), reason };
    let (_, file) = root.open(path).map_err(|error| match error {
        RootError::Io { source, .. } => failed(source.to_string()),
        other => failed(other.to_string()),
    })?;
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(|error| failed(error.to_string()))?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(failed(format!("it is larger than {} MiB", FILE_BYTES_MAX >> 20)));
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests;
