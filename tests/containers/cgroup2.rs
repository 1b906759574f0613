//! Limits of a real hierarchy of cgroup version 2. Where the memory controller is of version 1, as on a hybrid machine, there is none to
//! test with; the kernels of `make kernel-matrix` have one.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::podman::{holder, wait_until_paused};
use crate::support::build::Link;
use crate::support::process::{Process, wait_until};
use crate::support::recording::fragprof;

const ROOT: &str = "/sys/fs/cgroup";
const LIMIT_BYTES: u64 = 200 << 20;

/// A cgroup, removed when dropped.
struct Cgroup(PathBuf);

impl Cgroup {
    fn make(parent: &Path, name: &str) -> Self {
        std::fs::write(parent.join("cgroup.subtree_control"), "+memory").unwrap();
        let path = parent.join(name);
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn read(&self, file: &str) -> String {
        std::fs::read_to_string(self.0.join(file)).unwrap()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // The last process has been killed, but may not be gone yet.
        wait_until("the cgroup to be empty", || std::fs::remove_dir(&self.0).is_ok());
    }
}

#[test]
fn the_limit_of_a_parent_in_cgroup_version_2_is_reported_with_the_usage() {
    let program = holder(Link::Dynamic); // also where there is nothing to test: a guest without a compiler needs it prebuilt
    if !std::fs::read_to_string(format!("{ROOT}/cgroup.controllers")).is_ok_and(|text| text.contains("memory")) {
        println!("not here: no memory controller of cgroup version 2");
        return;
    }
    let parent = Cgroup::make(Path::new(ROOT), &format!("fragprof-{}", std::process::id()));
    std::fs::write(parent.0.join("memory.max"), LIMIT_BYTES.to_string()).unwrap();
    let child = Cgroup::make(&parent.0, "child");
    let words = "echo $$ > \"$0/cgroup.procs\" && exec \"$1\"";
    let target = Process::start(Command::new("sh").args(["-c", words]).arg(&child.0).arg(program));
    wait_until_paused(target.pid());
    let done = fragprof().args(["census", "--json", &target.pid().to_string()]).output().unwrap();
    let census: Value = serde_json::from_slice(&done.stdout).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&done.stderr)));
    let usage: u64 = child.read("memory.current").trim().parse().unwrap();
    let memory = &census["cgroup_memory"];
    assert_eq!(memory["limit_bytes"], LIMIT_BYTES, "{memory}");
    // Whichever cgroup is reported, the parent contains nothing but the child.
    let told = memory["usage_bytes"].as_u64().unwrap();
    assert!(told.abs_diff(usage) <= 4 << 20, "{told} reported, {usage} by the kernel");
    drop(target);
}
