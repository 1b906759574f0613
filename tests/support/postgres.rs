//! A PostgreSQL server: the newest one that Debian's package installed, on a directory of its own, without a port.

use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The statements for a backend: a table, an index, sorts, hashes and text. One per line; the answer to the last contains DONE.
pub const WORK: &str = "drop table if exists t\n\
    create temp table t as select i, md5(i::text) as b from generate_series(1, 40000) i\n\
    create index on t(b)\n\
    select count(*) from (select b, string_agg(i::text, ',') from t group by substr(b, 1, 3), b order by b) s\n\
    select count(*) from (select jsonb_build_object('k', b, 'v', i) -> 'k' from t) s\n\
    select 'DO' || 'NE' as answer\n";

/// The newest installed server's programs.
pub fn programs() -> Option<PathBuf> {
    let versions = std::fs::read_dir("/usr/lib/postgresql").ok()?.filter_map(Result::ok);
    versions.map(|entry| entry.path().join("bin")).max()
}

/// User and group that Debian's package makes; the server refuses to run as root.
pub fn user() -> Option<(u32, u32)> {
    let id =
        |option: &str| String::from_utf8_lossy(&Command::new("id").args([option, "postgres"]).output().ok()?.stdout).trim().parse().ok();
    Some((id("-u")?, id("-g")?))
}

/// What runs a program as that user: first the program, then arguments.
pub const AS_POSTGRES: [&str; 5] = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups", "--"];

/// One of the server's programs as that user.
fn program(name: &str) -> Command {
    let path = programs().expect("PostgreSQL is missing: install postgresql").join(name);
    let mut command = Command::new(AS_POSTGRES[0]);
    command.args(&AS_POSTGRES[1..]).arg(path).current_dir("/");
    command
}

/// Makes a database in a directory; returns where.
pub fn database(home: &Path) -> PathBuf {
    let (uid, gid) = user().expect("no user postgres: install postgresql");
    chown(home, Some(uid), Some(gid)).unwrap();
    let data = home.join("data");
    let made = program("initdb").args(["--no-sync", "-A", "trust", "-E", "UTF8", "--no-locale", "-D"]).arg(&data).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    data
}

/// A running server, ended when it is dropped.
pub struct Server {
    postgres: Child,
    directory: tempfile::TempDir,
}

impl Server {
    /// Makes a database and starts the server on it.
    pub fn start() -> Self {
        let directory = tempfile::Builder::new().prefix("pg").tempdir_in("/tmp").unwrap();
        let data = database(directory.path());
        let log = std::fs::File::create(directory.path().join("log")).unwrap();
        let mut postgres = program("postgres");
        postgres.arg("-D").arg(&data).args(["-c", "listen_addresses=", "-c", "fsync=off", "-k"]).arg(directory.path());
        let postgres = postgres.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap();
        let server = Self { postgres, directory };
        let deadline = Instant::now() + Duration::from_secs(60);
        while !server.psql(&["-c", "select 1"]).output().unwrap().status.success() {
            assert!(Instant::now() < deadline, "{}", server.log());
            std::thread::sleep(Duration::from_millis(50));
        }
        server
    }

    /// The server's own process.
    pub fn pid(&self) -> u32 {
        self.postgres.id()
    }

    /// A client, with these arguments.
    pub fn psql(&self, arguments: &[&str]) -> Command {
        let mut command = program("psql");
        command.args(["-X", "-q", "-t", "-A", "-h"]).arg(self.directory.path()).args(["-d", "postgres"]).args(arguments);
        command
    }

    /// What the server logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // SAFETY: kill takes numbers. SIGINT ends the backends too.
        unsafe { libc::kill(libc::pid_t::try_from(self.postgres.id()).unwrap(), libc::SIGINT) };
        let _ = self.postgres.wait();
    }
}
