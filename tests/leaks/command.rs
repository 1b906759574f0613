//! `fragprof leaks` on processes, core files, and processes that have ended.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

use super::target::build;

/// A program that prints "ready" and waits.
pub struct Waiting(pub Child);

impl Waiting {
    pub fn start(command: Command) -> Self {
        let (child, lines) = Self::with_lines(command);
        assert_eq!(lines, [""; 0]);
        child
    }

    /// The same, with the lines before.
    pub fn with_lines(mut command: Command) -> (Self, Vec<String>) {
        let mut child = Self(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
        let lines = BufReader::new(child.0.stdout.as_mut().unwrap()).lines().map(Result::unwrap);
        let lines = lines.take_while(|line| line != "ready").collect();
        (child, lines)
    }

    pub fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn leaks(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_fragprof")).arg("leaks").args(args).output().unwrap()
}

fn json(args: &[&str]) -> Value {
    let output = leaks(&[args, &["--json"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn types() -> Command {
    Command::new(build("g++", "types.cpp", &["-s"], "types"))
}

fn groups_of(leaks: &Value, name: &str) -> Vec<(u64, u64, u64)> {
    let number = |group: &Value, key: &str| group[key].as_u64().unwrap();
    let groups = leaks["groups"].as_array().unwrap().iter().filter(|group| group["type"] == name);
    groups.map(|group| (number(group, "blocks"), number(group, "held_blocks"), number(group, "held_bytes"))).collect()
}

#[test]
fn dropped_objects_of_a_stripped_program_are_named_by_class_with_what_they_hold() {
    let target = Waiting::start(types());
    let found = json(&[&target.pid(), "--looks", "1", "--interval", "0.1"]);
    assert_eq!(groups_of(&found, "cache::TextEntry"), [(300, 0, 0)], "{found:#}");
    assert_eq!(groups_of(&found, "cache::ImageEntry"), [(300, 300, 300 * 3000)], "{found:#}");
    assert!(found["groups"].as_array().unwrap().iter().all(|group| group["examples"][0].get("hex").is_none()), "contents are private");
    let shown = leaks(&[&target.pid(), "--looks", "0", "--show-content"]);
    assert!(String::from_utf8_lossy(&shown.stdout).contains("some text"));
}

#[test]
fn a_core_file_gives_the_same_result_as_the_process() {
    let target = Waiting::start(types());
    let directory = tempfile::tempdir().unwrap();
    let core = directory.path().join("core");
    let made = Command::new("gcore").arg("-o").arg(&core).arg(target.pid()).output().expect("gcore is missing: install gdb");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let path = format!("{}.{}", core.display(), target.pid());
    let (live, dead) = (json(&[&target.pid(), "--looks", "1", "--interval", "0.1"]), json(&["--core", &path]));
    assert_eq!(live["live_blocks"], dead["live_blocks"]);
    // A core file does not identify the main stack, so memory below its pointer is read too, which holds old pointers.
    let number = |found: &Value| found["unreached_blocks"].as_u64().unwrap();
    assert!(number(&dead) <= number(&live) && number(&dead) * 100 >= number(&live) * 99, "{} and {}", number(&dead), number(&live));
    assert_eq!(dead["looks"], 1);
}

#[test]
fn blocks_that_were_lost_while_their_process_was_recorded_have_their_call_stacks() {
    if crate::support::bpf().is_none() {
        return;
    }
    let _alone = crate::support::serial();
    let target = Waiting::start(Command::new(build("cc", "lost.c", &[], "lost")));
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("leaks.pb.gz");
    let found = json(&[&target.pid(), "--record", "1s", "--looks", "2", "--interval", "0.3", "-o", file.to_str().unwrap()]);
    let groups = found["groups"].as_array().unwrap();
    let frames =
        |group: &Value| group["frames"].as_array().unwrap().iter().map(|name| name.as_str().unwrap().to_owned()).collect::<Vec<_>>();
    let blocks = |named: bool| {
        let of = groups.iter().filter(|group| frames(group).iter().any(|name| name == "lose") == named);
        of.map(|group| group["blocks"].as_u64().unwrap()).sum::<u64>()
    };
    // At most a thousand per second; earlier blocks have no stacks.
    assert!(blocks(true) >= 200, "{found:#}");
    assert!(blocks(false) >= 90, "{found:#}");
    let named = groups.iter().find(|group| frames(group).contains(&"lose".to_owned())).unwrap();
    assert_eq!(frames(named).last().map(String::as_str), Some("_start"), "{named:#}");
    let report = Command::new(env!("CARGO_BIN_EXE_fragprof")).arg("report").arg(&file).args(["--by", "unreached"]).output().unwrap();
    assert!(String::from_utf8_lossy(&report.stdout).contains("lose"), "{}", String::from_utf8_lossy(&report.stdout));
}

#[test]
fn a_profile_of_the_blocks_adds_up_to_the_report() {
    let target = Waiting::start(types());
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("leaks.pb.gz");
    let told = json(&[&target.pid(), "--looks", "0", "-o", file.to_str().unwrap()]);
    let report =
        Command::new(env!("CARGO_BIN_EXE_fragprof")).arg("report").arg(&file).args(["--by", "unreached", "--json"]).output().unwrap();
    let report: Value = serde_json::from_slice(&report.stdout).unwrap();
    assert_eq!(report["totals"]["unreached_bytes"], told["unreached_bytes"], "{report:#}");
    assert_eq!(report["totals"]["unreached_blocks"], told["unreached_blocks"]);
    let raw = Command::new("go").args(["tool", "pprof", "-top", "-sample_index=unreached_space"]).arg(&file).output().unwrap();
    assert!(String::from_utf8_lossy(&raw.stdout).contains("cache::ImageEntry"), "{}", String::from_utf8_lossy(&raw.stderr));
}

#[test]
fn a_process_that_executes_another_program_between_two_scans_is_not_mixed_up_with_it() {
    // It loses some blocks: where none is lost there is no second scan.
    let lose = "import ctypes, os; c = ctypes.CDLL(None); [c.malloc(4000) for _ in range(9)]; print('ready', flush=True); input(); \
                os.execvp('sleep', ['sleep', '60'])";
    let mut command = Command::new("/usr/bin/python3");
    command.args(["-c", lose]);
    let mut target = Waiting::start(command);
    let running = Command::new(env!("CARGO_BIN_EXE_fragprof"))
        .args(["leaks", &target.pid(), "--looks", "1", "--interval", "3", "--json"])
        .stderr(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(std::time::Duration::from_millis(1500));
    std::io::Write::write_all(target.0.stdin.as_mut().unwrap(), b"go\n").unwrap();
    let output = running.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn a_process_that_ends_between_two_scans_is_reported_as_ended() {
    let target = Waiting::start(types());
    let running = Command::new(env!("CARGO_BIN_EXE_fragprof"))
        .args(["leaks", &target.pid(), "--looks", "1", "--interval", "3"])
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(std::time::Duration::from_millis(1500));
    drop(target);
    let output = running.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
}
