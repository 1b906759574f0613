//! Packaged programs under load: no block that they still use is reported.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fragprof::capture::registers::ThreadRegisters;
use fragprof::census::{LayoutCache, LiveMemory};
use fragprof::process::Process;
use fragprof::retention::scans::{Plan, ScanResult, scan};
use fragprof::units::Pid;

use crate::support::postgres::{Server, WORK};

/// A program, killed when it is dropped.
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(program: &str, args: &[&str]) -> Running {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    Running(command.spawn().unwrap_or_else(|error| panic!("{program} is missing: {error}")))
}

/// Waits until a process has at least this many blocks and scans it.
fn seen(child: &Running, blocks_min: u64) -> ScanResult {
    seen_pid(child.0.id(), blocks_min)
}

fn seen_pid(pid: u32, blocks_min: u64) -> ScanResult {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let memory = LiveMemory::open(Process::open(Pid(pid)).unwrap()).unwrap();
        let registers = ThreadRegisters::of(Pid(pid)).unwrap();
        let has_grown = scan(&memory, (pid, "x"), Plan { looks: 0, ..Plan::default() }, None, &mut LayoutCache::default());
        if has_grown.is_ok_and(|seen| seen.live_blocks >= blocks_min) {
            let plan = Plan { interval: Duration::from_millis(700), ..Plan::default() };
            let seen = scan(&memory, (pid, "x"), plan, Some(&|| registers.read()), &mut LayoutCache::default());
            // A shell that executes the program may have that many blocks too: scans of two different programs are refused.
            let Ok(seen) = seen else {
                assert!(Instant::now() < deadline, "{:?}", seen.err());
                continue;
            };
            println!(
                "{} blocks, {} after the first scan, {} remain; {:?}",
                seen.live_blocks,
                seen.first_pass_blocks,
                seen.candidates.len(),
                seen.doubts
            );
            return seen;
        }
        assert!(Instant::now() < deadline, "it has too few blocks");
        std::thread::sleep(Duration::from_millis(200));
    }
}

#[test]
fn redis_under_load_has_no_block_without_a_pointer() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("redis");
    let socket = socket.to_str().unwrap();
    let server = start("redis-server", &["--port", "0", "--save", "", "--unixsocket", socket]);
    let deadline = Instant::now() + Duration::from_secs(20);
    while !std::path::Path::new(socket).exists() {
        assert!(Instant::now() < deadline, "redis does not start");
        std::thread::sleep(Duration::from_millis(20));
    }
    let tests = ["-s", socket, "-q", "-n", "100000000", "-r", "100000", "-d", "100", "-t", "set,lpush,lpop,sadd,zadd"];
    let _load = start("redis-benchmark", &tests);
    assert_eq!(seen(&server, 100_000).candidates.len(), 0);
}

/// nginx, which takes pools per connection and request, with connections that stay, come and go.
#[test]
fn nginx_under_load_has_no_block_without_a_pointer() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let (socket, page) = (path("socket"), "a line of text that compresses well\n".repeat(2000));
    std::fs::write(path("page"), page).unwrap();
    let configuration = format!(
        "daemon off; master_process off; pid {}; error_log {}; events {{ worker_connections 1000; }} http {{ access_log off; gzip on; \
         gzip_types *; client_body_temp_path {}; proxy_temp_path {}; fastcgi_temp_path {}; uwsgi_temp_path {}; scgi_temp_path {}; \
         keepalive_requests 1000000; server {{ listen unix:{socket}; root {}; autoindex on; }} }}",
        path("pid"),
        path("log"),
        path("t1"),
        path("t2"),
        path("t3"),
        path("t4"),
        path("t5"),
        path("")
    );
    std::fs::write(path("conf"), configuration).unwrap();
    let server = start("nginx", &["-e", &path("log"), "-c", &path("conf")]);
    let deadline = Instant::now() + Duration::from_secs(20);
    while UnixStream::connect(&socket).is_err() {
        assert!(Instant::now() < deadline, "nginx does not start");
        std::thread::sleep(Duration::from_millis(20));
    }
    let stop = AtomicBool::new(false);
    let get = |mut stream: &UnixStream, path: &str| {
        let mut answer = [0; 1 << 16];
        stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\n\r\n").as_bytes()).unwrap();
        assert_ne!(stream.read(&mut answer).unwrap(), 0, "{path}");
    };
    let candidates = std::thread::scope(|scope| {
        for worker in 0..3 {
            let (socket, stop) = (&socket, &stop);
            scope.spawn(move || {
                let open = || UnixStream::connect(socket).unwrap();
                let mut streams: Vec<UnixStream> = (0..60).map(|_| open()).collect();
                for round in 0.. {
                    let at = round * 7 % streams.len();
                    get(&streams[at], if (round + worker) % 3 == 0 { "/page" } else { "/" });
                    if round % 5 == 0 {
                        streams[at] = open();
                    }
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
        }
        let seen = std::panic::catch_unwind(|| seen(&server, 300));
        stop.store(true, Ordering::Relaxed);
        seen.unwrap().candidates.len()
    });
    assert_eq!(candidates, 0);
}

#[test]
fn a_go_program_that_keeps_blocks_of_c_has_no_block_without_a_pointer() {
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("kept_by_go");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/leaks/kept_by_go.go");
    let mut go = Command::new("go");
    go.args(["build", "-o"]).arg(&program).arg(source).env("CGO_ENABLED", "1").env("GO111MODULE", "off");
    assert!(go.status().unwrap().success());
    assert_eq!(seen(&start(program.to_str().unwrap(), &[]), 25_000).candidates.len(), 0);
}

#[test]
fn cpython_has_no_block_without_a_pointer_on_malloc_or_its_own_arenas() {
    const PROGRAM: &str = "
import sqlite3, time
kept = [{'number': i, 'text': str(i) * 5} for i in range(30000)]
base = sqlite3.connect(':memory:')
base.execute('create table t(a, b)')
while True:
    base.executemany('insert into t values(?, ?)', [(i, 'v' * 60) for i in range(1000)])
    base.execute('delete from t where rowid % 2')
    kept[:100] = [{'number': i, 'text': str(i) * 7} for i in range(100)]
    time.sleep(0.01)
";
    for (allocator, blocks) in [("malloc", 100_000), ("pymalloc", 500)] {
        let mut command = Command::new("python3");
        command.args(["-c", PROGRAM]).env("PYTHONMALLOC", allocator).stdout(Stdio::null());
        assert_eq!(seen(&Running(command.spawn().unwrap()), blocks).candidates.len(), 0, "{allocator}");
    }
}

/// A backend that creates tables, sorts, aggregates and drops. It inherits the blocks that the server lost at its start: a copy of its
/// environment, a path.
#[test]
fn a_postgresql_backend_under_load_has_no_block_without_a_pointer_but_its_servers() {
    let server = Server::start();
    let mut session = server.psql(&[]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut input, mut output) = (session.stdin.take().unwrap(), BufReader::new(session.stdout.take().unwrap()));
    writeln!(input, "set client_min_messages to error;\nselect pg_backend_pid();").unwrap();
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    let pid = line.trim().parse().unwrap();
    let stop = AtomicBool::new(false);
    let seen = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                writeln!(input, "{}", WORK.replace("40000", "4000").replace('\n', ";\n")).unwrap();
                while !line.starts_with("DONE") {
                    line.clear();
                    assert_ne!(output.read_line(&mut line).unwrap(), 0, "the session has ended: {}", server.log());
                }
                line.clear();
            }
            drop(input);
        });
        let seen = std::panic::catch_unwind(|| seen_pid(pid, 100));
        stop.store(true, Ordering::Relaxed);
        seen.unwrap()
    });
    let _ = session.wait();
    let inherited: Vec<_> = seen_pid(server.pid(), 10).candidates.left().map(|(_, block)| block.range()).collect();
    let own: Vec<_> = seen.candidates.left().map(|(_, block)| block.range()).filter(|range| !inherited.contains(range)).collect();
    assert_eq!(own, []);
    assert!(inherited.len() <= 4, "{inherited:?}");
}

#[test]
fn node_under_load_has_no_block_without_a_pointer() {
    const PROGRAM: &str = "
let kept = [];
for (let i = 0; i < 20000; i++) kept.push({ i, buffer: Buffer.from('x'.repeat(300)) });
setInterval(() => { for (let i = 0; i < 50; i++) { kept.push({ i, buffer: Buffer.alloc(200) }); kept.shift(); } }, 1);
";
    assert_eq!(seen(&start("node", &["-e", PROGRAM]), 20_000).candidates.len(), 0);
}

/// The blocks of OpenJDK 17 are options of its launcher, which copies them and drops the copies.
#[test]
fn a_jvm_has_almost_no_block_without_a_pointer() {
    let directory = tempfile::tempdir().unwrap();
    let source = directory.path().join("Buffers.java");
    let program = "import java.nio.*; import java.util.*; public class Buffers { public static void main(String[] a) throws Exception {
        var kept = new ArrayList<ByteBuffer>(); for (int i = 0; i < 5000; i++) kept.add(ByteBuffer.allocateDirect(4096));
        var random = new Random(); while (true) { kept.set(random.nextInt(5000), ByteBuffer.allocateDirect(4096)); Thread.sleep(1); } } }";
    std::fs::write(&source, program).unwrap();
    let jvm = start("java", &["-Xmx256m", source.to_str().unwrap()]);
    // While it is being compiled on a busy machine, a scan may find more, which the next one does not.
    let counts: Vec<usize> = (0..3).map(|_| seen(&jvm, 10_000).candidates.len()).take_while(|&count| count > 12).collect();
    assert!(counts.len() < 3, "{counts:?}");
}
