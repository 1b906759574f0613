//! The drop-in: what it says, and writing, removing and listing it.
//!
//! Its name sorts behind usual ones, because the last assignment counts. Where the unit reads environment files, which count more than
//! `Environment=`, the variable is in a file of that kind beside it. Nothing else is written, and only files with our first line are
//! replaced or removed.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::{PRELOAD, Plan, UnitName, UnitRefusal, read, syntax};
use crate::replace::replace;
use crate::sampler::library;
use crate::sampler::root::{Root, RootError};
use crate::sampler::{SAMPLE_BYTES_VARIABLE, SAMPLES_PER_SECOND_VARIABLE};

/// The drop-in's file name.
pub const FILE: &str = "zz-fragprof-sampler.conf";
/// The environment file's.
const ENVIRONMENT_FILE: &str = "zz-fragprof-sampler.env";
/// How the first line of both begins.
const MARK: &str = "# Written by fragprof sampler enable";

/// Whether it stays after a reboot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Below /etc.
    Persistent,
    /// Below /run.
    Runtime,
}

impl Place {
    const ALL: [Self; 2] = [Self::Persistent, Self::Runtime];

    fn folder(self) -> &'static Path {
        Path::new(match self {
            Self::Persistent => "/etc/systemd/system",
            Self::Runtime => "/run/systemd/system",
        })
    }

    fn other(self) -> Self {
        match self {
            Self::Persistent => Self::Runtime,
            Self::Runtime => Self::Persistent,
        }
    }

    fn of_unit(self, name: &UnitName) -> PathBuf {
        self.folder().join(format!("{name}.d"))
    }
}

/// Distances, where they are not the library's own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Distances {
    /// Mean distance between samples, bytes.
    pub sample_bytes: Option<u64>,
    /// Samples per second above which it grows.
    pub samples_per_second: Option<u64>,
}

/// A unit that is enabled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Enabled {
    /// The unit.
    pub unit: String,
    /// The drop-in.
    pub drop_in: PathBuf,
    /// The library.
    pub library: String,
    /// Whether the drop-in is gone after a reboot.
    pub runtime: bool,
}

/// The drop-in's text, and that of the environment file if there is one.
#[must_use]
pub fn texts(name: &UnitName, plan: &Plan, library: &Path, distances: Distances, place: Place) -> (String, Option<String>) {
    let preload = library::preload(library, plan.preloaded.as_deref().map(AsRef::as_ref));
    let preload = preload.to_string_lossy();
    let first = format!("{MARK}; fragprof sampler disable {name} removes it.\n");
    let mut text = format!("{first}[Service]\nEnvironment={}\n", syntax::quoted_assignment(PRELOAD, &preload));
    let variables = [(SAMPLE_BYTES_VARIABLE, distances.sample_bytes), (SAMPLES_PER_SECOND_VARIABLE, distances.samples_per_second)];
    for (variable, value) in variables {
        if let Some(value) = value {
            text.push_str(&format!("Environment={variable}={value}\n"));
        }
    }
    if !plan.has_files {
        return (text, None);
    }
    let file = place.of_unit(name).join(ENVIRONMENT_FILE);
    text.push_str(&format!("EnvironmentFile={}\n", file.display()));
    (text, Some(format!("{first}{}\n", syntax::quoted_line(PRELOAD, &preload))))
}

/// Writes it. The directories are created if needed; of the unit nothing else is changed.
///
/// # Errors
/// If there is a file of the name that fragprof did not write, the unit is enabled in the other place, or a file cannot be written.
pub fn write(
    root: &Root,
    name: &UnitName,
    plan: &Plan,
    library: &Path,
    distances: Distances,
    place: Place,
) -> Result<PathBuf, UnitRefusal> {
    let folder = place.of_unit(name);
    let path = folder.join(FILE);
    is_ours(root, &path)?;
    is_ours(root, &folder.join(ENVIRONMENT_FILE))?;
    let other = place.other().of_unit(name).join(FILE);
    if is_ours(root, &other)? {
        return Err(UnitRefusal::Already { unit: name.clone(), path: other });
    }
    let (text, environment) = texts(name, plan, library, distances, place);
    let here = directory(root, &folder)?;
    let failed = |path: PathBuf| move |source| UnitRefusal::Write { path, source };
    // The file that the drop-in names is there before it.
    match environment {
        Some(environment) => {
            replace(&here.join(ENVIRONMENT_FILE), environment.as_bytes(), 0o644).map_err(failed(here.join(ENVIRONMENT_FILE)))?
        }
        None => remove_file(&here.join(ENVIRONMENT_FILE))?,
    }
    replace(&here.join(FILE), text.as_bytes(), 0o644).map_err(failed(here.join(FILE)))?;
    Ok(path)
}

/// Removes what was written, in both places, and directories that are empty then. Returns the drop-ins removed.
///
/// # Errors
/// If the unit is not enabled, a file is not ours, or it cannot be removed.
pub fn remove(root: &Root, name: &UnitName) -> Result<Vec<PathBuf>, UnitRefusal> {
    let mut removed = Vec::new();
    for place in Place::ALL {
        let folder = place.of_unit(name);
        let drop_in = is_ours(root, &folder.join(FILE))?;
        let environment = is_ours(root, &folder.join(ENVIRONMENT_FILE))?;
        let Ok(here) = root.find(&folder) else { continue };
        if drop_in {
            remove_file(&here.here.join(FILE))?;
            removed.push(folder.join(FILE));
        }
        if environment {
            remove_file(&here.here.join(ENVIRONMENT_FILE))?;
        }
        if drop_in || environment {
            // One with other drop-ins stays.
            let _ = fs::remove_dir(&here.here);
        }
    }
    if removed.is_empty() {
        return Err(UnitRefusal::NotEnabled(name.clone()));
    }
    Ok(removed)
}

/// Every unit that is enabled.
#[must_use]
pub fn list(root: &Root) -> Vec<Enabled> {
    let mut found = Vec::new();
    for place in Place::ALL {
        let Ok(folder) = root.find(place.folder()) else { continue };
        let Ok(entries) = fs::read_dir(&folder.here) else { continue };
        for entry in entries.flatten() {
            let name = entry.file_name();
            let Some(name) = name.to_str().and_then(|name| name.strip_suffix(".d")) else { continue };
            let path = place.folder().join(entry.file_name()).join(FILE);
            let Some(library) = library_of(root, &path) else { continue };
            found.push(Enabled { unit: name.to_owned(), drop_in: path, library, runtime: place == Place::Runtime });
        }
    }
    found.sort_by(|a: &Enabled, b: &Enabled| a.unit.cmp(&b.unit));
    found
}

/// The library that a drop-in of ours names.
fn library_of(root: &Root, path: &Path) -> Option<String> {
    let text = read(root, path).ok().filter(|text| text.starts_with(MARK))?;
    let assignments = syntax::assignments(&text, "Service");
    let mut words = assignments.iter().filter(|(key, _)| *key == "Environment").flat_map(|(_, value)| syntax::words(value));
    let value = words.find_map(|word| Some(word.strip_prefix("LD_PRELOAD=")?.replace("%%", "%")))?;
    value.split(':').next().map(str::to_owned)
}

/// Whether a file exists; an error if it is not ours.
fn is_ours(root: &Root, path: &Path) -> Result<bool, UnitRefusal> {
    match root.find(path) {
        Err(RootError::NotFound { .. }) => return Ok(false),
        Err(error) => return Err(UnitRefusal::Unreadable { path: path.to_owned(), reason: error.to_string() }),
        // A link is none of ours, wherever it leads.
        Ok(found) if found.path.file_name() != path.file_name() => {}
        Ok(_) if read(root, path)?.starts_with(MARK) => return Ok(true),
        Ok(_) => {}
    }
    Err(UnitRefusal::Foreign { path: path.to_owned() })
}

fn remove_file(path: &Path) -> Result<(), UnitRefusal> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(UnitRefusal::Write { path: path.to_owned(), source }),
        _ => Ok(()),
    }
}

/// A directory within the root, created if it is missing. Returns its path on this machine.
///
/// # Errors
/// If it cannot be created.
pub fn directory(root: &Root, path: &Path) -> Result<PathBuf, UnitRefusal> {
    match root.find(path) {
        Ok(found) => return Ok(found.here),
        Err(RootError::NotFound { .. }) => {}
        Err(error) => return Err(UnitRefusal::Unreadable { path: path.to_owned(), reason: error.to_string() }),
    }
    let (parent, name) = match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) if !name.as_bytes().is_empty() => (parent, name),
        _ => return Err(UnitRefusal::Unreadable { path: path.to_owned(), reason: "it is no directory".to_owned() }),
    };
    let here = directory(root, parent)?.join(name);
    let failed = |source| UnitRefusal::Write { path: here.clone(), source };
    fs::create_dir(&here).map_err(failed)?;
    // Whatever the umask.
    fs::set_permissions(&here, fs::Permissions::from_mode(0o755)).map_err(failed)?;
    Ok(here)
}
