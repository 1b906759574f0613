//! What comes from the terminal: keys, movements of the mouse, and its end.
//!
//! A terminal that has gone (its window closed, its connection lost) is always readable and gives nothing. crossterm 0.29 reads such a one
//! again and again inside its own `poll` and never comes back, so it is asked only where the kernel says that there is something and that
//! the terminal is still there. The moment between the two is the guard's: a thread that waits for the terminal's end, leaves the program
//! some time to end in good order, and then ends it.

use std::fs::File;
use std::io::{self, IsTerminal as _};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;
use std::time::Duration;

use crossterm::event::{self, Event};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// How often the guard looks by itself: a hang-up need not wake a poll that asks for nothing else (`pollwake`, fs/select.c).
const GUARD_EVERY: Duration = Duration::from_millis(250);
/// Time between the terminal's end and the program's, if that does not end by itself.
const END_WITHIN: Duration = Duration::from_secs(2);
/// Exit status of a program that its terminal's end has ended: 128 and the number of SIGHUP, as shells have it.
const STATUS_HUNG_UP: i32 = 129;

/// What came.
#[derive(Debug)]
pub enum Input {
    /// A key, the mouse, another size.
    Event(Event),
    /// Nothing in this time.
    Nothing,
    /// The terminal's end.
    Gone,
}

/// The terminal that is read: standard input, or else that of the session, as crossterm has it.
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

/// Waits for `events` on the terminal; what is there afterwards. A signal ends the wait.
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

/// Whether the terminal has gone. What cannot be asked counts as there.
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
    // Further events of what was read before.
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
        // crossterm has left it for later: this must not become a busy loop.
        std::thread::sleep(most);
    }
    Ok(Input::Nothing)
}

/// Starts the guard, once for the program's life.
///
/// # Errors
/// If there is no terminal, or the system gives no thread.
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
                // Without an answer nobody would see the end: it is taken for one.
                Ok(_) | Err(_) => break,
            }
        }
        std::thread::sleep(END_WITHIN);
        signal_hook::low_level::exit(STATUS_HUNG_UP);
    };
    std::thread::Builder::new().name("fragprof-tty".into()).spawn(watch).map(drop)
}
