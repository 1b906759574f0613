//! Reports the agent's state to the service manager: datagrams to `$NOTIFY_SOCKET` (sd_notify(3)).

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// The manager's socket, if there is one.
#[derive(Debug)]
pub struct Notifier {
    socket: Option<(UnixDatagram, SocketAddr)>,
    watchdog: Option<Duration>,
}

impl Notifier {
    /// Reads the socket and the watchdog's interval from the environment. Without `$NOTIFY_SOCKET` nothing is sent.
    ///
    /// # Errors
    /// If there is an address but no socket for it.
    pub fn from_environment() -> io::Result<Self> {
        let socket = match std::env::var_os("NOTIFY_SOCKET").filter(|path| !path.is_empty()) {
            Some(path) => Some((UnixDatagram::unbound()?, address(path.as_bytes())?)),
            None => None,
        };
        let number = |name| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
        // The interval applies only to the process with that pid (sd_watchdog_enabled(3)).
        let is_ours = number("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
        let watchdog = number("WATCHDOG_USEC").filter(|&us| us > 0 && is_ours && socket.is_some()).map(Duration::from_micros);
        Ok(Self { socket, watchdog })
    }

    /// Time without a message after which the manager restarts the agent.
    #[must_use]
    pub fn watchdog(&self) -> Option<Duration> {
        self.watchdog
    }

    /// Sends a state such as `READY=1`. A failure is only logged.
    pub fn send(&self, state: &str) {
        if let Some((socket, address)) = &self.socket
            && let Err(error) = socket.send_to_addr(state.as_bytes(), address)
        {
            tracing::warn!("cannot send {state:?} to the service manager: {error}");
        }
    }
}

/// A path, or a name in the abstract namespace after `@`.
fn address(path: &[u8]) -> io::Result<SocketAddr> {
    match path.split_first() {
        Some((b'@', name)) => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(path)),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn both_kinds_of_address_are_understood() {
        assert_eq!(address(b"@manager").unwrap().as_abstract_name(), Some(&b"manager"[..]));
        assert_eq!(address(b"/run/notify").unwrap().as_pathname(), Some("/run/notify".as_ref()));
    }

    #[test]
    fn a_state_arrives_as_one_datagram() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        let socket = Some((UnixDatagram::unbound().unwrap(), address(path.as_os_str().as_bytes()).unwrap()));
        Notifier { socket, watchdog: None }.send("READY=1\nSTATUS=x");
        let mut got = [0; 64];
        let bytes = manager.recv(&mut got).unwrap();
        assert_eq!(&got[..bytes], b"READY=1\nSTATUS=x");
    }
}
