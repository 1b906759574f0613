//! Real programs with the sampler: they behave as without it, and their samples add up to their own statistics.

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use fragprof::sampler::library::Flavour;

use super::consumer::{Consumer, Ledger};
use super::programs::{Allocator, Libraries, sampled};
use crate::support::build::tool;
use crate::support::process::{Process, run, wait_until};
use crate::support::recording::fragprof;
use crate::support::{LIMIT, serial};

/// Runs a command with the sampler and a listener, and without; both must print the same.
fn same_with_and_without(program: &std::path::Path, arguments: &[&str], input: &str) {
    let libraries = Libraries::new();
    let library = libraries.path(Flavour::Standard);
    let mut consumer = Consumer::new();
    consumer.attach(-1, &library);
    let say = |command: &mut Command| {
        let mut child = command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let input = input.to_owned();
        let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
        let output = child.wait_with_output().unwrap();
        writer.join().unwrap().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let without = say(&mut Command::new(program));
    let with = say(&mut sampled(program, &library, Allocator::Glibc, 16 << 10));
    assert_eq!(without.0, Some(0), "{}", without.2);
    assert!(with == without, "{with:?}");
    assert!(!consumer.records().is_empty(), "nothing was reported");
}

#[test]
fn sqlite_answers_the_same() {
    let (Some(_bpf), Some(sqlite)) = (crate::support::bpf(), tool("sqlite3")) else { return };
    let sql = "create table t(a integer primary key, b text);\n\
        with recursive n(i) as (select 1 union all select i+1 from n where i < 40000) insert into t select i, hex(zeroblob(i%200)) from n;\n\
        create index x on t(b); select count(*), sum(length(b)), max(a) from t where b > '00'; select sum(a) from t group by length(b) order by 1;\n";
    same_with_and_without(&sqlite, &[":memory:"], sql);
}

#[test]
fn git_prints_the_same_for_a_repository() {
    let (Some(_bpf), Some(git)) = (crate::support::bpf(), tool("git")) else { return };
    let root = env!("CARGO_MANIFEST_DIR");
    same_with_and_without(&git, &["-c", "safe.directory=*", "-C", root, "log", "--stat", "-n", "30"], "");
}

#[test]
fn the_sort_of_coreutils_with_threads_sorts_the_same() {
    let (Some(_bpf), Some(sort)) = (crate::support::bpf(), tool("sort")) else { return };
    let mut seed = 1u64;
    let mut input = String::new();
    for _ in 0..100_000 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        input.push_str(&format!("{seed:x}\n"));
    }
    same_with_and_without(&sort, &["--parallel=4"], &input);
}

#[test]
fn pythons_own_tests_pass() {
    let Some(python) = tool("python3") else { return };
    // By default CPython allocates small objects itself; on malloc every object goes through the sampler.
    let mut command = fragprof();
    command.args(["run", "--sample-bytes", "65536", "--"]).arg(python).args([
        "-m",
        "test",
        "-q",
        "test_json",
        "test_list",
        "test_dict",
        "test_threading_local",
    ]);
    let done = run(command.env("PYTHONMALLOC", "malloc"));
    if done.err.contains("No module named test") {
        println!("skipped: python3 has no test package");
        return;
    }
    assert!(done.status.success(), "{}\n{}", done.out, done.err);
}

#[test]
fn samples_of_redis_add_up_to_its_own_statistics() {
    let (Some(_bpf), Some(redis), Some(cli), Some(benchmark)) =
        (crate::support::bpf(), tool("redis-server"), tool("redis-cli"), tool("redis-benchmark"))
    else {
        return;
    };
    let _alone = serial();
    let libraries = Libraries::new();
    // Its jemalloc is a library of the system's, so it gets the build with jemalloc's names.
    let library = libraries.path(Flavour::Jemalloc);
    let socket = libraries.folder().join("redis.sock");
    let mut consumer = Consumer::new();
    consumer.attach(-1, &library);
    let mut server = sampled(&redis, &library, Allocator::Glibc, 64 << 10);
    server.args(["--port", "0", "--save", "", "--appendonly", "no", "--dir"]).arg(libraries.folder()).arg("--unixsocket").arg(&socket);
    let mut server = Process::start(&mut server);
    wait_until("redis listens", || socket.exists());
    let ask = |words: &[&str]| run(Command::new(&cli).arg("-s").arg(&socket).args(words)).out;
    let mut ledger = Ledger::default();
    let mut load = Process::start(Command::new(&benchmark).arg("-s").arg(&socket).args([
        "-q",
        "-n",
        "40000",
        "-r",
        "20000",
        "-d",
        "300",
        "-t",
        "set,lpush,hset",
    ]));
    while load.is_running() {
        ledger.add(&consumer.records());
        load.out.wait_for(Duration::from_millis(50), |_| false);
    }
    assert!(load.wait(LIMIT).success(), "{}", load.err.all());
    ask(&["debug", "populate", "60000", "filler", "200"]);
    // The clients have disconnected: only data is left.
    wait_until("the load's clients have disconnected", || ask(&["info", "clients"]).contains("connected_clients:1"));
    ledger.add(&consumer.records());
    let memory = ask(&["info", "memory"]);
    ledger.add(&consumer.records());
    let field = |name: &str| -> f64 { memory.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().parse().unwrap() };
    let used = field("used_memory:");
    let told = ledger.live_weight_bytes() as f64;
    // Poisson: the variance is the interval times the live bytes. redis counts usable sizes: up to a tenth more than requested.
    let stderr = (used * f64::from(64 << 10)).sqrt();
    assert_eq!((ledger.collisions, ledger.unknown_frees), (0, 0));
    println!("redis reports {used:.0}, sampled {told:.0} ± {stderr:.0}");
    assert!(used > 20e6, "{used}");
    assert!(
        told < used + 3.0 * stderr && told > 0.88 * used - 3.0 * stderr,
        "redis reports {used}, sampled {told}, standard error {stderr}"
    );
    server.signal(rustix::process::Signal::KILL);
    server.wait(LIMIT);
}
