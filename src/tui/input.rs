//! Input from the terminal: keys, the mouse, and hang-up.
//!
//! After a hang-up (window closed, connection lost) a terminal is always readable and returns nothing. crossterm 0.29 then loops inside its
//! own `poll` and never returns, so it is called only if the kernel reports input and no hang-up. The race between the two is covered by the
//! guard: a thread that waits for the hang-up, leaves the program some time to end in an orderly way, and then ends it.

use std::fs::File;
use std::io::{self, IsTerminal as _};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;
use std::time::Duration;

use crossterm::event::{self, Event};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// How often the guard checks: a hang-up need not wake a poll that waits for nothing else (`pollwake`, fs/select.c).
const GUARD_EVERY: Duration = Duration::from_millis(250);
/// Time from the hang-up until the guard ends the program.
const END_WITHIN: Duration = Duration::from_secs(2);
/// Exit status after a hang-up: 128 plus the number of SIGHUP, as in shells.
const STATUS_HUNG_UP: i32 = 129;

/// An input.
#[derive(Debug)]
pub enum Input {
    /// A key, the mouse, or a resize.
    Event(Event),
    /// Nothing within the time.
    Nothing,
    /// Hang-up.
    Gone,
}

/// The terminal that is read: standard input, or else the session's terminal, as in crossterm.
fn terminal() -> io::Result<&'static OwnedFd> {
    static TERMINAL: OnceLock<OwnedFd> = OnceLock::new();
    if let Some(terminal) = TERMINAL.get() {
        return Ok(terminal);
    }
    let stdin = io::stdin();
    let opened = if stdin.is_terminal() {
        stdin.as_fd().try_clone_to_owned()?
    } else {
        File::options().read(true).write(true).open("/dev/tty")?.into()
    };
    Ok(TERMINAL.get_or_init(|| opened))
}

/// Waits for `events` on the terminal and returns those present. A signal ends the wait.
fn wait_for(terminal: &OwnedFd, events: PollFlags, most: Duration) -> io::Result<PollFlags> {
    let mut polled = [PollFd::new(terminal, events)];
    let timeout = Timespec::try_from(most).map_err(io::Error::other)?;
    match poll(&mut polled, Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => Ok(polled[0].revents()),
        Err(error) => Err(error.into()),
    }
}

fn has_gone(found: PollFlags) -> bool {
    found.intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL)
}

/// Whether the terminal has hung up. If that cannot be checked, it has not.
#[must_use]
pub fn is_gone() -> bool {
    terminal().and_then(|terminal| wait_for(terminal, PollFlags::empty(), Duration::ZERO)).is_ok_and(has_gone)
}

/// The next event, waited for `most`.
///
/// # Errors
/// If the terminal cannot be read.
pub fn next(most: Duration) -> io::Result<Input> {
    match read(most) {
        Err(_) if is_gone() => Ok(Input::Gone),
        other => other,
    }
}

fn read(most: Duration) -> io::Result<Input> {
    let terminal = terminal()?;
    if has_gone(wait_for(terminal, PollFlags::empty(), Duration::ZERO)?) {
        return Ok(Input::Gone);
    }
    // Further events of an earlier read.
    if event::poll(Duration::ZERO)? {
        return event::read().map(Input::Event);
    }
    let found = wait_for(terminal, PollFlags::IN, most)?;
    if has_gone(found) {
        return Ok(Input::Gone);
    }
    if event::poll(Duration::ZERO)? {
        return event::read().map(Input::Event);
    }
    if found.contains(PollFlags::IN) {
        // crossterm left it for later: this must not become a busy loop.
        std::thread::sleep(most);
    }
    Ok(Input::Nothing)
}

/// Starts the guard, once for the program's life.
///
/// # Errors
/// If there is no terminal, or no thread can be started.
pub fn guard() -> io::Result<()> {
    static STARTED: OnceLock<()> = OnceLock::new();
    let terminal = terminal()?;
    if STARTED.set(()).is_err() {
        return Ok(());
    }
    let watch = move || {
        loop {
            match wait_for(terminal, PollFlags::empty(), GUARD_EVERY) {
                Ok(found) if !has_gone(found) => {}
                // If polling fails, a hang-up would go unnoticed: treat the failure as one.
                Ok(_) | Err(_) => break,
            }
        }
        std::thread::sleep(END_WITHIN);
        signal_hook::low_level::exit(STATUS_HUNG_UP);
    };
    std::thread::Builder::new().name("fragprof-tty".into()).spawn(watch).map(drop)
}
