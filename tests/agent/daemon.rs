//! A running agent, and requests to it over a plain socket.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;

use crate::support::LIMIT;
use crate::support::process::{Process, wait_until};

/// An agent that is killed when dropped.
pub struct Daemon {
    pub process: Process,
    pub address: SocketAddr,
    directory: tempfile::TempDir,
}

/// An answer.
pub struct Answer {
    pub status: u16,
    pub headers: String,
    pub body: String,
}

impl Daemon {
    /// Starts one with this configuration on a port of the system's choice.
    pub fn start(config: &str) -> Self {
        Self::start_with(config, |_, _| {})
    }

    /// As [`Daemon::start`]; `prepare` may write into the configuration's directory and change the command.
    pub fn start_with(config: &str, prepare: impl FnOnce(&Path, &mut Command)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("agent.toml");
        std::fs::write(&path, config).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_fragprof"));
        command.args(["agent", "--config"]).arg(&path);
        prepare(directory.path(), &mut command);
        let process = Process::start(&mut command);
        let line = process.out.wait_for(LIMIT, |line| line.starts_with("fragprof agent: "));
        let line = line.unwrap_or_else(|| panic!("the agent did not start: {}", process.err));
        let address = line.trim_start_matches("fragprof agent: http://").trim_end_matches("/metrics").parse().unwrap();
        Self { process, address, directory }
    }

    /// Replaces the configuration; a signal makes the agent read it.
    pub fn configure(&self, config: &str) {
        std::fs::write(self.directory.path().join("agent.toml"), config).unwrap();
    }

    /// Its directory, which is its own.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Requests a path.
    pub fn get(&self, path: &str) -> Answer {
        self.ask(&format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"))
    }

    /// Sends a request as it stands.
    pub fn ask(&self, request: &str) -> Answer {
        self.try_ask(request).unwrap()
    }

    /// The same for tests of an hour, in which the whole machine may stand still for longer than a connection lasts.
    pub fn try_ask(&self, request: &str) -> std::io::Result<Answer> {
        let mut stream = TcpStream::connect(self.address)?;
        stream.set_read_timeout(Some(LIMIT))?;
        stream.write_all(request.as_bytes())?;
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes)?;
        let text = String::from_utf8(bytes).unwrap();
        let (headers, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        let status = headers.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        Ok(Answer { status, headers: headers.to_owned(), body: body.to_owned() })
    }

    /// The body of an answer that is not text.
    pub fn get_bytes(&self, path: &str) -> Vec<u8> {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").as_bytes()).unwrap();
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        let end = bytes.windows(4).position(|four| four == b"\r\n\r\n").unwrap();
        bytes.split_off(end + 4)
    }

    /// The exposition.
    pub fn metrics(&self) -> String {
        self.get("/metrics").body
    }

    /// Waits until the exposition has a series of this name whose labels contain `label`; returns the exposition.
    pub fn metrics_with(&self, name: &str, label: &str) -> String {
        let mut text = String::new();
        wait_until(&format!("{name} with {label}"), || {
            text = self.metrics();
            value(&text, name, label).is_some()
        });
        text
    }
}

/// Writes a token that no other user may read.
pub fn secret(path: &Path, token: &str) {
    std::fs::write(path, token).unwrap();
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
}

/// The value of the first series of this name whose labels contain `label`.
pub fn value(exposition: &str, name: &str, label: &str) -> Option<f64> {
    let of_name = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']));
    let line = exposition.lines().filter(of_name).find(|line| line.contains(label))?;
    line.rsplit(' ').next()?.parse().ok()
}

/// A configuration that watches only the named commands, often, at up to one core, on a free port. Without windows, unless `rest` has them:
/// most tests are about the census, and probes would change what they measure.
pub fn watching(commands: &[&str], rest: &str) -> String {
    let rest = if rest.contains("[governed]") { rest.to_owned() } else { format!("{rest}\n[governed]\nenabled = false") };
    format!(
        "[discovery]\nscan_interval_s = 1\nrss_min_mib = 0\ninclude = {commands:?}\n[census]\nbudget_percent = 100.0\ntop_interval_s = 1\n\
         full_interval_s = 2\n{rest}\n[server]\nlisten = '127.0.0.1:0'\n"
    )
}
