//! Replaces a small file atomically: readers of its path find the old contents or the new ones, never a part.

use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

/// Writes a temporary file next to the path and renames it. `mode`: the permissions of the new file, whatever the umask.
///
/// # Errors
/// If the directory is not writable or the disk is full; nothing is then left behind.
pub fn replace(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    static NTH: AtomicU32 = AtomicU32::new(0);
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}.{}", std::process::id(), NTH.fetch_add(1, Ordering::Relaxed)));
    let written = (|| {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&beside)?;
        file.write_all(bytes)?;
        file.set_permissions(Permissions::from_mode(mode))?;
        fs::rename(&beside, path)
    })();
    if written.is_err() {
        drop(fs::remove_file(&beside));
    }
    written
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_file_is_replaced_with_its_permissions_and_a_failure_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file.txt");
        for (bytes, mode) in [(&b"old"[..], 0o600), (b"new", 0o644)] {
            replace(&path, bytes, mode).unwrap();
            assert_eq!(fs::read(&path).unwrap(), bytes);
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, mode);
        }
        // A directory cannot be replaced by renaming.
        fs::create_dir(folder.path().join("taken")).unwrap();
        assert!(replace(&folder.path().join("taken"), b"new", 0o600).is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
