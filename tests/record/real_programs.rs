//! Programs not written for this project, compared with their own statistics.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::support::build::{self, Link, script, tool};
use crate::support::process::{Process, run, wait_until};
use crate::support::recording::{Recording, fragprof};
use crate::support::rendezvous::Rendezvous;
use crate::support::report::Report;
use crate::support::{LIMIT, bpf, serial};

/// Fails unless `reported` is within `share` of `truth`.
#[track_caller]
fn assert_near(what: &str, reported: u64, truth: u64, share: f64, report: &Report) {
    let error = (reported as f64 - truth as f64) / truth as f64;
    assert!(
        error.abs() <= share,
        "{what}: reported {reported}, the program says {truth} ({:+.2} %); losses {:?}",
        error * 100.0,
        report.nonzero_losses()
    );
}

/// A redis-server under `fragprof record --`, on a unix socket.
struct Redis {
    recording: Recording,
    socket: PathBuf,
    dir: TempDir,
}

impl Redis {
    fn start(server: &Path) -> Self {
        let dir = TempDir::new().unwrap();
        let socket = dir.path().join("redis");
        let mut command = fragprof();
        command.args(["record", "--duration", "300s"]);
        let path = dir.path().to_str().unwrap().to_owned();
        let socket_path = socket.to_str().unwrap().to_owned();
        let args = ["--port", "0", "--save", "", "--appendonly", "no", "--dir", &path, "--unixsocket", &socket_path];
        let target: Vec<_> = std::iter::once(server.as_os_str()).chain(args.iter().map(std::ffi::OsStr::new)).collect();
        let recording = Recording::start(&mut command, &target);
        let mut redis = Self { recording, socket, dir };
        wait_until("redis-server answers", || {
            let process = &mut redis.recording.process;
            assert!(process.is_running(), "fragprof ended; it said:\n{}\n{}", process.out, process.err);
            UnixStream::connect(&redis.socket).is_ok()
        });
        redis
    }

    /// Sends one command and returns the whole reply, without its type and length.
    fn ask(&self, command: &str) -> String {
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.write_all(format!("{command}\r\n").as_bytes()).unwrap();
        let mut reader = BufReader::new(stream);
        let mut first = String::new();
        reader.read_line(&mut first).unwrap();
        let Some(length) = first.strip_prefix('$') else { return first.trim_end().to_owned() };
        let mut body = vec![0; length.trim_end().parse().unwrap()];
        std::io::Read::read_exact(&mut reader, &mut body).unwrap();
        String::from_utf8(body).unwrap()
    }

    fn info(&self, section: &str, key: &str) -> u64 {
        let info = self.ask(&format!("INFO {section}"));
        let line = info.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':').map(str::to_owned));
        line.unwrap_or_else(|| panic!("no {key} in INFO {section}")).parse().unwrap()
    }

    /// Fills a database with keys through redis-benchmark.
    ///
    /// Redis counts the size classes that jemalloc returns, fragprof the bytes requested. A value of 16,378 bytes, with its header of 5
    /// bytes and its final zero, is exactly one size class of jemalloc, so that the two can be compared. Before any load redis has small
    /// blocks, whose rounding is about 400 KB: small compared with the load.
    fn load(&self, database: u32) {
        let benchmark = tool("redis-benchmark").expect("redis-benchmark comes with redis-server");
        let socket = self.socket.to_str().unwrap();
        let database = database.to_string();
        let args = ["-s", socket, "--dbnum", &database, "-t", "set", "-n", "12000", "-r", "6000", "-d", "16378", "-c", "4", "-q"];
        let done = run(Command::new(benchmark).args(args));
        assert!(done.status.success(), "{}", done.err);
        wait_until("the load's clients have disconnected", || self.info("clients", "connected_clients") == 1);
    }

    /// The allocator's statistics according to redis, once they no longer change: clients' buffers are freed some time after they
    /// disconnect.
    fn allocated_at_rest(&self) -> u64 {
        let mut last = 0;
        let mut same = 0;
        wait_until("redis comes to rest", || {
            let now = self.info("memory", "allocator_allocated");
            same = if now == last { same + 1 } else { 0 };
            last = now;
            same >= 200
        });
        last
    }

    /// Ends the recording and returns redis's own figure and the report.
    fn finish(self) -> (u64, Report) {
        let truth = self.allocated_at_rest();
        let pid = i32::try_from(self.info("server", "process_id")).unwrap();
        let Self { recording, socket: _, dir } = self;
        let report = recording.stop();
        // Redis may have outlived its recorder; it is no error if it has ended.
        let _ = rustix::process::kill_process(rustix::process::Pid::from_raw(pid).unwrap(), rustix::process::Signal::KILL);
        drop(dir);
        (truth, report)
    }
}

#[test]
fn live_bytes_of_redis_after_a_load_equal_its_allocators_statistics() {
    let (Some(_bpf), Some(server)) = (bpf(), tool("redis-server")) else { return };
    let _alone = serial();
    let redis = Redis::start(&server);
    redis.load(0);
    let (truth, report) = redis.finish();
    assert!(truth > 40 << 20, "the load left {truth} bytes");
    assert_near("redis after a load", report.totals.inuse_bytes, truth, 0.01, &report);
}

#[test]
fn live_bytes_of_redis_after_a_flush_equal_its_allocators_statistics() {
    let (Some(_bpf), Some(server)) = (bpf(), tool("redis-server")) else { return };
    let _alone = serial();
    let redis = Redis::start(&server);
    redis.load(0);
    redis.load(1);
    let loaded = redis.allocated_at_rest();
    // One of the two databases stays, so that one percent is a meaningful amount.
    let mut flush = UnixStream::connect(&redis.socket).unwrap();
    flush.write_all(b"SELECT 0\r\nFLUSHDB\r\n").unwrap();
    let mut replies = BufReader::new(flush).lines();
    assert_eq!((replies.next().unwrap().unwrap(), replies.next().unwrap().unwrap()), ("+OK".into(), "+OK".into()));
    drop(replies);
    let (truth, report) = redis.finish();
    assert!(truth < loaded * 6 / 10, "the flush left {truth} of {loaded} bytes");
    assert_near("redis after a flush", report.totals.inuse_bytes, truth, 0.01, &report);
}

#[test]
fn live_bytes_of_python_on_malloc_equal_its_allocators_statistics() {
    let (Some(_bpf), Some(python)) = (bpf(), tool("python3")) else { return };
    let _alone = serial();
    let rendezvous = Rendezvous::new();
    // The shim of a version manager is a shell script: ask it for the actual program.
    let asked = run(Command::new(python).args(["-c", "import sys; print(sys.executable)"]));
    let python = PathBuf::from(asked.out.trim());
    let program = script("holds_memory.py");
    let recording = Recording::launch(&rendezvous, &python, &[program.to_str().unwrap()], &[("PYTHONMALLOC", "malloc")]);
    let said = recording.process.out.wait_for(LIMIT, |line| line.starts_with("in use ")).unwrap_or_default();
    let numbers: Vec<u64> = said.split(' ').filter_map(|word| word.parse().ok()).collect();
    let [truth] = numbers[..] else { panic!("python said {said:?}:\n{}", recording.process.err) };
    let report = recording.finish();
    assert_near("python3", report.totals.inuse_bytes, truth, 0.01, &report);
}

#[test]
fn live_java_direct_buffers_equal_the_virtual_machines_count() {
    let (Some(_bpf), Some(java)) = (bpf(), tool("java")) else { return };
    let _alone = serial();
    let mut command = Command::new(java);
    command.args(["-Xmx256m", "-XX:+UseSerialGC", "-XX:MaxDirectMemorySize=512m"]).arg(script("DirectBuffers.java"));
    let mut machine = Process::start_piped(&mut command);
    let mut input = machine.input();
    assert!(machine.out.wait_for(LIMIT, |line| line == "ready").is_some(), "{}\n{}", machine.out, machine.err);
    let recording = Recording::attach(&[machine.pid()]);
    input.write_all(b"\n").unwrap();
    let said = machine.out.wait_for(LIMIT, |line| line.starts_with("direct "));
    let said = said.unwrap_or_else(|| panic!("{}\n{}", machine.out, machine.err));
    let numbers: Vec<u64> = said.split(' ').filter_map(|word| word.parse().ok()).collect();
    let [count, bytes] = numbers[..] else { panic!("java said {said:?}") };
    let report = recording.stop();
    // The virtual machine makes a few allocations of its own meanwhile.
    assert_near("direct buffers", report.totals.inuse_bytes, bytes, 0.02, &report);
    assert!(report.totals.inuse_allocations >= count);
}

/// `entry_points` then skips pvalloc, which ends a program under valgrind. The others ignore the argument.
const VALGRIND_ARG: &str = "without-pvalloc";

#[test]
fn live_blocks_in_the_report_equal_valgrinds_reachable_and_lost_ones() {
    let (Some(_bpf), Some(valgrind)) = (bpf(), tool("valgrind")) else { return };
    for name in ["entry_points", "realloc_forms", "nested"] {
        let path = build::program(name, Link::Dynamic);
        let mut command = Command::new(&valgrind);
        let done = run(command.args(["--leak-check=full", "--show-leak-kinds=all", "--run-libc-freeres=no"]).arg(&path).arg(VALGRIND_ARG));
        let lines: BTreeMap<&str, (u64, u64)> = done.err.lines().filter_map(summary_line).collect();
        let sum = |kinds: &[&str]| {
            kinds.iter().fold((0, 0), |(bytes, blocks), kind| {
                let (b, n) = lines.get(kind).copied().unwrap_or_default();
                (bytes + b, blocks + n)
            })
        };
        let by_valgrind = sum(&["still reachable", "definitely lost", "indirectly lost", "possibly lost"]);
        assert!(by_valgrind.1 > 0, "no leak summary from valgrind:\n{}", done.err);

        let dir = TempDir::new().unwrap();
        let file = dir.path().join("out.pb.gz");
        // To a file: valgrind's run has no rendezvous, so this one has none either.
        let mut command = fragprof();
        command.args(["record", "--duration", "300s", "-o"]).arg(&file).arg("--").arg(&path).arg(VALGRIND_ARG);
        let recorded = run(&mut command);
        assert!(recorded.status.success(), "{}", recorded.err);
        let totals = Report::read(&file).totals;
        assert_eq!((totals.inuse_bytes, totals.inuse_allocations), by_valgrind, "{name}");
    }
}

/// `==7==    still reachable: 1,234 bytes in 5 blocks`
fn summary_line(line: &str) -> Option<(&str, (u64, u64))> {
    let (kind, rest) = line.trim_start_matches(|c: char| c == '=' || c.is_ascii_digit()).trim().split_once(": ")?;
    let (bytes, rest) = rest.split_once(" bytes in ")?;
    let blocks = rest.strip_suffix(" blocks")?;
    let number = |s: &str| s.replace(',', "").parse().ok();
    Some((kind, (number(bytes)?, number(blocks)?)))
}
