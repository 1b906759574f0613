//! Databases as workloads: newly created for each program that is started, and their load.

use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command};

use super::workloads::{Load, wait_for_idle};
use crate::support::build::tool;
use crate::support::process::{Process, run, wait_until};

/// The statements for a backend: a table, an index, sorts, hashes and text. One per line; the answer to the last contains DONE.
pub const POSTGRES_UNIT: &str = "drop table if exists t\n\
    create temp table t as select i, md5(i::text) as b from generate_series(1, 40000) i\n\
    create index on t(b)\n\
    select count(*) from (select b, string_agg(i::text, ',') from t group by substr(b, 1, 3), b order by b) s\n\
    select count(*) from (select jsonb_build_object('k', b, 'v', i) -> 'k' from t) s\n\
    select 'DO' || 'NE' as answer\n";

/// The user of Debian's package: the server refuses to run as root.
fn user(name: &str) -> Option<(u32, u32)> {
    let id = |option: &str| String::from_utf8_lossy(&Command::new("id").args([option, name]).output().ok()?.stdout).trim().parse().ok();
    Some((id("-u")?, id("-g")?))
}

/// The program that becomes a backend, and its arguments so far.
pub fn postgres_backend() -> Option<(PathBuf, Vec<String>)> {
    user("postgres")?;
    let words = ["--reuid=postgres", "--regid=postgres", "--init-groups", "--"].map(str::to_owned);
    let postgres = postgres_programs()?.join("postgres").display().to_string();
    Some((tool("setpriv")?, [&words[..], &[postgres, "--single".into(), "-F".into()]].concat()))
}

/// The newest installed server's programs.
fn postgres_programs() -> Option<PathBuf> {
    let versions = std::fs::read_dir("/usr/lib/postgresql").ok()?.filter_map(Result::ok);
    versions.map(|entry| entry.path().join("bin")).max()
}

/// Makes a database in a folder; returns where.
pub fn postgres(folder: &Path, number: usize) -> PathBuf {
    let (uid, gid) = user("postgres").unwrap();
    std::fs::set_permissions(folder, PermissionsExt::from_mode(0o755)).unwrap();
    let home = folder.join(number.to_string());
    std::fs::create_dir(&home).unwrap();
    chown(&home, Some(uid), Some(gid)).unwrap();
    let data = home.join("data");
    let mut initdb = Command::new("setpriv");
    initdb.args(["--reuid=postgres", "--regid=postgres", "--init-groups", "--"]).arg(postgres_programs().unwrap().join("initdb"));
    let made = run(initdb.args(["--no-sync", "-A", "trust", "-E", "UTF8", "--no-locale", "-D"]).arg(&data).current_dir("/"));
    assert!(made.status.success(), "{}", made.err);
    data
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
