//! The agent's unix socket: a file that only its own user may open.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// The file of a socket, removed when dropped.
#[derive(Debug)]
pub struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // It may have been removed already.
        let _ = fs::remove_file(&self.0);
    }
}

/// Binds a socket. A stale one without a listener is replaced; another kind of file, or a running agent's socket, is not.
///
/// # Errors
/// If the path is in use, or the socket cannot be created.
pub fn bind(path: &Path) -> io::Result<(UnixListener, SocketFile)> {
    let is_left_over = fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket()) && UnixStream::connect(path).is_err();
    if is_left_over {
        fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path)?;
    let file = SocketFile(path.to_owned());
    // A client that connects before this is refused by the listener, which checks its credentials.
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok((listener, file))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_socket_left_behind_is_replaced_and_nothing_else_is() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("agent.sock");
        let (listener, file) = bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(bind(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse, "an agent is listening there");
        drop(listener);
        let (again, second) = bind(&path).unwrap();
        drop((again, second));
        assert!(!path.exists());
        drop(file);
        fs::write(&path, "a file").unwrap();
        assert!(bind(&path).is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "a file");
    }
}
