//! Calls in real programs under load, each of which checks itself or is checked by its client, and with the command killed at each of its
//! steps and at random. The long version prints a table.

use std::any::Any;
use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::figures::pair;
use super::{Act, build, kill_at_every_step, kill_at_random, made, of_threads, source, trims};
use crate::containers::podman::{Podman, QUIRKS};
use crate::support::build::tool;
use crate::support::postgres::{Server, WORK, programs};
use crate::support::process::{Process, wait_until};
use crate::support::{LIMIT, serial};

/// A program that runs under load: what is trimmed, and what judges it.
pub(crate) struct Subject {
    pub(crate) pid: u32,
    /// Ends when its input does, with status 0 if nothing was wrong, and prints what it counted.
    judge: Process,
    /// What must live as long.
    _kept: Vec<Box<dyn Any>>,
}

impl Subject {
    /// A program that checks itself.
    fn of_itself(command: &mut Command) -> Self {
        let judge = ready(Process::start_piped(command));
        Self { pid: judge.pid(), judge, _kept: Vec::new() }
    }

    /// A server that is checked by a client.
    fn served(server: Process, client: &mut Command, kept: Vec<Box<dyn Any>>) -> Self {
        let pid = server.pid();
        let judge = ready(Process::start_piped(client));
        // The server ends before its files go.
        Self { pid, judge, _kept: std::iter::once(Box::new(server) as Box<dyn Any>).chain(kept).collect() }
    }

    /// Ends it; what it counted.
    pub(crate) fn end(mut self) -> Value {
        assert!(Path::new(&format!("/proc/{}", self.pid)).exists(), "crash: the process is gone; {}", self.judge.err);
        drop(self.judge.input());
        let status = self.judge.wait(LIMIT);
        assert!(status.success(), "{status}: {}", self.judge.err);
        serde_json::from_str(self.judge.out.all().lines().last().unwrap_or_default()).unwrap_or_default()
    }
}

fn ready(process: Process) -> Process {
    let line = process.out.wait_for(LIMIT, |line| line == "ready");
    assert!(line.is_some(), "not ready: {} {}", process.out, process.err);
    process
}

fn script(name: &str) -> PathBuf {
    source("programs").join(name)
}

fn churn(words: &[&str], flags: &[&str]) -> Subject {
    let program = build("churn.c", if flags.is_empty() { "churn" } else { "churn-static" }, &[&["-pthread", "-lm"], flags].concat());
    Subject::of_itself(Command::new(program).args(words))
}

pub(crate) fn events(words: &[&str]) -> Subject {
    Subject::of_itself(Command::new(build("events.c", "events", &["-pthread"])).args(words))
}

pub(crate) fn python() -> Option<Subject> {
    Some(Subject::of_itself(Command::new(tool("python3")?).arg(script("churn.py")).env("PYTHONMALLOC", "malloc")))
}

pub(crate) fn node() -> Option<Subject> {
    Some(Subject::of_itself(Command::new(tool("node")?).arg("--expose-gc").arg(script("churn.js"))))
}

pub(crate) fn java() -> Option<Subject> {
    Some(Subject::of_itself(Command::new(tool("java")?).args(["-Xmx256m", "-XX:MaxDirectMemorySize=512m"]).arg(script("Churn.java"))))
}

fn client(kind: &str) -> Option<Command> {
    let mut command = Command::new(tool("python3")?);
    command.arg(script("client.py")).arg(kind);
    Some(command)
}

pub(crate) fn redis() -> Option<Subject> {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let mut command = Command::new(tool("redis-server")?);
    command.args(["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"]).arg(&socket).arg("--dir").arg(directory.path());
    // Free pages stay until they are asked for: by itself jemalloc gives them back after some seconds, and a call finds none.
    let server = Process::start(command.env("MALLOC_CONF", "dirty_decay_ms:-1"));
    wait_until("redis listens", || socket.exists());
    Some(Subject::served(server, client("redis")?.arg(socket), vec![Box::new(directory)]))
}

pub(crate) fn nginx() -> Option<Subject> {
    // Its worker runs as another user, who must get at the files.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let (files, socket) = (path.join("files"), path.join("socket"));
    std::fs::create_dir(&files).unwrap();
    for (name, bytes) in [("a", 100), ("b", 5000), ("c", 200_000)] {
        std::fs::write(files.join(name), name.repeat(bytes)).unwrap();
    }
    let configuration = format!(
        "daemon off; master_process off; pid {0}/pid; error_log {0}/errors;\nevents {{ worker_connections 400; }}\nhttp {{ access_log off;\n\
         client_body_temp_path {0}/t1; proxy_temp_path {0}/t2; fastcgi_temp_path {0}/t3; uwsgi_temp_path {0}/t4; scgi_temp_path {0}/t5;\n\
         large_client_header_buffers 8 16k;\nserver {{ listen unix:{0}/socket; root {0}/files; }} }}\n",
        path.display()
    );
    std::fs::write(path.join("nginx.conf"), configuration).unwrap();
    let nginx = tool("nginx").or_else(|| Some(PathBuf::from("/usr/sbin/nginx")).filter(|path| path.exists()))?;
    let server = Process::start(Command::new(nginx).arg("-c").arg(path.join("nginx.conf")).arg("-e").arg(path.join("errors")));
    wait_until("nginx listens", || socket.exists());
    Some(Subject::served(server, client("nginx")?.arg(socket).arg(files), vec![Box::new(directory)]))
}

/// A backend; its statements run one after the other until the input of a shell ends, which compares the answers.
pub(crate) fn postgres() -> Option<Subject> {
    programs()?;
    let server = Server::start();
    let mut psql = server.psql(&[]);
    let mut client = psql.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let (mut ask, mut answers) = (client.stdin.take().unwrap(), BufReader::new(client.stdout.take().unwrap()).lines());
    writeln!(ask, "select pg_backend_pid();").unwrap();
    let pid: u32 = answers.next().unwrap().unwrap().trim().parse().unwrap();
    let judge = Process::start_piped(Command::new("cat").arg("-"));
    let is_over = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let over = std::sync::Arc::clone(&is_over);
    let worker = std::thread::spawn(move || {
        let mut rounds = 0;
        while !over.load(std::sync::atomic::Ordering::Relaxed) {
            for statement in WORK.lines() {
                writeln!(ask, "{statement};").unwrap();
            }
            let said: Vec<String> = answers.by_ref().map_while(Result::ok).take_while(|line| line != "DONE").collect();
            assert_eq!(said.iter().filter(|line| *line == "40000").count(), 2, "WRONG: {said:?}");
            rounds += 1;
            // A backend has one thread, in which a call can be made only while it waits.
            std::thread::sleep(Duration::from_millis(500));
        }
        drop(ask);
        let _ = client.wait();
        rounds
    });
    Some(Subject { pid, judge, _kept: vec![Box::new(Ended { is_over, worker: Some(worker) }), Box::new(server)] })
}

/// A thread that is ended when dropped, and whose failure is one of the test.
struct Ended {
    is_over: std::sync::Arc<std::sync::atomic::AtomicBool>,
    worker: Option<std::thread::JoinHandle<u32>>,
}

impl Drop for Ended {
    fn drop(&mut self) {
        self.is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        let rounds = self.worker.take().unwrap().join();
        if !std::thread::panicking() {
            assert!(rounds.expect("WRONG: the client failed") > 0);
        }
    }
}

fn in_user_namespace() -> Option<Subject> {
    let program = build("churn.c", "churn", &["-pthread", "-lm"]);
    Some(Subject::of_itself(
        Command::new(tool("unshare")?).args(["--user", "--map-root-user", "--mount"]).arg(program).args(["1", "1", "200"]),
    ))
}

pub(crate) fn in_container() -> Option<Subject> {
    let podman = Podman::new()?;
    podman.image("churn", &[(&build("churn.c", "churn", &["-pthread", "-lm"]), "/churn")]);
    let mut run = podman.command("run");
    // With podman's own seccomp filter, as containers have it.
    run.args(["--rm", "--interactive", "--name", "churn"]).args(QUIRKS.iter().filter(|option| !option.contains("seccomp")));
    run.args(["localhost/churn", "/churn", "1", "1", "200"]);
    let judge = ready(Process::start_piped(&mut run));
    let pid = podman.done(podman.command("inspect").args(["--format", "{{.State.Pid}}", "churn"])).parse().unwrap();
    Some(Subject { pid, judge, _kept: vec![Box::new(podman)] })
}

pub(crate) type Start = fn() -> Option<Subject>;

/// Every program of the long version, by name.
pub(crate) const PROGRAMS: [(&str, Start); 13] = [
    ("churn, 1 ms timer", || Some(churn(&["1", "1", "200"], &[]))),
    ("churn, tight loops", || Some(churn(&["4", "1", "0"], &[]))),
    ("static", || Some(churn(&["1", "1", "200"], &["-static"]))),
    ("user namespace", in_user_namespace),
    ("container", in_container),
    ("fork, exec, cancel", || Some(events(&[]))),
    ("replaces itself", || Some(events(&["exec"]))),
    ("redis", redis),
    ("postgres", postgres),
    ("python", python),
    ("jvm", java),
    ("node", node),
    ("nginx", nginx),
];

/// What happened to one program.
#[derive(Debug, Default)]
pub(crate) struct Row {
    pub(crate) calls: u32,
    pub(crate) made: u32,
    refused: BTreeMap<String, u32>,
    /// Bytes predicted and given back, of each call that was made.
    bytes: Vec<(f64, f64)>,
    pub(crate) killed: u32,
    pub(crate) masks: u32,
    /// By system call: how often its thread got EINTR from a stop.
    interrupted: BTreeMap<String, u32>,
    pub(crate) failure: Option<String>,
    counts: Value,
}

/// Blocked signals of the threads that exist all the time and do not change them by themselves.
fn lasting_masks(pid: u32) -> BTreeMap<u32, String> {
    let first = of_threads(pid, "SigBlk:");
    std::thread::sleep(Duration::from_millis(100));
    let second = of_threads(pid, "SigBlk:");
    first.into_iter().filter(|(thread, mask)| second.get(thread) == Some(mask)).collect()
}

/// A call blocks the C library's own signals 32 and 33, which no program's mask does.
fn is_mask_of_a_call(mask: &str) -> bool {
    u64::from_str_radix(mask, 16).is_ok_and(|mask| mask >> 31 & 3 == 3)
}

/// Threads whose mask is not what it was, and does not become it again within some seconds: a handler that runs has another one for a while.
fn changed(pid: u32, masks: &BTreeMap<u32, String>) -> u32 {
    let mut left = masks.clone();
    let deadline = Instant::now() + Duration::from_secs(5);
    while !left.is_empty() && Instant::now() < deadline {
        let now = of_threads(pid, "SigBlk:");
        left.retain(|thread, mask| now.get(thread).is_some_and(|now| now != mask));
        std::thread::sleep(Duration::from_millis(20));
    }
    left.len() as u32
}

/// Runs a command that makes calls in a program, kills some, and ends it. Anything wrong is in `failure`.
pub(crate) fn exercise(start: Start, act: Act, calls: u32, step_rounds: u32, random_kills: u32, seed: u64) -> Option<Row> {
    let mut row = Row::default();
    let mut is_there = true;
    let done = catch_unwind(AssertUnwindSafe(|| {
        let Some(subject) = start() else {
            is_there = false;
            return;
        };
        let masks = lasting_masks(subject.pid);
        let deadline = Instant::now() + Duration::from_secs(u64::from(calls) * 5 + 60);
        for round in 0..calls {
            assert!(Instant::now() < deadline, "hang: {} of {calls} calls in time", row.calls);
            row.calls += 1;
            row.note(&made(&act(subject.pid, round)));
        }
        row.killed += kill_at_every_step(subject.pid, step_rounds, act);
        row.killed += kill_at_random(subject.pid, random_kills, seed, act);
        // A call whose command was killed goes on by itself.
        wait_until("no call runs", || !of_threads(subject.pid, "SigBlk:").values().any(|mask| is_mask_of_a_call(mask)));
        row.masks = changed(subject.pid, &masks);
        row.counts = subject.end();
    }));
    if let Err(panic) = done {
        let text = panic.downcast_ref::<String>().cloned().or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        row.failure = Some(text.unwrap_or_else(|| "a panic".to_owned()));
    }
    is_there.then_some(row)
}

impl Row {
    /// What a command reports: of a trim, or of an attached sampler, which makes several calls and says why not in one word.
    fn note(&mut self, report: &Value) {
        let calls = report["calls"].as_array().cloned().unwrap_or_else(|| vec![report.clone()]);
        for call in calls.iter().filter(|call| call["interrupted"] == true) {
            *self.interrupted.entry(call["thread_in"].as_str().unwrap_or("?").to_owned()).or_default() += 1;
        }
        let refused = report["refused"]["name"].as_str().or(report["refused"].as_str());
        if let Some(why) = refused.or(report["ending"].as_str().filter(|ending| *ending != "returned")) {
            *self.refused.entry(why.to_owned()).or_default() += 1;
        } else {
            self.made += 1;
            self.bytes.extend(pair(report));
        }
    }

    /// Why calls were not made, and where a stop was seen by the program.
    pub(crate) fn notes(&self) -> [String; 2] {
        [list(&self.refused), list(&self.interrupted)]
    }

    /// What was given back beside what was predicted, and the share of calls within 5 % or 256 KiB, the goal under load.
    fn bytes(&self) -> String {
        let mib = |of: fn(&(f64, f64)) -> f64| self.bytes.iter().map(of).sum::<f64>() / f64::from(1 << 20);
        let is_near = |(predicted, given): &&(f64, f64)| (given - predicted).abs() <= (predicted * 0.05).max(256.0 * 1024.0);
        let near = self.bytes.iter().filter(is_near).count() * 100 / self.bytes.len().max(1);
        if self.bytes.is_empty() { "–".to_owned() } else { format!("{:.1} of {:.1} MiB; {near} %", mib(|one| one.1), mib(|one| one.0)) }
    }
}

fn list(of: &BTreeMap<String, u32>) -> String {
    let parts: Vec<String> = of.iter().map(|(name, count)| format!("{name} {count}")).collect();
    if parts.is_empty() { "–".to_owned() } else { parts.join(", ") }
}

#[test]
fn real_programs_go_on_as_before_after_calls_and_killed_commands() {
    let short: [(&str, Start); 4] =
        [("fork, exec, cancel", || Some(events(&[]))), ("exec", || Some(events(&["exec"]))), ("redis", redis), ("python", python)];
    for (name, start) in short {
        let Some(row) = exercise(start, trims, 4, 0, 4, 7) else { continue };
        println!("{name}: {row:?}");
        assert!(row.failure.is_none() && row.masks == 0, "{name}: {row:?}");
        assert!(name != "redis" && name != "fork, exec, cancel" || row.made > 0, "{name}: {row:?}");
    }
}

pub(crate) fn number(variable: &str, usual: u32) -> u32 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

#[test]
#[ignore = "takes half an hour: make faults"]
fn thousands_of_calls_in_real_programs_and_a_thousand_killed_commands_harm_nothing() {
    let _alone = serial();
    let programs = PROGRAMS.len() as u32;
    let calls = number("FRAGPROF_TRIM_CALLS", 3000).div_ceil(programs);
    let kills = number("FRAGPROF_TRIM_KILLS", 1000).div_ceil(programs);
    let mut rows = Vec::new();
    println!(
        "| program | calls | made | killed | crashes, hangs | masks changed | wrong answers | EINTR from a stop | given back of predicted; \
         calls within 5 % or 256 KiB | refused |\n|---|---|---|---|---|---|---|---|---|---|"
    );
    for (seed, (name, start)) in (1..).zip(PROGRAMS) {
        let Some(row) = exercise(start, trims, calls, kills.div_ceil(20), kills / 2, seed) else {
            println!("| {name} | not installed | | | | | | | | |");
            continue;
        };
        let is_wrong = row.failure.as_ref().is_some_and(|text| text.contains("WRONG"));
        println!(
            "| {name} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
            row.calls,
            row.made,
            row.killed,
            u32::from(row.failure.is_some() && !is_wrong),
            row.masks,
            u32::from(is_wrong),
            list(&row.interrupted),
            row.bytes(),
            list(&row.refused)
        );
        if let Some(failure) = &row.failure {
            println!("{name}: {failure}");
        }
        println!("<!-- {name} counted {} -->", row.counts);
        rows.push((name, row));
    }
    let sum = |of: fn(&Row) -> u32| rows.iter().map(|(_, row)| of(row)).sum::<u32>();
    println!("{} calls, {} made, {} killed", sum(|row| row.calls), sum(|row| row.made), sum(|row| row.killed));
    for (name, row) in &rows {
        assert!(row.failure.is_none() && row.masks == 0, "{name}: {row:?}");
    }
}
