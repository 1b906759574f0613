//! A file tree that another process will have as its root directory: one directory, or the layers of an overlay that is not mounted yet.
//!
//! Paths are resolved as the kernel will, component by component, so that no link leads out of the tree. Layers are those of overlayfs
//! (Documentation/filesystems/overlayfs.rst): the first that has a name decides, directories are merged, a character device 0:0 hides what
//! is below it, and so does a directory with the attribute `overlay.opaque`. Without CAP_SYS_ADMIN `trusted.overlay.opaque` is not shown,
//! and such a directory is seen as merged: a file that was replaced together with its directory can be taken for the older one.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Component, Path, PathBuf};

use thiserror::Error;

/// Links that are followed for one path: the kernel's own limit (`MAXSYMLINKS`).
const LINKS_MAX: usize = 40;
/// Longest path (`PATH_MAX`), links included.
const PATH_BYTES_MAX: usize = 4096;
/// Layers of an overlay; the kernel accepts 500 (`OVL_MAX_STACK`).
const LAYERS_MAX: usize = 500;

/// Why a path leads to no file.
#[derive(Debug, Error)]
pub enum RootError {
    /// There is nothing.
    #[error("{path} does not exist")]
    NotFound {
        /// The path within the root.
        path: PathBuf,
    },
    /// Too many links, or too long.
    #[error("{path} leads through too many links")]
    Links {
        /// The path within the root.
        path: PathBuf,
    },
    /// Too many layers.
    #[error("it has more than {LAYERS_MAX} layers")]
    Layers,
    /// It is not a regular file.
    #[error("{path} is not a file")]
    NotAFile {
        /// The path within the root.
        path: PathBuf,
    },
    /// The system's error.
    #[error("{path} cannot be read: {source}")]
    Io {
        /// The path on this machine.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
}

/// The tree.
#[derive(Debug, Clone)]
pub struct Root {
    /// Directories of this machine, the uppermost first.
    layers: Vec<PathBuf>,
}

/// A file of the tree.
#[derive(Debug)]
pub struct Found {
    /// Its path within the root, without links.
    pub path: PathBuf,
    /// Its path on this machine.
    pub here: PathBuf,
    /// What it is; never a link.
    pub metadata: Metadata,
}

impl Root {
    /// A directory.
    #[must_use]
    pub fn directory(path: impl Into<PathBuf>) -> Self {
        Self { layers: vec![path.into()] }
    }

    /// The layers of an overlay, the uppermost first.
    ///
    /// # Errors
    /// If there are none or too many.
    pub fn layers(layers: Vec<PathBuf>) -> Result<Self, RootError> {
        if layers.is_empty() || layers.len() > LAYERS_MAX {
            return Err(RootError::Layers);
        }
        Ok(Self { layers })
    }

    /// What is at an absolute path, links followed within the tree.
    ///
    /// # Errors
    /// [`RootError`].
    pub fn find(&self, path: &Path) -> Result<Found, RootError> {
        let not_found = || RootError::NotFound { path: path.to_owned() };
        let mut left: Vec<OsString> = components(path)?;
        left.reverse();
        // The directories from the root to where the walk is, each with the layers that are merged in it.
        let mut open: Vec<(OsString, Vec<PathBuf>)> = vec![(OsString::new(), self.layers.clone())];
        let mut links = 0;
        let mut last = None;
        while let Some(name) = left.pop() {
            if name == ".." {
                // The root's parent is the root.
                if open.len() > 1 {
                    open.pop();
                }
                last = None;
                continue;
            }
            let (_, layers) = open.last().ok_or_else(not_found)?;
            match look_up(layers, &name)? {
                None => return Err(not_found()),
                Some(Entry::Directory(layers)) => {
                    open.push((name, layers));
                    last = None;
                }
                Some(Entry::Link(target)) => {
                    links += 1;
                    let further = components(&target)?;
                    let bytes: usize = left.iter().chain(&further).map(|name| name.len() + 1).sum();
                    if links > LINKS_MAX || bytes > PATH_BYTES_MAX {
                        return Err(RootError::Links { path: path.to_owned() });
                    }
                    if target.is_absolute() {
                        open.truncate(1);
                    }
                    left.extend(further.into_iter().rev());
                }
                Some(Entry::File(here, metadata)) => {
                    // Something below a file.
                    if !left.is_empty() {
                        return Err(not_found());
                    }
                    last = Some((name, here, metadata));
                }
            }
        }
        let mut inner: PathBuf = std::iter::once(OsStr::new("/")).chain(open.iter().skip(1).map(|(name, _)| name.as_os_str())).collect();
        if let Some((name, here, metadata)) = last {
            inner.push(name);
            return Ok(Found { path: inner, here, metadata });
        }
        let here = open.pop().and_then(|(_, layers)| layers.into_iter().next()).ok_or_else(not_found)?;
        let metadata = fs::symlink_metadata(&here).map_err(|source| RootError::Io { path: here.clone(), source })?;
        Ok(Found { path: inner, here, metadata })
    }

    /// Opens a regular file.
    ///
    /// # Errors
    /// [`RootError`]; for a FIFO or a device too, which is not opened.
    pub fn open(&self, path: &Path) -> Result<(Found, File), RootError> {
        let found = self.find(path)?;
        let io = |source| RootError::Io { path: found.here.clone(), source };
        // What it is may have changed since: no link is followed, and opening a FIFO does not wait.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC | libc::O_NOCTTY;
        if !found.metadata.is_file() {
            return Err(RootError::NotAFile { path: found.path });
        }
        let file = OpenOptions::new().read(true).custom_flags(flags).open(&found.here).map_err(io)?;
        if !file.metadata().map_err(io)?.is_file() {
            return Err(RootError::NotAFile { path: found.path });
        }
        Ok((found, file))
    }
}

/// What a name is in merged directories.
enum Entry {
    Directory(Vec<PathBuf>),
    Link(PathBuf),
    File(PathBuf, Metadata),
}

fn look_up(layers: &[PathBuf], name: &OsStr) -> Result<Option<Entry>, RootError> {
    let mut merged = Vec::new();
    for layer in layers {
        let here = layer.join(name);
        let metadata = match fs::symlink_metadata(&here) {
            Ok(metadata) => metadata,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => continue,
            Err(source) => return Err(RootError::Io { path: here, source }),
        };
        let kind = metadata.file_type();
        if kind.is_dir() {
            let is_opaque = is_opaque(&here);
            merged.push(here);
            if is_opaque {
                break;
            }
        } else if !merged.is_empty() || (kind.is_char_device() && metadata.rdev() == 0) {
            // Hidden by a directory above it, or a whiteout.
            break;
        } else if kind.is_symlink() {
            let target = fs::read_link(&here).map_err(|source| RootError::Io { path: here, source })?;
            return Ok(Some(Entry::Link(target)));
        } else {
            return Ok(Some(Entry::File(here, metadata)));
        }
    }
    Ok((!merged.is_empty()).then_some(Entry::Directory(merged)))
}

fn is_opaque(directory: &Path) -> bool {
    let mut value = [0u8; 8];
    [c"trusted.overlay.opaque", c"user.overlay.opaque"]
        .into_iter()
        .any(|name| rustix::fs::lgetxattr(directory, name, &mut value).is_ok_and(|bytes| bytes == 1 && value[0] == b'y'))
}

/// The names of a path, of which `.` and the root are left out.
fn components(path: &Path) -> Result<Vec<OsString>, RootError> {
    if path.as_os_str().as_bytes().len() > PATH_BYTES_MAX {
        return Err(RootError::Links { path: path.to_owned() });
    }
    let name = |component: Component<'_>| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        _ => None,
    };
    Ok(path.components().filter_map(name).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::fs::symlink;

    use super::*;

    fn tree(files: &[&str]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for file in files {
            let path = directory.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, file).unwrap();
        }
        directory
    }

    fn found(root: &Root, path: &str) -> Option<String> {
        root.find(Path::new(path)).ok().map(|found| found.path.display().to_string())
    }

    #[test]
    fn links_are_followed_within_the_tree_and_never_out_of_it() {
        let directory = tree(&["usr/bin/tool", "etc/passwd"]);
        let at = |name: &str| directory.path().join(name);
        symlink("usr/bin", at("bin")).unwrap();
        symlink("/etc/passwd", at("users")).unwrap();
        symlink("../../../../etc/passwd", at("usr/out")).unwrap();
        symlink("loop", at("loop")).unwrap();
        let root = Root::directory(directory.path());
        assert_eq!(found(&root, "/bin/tool").as_deref(), Some("/usr/bin/tool"));
        assert_eq!(found(&root, "/users").as_deref(), Some("/etc/passwd"));
        assert_eq!(found(&root, "/usr/out").as_deref(), Some("/etc/passwd"));
        assert_eq!(found(&root, "/../../usr/./bin/../bin/tool").as_deref(), Some("/usr/bin/tool"));
        assert_eq!(found(&root, "/bin").as_deref(), Some("/usr/bin"));
        assert!(matches!(root.find(Path::new("/loop")), Err(RootError::Links { .. })));
        for absent in ["/none", "/etc/passwd/below", "/bin/none"] {
            assert!(matches!(root.find(Path::new(absent)), Err(RootError::NotFound { .. })), "{absent}");
        }
        assert!(matches!(root.open(Path::new("/bin")), Err(RootError::NotAFile { .. })));
        assert!(root.find(Path::new(&"/a".repeat(3000))).is_err());
    }

    #[test]
    fn the_uppermost_layer_that_has_a_name_decides() {
        let (upper, lower) = (tree(&["bin/new", "lib/a/file"]), tree(&["bin/old", "lib/a", "etc/x"]));
        let root = Root::layers(vec![upper.path().to_owned(), lower.path().to_owned()]).unwrap();
        assert!(found(&root, "/bin/new").is_some() && found(&root, "/bin/old").is_some() && found(&root, "/etc/x").is_some());
        // A directory in front of a file.
        assert!(found(&root, "/lib/a/file").is_some());
        assert!(Root::layers(Vec::new()).is_err() && Root::layers(vec!["/".into(); 501]).is_err());
    }

    #[test]
    fn a_whiteout_and_an_opaque_directory_hide_what_is_below() {
        let (upper, lower) = (tree(&["opt/new"]), tree(&["opt/old", "bin/gone"]));
        fs::create_dir(upper.path().join("bin")).unwrap();
        let whiteout = upper.path().join("bin/gone");
        let kind = rustix::fs::FileType::CharacterDevice;
        if rustix::fs::mknodat(rustix::fs::CWD, &whiteout, kind, rustix::fs::Mode::empty(), 0).is_err() {
            return; // Only root may.
        }
        let root = Root::layers(vec![upper.path().to_owned(), lower.path().to_owned()]).unwrap();
        assert_eq!(found(&root, "/bin/gone"), None);
        assert!(found(&root, "/opt/old").is_some());
        let opaque = rustix::fs::setxattr(upper.path().join("opt"), c"trusted.overlay.opaque", b"y", rustix::fs::XattrFlags::empty());
        if opaque.is_ok() {
            assert_eq!(found(&root, "/opt/old"), None);
            assert!(found(&root, "/opt/new").is_some());
        }
    }
}
