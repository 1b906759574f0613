//! `fragprof record` of a program without symbols, with a debuginfod server that has its debug information, has it not, or hangs. The true
//! lines are those of addr2line on the program before it was stripped.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::support::process::Process;
use crate::support::recording::{Recording, fragprof};
use crate::support::report::{Frame, Report};
use crate::support::tls::{listen, read_request};
use crate::support::{LIMIT, bpf};

const PROGRAM: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
static void *kept[1 << 16];
static __attribute__((noinline)) void *take_one(long bytes) {
    void *block = malloc(bytes);
    *(volatile char *)block = 1;
    return block;
}
static __attribute__((noinline)) void keep_one(long number) {
    kept[number] = take_one(1000 + number % 7);
}
int main(void) {
    puts("ready");
    fflush(stdout);
    for (long number = 0; number < 1 << 16; number++) {
        keep_one(number);
        usleep(1000);
    }
}
"#;

/// A running program without symbols.
struct Stripped {
    directory: TempDir,
    process: Process,
}

impl Stripped {
    fn start() -> Self {
        let directory = TempDir::new().unwrap();
        let at = |name: &str| directory.path().join(name);
        std::fs::write(at("shop.c"), PROGRAM).unwrap();
        run(Command::new("cc").args(["-O1", "-g", "-o"]).args([at("whole"), at("shop.c")]));
        run(Command::new("objcopy").arg("--only-keep-debug").args([at("whole"), at("debug")]));
        run(Command::new("strip").arg("-o").args([at("shop"), at("whole")]));
        let process = Process::start(&mut Command::new(at("shop")));
        assert!(process.out.wait_for(LIMIT, |line| line == "ready").is_some());
        Self { directory, process }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn debug(&self) -> Vec<u8> {
        std::fs::read(self.path("debug")).unwrap()
    }

    /// The command, which keeps fetched files in this test's own directory.
    fn fragprof(&self, urls: Option<&str>) -> Command {
        let mut command = fragprof();
        command.env_remove("DEBUGINFOD_URLS").env("XDG_CACHE_HOME", self.path("cache"));
        if let Some(urls) = urls {
            command.env("DEBUGINFOD_URLS", urls);
        }
        command
    }

    fn cached(&self) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.path("cache/fragprof/debuginfod")) else { return Vec::new() };
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    fn record(&self, urls: Option<&str>) -> Recording {
        let recording = Recording::attach_by(self.fragprof(urls), &[self.process.pid()], &[]);
        std::thread::sleep(Duration::from_millis(300));
        recording
    }

    /// The frames of the stacks that were recorded, leaf first.
    fn frames<'a>(&self, report: &'a Report) -> Vec<&'a [Frame]> {
        let recorded = report.stacks.iter().map(|stack| stack.frames.as_slice()).filter(|frames| frames.len() > 1);
        let recorded: Vec<&[Frame]> = recorded.collect();
        assert!(!recorded.is_empty());
        recorded
    }
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The first line of a call in a function, by the source.
fn line_of(text: &str) -> u64 {
    PROGRAM.lines().position(|line| line.contains(text)).unwrap() as u64 + 1
}

/// A server that handles each request as it is told, and the paths that were requested.
fn server(handle: impl Fn(&mut TcpStream) + Send + 'static) -> (String, Arc<Mutex<Vec<String>>>) {
    let requests = Arc::<Mutex<Vec<String>>>::default();
    let seen = Arc::clone(&requests);
    let port = listen(move |mut stream| {
        let Ok((head, _)) = read_request(&mut stream) else { return };
        seen.lock().unwrap().push(head.split(' ').nth(1).unwrap().to_owned());
        handle(&mut stream);
    });
    (format!("http://127.0.0.1:{port}"), requests)
}

fn answers(body: Vec<u8>) -> impl Fn(&mut TcpStream) {
    move |stream| {
        let _ = write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
        let _ = stream.write_all(&body);
    }
}

fn build_id(path: &Path) -> String {
    let notes = run(Command::new("readelf").arg("-n").arg(path));
    notes.lines().find_map(|line| line.trim().strip_prefix("Build ID: ")).unwrap().to_owned()
}

fn assert_named(target: &Stripped, report: &Report) {
    for frames in target.frames(report) {
        let of = |function: &str| {
            let frame = frames.iter().find(|frame| frame.function.as_deref() == Some(function));
            frame.unwrap_or_else(|| panic!("no {function} in {frames:?}"))
        };
        let places = ["take_one", "keep_one", "main"].map(|name| (of(name).file.clone().unwrap_or_default(), of(name).line.unwrap()));
        assert!(places.iter().all(|(file, _)| file.ends_with("shop.c")), "{places:?}");
        let lines = [line_of("malloc(bytes)"), line_of("take_one(1000"), line_of("keep_one(number);")];
        assert_eq!(places.map(|(_, line)| line), lines, "{frames:?}");
    }
}

#[test]
fn a_stripped_programs_functions_and_lines_are_those_of_its_debug_information_on_a_server() {
    if bpf().is_none() {
        return;
    }
    let target = Stripped::start();
    // The C library of this machine is stripped too: its debug information is not known here.
    let (own, debug) = (build_id(&target.path("whole")), target.debug());
    let requests = Arc::<Mutex<Vec<String>>>::default();
    let seen = Arc::clone(&requests);
    let path = format!("/buildid/{own}/debuginfo");
    let known = path.clone();
    let port = listen(move |mut stream| {
        let Ok((head, _)) = read_request(&mut stream) else { return };
        let asked = head.split(' ').nth(1).unwrap().to_owned();
        if asked == known {
            answers(debug.clone())(&mut stream);
        } else {
            let _ = stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n");
        }
        seen.lock().unwrap().push(asked);
    });
    let url = format!("http://127.0.0.1:{port}");
    let mut recording = target.record(Some(&url));
    recording.process.signal(Signal::INT);
    assert!(recording.wait(LIMIT).success());
    let (said, report) = (recording.process.err.all(), Report::read(&recording.file()));
    assert_named(&target, &report);
    let fetching = format!("fetching debug information of {} (build id {own})", target.path("shop").display());
    assert!(said.contains(&fetching) && said.contains("debug information: 1 file fetched ("), "{said}");
    assert_eq!(target.cached(), [format!("{own}.debug")]);
    assert_eq!(requests.lock().unwrap().iter().filter(|asked| **asked == path).count(), 1);

    // The next recording has it from the cache.
    let report = target.record(Some(&url)).stop();
    assert_named(&target, &report);
    assert_eq!(requests.lock().unwrap().iter().filter(|asked| **asked == path).count(), 1);
}

#[test]
fn without_servers_nothing_is_asked_and_frames_have_addresses() {
    if bpf().is_none() {
        return;
    }
    let target = Stripped::start();
    let report = target.record(None).stop();
    for frames in target.frames(&report) {
        assert!(frames.iter().any(|frame| frame.function.as_deref().is_some_and(|name| name.starts_with("[shop+0x"))), "{frames:?}");
    }
    assert!(!target.path("cache").exists(), "a cache was created");
}

#[test]
fn a_wrong_answer_names_nothing_and_is_reported() {
    if bpf().is_none() {
        return;
    }
    let target = Stripped::start();
    let (url, requests) = server(answers(b"<html>log in first</html>".to_vec()));
    let mut recording = target.record(Some(&url));
    recording.process.signal(Signal::INT);
    assert!(recording.wait(LIMIT).success());
    let said = recording.process.err.all();
    let count = requests.lock().unwrap().len();
    assert!(count >= 1 && said.contains(&format!("{count} wrong")) && said.contains("not an ELF file"), "{said}");
    for frames in target.frames(&Report::read(&recording.file())) {
        assert!(frames.iter().any(|frame| frame.function.as_deref().is_some_and(|name| name.starts_with("[shop+0x"))), "{frames:?}");
    }
    assert_eq!(target.cached(), Vec::<String>::new());
}

#[test]
fn a_signal_ends_the_wait_for_a_server_that_hangs_and_the_profile_is_written() {
    if bpf().is_none() {
        return;
    }
    let target = Stripped::start();
    let (url, _) = server(|stream| while matches!(stream.read(&mut [0; 64]), Ok(1..)) {});
    let mut recording = target.record(Some(&url));
    recording.process.signal(Signal::INT);
    let waits = |line: &str| line.contains("fetching debug information");
    assert!(recording.process.err.wait_for(LIMIT, waits).is_some(), "{}", recording.process.err);
    let began = Instant::now();
    // Signals within half a second of the first are the same request.
    while recording.process.is_running() {
        recording.process.signal(Signal::INT);
        std::thread::sleep(Duration::from_millis(100));
        if recording.process.err.to_string().contains("not waiting any longer") {
            break;
        }
    }
    assert!(recording.wait(LIMIT).success(), "{}", recording.process.err.all());
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    assert!(!target.frames(&Report::read(&recording.file())).is_empty());
    let said = recording.process.err.all();
    assert!(said.contains("not waiting any longer") && said.contains("given up"), "{said}");
    assert_eq!(target.cached(), Vec::<String>::new());
}
