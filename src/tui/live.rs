//! The event loop: samples and keys in, frames out.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Duration;

use crossterm::event::{Event, KeyEventKind};

use super::draw;
use super::input::{self, Input};
use super::sample::Sample;
use super::screen::Screen;
use super::state::{State, Then};

/// Longest wait for a key before samples and signals are checked, and so the longest delay of a new sample.
const POLL: Duration = Duration::from_millis(50);

/// Why the view ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// The user or a signal requested it, or the terminal hung up.
    Asked,
    /// The source of samples failed while processes were still running.
    SourceFailed,
}

/// Shows samples until the user quits, `stop` is set, the terminal hangs up, or the source fails. When all processes have ended, the last
/// sample stays until a key is pressed.
///
/// # Errors
/// If the terminal cannot be set up, read or written.
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
            match screen.draw(|frame| draw::draw(frame, sample.as_ref(), &state, colour)) {
                Err(_) if input::is_gone() => return Ok(Left::Asked),
                drawn => drawn?,
            }
            changed = false;
        }
        let event = match input::next(POLL)? {
            Input::Event(event) => event,
            Input::Nothing => continue,
            Input::Gone => return Ok(Left::Asked),
        };
        match event {
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
