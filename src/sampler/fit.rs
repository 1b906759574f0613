//! Whether a program can run with the sampler, and with which build of it.
//!
//! Whether a preload library works depends on the program's file and on what its dynamic linker will load: a static program loads nothing,
//! a privileged one ignores the environment, a sanitizer must come first, and calls of an allocator linked into the program are not
//! interposable. The user gets an error in these cases, instead of a program without any samples.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use object::elf::FileHeader64;
use object::read::elf::{FileHeader as _, ProgramHeader as _};
use object::{LittleEndian, ReadCache};
use thiserror::Error;

use super::library::Flavour;
use crate::allocator::in_file;
use crate::process::elf::{Elf, ElfError};

/// Maximum number of nested script interpreters: the kernel's own limit (`BINPRM_MAX_RECURSION`, 4) and the last one's program.
pub(super) const SCRIPTS_MAX: usize = 5;
/// Number of bytes of a script's first line that the kernel reads (`BINPRM_BUF_SIZE`).
pub(super) const SCRIPT_LINE_BYTES_MAX: u64 = 256;
/// Maximum number of program headers of a file. Real files have about 15.
const SEGMENTS_MAX: usize = 1024;
/// Longest path of a dynamic linker, with its end (`PATH_MAX`).
const INTERPRETER_BYTES_MAX: u64 = 4096;
/// Maximum number of objects that a program loads. Large desktop programs have about 300.
const OBJECTS_MAX: usize = 4096;
/// The sanitizers' start functions, in a program that has a sanitizer linked in.
const SANITIZERS: [&[u8]; 5] = [b"__asan_init", b"__tsan_init", b"__msan_init", b"__hwasan_init", b"__lsan_init"];
/// Prefixes of the names of their libraries.
pub const SANITIZER_LIBRARIES: [&str; 10] = [
    "libasan.so",
    "libtsan.so",
    "liblsan.so",
    "libhwasan.so",
    "libclang_rt.asan",
    "libclang_rt.tsan",
    "libclang_rt.msan",
    "libclang_rt.lsan",
    "libclang_rt.hwasan",
    "libclang_rt.memprof",
];

/// What a program has linked in that bears on the sampler.
#[derive(Debug, Default)]
pub(super) struct Linked {
    /// It exports a `malloc` of its own.
    pub(super) own_malloc: bool,
    /// The name of a sanitizer's start function.
    pub(super) sanitizer: Option<String>,
    /// An allocator whose functions have names of their own, which cannot be interposed.
    pub(super) other: Option<&'static str>,
}

impl Linked {
    /// Reads it from the program's symbols.
    pub(super) fn of(elf: &Elf<File>) -> Self {
        let found = in_file::identify(elf);
        let mut linked = Self { other: found.functions.first().map(|function| function.allocator.name()), ..Self::default() };
        elf.for_each_function(|function| {
            linked.own_malloc |= function.exported && function.name == b"malloc";
            if SANITIZERS.contains(&function.name) {
                linked.sanitizer = Some(String::from_utf8_lossy(function.name).into_owned());
            }
            if function.name == b"rpmalloc" {
                linked.other = Some("rpmalloc");
            }
        });
        linked
    }
}

/// How to run a program with the sampler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fit {
    /// The build of the library.
    pub flavour: Flavour,
    /// Allocations that the sampler will not see, as sentences.
    pub doubts: Vec<String>,
}

/// Why a program cannot run with the sampler. Each message names the program, the reason, and what to do instead.
#[derive(Debug, Error)]
pub enum Unfit {
    /// There is no such program.
    #[error("cannot run {0}: no such program in PATH")]
    NotFound(String),
    /// The file cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// Not a program that this machine's 64-bit loader starts.
    #[error("{path} is not a 64-bit {} program: the sampler has no build for it", crate::machine::Machine::HOST.name())]
    WrongClass {
        /// The file.
        path: PathBuf,
    },
    /// The file is damaged.
    #[error("cannot read {path}: {source}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The fault.
        source: ElfError,
    },
    /// No dynamic linker.
    #[error("{path} is statically linked: nothing can be preloaded. Trace it from outside instead: fragprof record -- {path}")]
    Static {
        /// The file.
        path: PathBuf,
    },
    /// The dynamic linker will ignore LD_PRELOAD.
    #[error(
        "{path} gains privileges when it starts ({how}), so the dynamic linker ignores LD_PRELOAD. Start fragprof run as the user that it \
         switches to, or trace it from outside: fragprof record"
    )]
    Privileged {
        /// The file.
        path: PathBuf,
        /// The means.
        how: &'static str,
    },
    /// It has a sanitizer.
    #[error("{path} is built with a sanitizer ({name}), which has its own allocator and must come first. Run a build without it")]
    Sanitizer {
        /// The file.
        path: PathBuf,
        /// The library or function by which it was recognised.
        name: String,
    },
    /// It has its own malloc.
    #[error(
        "{path} has malloc linked in, and calls it without the dynamic linker: the sampler would see nothing. Trace it from outside \
         instead: fragprof record -- {path}"
    )]
    OwnMalloc {
        /// The file.
        path: PathBuf,
    },
}

/// Examines the program that `command` would start.
///
/// Its dynamic linker is run once, in the mode in which it only lists the libraries that it would load.
///
/// # Errors
/// [`Unfit`], if it cannot run with the sampler.
pub fn examine(command: &[OsString]) -> Result<Fit, Unfit> {
    let name = command.first().map_or(OsStr::new(""), OsString::as_os_str);
    let path = program(name, command.get(1).map(OsString::as_os_str))?;
    check_privileges(&path)?;
    let read = |source| Unfit::Read { path: path.clone(), source };
    let elf = Elf::parse(File::open(&path).map_err(read)?).map_err(|error| match error {
        ElfError::WrongClass | ElfError::NotElf => Unfit::WrongClass { path: path.clone() },
        source => Unfit::Damaged { path: path.clone(), source },
    })?;
    let Some(interpreter) = interpreter(&path) else { return Err(Unfit::Static { path }) };
    let mut doubts = check_functions(&elf, &path)?;
    if elf.is_go() {
        doubts.push("it is a Go program: only the allocations of its C code are seen".to_owned());
    }
    let objects = loaded_objects(&interpreter, &path);
    check_objects(&path, &objects)?;
    let flavour = if objects.iter().any(|object| defines(object, b"mallocx")) { Flavour::Jemalloc } else { Flavour::Standard };
    Ok(Fit { flavour, doubts })
}

/// The ELF program behind a name: through PATH, and through scripts' first lines.
fn program(name: &OsStr, argument: Option<&OsStr>) -> Result<PathBuf, Unfit> {
    let not_found = |name: &OsStr| Unfit::NotFound(name.to_string_lossy().into_owned());
    let mut path = find(name).ok_or_else(|| not_found(name))?;
    let mut argument = argument.map(OsStr::to_owned);
    for _ in 0..SCRIPTS_MAX {
        // env starts its argument.
        if path.file_name() == Some(OsStr::new("env"))
            && let Some(next) = argument.take().filter(|next| !next.as_bytes().starts_with(b"-") && !next.as_bytes().contains(&b'='))
        {
            path = find(&next).ok_or_else(|| not_found(&next))?;
            continue;
        }
        let mut line = Vec::new();
        let read = |source| Unfit::Read { path: path.clone(), source };
        File::open(&path).and_then(|file| file.take(SCRIPT_LINE_BYTES_MAX).read_to_end(&mut line)).map_err(read)?;
        let Some((interpreter, its_argument)) = script_interpreter(&line) else { break };
        path = find(&interpreter).ok_or_else(|| not_found(&interpreter))?;
        argument = its_argument;
    }
    Ok(path)
}

/// `#!interpreter [argument]`, as the kernel reads it (execve(2)): one argument, the rest of the line.
pub(super) fn script_interpreter(line: &[u8]) -> Option<(OsString, Option<OsString>)> {
    let line = line.strip_prefix(b"#!")?;
    let line = line.split(|&byte| byte == b'\n').next()?.trim_ascii();
    let mut words = line.splitn(2, |byte| b" \t".contains(byte));
    let word = |bytes: &[u8]| OsStr::from_bytes(bytes.trim_ascii()).to_owned();
    let interpreter = words.next().filter(|word| !word.is_empty()).map(word)?;
    Some((interpreter, words.next().map(word)))
}

/// As execvp: a name with a slash is a path, any other is searched for in PATH.
fn find(name: &OsStr) -> Option<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return Path::new(name).is_file().then(|| name.into());
    }
    let executable = |path: &PathBuf| fs::metadata(path).is_ok_and(|found| found.is_file() && found.mode() & 0o111 != 0);
    std::env::split_paths(&std::env::var_os("PATH")?).map(|folder| folder.join(name)).find(executable)
}

/// What makes the kernel set AT_SECURE (execve(2), capabilities(7)).
fn check_privileges(path: &Path) -> Result<(), Unfit> {
    let found = fs::metadata(path).map_err(|source| Unfit::Read { path: path.to_owned(), source })?;
    let refuse = |how| Err(Unfit::Privileged { path: path.to_owned(), how });
    if found.mode() & 0o4000 != 0 && found.uid() != rustix::process::getuid().as_raw() {
        return refuse("set-user-ID");
    }
    // Without group execution the bit means mandatory locking.
    if found.mode() & 0o2010 == 0o2010 && found.gid() != rustix::process::getgid().as_raw() {
        return refuse("set-group-ID");
    }
    let mut value = [0u8; 64];
    if !rustix::process::getuid().is_root() && rustix::fs::getxattr(path, c"security.capability", &mut value).is_ok_and(|bytes| bytes > 0) {
        return refuse("file capabilities");
    }
    Ok(())
}

/// Refuses sanitizers and a malloc of the program's own; returns other allocations that will not be seen.
fn check_functions(elf: &Elf<File>, path: &Path) -> Result<Vec<String>, Unfit> {
    let Linked { own_malloc, sanitizer, other } = Linked::of(elf);
    if let Some(name) = sanitizer {
        return Err(Unfit::Sanitizer { path: path.to_owned(), name });
    }
    if own_malloc {
        return Err(Unfit::OwnMalloc { path: path.to_owned() });
    }
    Ok(other
        .map(|name| format!("it has an allocator linked in ({name}), whose allocations are not seen; fragprof record sees them"))
        .into_iter()
        .collect())
}

fn check_objects(path: &Path, objects: &[PathBuf]) -> Result<(), Unfit> {
    for object in objects {
        let name = object.file_name().unwrap_or_default().to_string_lossy();
        if SANITIZER_LIBRARIES.iter().any(|start| name.starts_with(start)) {
            return Err(Unfit::Sanitizer { path: path.to_owned(), name: name.into_owned() });
        }
    }
    Ok(())
}

/// The dynamic linker that the program names (PT_INTERP).
pub(super) fn interpreter(path: &Path) -> Option<PathBuf> {
    let file = ReadCache::new(File::open(path).ok()?);
    let header = FileHeader64::<LittleEndian>::parse(&file).ok()?;
    let segments = header.program_headers(LittleEndian, &file).ok()?;
    let is_path = |segment: &&object::elf::ProgramHeader64<LittleEndian>| segment.p_filesz(LittleEndian) <= INTERPRETER_BYTES_MAX;
    let name = segments.iter().take(SEGMENTS_MAX).filter(is_path).find_map(|segment| segment.interpreter(LittleEndian, &file).ok()?)?;
    Some(PathBuf::from(OsStr::from_bytes(name)))
}

/// The libraries that the loader would load for the program (glibc and musl: `--list`, as ldd does). Empty if that fails: the program is
/// then run with the build for any program.
fn loaded_objects(interpreter: &Path, program: &Path) -> Vec<PathBuf> {
    let listed = Command::new(interpreter).arg("--list").arg(program).stdin(Stdio::null()).stderr(Stdio::null()).output();
    listed.map(|output| parse_list(&output.stdout)).unwrap_or_default()
}

/// Lines are `name => /path (0xaddress)` or `/path (0xaddress)`.
fn parse_list(text: &[u8]) -> Vec<PathBuf> {
    let path = |line: &[u8]| {
        let start = line.iter().position(|&byte| byte == b'/')?;
        let line = &line[start..];
        let line = line.windows(4).position(|window| window == b" => ").map_or(line, |arrow| &line[arrow + 4..]);
        let end = line.windows(4).rposition(|window| window == b" (0x")?;
        Some(PathBuf::from(OsStr::from_bytes(&line[..end])))
    };
    text.split(|&byte| byte == b'\n').filter_map(path).take(OBJECTS_MAX).collect()
}

fn defines(object: &Path, function: &[u8]) -> bool {
    let Some(elf) = File::open(object).ok().and_then(|file| Elf::parse(file).ok()) else { return false };
    let mut found = false;
    elf.for_each_function(|defined| found |= defined.exported && defined.name == function);
    found
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_scripts_first_line_is_read_as_the_kernel_reads_it() {
        let of =
            |line: &str| script_interpreter(line.as_bytes()).map(|(i, a)| (i.into_string().unwrap(), a.map(|a| a.into_string().unwrap())));
        assert_eq!(of("#!/bin/sh\necho"), Some(("/bin/sh".into(), None)));
        assert_eq!(of("#! /usr/bin/env python3 -u\n"), Some(("/usr/bin/env".into(), Some("python3 -u".into()))));
        assert_eq!(of("#!\n"), None);
        assert_eq!(of("\x7fELF"), None);
    }

    #[test]
    fn the_loaders_list_is_read_for_glibc_and_for_musl() {
        let glibc = b"\tlinux-vdso.so.1 (0x00007ffc)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 \
                      (0x00007f24)\n\t/lib64/ld-linux-x86-64.so.2 (0x00007f25)\n";
        assert_eq!(parse_list(glibc), [PathBuf::from("/lib/x86_64-linux-gnu/libc.so.6"), "/lib64/ld-linux-x86-64.so.2".into()]);
        let musl = b"\t/lib/ld-musl-x86_64.so.1 (0x7f8a)\n\tlibc.so => /lib/ld-musl-x86_64.so.1 (0x7f8a)\n\tlibx.so => not found\n";
        assert_eq!(parse_list(musl), [PathBuf::from("/lib/ld-musl-x86_64.so.1"), "/lib/ld-musl-x86_64.so.1".into()]);
    }

    #[test]
    fn a_missing_program_is_named_in_the_error() {
        let error = examine(&["no-such-program-anywhere".into()]).unwrap_err();
        assert_eq!(error.to_string(), "cannot run no-such-program-anywhere: no such program in PATH");
    }
}
