//! `doctor` has run the sandbox before it writes its first byte: a reader that has begun to read does not wait for seconds, and one that does
//! not read on leaves no foreign library stopped in a sandbox.

use std::fs;
use std::io::Read as _;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::io::write;
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};

use super::{Build, can_isolate};
use crate::support::bpf;
use crate::support::build::LIB_DIR;
use crate::support::process::{Process, wait_until};
use crate::support::recording::fragprof;

/// Page faults of the children that a process has waited for (`cminflt`, proc_pid_stat(5)): 0 = there were none.
fn faults_of_children(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit(')').next().unwrap().split_whitespace().nth(8).unwrap().parse().unwrap()
}

#[test]
fn doctor_runs_no_sandbox_while_it_writes() {
    if !can_isolate() || bpf().is_none() {
        return;
    }
    for json in [false, true] {
        // A build that nobody knows: the bytes behind the sections change only its checksum.
        let build = Build::copy_of(Path::new(LIB_DIR));
        let mut bytes = fs::read(build.library()).unwrap();
        bytes.extend_from_slice(&std::process::id().to_ne_bytes());
        bytes.push(json.into());
        fs::write(build.library(), bytes).unwrap();
        let target = Process::start(Command::new("/bin/sleep").arg("600").env("LD_LIBRARY_PATH", build.folder.path()));
        let library = build.library();
        wait_until("the copy is mapped", || {
            fs::read_to_string(format!("/proc/{}/maps", target.pid())).is_ok_and(|maps| maps.contains(library.to_str().unwrap()))
        });

        // A full pipe: the first write waits.
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
        let room = fcntl_setpipe_size(&writer, 4096).unwrap();
        assert_eq!(write(&writer, &vec![b' '; room]).unwrap(), room);
        let mut command = fragprof();
        command.args(["doctor", "-p", &target.pid().to_string()]).stdout(Stdio::from(writer)).stderr(Stdio::null());
        if json {
            command.arg("--json");
        }
        let mut doctor = command.spawn().unwrap();
        drop(command);
        let waits = format!("{} 0x1 ", libc::SYS_write);
        wait_until("doctor writes", || {
            fs::read_to_string(format!("/proc/{}/syscall", doctor.id())).is_ok_and(|call| call.starts_with(&waits))
        });
        let before = faults_of_children(doctor.id());
        let mut text = String::new();
        fs::File::from(reader).read_to_string(&mut text).unwrap();
        assert!(doctor.wait().unwrap().success(), "{text}");
        let shown = if json { "\"from_bytes\"" } else { " bytes or more can" };
        assert!(text.contains(shown), "{text}");
        assert!(before > 0, "no sandbox had run: {text}");
    }
}
