//! The terminal: set up for the live view, and restored however it ends.
//!
//! A panic anywhere in the program restores it before the message is printed; after that nothing more is drawn.

use std::io::{self, Stdout};
use std::mem::ManuallyDrop;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use crossterm::event::{DisableMouseCapture, EnableMouseCapture};
use crossterm::terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode};
use crossterm::{cursor, execute};
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;

use super::input;

/// Whether the terminal is set up for drawing.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// The terminal, set up for drawing. Dropping it restores the terminal.
pub struct Screen {
    /// Never dropped: that would show the cursor again, and panic if neither that nor a message about it can be written (ratatui-core 0.1,
    /// `Terminal::drop`).
    terminal: ManuallyDrop<Terminal<CrosstermBackend<Stdout>>>,
}

impl Screen {
    /// Sets up the terminal: raw mode, alternate screen, no cursor.
    ///
    /// # Errors
    /// If the terminal refuses; it is then unchanged.
    pub fn take() -> io::Result<Self> {
        restore_on_panic();
        input::guard()?;
        TAKEN.store(true, Ordering::SeqCst);
        let taken = enable_raw_mode()
            .and_then(|()| execute!(io::stdout(), EnterAlternateScreen, cursor::Hide))
            .and_then(|()| Terminal::new(CrosstermBackend::new(io::stdout())));
        taken.map(|terminal| Self { terminal: ManuallyDrop::new(terminal) }).inspect_err(|_| put_back())
    }

    /// Like [`take`](Self::take), with mouse events.
    ///
    /// # Errors
    /// If the terminal refuses; it is then unchanged.
    pub fn take_with_mouse() -> io::Result<Self> {
        let screen = Self::take()?;
        execute!(io::stdout(), EnableMouseCapture)?;
        Ok(screen)
    }

    /// Draws a frame.
    ///
    /// # Errors
    /// If the terminal hung up, or was restored by a panic.
    pub fn draw(&mut self, draw: impl FnOnce(&mut ratatui::Frame<'_>)) -> io::Result<()> {
        if !TAKEN.load(Ordering::SeqCst) {
            return Err(io::Error::other("a thread of fragprof panicked"));
        }
        self.terminal.draw(draw).map(drop)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        put_back();
    }
}

/// Restores the terminal, if it is set up.
fn put_back() {
    if TAKEN.swap(false, Ordering::SeqCst) {
        // After a hang-up it cannot be restored, and there is nowhere to report it.
        let _ = execute!(io::stdout(), DisableMouseCapture, LeaveAlternateScreen, cursor::Show);
        let _ = disable_raw_mode();
    }
}

fn restore_on_panic() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            put_back();
            before(panic);
        }));
    });
}
