//! Debug information of a file in another file on this machine: whether one is needed, and where it may be.
//!
//! A program that a distribution packages has none of its own. Its debug file is found by the name in `.gnu_debuglink`, or by the build id
//! that both have (GDB manual, "Separate Debug Files").

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use crate::process::elf::{BuildId, Elf};

/// Where packages of debug information are installed. blazesym follows debug links to the same directories.
const DIRECTORIES: [&str; 2] = ["/usr/lib/debug", "/lib/debug"];
/// Shortest build id that identifies a file: lld's `--build-id=fast` has 8 bytes.
const BUILD_ID_BYTES_MIN: usize = 8;
/// File names have at most 255 bytes; a checksum follows.
pub(super) const LINK_BYTES_MAX: u64 = 300;

/// A file that has no symbols, with what its debug file is looked for by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Separate {
    /// The build id that the debug file must have.
    pub build_id: BuildId,
    /// The file's path, for messages.
    pub of: String,
}

/// What a debug file must be found by, if the file at `path` needs one: it has neither a symbol table nor debug information of its own, and its
/// debug link leads to no usable file, or must not be followed.
pub(super) fn needed(elf: &Elf<File>, path: &Path, of: &str, links_are_safe: bool) -> Option<Separate> {
    const OWN: [&[u8]; 4] = [b".symtab", b".debug_info", b".zdebug_info", b".gnu_debugdata"];
    if OWN.into_iter().any(|section| elf.has_section(section)) {
        return None;
    }
    let build_id = elf.build_id().filter(|id| id.0.len() >= BUILD_ID_BYTES_MIN)?;
    let link = elf.section(b".gnu_debuglink", LINK_BYTES_MAX).filter(|_| links_are_safe);
    if let Some(link) = link
        && linked(link, path, &build_id).iter().any(|path| is_debug_file(path, &build_id))
    {
        return None;
    }
    Some(Separate { build_id, of: of.to_owned() })
}

/// The debug file of this build id that a package has installed.
pub(super) fn installed(build_id: &BuildId) -> Option<PathBuf> {
    DIRECTORIES.iter().map(|directory| by_build_id(directory, build_id)).find(|path| is_debug_file(path, build_id))
}

fn by_build_id(directory: &str, build_id: &BuildId) -> PathBuf {
    let hex = build_id.to_string();
    let (first, rest) = hex.split_at_checked(2).unwrap_or((&hex, ""));
    Path::new(directory).join(".build-id").join(first).join(format!("{rest}.debug"))
}

/// Where a debug link may lead, in blazesym's order.
fn linked(link: Vec<u8>, path: &Path, build_id: &BuildId) -> Vec<PathBuf> {
    let name: Vec<u8> = link.into_iter().take_while(|&byte| byte != 0).collect();
    let name = OsString::from_vec(name);
    let mut found: Vec<PathBuf> = DIRECTORIES.iter().map(|directory| by_build_id(directory, build_id)).collect();
    found.extend(DIRECTORIES.iter().map(|directory| Path::new(directory).join(&name)));
    if let Some(own) = path.canonicalize().ok().as_deref().and_then(Path::parent) {
        found.push(own.join(&name));
        let below = own.strip_prefix("/").unwrap_or(own);
        found.extend(DIRECTORIES.iter().map(|directory| Path::new(directory).join(below).join(&name)));
    }
    found
}

/// Whether it is a regular file (opening others may block) with this build id.
fn is_debug_file(path: &Path, build_id: &BuildId) -> bool {
    if !path.metadata().is_ok_and(|meta| meta.is_file()) {
        return false;
    }
    let elf = File::open(path).ok().and_then(|file| Elf::parse(file).ok());
    elf.is_some_and(|elf| elf.build_id_of_section().or_else(|| elf.build_id()).as_ref() == Some(build_id))
}
