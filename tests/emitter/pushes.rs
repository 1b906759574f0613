//! What an agent pushes, as a server sees it: files merged by `go tool pprof` against the program's own count.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};

use fragprof::profile::pprof::proto;
use fragprof::profile::{ValueKind, pprof};
use prost::Message as _;
use tempfile::TempDir;

use super::programs::{compile, sampled};
use crate::agent::daemon::{Daemon, watching};
use crate::support::build::tool;
use crate::support::process::{Process, run, wait_until};
use crate::support::{LIMIT, bpf, serial};

const ROUNDS: usize = 4;
/// Mean distance of the samples in bytes.
const SAMPLE_BYTES: u64 = 4096;

/// A file that was pushed, and the query that it came with.
struct Pushed {
    query: String,
    file: Vec<u8>,
    message: proto::Profile,
}

impl Pushed {
    fn types(&self) -> Vec<&str> {
        let text = |index: i64| self.message.string_table[usize::try_from(index).unwrap()].as_str();
        self.message.sample_type.iter().map(|kind| text(kind.r#type)).collect()
    }

    fn total(&self, kind: &str) -> u64 {
        let Some(at) = self.types().iter().position(|one| *one == kind) else { return 0 };
        self.message.sample.iter().map(|sample| u64::try_from(sample.value[at]).unwrap()).sum()
    }
}

/// Takes one request and answers it.
fn take(mut stream: TcpStream) -> Pushed {
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let (mut bytes, mut piece) = (Vec::new(), [0; 65536]);
    let head = loop {
        let got = stream.read(&mut piece).unwrap();
        assert!(got > 0, "the request is cut short");
        bytes.extend_from_slice(&piece[..got]);
        if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break String::from_utf8(bytes.drain(..end + 4).collect()).unwrap();
        }
    };
    let length = head.lines().find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length:").map(|n| n.trim().parse().unwrap()));
    let length: usize = length.unwrap();
    while bytes.len() < length {
        let got = stream.read(&mut piece).unwrap();
        assert!(got > 0, "the body is cut short");
        bytes.extend_from_slice(&piece[..got]);
    }
    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").unwrap();
    let boundary = head.split("boundary=").nth(1).unwrap().split("\r\n").next().unwrap();
    let start = bytes.windows(2).position(|two| two == [0x1f, 0x8b]).unwrap();
    let file = bytes[start..bytes.len() - format!("\r\n--{boundary}--\r\n").len()].to_vec();
    let mut plain = Vec::new();
    flate2::read::GzDecoder::new(file.as_slice()).read_to_end(&mut plain).unwrap();
    let query = head.split(' ').nth(1).unwrap().to_owned();
    Pushed { query, file, message: proto::Profile::decode(plain.as_slice()).unwrap() }
}

fn server() -> (String, Receiver<Pushed>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (sender, pushes) = channel();
    std::thread::spawn(move || while sender.send(take(listener.accept().unwrap().0)).is_ok() {});
    (url, pushes)
}

/// The total of a type in files merged by Go's tool.
fn merged(go: &Path, files: &[PathBuf], kind: &str) -> u64 {
    let mut command = Command::new(go);
    command.args(["tool", "pprof", "-symbolize=none", "-top", "-nodefraction=0", "-unit=B"]).env("GOTOOLCHAIN", "local");
    let done = run(command.arg(format!("-sample_index={kind}")).args(files));
    assert!(done.status.success(), "{}", done.err);
    let shown = done.out.lines().find(|line| line.starts_with("Showing nodes")).unwrap_or_else(|| panic!("{}", done.out));
    shown.split(" of ").nth(1).unwrap().split_whitespace().next().unwrap().trim_end_matches('B').parse().unwrap()
}

#[test]
fn merged_pushes_are_what_the_program_allocated_and_the_last_one_is_what_is_live() {
    if bpf().is_none() {
        return;
    }
    let Some(go) = tool("go") else { return };
    // Newer releases build the tool at its first use, however long that takes.
    Command::new(&go).args(["tool", "pprof", "-help"]).env("GOTOOLCHAIN", "local").output().unwrap();
    let _alone = serial();
    let folder = TempDir::new().unwrap();
    let mut process = Process::start_piped(&mut sampled(&compile(folder.path(), "rounds.c", "rounds_pushed", &["-O2"]), SAMPLE_BYTES));
    process.out.wait_for(LIMIT, |line| line == "ready").unwrap();
    let (url, pushes) = server();
    let rest = format!(
        "[listening]\nprofile_interval_s = 1\ncensus_interval_s = 1\ncpu_percent = 100.0\n[push]\nurl = {url:?}\ninterval_s = 1\n[push.labels]\n\
         cluster = 'a'"
    );
    let daemon = Daemon::start(&watching(&["rounds_pushed"], &rest));
    daemon.metrics_with("fragprof_process_samples_total", &format!("pid=\"{}\"", process.pid()));
    let mut input = process.input();
    let mut got: Vec<Pushed> = Vec::new();
    let mut truth = (0, 0);
    for round in 0..ROUNDS {
        input.write_all(b"go\n").unwrap();
        let line = process.out.nth(1 + round, LIMIT).unwrap();
        let numbers: Vec<u64> = line.split(' ').skip(1).map(|word| word.parse().unwrap()).collect();
        truth = (numbers[0], numbers[1]);
        // Each round has pushes of its own.
        while got.iter().map(|one| one.total("alloc_space")).sum::<u64>() < truth.0 * 9 / 10 {
            got.push(pushes.recv_timeout(LIMIT).unwrap());
        }
    }
    // The agent's own figures, once nothing is being sent.
    let path = format!("/api/v1/processes/{}/profile?format=pprof", process.pid());
    let own = || pprof::read(daemon.get_bytes(&path).as_slice()).unwrap().totals();
    wait_until("all was pushed", || {
        got.extend(pushes.try_iter());
        got.iter().map(|one| one.total("alloc_space")).sum::<u64>() == own().get(ValueKind::AllocSpace)
    });

    let mut sets: BTreeMap<Vec<&str>, Vec<PathBuf>> = BTreeMap::new();
    for (at, pushed) in got.iter().enumerate() {
        let file = folder.path().join(at.to_string());
        std::fs::write(&file, &pushed.file).unwrap();
        sets.entry(pushed.types()).or_default().push(file);
    }
    // Files are merged where they have the same types: those of a census come with the first one.
    let total: u64 = sets.values().map(|files| merged(&go, files, "alloc_space")).sum();
    let error = 5.0 / (truth.0 as f64 / SAMPLE_BYTES as f64).sqrt();
    assert!((total as f64 / truth.0 as f64 - 1.0).abs() < error, "{total} of {} within {error:.3}", truth.0);
    let last = got.iter().rev().find(|one| one.total("inuse_space") > 0).unwrap();
    let error = 5.0 / (truth.1 as f64 / SAMPLE_BYTES as f64).sqrt();
    assert!((last.total("inuse_space") as f64 / truth.1 as f64 - 1.0).abs() < error, "{} of {}", last.total("inuse_space"), truth.1);
    assert!(got.len() > ROUNDS, "{}", got.len());
    for two in got.windows(2) {
        let [before, after] = [&two[0].message, &two[1].message];
        assert!(after.time_nanos > before.time_nanos && after.duration_nanos > 0);
        let gap_ns = after.time_nanos - after.duration_nanos - before.time_nanos;
        assert!(gap_ns.abs() < 100_000_000, "an interval must begin where the last one ended: {gap_ns} ns");
    }
    assert!(
        got[0].query.starts_with("/ingest?name=rounds_pushed%7Bcluster%3Da%2C") && !got[0].query.contains("format="),
        "{}",
        got[0].query
    );
    drop(input);
}
