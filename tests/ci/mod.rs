//! What continuous integration runs.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

/// A stand-in for make, which prints what it was called with.
const MAKE: &str = "#!/bin/sh\necho \"$CI $*\"\n";

#[test]
fn continuous_integration_runs_the_test_command_and_says_that_it_is_one() {
    let folder = tempfile::tempdir().unwrap();
    let make = folder.path().join("make");
    std::fs::write(&make, MAKE).unwrap();
    std::fs::set_permissions(&make, std::fs::Permissions::from_mode(0o755)).unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    // Tests that need BPF are skipped without CI=true: it does not depend on the machine that runs it.
    let done = Command::new(root.join(".ci/run")).env_remove("CI").env("PATH", path).output().unwrap();
    assert_eq!(String::from_utf8(done.stdout).unwrap(), "true test\n", "{}", String::from_utf8_lossy(&done.stderr));
    assert!(std::fs::read_to_string(root.join("README.md")).unwrap().contains("make test"));
}
