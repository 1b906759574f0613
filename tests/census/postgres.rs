//! A PostgreSQL server, a program not written for this project: its backends against their allocator's own account.

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use fragprof::census::{LayoutCache, Level, LiveMemory, Options, Pace, take};
use fragprof::process::Process;
use fragprof::units::Pid;

use crate::support::postgres::Server;

/// Numbers of a line of malloc_stats, by its prefix, summed over all arenas.
fn sum_of(stats: &str, key: &str) -> u64 {
    let lines = stats.lines().filter(|line| line.trim_start().starts_with(key));
    lines.filter_map(|line| line.split('=').nth(1)?.trim().parse::<u64>().ok()).sum()
}

#[test]
fn a_backend_of_postgres_is_walked_to_the_last_byte_of_its_own_account() {
    let server = Server::start();
    let mut session = server.psql(&[]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut input = session.stdin.take().unwrap();
    let mut output = std::io::BufReader::new(session.stdout.take().unwrap());
    // Two hundred tables in the backend's caches.
    writeln!(
        input,
        "do $$ begin for n in 1..200 loop execute format('create temp table t%s (a int primary key, b text)', n); end loop; end $$;"
    )
    .unwrap();
    writeln!(input, "select pg_backend_pid(), (select sum(total_bytes) from pg_backend_memory_contexts where name in ('TopMemoryContext', 'CacheMemoryContext'));").unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut output, &mut line).unwrap();
    let numbers: Vec<u64> = line.trim().split('|').map(|number| number.parse().unwrap()).collect();
    let (pid, contexts) = (u32::try_from(numbers[0]).unwrap(), numbers[1]);
    let memory = LiveMemory::open(Process::open(Pid(pid)).unwrap()).unwrap();
    let options = Options { level: Level::Full, pace: Pace::default(), with_not_malloc: true };
    // The answer is sent before the query's memory is returned.
    await_sleep(pid);
    let taken = take(&memory, pid, "postgres", options, &mut LayoutCache::default()).unwrap();
    let heap = &taken.census.heaps[0];
    assert_eq!(
        (heap.allocator.name(), heap.ladder.unknown_bytes.unwrap(), heap.off_balance_bytes()),
        ("glibc", 0, Some(0)),
        "{:?}",
        taken.census.walk
    );
    assert!(taken.census.walk.usable && taken.census.layout_unknown.is_empty(), "{:?}", taken.census.layout_unknown);
    assert!(heap.ladder.live_bytes.unwrap() >= contexts, "{} live, contexts that stay have {contexts}", heap.ladder.live_bytes.unwrap());
    assert!(taken.census.not_malloc.iter().any(|part| part.kind == "shared_memory"), "{:?}", taken.census.not_malloc);
    // Its allocator's account, called from outside, goes to the server's log.
    let before = server.log().len();
    let mut gdb = Command::new("gdb");
    gdb.args(["-batch", "-nx", "-p", &pid.to_string(), "-ex", "call ((void (*)(void)) malloc_stats)()"]);
    let called = gdb.output().expect("gdb is missing: install gdb");
    let log = server.log();
    let stats = &log[before..];
    let total = stats.find("Total").unwrap_or_else(|| panic!("{stats} {}", String::from_utf8_lossy(&called.stderr)));
    let (arenas, total) = stats.split_at(total);
    assert_eq!(heap.ladder.extent_bytes - heap.mmapped_bytes, sum_of(arenas, "system bytes"), "{stats}");
    assert_eq!(heap.ladder.extent_bytes, sum_of(total, "system bytes"), "{stats}");
    let tcache = heap.details.cached_bytes.unwrap() - heap.fastbin_bytes.unwrap();
    assert_eq!(heap.ladder.live_bytes.unwrap() + tcache + heap.overhead_bytes, sum_of(total, "in use bytes"), "{stats}");
    drop(input);
    let _ = session.wait();
}

/// Waits until the process sleeps in a system call with nothing left to do.
fn await_sleep(pid: u32) {
    let deadline = Instant::now() + Duration::from_secs(20);
    let state = || std::fs::read_to_string(format!("/proc/{pid}/wchan")).unwrap_or_default();
    while !state().contains("poll") {
        assert!(Instant::now() < deadline, "the backend does not become idle: {}", state());
        std::thread::sleep(Duration::from_millis(5));
    }
}
