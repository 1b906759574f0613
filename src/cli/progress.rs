//! A progress line on the terminal during long work: what is done, how much of it, for how long. None if standard error is not a terminal.

use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Work that takes less than this shows no line.
const AFTER: Duration = Duration::from_millis(400);
/// Time between two updates of the line.
const EVERY: Duration = Duration::from_millis(100);
/// Characters of the bar.
const BAR: usize = 24;
/// Columns assumed for a terminal that does not report them.
const COLUMNS: usize = 80;

/// Whether the line is on the terminal now.
static SHOWN: Mutex<bool> = Mutex::new(false);

/// The contents of the line.
#[derive(Debug, Clone, Default)]
pub struct Said {
    /// What is being done.
    pub what: String,
    /// How much of it is done, from 0 to 1, if known.
    pub share: Option<f64>,
}

/// A line that is updated until this is dropped.
#[derive(Debug)]
#[must_use]
pub struct Progress {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Shows what `say` returns, if standard error is a terminal.
pub fn show(say: impl Fn() -> Said + Send + 'static) -> Progress {
    let none = Progress { stop: None, thread: None };
    if !io::stderr().is_terminal() || std::env::var_os("TERM").is_some_and(|term| term == "dumb") {
        return none;
    }
    let (stop, stopped) = channel();
    let began = Instant::now();
    let run = move || {
        let mut wait = AFTER;
        while stopped.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
            put(&line(&say(), began.elapsed(), columns()));
            wait = EVERY;
        }
    };
    // If the thread cannot be started there is no line; the work continues.
    let Ok(thread) = std::thread::Builder::new().name("fragprof-progress".into()).spawn(run) else { return none };
    Progress { stop: Some(stop), thread: Some(thread) }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // The thread returns nothing.
            let _ = thread.join();
        }
        make_room();
    }
}

/// Clears the line so that others can be printed; the next update brings it back.
pub fn make_room() {
    let mut shown = SHOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if std::mem::take(&mut *shown) {
        // If standard error is closed, there is nowhere to report it.
        let _ = io::stderr().write_all(b"\r\x1b[K");
    }
}

fn put(line: &str) {
    let mut shown = SHOWN.lock().unwrap_or_else(PoisonError::into_inner);
    *shown = io::stderr().write_all(format!("\r{line}\x1b[K").as_bytes()).is_ok();
}

fn columns() -> usize {
    rustix::termios::tcgetwinsize(io::stderr()).ok().map(|size| usize::from(size.ws_col)).filter(|&columns| columns > 0).unwrap_or(COLUMNS)
}

/// The line, cut to the terminal's width: a wrapped line could not be cleared.
fn line(said: &Said, elapsed: Duration, columns: usize) -> String {
    let bar = said.share.map(|share| {
        let full = (share.clamp(0.0, 1.0) * BAR as f64) as usize;
        format!(" [{}{}]", "#".repeat(full), "-".repeat(BAR - full))
    });
    let text = format!("fragprof: {}{} {:.0} s", said.what, bar.unwrap_or_default(), elapsed.as_secs_f64());
    text.chars().take(columns.saturating_sub(1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_a_bar_where_the_end_is_known_and_never_wraps() {
        let said = |share| Said { what: "recording".into(), share };
        let of = |share, columns| line(&said(share), Duration::from_secs(3), columns);
        assert_eq!(of(Some(0.5), 80), "fragprof: recording [############------------] 3 s");
        assert_eq!(of(None, 80), "fragprof: recording 3 s");
        assert_eq!(of(Some(7.0), 15), "fragprof: reco");
        assert_eq!(of(None, 0), "");
    }
}
