//! Pages that a forked process still has free nothing, and a trim says so. The truth is the kernel's account of private memory.

use std::process::Command;

use serde_json::Value;

use super::Target;
use crate::support::build::tool;
use crate::support::recording::fragprof;

/// Blocks that are freed below one that is kept, and a fork if it is asked for: parent and child wait.
const WORK: &str = "import os, sys\n\
    blocks = [bytes(200) for _ in range(300_000)]\n\
    kept = [bytes(200) for _ in range(100)]\n\
    del blocks\n\
    child = sys.argv[1] == 'forks' and os.fork() == 0\n\
    if not child: print('ready', flush=True)\n\
    sys.stdin.read()\n";

fn private_dirty_bytes(pid: u32) -> u64 {
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let line = smaps.lines().find_map(|line| line.strip_prefix("Private_Dirty:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

#[test]
fn what_a_forked_process_still_has_is_not_gained() {
    let Some(python) = tool("python3") else { return };
    for forks in ["forks", "alone"] {
        let target = Target::start(Command::new(&python).args(["-c", WORK, forks]).env("PYTHONMALLOC", "malloc"));
        let before = private_dirty_bytes(target.pid());
        let done = fragprof().args(["trim", &target.pid().to_string(), "--yes", "--json"]).output().unwrap();
        let report: Value = serde_json::from_slice(&done.stdout).unwrap();
        let freed = before.saturating_sub(private_dirty_bytes(target.pid()));
        let of = |key: &str| report[key].as_u64().unwrap_or_else(|| panic!("{key} in {report}"));
        let (given_back, shared) = (of("given_back_bytes"), of("shared_given_back_bytes"));
        assert!(given_back > 32 << 20, "{forks}: {report}");
        assert!(of("shared_bytes") >= shared, "{forks}: {report}");
        // The interpreter touches some pages of its own meanwhile.
        let gained = given_back - shared;
        assert!(gained.abs_diff(freed) < 4 << 20, "{forks}: gained {gained}, private memory fell by {freed}: {report}");
        target.end();
    }
}
