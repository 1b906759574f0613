//! The event loop: samples and keys in, frames out.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use crossterm::event::{Event, KeyEventKind, poll, read};

use super::choice::{self, Choice, Chosen};
use super::sample::Sample;
use super::screen::Screen;
use super::state::{State, Then};
use super::{draw, processes};

/// How long a key is waited for before samples and signals are looked at: a new sample is on the screen within it.
const POLL: Duration = Duration::from_millis(50);

/// How often the list of processes is read anew.
const LIST_INTERVAL: Duration = Duration::from_secs(2);

/// Why the view ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// The user or a signal asked for it.
    Asked,
    /// The source of samples failed, while processes still ran.
    SourceFailed,
}

/// Lets the user choose a process; `None` = none was chosen.
///
/// # Errors
/// If the terminal cannot be taken, read or written.
pub fn choose(stop: &AtomicBool) -> io::Result<Option<u32>> {
    let mut screen = Screen::take()?;
    let mut choice = Choice::default();
    let (mut candidates, mut listed) = (processes::list(), Instant::now());
    let mut changed = true;
    while !stop.load(Ordering::Relaxed) {
        if listed.elapsed() >= LIST_INTERVAL {
            (candidates, listed, changed) = (processes::list(), Instant::now(), true);
        }
        if changed {
            screen.draw(|frame| choice::draw(frame, &candidates, &choice))?;
            changed = false;
        }
        if !poll(POLL)? {
            continue;
        }
        match read()? {
            Event::Key(key) if key.kind != KeyEventKind::Release => {
                changed = true;
                match choice.key(key, &candidates) {
                    Chosen::Not => {}
                    Chosen::Quit => return Ok(None),
                    Chosen::Pid(pid) => return Ok(Some(pid)),
                }
            }
            Event::Resize(..) => changed = true,
            _ => {}
        }
    }
    Ok(None)
}

/// Shows samples until the user leaves, `stop` is set, or the source fails. When all processes have ended, the last picture stays until
/// a key.
///
/// # Errors
/// If the terminal cannot be taken, read or written.
pub fn show(samples: &Receiver<Sample>, stop: &AtomicBool, colour: bool) -> io::Result<Left> {
    let mut screen = Screen::take()?;
    let mut state = State::default();
    let mut sample: Option<Sample> = None;
    let mut changed = true;
    while !stop.load(Ordering::Relaxed) {
        match samples.try_recv() {
            Ok(new) => {
                state.over = !new.processes.is_empty() && new.processes.iter().all(|process| process.end.is_some());
                sample = Some(new);
                changed = true;
            }
            Err(TryRecvError::Disconnected) if !state.over => return Ok(Left::SourceFailed),
            Err(_) => {}
        }
        if changed {
            screen.draw(|frame| draw::draw(frame, sample.as_ref(), &state, colour))?;
            changed = false;
        }
        if !poll(POLL)? {
            continue;
        }
        match read()? {
            Event::Key(key) if key.kind != KeyEventKind::Release => {
                changed = true;
                if state.key(key, sample.as_ref()) == Then::Quit {
                    return Ok(Left::Asked);
                }
            }
            Event::Resize(..) => changed = true,
            _ => {}
        }
    }
    Ok(Left::Asked)
}
