//! Databases as workloads: newly created for each program that is started, and their load.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command};

use super::workloads::{Load, wait_for_idle};
use crate::support::build::tool;
use crate::support::postgres::{self, AS_POSTGRES};
use crate::support::process::{Process, run, wait_until};

/// The program that becomes a backend, and its arguments so far.
pub fn postgres_backend() -> Option<(PathBuf, Vec<String>)> {
    postgres::user()?;
    let server = postgres::programs()?.join("postgres").display().to_string();
    let words = AS_POSTGRES[1..].iter().map(|&word| word.to_owned());
    Some((tool(AS_POSTGRES[0])?, words.chain([server, "--single".into(), "-F".into()]).collect()))
}

/// Makes a database in a folder; returns where.
pub fn postgres(folder: &Path, number: usize) -> PathBuf {
    std::fs::set_permissions(folder, PermissionsExt::from_mode(0o755)).unwrap();
    let home = folder.join(number.to_string());
    std::fs::create_dir(&home).unwrap();
    postgres::database(&home)
}

/// The server's program.
pub fn mariadb_server() -> Option<PathBuf> {
    let places = ["/usr/sbin/mariadbd", "/usr/bin/mariadbd"].map(PathBuf::from);
    places.into_iter().find(|path| path.is_file())
}

/// Makes an instance in a folder; returns the arguments with which it is started.
pub fn mariadb(folder: &Path, number: usize) -> Vec<String> {
    let data = folder.join(format!("data{number}"));
    let flag = |name: &str, path: &Path| format!("--{name}={}", path.display());
    let mut install = Command::new("mariadb-install-db");
    install.args(["--no-defaults", "--auth-root-authentication-method=normal", "--skip-test-db", "--user=root"]);
    let made = run(install.arg(flag("datadir", &data)));
    assert!(made.status.success(), "{}{}", made.out, made.err);
    let words =
        ["--no-defaults", "--user=root", "--skip-networking", "--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=64M"];
    words.map(str::to_owned).into_iter().chain([flag("datadir", &data)]).collect()
}

/// The load of a MariaDB.
pub struct Mariadb {
    socket: PathBuf,
}

impl Mariadb {
    /// On this socket.
    pub fn new(socket: PathBuf) -> Self {
        Self { socket }
    }
}

impl Load for Mariadb {
    fn begin(&mut self, _: &Process) {
        wait_until("mariadb listens", || self.socket.exists());
    }

    fn work(&mut self, process: &Process, _: &mut ChildStdin) {
        let mut slap = Command::new("mariadb-slap");
        slap.args(["--no-defaults", "--user=root"]).arg(format!("--socket={}", self.socket.display()));
        let done = run(slap.args([
            "--auto-generate-sql",
            "--auto-generate-sql-load-type=mixed",
            "--number-char-cols=4",
            "--concurrency=4",
            "--number-of-queries=4000",
        ]));
        assert!(done.status.success(), "{}", done.err);
        wait_for_idle(process);
    }
}
