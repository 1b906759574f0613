//! The event loop of the view of all processes.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::time::Duration;

use crossterm::event::{Event, KeyEventKind};

use super::source::Wanted;
use super::state::State;
use super::{Sample, draw};
use crate::tui::input::{self, Input};
use crate::tui::screen::Screen;
use crate::tui::state::Then;

/// Longest wait for a key before samples and signals are checked.
const POLL: Duration = Duration::from_millis(50);

/// Settings of the view.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The source of the samples.
    pub title: String,
    /// Whether a process can be recorded from here.
    pub can_record: bool,
    /// Whether to use colours.
    pub colour: bool,
}

/// Shows samples until the user quits, `stop` is set, or the terminal hangs up. Returns the process that the user wants to record, if any.
///
/// # Errors
/// If the terminal cannot be set up, read or written.
pub fn show(samples: &Receiver<Sample>, wanted: &Wanted, settings: &Settings, stop: &AtomicBool) -> io::Result<Option<u32>> {
    let mut screen = Screen::take_with_mouse()?;
    let mut state = State { can_record: settings.can_record, ..State::default() };
    let mut sample: Option<Sample> = None;
    let mut changed = true;
    while !stop.load(Ordering::Relaxed) {
        if let Ok(new) = samples.try_recv() {
            sample = Some(new);
            changed = true;
        }
        wanted.pid.store(state.open().unwrap_or(0), Ordering::Relaxed);
        if changed {
            match screen.draw(|frame| draw::draw(frame, sample.as_ref(), &mut state, &settings.title, settings.colour)) {
                Err(_) if input::is_gone() => break,
                drawn => drawn?,
            }
            changed = false;
        }
        let event = match input::next(POLL)? {
            Input::Event(event) => event,
            Input::Nothing => continue,
            Input::Gone => break,
        };
        let empty = Sample::default();
        let known = sample.as_ref().unwrap_or(&empty);
        changed = true;
        let quits = match event {
            Event::Key(key) if key.kind != KeyEventKind::Release => state.key(key, known) == Then::Quit,
            Event::Mouse(mouse) => {
                state.mouse(mouse, known);
                false
            }
            _ => false,
        };
        if quits {
            break;
        }
    }
    wanted.done.store(true, Ordering::Relaxed);
    Ok(state.record)
}
