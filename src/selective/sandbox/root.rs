//! The files that the process sees.

use std::ffi::{CString, OsString};
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use crate::selective::sandbox::{FileNumber, LIBRARY, LOADER, PROGRAM};

/// The directory that is the process's root.
pub(super) struct Root(PathBuf);

impl Root {
    pub(super) fn make(folders: &[PathBuf]) -> io::Result<Self> {
        let mut refused = io::Error::other("there is no directory to create it in");
        for folder in folders {
            match Self::make_in(folder) {
                Ok(root) => return Ok(root),
                Err(error) => refused = io::Error::other(format!("{}: {error}", folder.display())),
            }
        }
        Err(refused)
    }

    fn make_in(folder: &Path) -> io::Result<Self> {
        if rustix::fs::statvfs(folder)?.f_flag.contains(rustix::fs::StatVfsMountFlags::NOEXEC) {
            return Err(io::Error::other("mounted noexec"));
        }
        let template = folder.join("fragprof-scratch-XXXXXX");
        let mut template = CString::new(template.as_os_str().as_bytes())?.into_bytes_with_nul();
        // SAFETY: the template is writable, ends with a zero, and outlives the call. The directory is new and accessible only to us.
        if unsafe { libc::mkdtemp(template.as_mut_ptr().cast()) }.is_null() {
            return Err(io::Error::last_os_error());
        }
        template.pop();
        Ok(Self(PathBuf::from(OsString::from_vec(template))))
    }

    pub(super) fn add(&self, name: &str, bytes: &[u8], mode: u32) -> io::Result<FileNumber> {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(self.0.join(name))?;
        file.write_all(bytes)?;
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        Ok(FileNumber(file.metadata()?.ino()))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// Removes write permission for everyone, and permits everyone to look up names in it.
    pub(super) fn close(&self) -> io::Result<()> {
        fs::set_permissions(&self.0, fs::Permissions::from_mode(0o711))
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        for name in [LOADER, LIBRARY, PROGRAM] {
            drop(fs::remove_file(self.0.join(name)));
        }
        if let Err(error) = fs::remove_dir(&self.0) {
            tracing::warn!("cannot remove {}: {error}", self.0.display());
        }
    }
}
