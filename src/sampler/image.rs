//! Whether a program of a file tree can run with the sampler, determined from its files alone: nothing of the tree is run. For units, images
//! and containers that have not started yet.
//!
//! Libraries are not followed beyond those that the program itself needs, and what the program starts in turn is not known: it inherits
//! `LD_PRELOAD`.

use std::ffi::{OsStr, OsString};
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::fit::{self, Linked, SANITIZER_LIBRARIES, SCRIPT_LINE_BYTES_MAX, SCRIPTS_MAX};
use super::library::Flavour;
use super::root::{Root, RootError};
use crate::machine::Machine;
use crate::process::elf::{Elf, ElfError};

/// The C library that starts a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Libc {
    /// glibc.
    Glibc,
    /// musl.
    Musl,
}

impl Libc {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Glibc => "glibc",
            Self::Musl => "musl",
        }
    }

    /// That of a dynamic linker, by its file name: `ld-linux-x86-64.so.2`, `ld-linux-aarch64.so.1`, `ld-musl-ARCHITECTURE.so.1`.
    fn of_linker(path: &Path) -> Option<Self> {
        let name = path.file_name()?.as_bytes();
        let (linux, musl) = match Machine::HOST {
            Machine::X86_64 => (&b"ld-linux-x86-64.so.2"[..], &b"ld-musl-x86_64.so.1"[..]),
            Machine::Aarch64 => (&b"ld-linux-aarch64.so.1"[..], &b"ld-musl-aarch64.so.1"[..]),
        };
        if name == linux {
            return Some(Self::Glibc);
        }
        (name == musl).then_some(Self::Musl)
    }
}

/// A program that can run with the sampler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageFit {
    /// The file that is executed in the end, by its path in the tree: that of a script is its interpreter.
    pub program: PathBuf,
    /// Its C library.
    pub libc: Libc,
    /// The build of the sampler.
    pub flavour: Flavour,
    /// Allocations that will not be seen, as sentences.
    pub doubts: Vec<String>,
}

/// Why it cannot.
#[derive(Debug, Error)]
pub enum ImageUnfit {
    /// No program is named.
    #[error("no program is named")]
    NoProgram,
    /// The path is relative to a directory that is not known.
    #[error("{} is relative to a directory that is not known here: name it by an absolute path", .0.display())]
    Relative(PathBuf),
    /// There is no such program.
    #[error("{0} is not found")]
    NotFound(String),
    /// A file cannot be read.
    #[error(transparent)]
    Root(RootError),
    /// Neither a script nor a program of this machine.
    #[error("{} is not a 64-bit {} program", .0.display(), Machine::HOST.name())]
    Architecture(PathBuf),
    /// The file is damaged.
    #[error("{}: {source}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The fault.
        source: ElfError,
    },
    /// No dynamic linker.
    #[error("{} is statically linked: nothing can be preloaded", .0.display())]
    Static(PathBuf),
    /// Its dynamic linker is none that is known, or is missing.
    #[error("the dynamic linker of {}, {}, is {why}", path.display(), linker.display())]
    Linker {
        /// The program.
        path: PathBuf,
        /// The linker that it names.
        linker: PathBuf,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The dynamic linker will ignore `LD_PRELOAD`.
    #[error("{} gains privileges when it starts ({how}), so the dynamic linker ignores LD_PRELOAD", path.display())]
    Privileged {
        /// The file.
        path: PathBuf,
        /// The means.
        how: &'static str,
    },
    /// It has a sanitizer.
    #[error("{} is built with a sanitizer ({name}), which must come first", path.display())]
    Sanitizer {
        /// The file.
        path: PathBuf,
        /// The library or function by which it was recognised.
        name: String,
    },
    /// It has its own malloc.
    #[error("{} has malloc linked in: the sampler would see nothing", .0.display())]
    OwnMalloc(PathBuf),
    /// Scripts that start scripts.
    #[error("{} leads through too many scripts", .0.display())]
    Scripts(PathBuf),
}

impl ImageUnfit {
    /// Short, for metrics and scripts.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::NoProgram => "no_program",
            Self::Relative(_) => "relative_path",
            Self::NotFound(_) => "not_found",
            Self::Root(_) | Self::Damaged { .. } => "unreadable",
            Self::Architecture(_) => "architecture",
            Self::Static(_) => "static",
            Self::Linker { .. } => "linker",
            Self::Privileged { .. } => "privileged",
            Self::Sanitizer { .. } => "sanitizer",
            Self::OwnMalloc(_) => "own_malloc",
            Self::Scripts(_) => "scripts",
        }
    }
}

/// A file that the program leads to, and may be hidden by something else.
pub type Hidden<'a> = &'a dyn Fn(&Path) -> Result<(), ImageUnfit>;

/// Examines the program that this command line would start in the tree. `search` is the value of `PATH`.
///
/// # Errors
/// [`ImageUnfit`], if it cannot run with the sampler.
pub fn examine(root: &Root, command: &[OsString], search: &str) -> Result<ImageFit, ImageUnfit> {
    examine_with(root, command, search, &|_| Ok(()))
}

/// As [`examine`]; `check` is called with the path of each file that matters, and may refuse it.
///
/// # Errors
/// [`ImageUnfit`], if it cannot run with the sampler, or that of `check`.
pub fn examine_with(root: &Root, command: &[OsString], search: &str, check: Hidden<'_>) -> Result<ImageFit, ImageUnfit> {
    let path = program(root, command, search, check)?;
    let (found, file) = root.open(&path).map_err(ImageUnfit::Root)?;
    check_privileges(&found.here, found.metadata.mode(), &path)?;
    let elf = Elf::parse(file).map_err(|error| match error {
        ElfError::WrongClass | ElfError::NotElf => ImageUnfit::Architecture(path.clone()),
        source => ImageUnfit::Damaged { path: path.clone(), source },
    })?;
    let Some(linker) = fit::interpreter(&found.here) else { return Err(ImageUnfit::Static(path)) };
    check(&linker)?;
    let refused = |why| ImageUnfit::Linker { path: path.clone(), linker: linker.clone(), why };
    let libc = Libc::of_linker(&linker).ok_or_else(|| refused("neither glibc's nor musl's"))?;
    let (found_linker, _) = root.open(&linker).map_err(|_| refused("missing"))?;
    check(&found_linker.path)?;
    let Linked { own_malloc, sanitizer, other } = Linked::of(&elf);
    let needed = elf.dynamic().needed;
    let library = |names: &[&str]| needed.iter().find(|name| names.iter().any(|start| name.starts_with(start))).cloned();
    if let Some(name) = sanitizer.or_else(|| library(&SANITIZER_LIBRARIES)) {
        return Err(ImageUnfit::Sanitizer { path, name });
    }
    if own_malloc {
        return Err(ImageUnfit::OwnMalloc(path));
    }
    let mut doubts = Vec::new();
    if let Some(name) = other {
        doubts.push(format!("it has an allocator linked in ({name}), whose allocations are not seen"));
    }
    if elf.is_go() {
        doubts.push("it is a Go program: only the allocations of its C code are seen".to_owned());
    }
    let flavour = if library(&["libjemalloc."]).is_some() { Flavour::Jemalloc } else { Flavour::Standard };
    Ok(ImageFit { program: path, libc, flavour, doubts })
}

/// The ELF program behind a command line: through the search path, and through scripts' first lines.
fn program(root: &Root, command: &[OsString], search: &str, check: Hidden<'_>) -> Result<PathBuf, ImageUnfit> {
    let name = command.first().filter(|name| !name.is_empty()).ok_or(ImageUnfit::NoProgram)?;
    let mut path = find(root, name, search)?;
    let mut argument = command.get(1).cloned();
    for _ in 0..=SCRIPTS_MAX {
        check(&path)?;
        // env starts its argument.
        if path.file_name() == Some(OsStr::new("env"))
            && let Some(next) = argument.take().filter(|next| !next.as_bytes().starts_with(b"-") && !next.as_bytes().contains(&b'='))
        {
            path = find(root, &next, search)?;
            continue;
        }
        let (found, file) = root.open(&path).map_err(ImageUnfit::Root)?;
        // Where links lead, too.
        check(&found.path)?;
        let mut line = Vec::new();
        let read = |source| ImageUnfit::Root(RootError::Io { path: found.here.clone(), source });
        file.take(SCRIPT_LINE_BYTES_MAX).read_to_end(&mut line).map_err(read)?;
        let Some((interpreter, its_argument)) = fit::script_interpreter(&line) else { return Ok(path) };
        path = find(root, &interpreter, search)?;
        argument = its_argument;
    }
    Err(ImageUnfit::Scripts(path))
}

/// As execvp, in the tree.
fn find(root: &Root, name: &OsStr, search: &str) -> Result<PathBuf, ImageUnfit> {
    let not_found = || ImageUnfit::NotFound(name.to_string_lossy().into_owned());
    let is_program = |path: &Path| root.find(path).is_ok_and(|found| found.metadata.is_file() && found.metadata.mode() & 0o111 != 0);
    if name.as_bytes().contains(&b'/') {
        let path = PathBuf::from(name);
        if !path.is_absolute() {
            return Err(ImageUnfit::Relative(path));
        }
        return is_program(&path).then_some(path).ok_or_else(not_found);
    }
    std::env::split_paths(search)
        .filter(|folder| folder.is_absolute())
        .map(|folder| folder.join(name))
        .find(|path| is_program(path))
        .ok_or_else(not_found)
}

/// Whoever starts it: what makes the kernel set AT_SECURE for some users (execve(2), capabilities(7)).
fn check_privileges(here: &Path, mode: u32, path: &Path) -> Result<(), ImageUnfit> {
    let refuse = |how| Err(ImageUnfit::Privileged { path: path.to_owned(), how });
    if mode & 0o4000 != 0 {
        return refuse("set-user-ID");
    }
    // Without group execution the bit means mandatory locking.
    if mode & 0o2010 == 0o2010 {
        return refuse("set-group-ID");
    }
    let mut value = [0u8; 64];
    if rustix::fs::lgetxattr(here, c"security.capability", &mut value).is_ok_and(|bytes| bytes > 0) {
        return refuse("file capabilities");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// The test's own program and what it needs of this machine, in a tree.
    fn tree() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let own = fs::read("/proc/self/exe").unwrap();
        let linker = fit::interpreter(Path::new("/proc/self/exe")).unwrap();
        let put = |name: &Path, bytes: &[u8]| {
            let path = directory.path().join(name.strip_prefix("/").unwrap());
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, bytes).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        };
        put(Path::new("/usr/bin/own"), &own);
        put(&linker, b"");
        put(Path::new("/usr/bin/start"), b"#!/usr/bin/env own -x\n");
        put(Path::new("/usr/bin/again"), b"#! /usr/bin/again\n");
        put(Path::new("/usr/bin/text"), b"hello");
        directory
    }

    fn of(directory: &Path, command: &[&str]) -> Result<ImageFit, ImageUnfit> {
        let command: Vec<OsString> = command.iter().map(OsString::from).collect();
        examine(&Root::directory(directory), &command, "/bin:/usr/bin")
    }

    #[test]
    fn a_program_is_found_as_execvp_finds_it_and_a_script_by_its_interpreter() {
        let directory = tree();
        for command in [&["own"][..], &["/usr/bin/own"]] {
            let fit = of(directory.path(), command).unwrap();
            assert_eq!((fit.program.as_path(), fit.libc), (Path::new("/usr/bin/own"), Libc::Glibc));
        }
        fs::write(directory.path().join("usr/bin/env"), b"").unwrap();
        fs::set_permissions(directory.path().join("usr/bin/env"), fs::Permissions::from_mode(0o755)).unwrap();
        let error = of(directory.path(), &["start"]).unwrap_err();
        assert!(matches!(&error, ImageUnfit::NotFound(name) if name == "own -x"), "{error}");
    }

    #[test]
    fn each_refusal_has_its_name() {
        let directory = tree();
        let name = |command: &[&str]| of(directory.path(), command).unwrap_err().name();
        assert_eq!(name(&[]), "no_program");
        assert_eq!(name(&["./own"]), "relative_path");
        assert_eq!(name(&["none"]), "not_found");
        assert_eq!(name(&["text"]), "architecture");
        assert_eq!(name(&["again"]), "scripts");
        let own = directory.path().join("usr/bin/own");
        fs::set_permissions(&own, fs::Permissions::from_mode(0o4755)).unwrap();
        assert_eq!(name(&["own"]), "privileged");
        fs::set_permissions(&own, fs::Permissions::from_mode(0o755)).unwrap();
        let linker = fit::interpreter(&own).unwrap();
        fs::remove_file(directory.path().join(linker.strip_prefix("/").unwrap())).unwrap();
        assert_eq!(name(&["own"]), "linker");
    }
}
