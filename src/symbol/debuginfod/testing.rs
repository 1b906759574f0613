//! For tests: a stripped program with its debug file, by binutils, and a server that answers as it is told to.
#![allow(clippy::unwrap_used)]

use std::io::Write as _;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use crate::client::testing::{listen, read_request};
use crate::process::elf::BuildId;

/// Lines are counted in the tests.
const PROGRAM: &str = r#"
#include <stdlib.h>
static __attribute__((noinline)) void *hidden_take(long bytes) {
    return malloc(bytes);
}
__attribute__((noinline, visibility("default"))) void *exported_take(long bytes) {
    return hidden_take(bytes + 1);
}
int main(int count, char **arguments) {
    return exported_take(count) == 0 || arguments == 0;
}
"#;

/// A program without symbols, and what was taken from it.
pub struct Stripped {
    pub path: PathBuf,
    /// The program before that.
    pub whole: PathBuf,
    pub debug: Vec<u8>,
    pub build_id: BuildId,
}

impl Stripped {
    pub fn build(directory: &Path) -> Self {
        Self::build_with(directory, "program", &[])
    }

    pub fn build_with(directory: &Path, name: &str, more: &[&str]) -> Self {
        let in_place = |ending: &str| directory.join(format!("{name}{ending}"));
        let (source, whole, debug, path) = (in_place(".c"), in_place(".whole"), in_place(".debug-file"), in_place(""));
        std::fs::write(&source, PROGRAM).unwrap();
        // Its name makes the build id differ.
        let named = format!("-DNAME_{}", name.replace(|c: char| !c.is_ascii_alphanumeric(), "_"));
        run(Command::new("cc")
            .args(["-O1", "-g3", "-rdynamic", "-fno-optimize-sibling-calls", &named])
            .args(more)
            .arg("-o")
            .args([&whole, &source]));
        run(Command::new("objcopy").arg("--only-keep-debug").args([&whole, &debug]));
        run(Command::new("strip").arg("-o").args([&path, &whole]));
        Self { build_id: build_id(&whole), debug: std::fs::read(&debug).unwrap(), path, whole }
    }
}

pub fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The build id, by readelf.
fn build_id(path: &Path) -> BuildId {
    let notes = run(Command::new("readelf").arg("-n").arg(path));
    let hex = notes.lines().find_map(|line| line.trim().strip_prefix("Build ID: ")).unwrap().trim().to_owned();
    BuildId((0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect())
}

/// The names of the entries of a directory, sorted.
pub fn names_in(directory: &Path) -> Vec<String> {
    let names = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// A server, and the first lines of the requests that it got.
pub struct FakeServer {
    pub url: String,
    pub requests: Arc<Mutex<Vec<String>>>,
}

impl FakeServer {
    /// `answer` gets the path of a request and the connection.
    pub fn start(answer: impl Fn(&str, &mut TcpStream) + Send + 'static) -> Self {
        let requests = Arc::<Mutex<Vec<String>>>::default();
        let seen = Arc::clone(&requests);
        let port = listen(move |mut stream| {
            let Ok((head, _)) = read_request(&mut stream) else { return };
            let line = head.lines().next().unwrap_or_default().to_owned();
            let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
            seen.lock().unwrap().push(line);
            answer(&path, &mut stream);
        });
        Self { url: format!("http://127.0.0.1:{port}"), requests }
    }

    /// A server that answers each request with these bytes.
    pub fn with(bytes: impl Into<Vec<u8>>) -> Self {
        let bytes = bytes.into();
        Self::start(move |_, stream| drop(stream.write_all(&bytes)))
    }

    pub fn asked(&self) -> usize {
        self.requests.lock().unwrap().len()
    }
}

/// A response with this body.
pub fn found(body: &[u8]) -> Vec<u8> {
    let head = format!("HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: {}\r\n\r\n", body.len());
    [head.as_bytes(), body].concat()
}

/// A response with this status and no body.
pub fn status(status: u16) -> Vec<u8> {
    format!("HTTP/1.1 {status} x\r\nContent-Length: 0\r\n\r\n").into_bytes()
}
