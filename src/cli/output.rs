//! A command's output: to standard output, or to a file that appears only when it is complete.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead as _, BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;

/// A line for the user on standard error. If it cannot be written (the terminal is closed) it is dropped: `eprintln!` would panic.
macro_rules! say {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), $($text)*);
    }};
}
pub(crate) use say;

/// Whether to use colours on standard output: it is a terminal, not a dumb one, and `NO_COLOR` is not set (<https://no-color.org>).
pub fn colour() -> bool {
    let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    io::stdout().is_terminal() && !set("NO_COLOR") && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Columns of the terminal on standard output; `None` = not a terminal, so lines are not cut.
pub fn columns() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    (size.ws_col > 0).then_some(usize::from(size.ws_col))
}

/// Writes text to standard output. A closed pipe (`| head`) is not an error.
///
/// # Errors
/// If the text cannot be written.
pub fn print(text: &str) -> anyhow::Result<()> {
    to_stdout(|out| out.write_all(text.as_bytes()))
}

/// Writes to standard output. A closed pipe (`| head`) is not an error.
///
/// # Errors
/// What `write` reports.
pub fn to_stdout(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> anyhow::Result<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    match write(&mut out).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => done.context("cannot write to standard output"),
    }
}

/// The result of a command that writes as it goes on: a closed pipe ends it, and is not an error.
///
/// # Errors
/// Those of `done`.
pub fn unless_closed(done: anyhow::Result<()>) -> anyhow::Result<()> {
    let is_closed = |error: &(dyn std::error::Error + 'static)| {
        error.downcast_ref().is_some_and(|io: &io::Error| io.kind() == io::ErrorKind::BrokenPipe)
    };
    match done {
        Err(error) if error.chain().any(is_closed) => Ok(()),
        done => done,
    }
}

/// Writes a file. It is written under a temporary name and renamed when complete, so that a full disk or an interruption leaves the old
/// file as it was. Anything that is not a regular file (`/dev/stdout`, a pipe) is written to directly.
///
/// # Errors
/// What `write` or the file system reports, with the path.
pub fn to_file(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> anyhow::Result<()> {
    let special = fs::metadata(path).is_ok_and(|meta| !meta.is_file());
    let done = if special {
        OpenOptions::new().write(true).open(path).and_then(|file| filled(file, write))
    } else {
        // The target of a symbolic link is replaced, not the link.
        let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
        let beside = beside(&target);
        let made = OpenOptions::new().write(true).create_new(true).open(&beside);
        let done = made.and_then(|file| filled(file, write)).and_then(|()| fs::rename(&beside, &target));
        if done.is_err() {
            // The error that matters is the first one.
            let _ = fs::remove_file(&beside);
        }
        done
    };
    done.map_err(|error| cannot_write(path, error))
}

/// Checks that [`to_file`] can write here, by creating the temporary file: called before work whose result would be lost.
///
/// # Errors
/// What the file system reports, with the path.
pub fn check_writable(path: &Path) -> anyhow::Result<()> {
    let done = if fs::metadata(path).is_ok_and(|meta| !meta.is_file()) {
        OpenOptions::new().write(true).open(path).map(drop)
    } else {
        let beside = beside(&fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf()));
        OpenOptions::new().write(true).create_new(true).open(&beside).and_then(|_| fs::remove_file(&beside))
    };
    done.map_err(|error| cannot_write(path, error))
}

/// Asks on the terminal; anything but a yes is a no.
#[must_use]
pub fn confirmed(question: &str) -> bool {
    let mut out = io::stderr();
    let _ = write!(out, "{question} [y/N] ");
    let _ = out.flush();
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line).is_ok() && matches!(line.trim(), "y" | "Y" | "yes")
}

/// The error with the path, and a hint if the file system is read-only, as a container's root can be.
fn cannot_write(path: &Path, error: io::Error) -> anyhow::Error {
    let is_read_only = error.kind() == io::ErrorKind::ReadOnlyFilesystem;
    let hint = if is_read_only { "; choose another file with -o (in the agent's own pod: one in /var/lib/fragprof)" } else { "" };
    anyhow::Error::new(error).context(format!("cannot write {}{hint}", path.display()))
}

fn filled(file: File, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let mut out = BufWriter::new(file);
    write(&mut out)?;
    out.flush()
}

fn beside(path: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}.part", std::process::id()));
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_error_of_a_read_only_file_system_suggests_another_file() {
        let error = cannot_write(Path::new("x.pb.gz"), io::Error::from_raw_os_error(libc::EROFS));
        assert!(format!("{error:#}").contains("choose another file with -o"), "{error:#}");
        let error = cannot_write(Path::new("x.pb.gz"), io::Error::from_raw_os_error(libc::ENOSPC));
        assert!(!format!("{error:#}").contains("another file"), "{error:#}");
    }

    #[test]
    fn a_failed_write_leaves_the_old_file_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.svg");
        fs::write(&path, "old").unwrap();
        let full = |out: &mut dyn Write| {
            out.write_all(b"half")?;
            Err(io::Error::from_raw_os_error(libc::ENOSPC))
        };
        let error = to_file(&path, full).unwrap_err();
        assert!(format!("{error:#}").contains("out.svg: No space left on device"), "{error:#}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        to_file(&path, |out| out.write_all(b"new")).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "new");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_device_is_written_to_and_its_error_shown() {
        let error = to_file(Path::new("/dev/full"), |out| out.write_all(b"x")).unwrap_err();
        assert!(format!("{error:#}").contains("/dev/full: No space left on device"), "{error:#}");
        assert!(fs::metadata("/dev/full").unwrap().len() == 0 && !fs::metadata("/dev/full").unwrap().is_file());
    }
}
