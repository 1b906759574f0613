//! The system log's line for each action in another process (`/dev/log`, facility authpriv). Best effort: where there is no system log, the
//! command's own output is all there is.

use std::os::unix::net::UnixDatagram;
use std::path::Path;

use crate::inject::audit::By;
use crate::process::handle::read_bounded;

/// Where syslogd and journald listen.
const SOCKET: &str = "/dev/log";
/// Facility authpriv, severity notice (RFC 3164: 10 × 8 + 5).
const PRIORITY: u32 = 85;
/// A user id and a line feed.
const LOGIN_BYTES_MAX: u64 = 32;

/// The user of this command.
#[must_use]
pub fn user() -> By {
    let login = read_bounded(Path::new("/proc/self/loginuid"), LOGIN_BYTES_MAX).unwrap_or_default();
    let login = String::from_utf8_lossy(&login).trim().parse().ok().filter(|&login| login != u32::MAX);
    By::User { uid: rustix::process::geteuid().as_raw(), login }
}

/// Writes a line.
pub fn write(line: &str) {
    if let Err(error) = send(Path::new(SOCKET), line) {
        tracing::debug!("no audit line in the system log: {SOCKET}: {error}");
    }
}

fn send(socket: &Path, line: &str) -> std::io::Result<()> {
    let sender = UnixDatagram::unbound()?;
    // A log that does not read must not hold up the command.
    sender.set_nonblocking(true)?;
    sender.send_to(format!("<{PRIORITY}>fragprof[{}]: {line}", std::process::id()).as_bytes(), socket).map(|_| ())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_line_reaches_the_log_with_priority_and_tag() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let log = UnixDatagram::bind(&path).unwrap();
        send(&path, "audit: something").unwrap();
        let mut bytes = [0; 256];
        let length = log.recv(&mut bytes).unwrap();
        let text = String::from_utf8_lossy(&bytes[..length]).into_owned();
        assert_eq!(text, format!("<85>fragprof[{}]: audit: something", std::process::id()));
        assert!(send(&directory.path().join("none"), "x").is_err());
    }
}
