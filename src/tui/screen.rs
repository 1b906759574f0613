//! The terminal: taken for the live view, and put back when it ends in whatever way.
//!
//! A panic anywhere in the program puts it back before the message is printed; after that nothing is drawn any more.

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

/// Whether the terminal is taken.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// The taken terminal. Dropping it puts the terminal back.
pub struct Screen {
    /// Never dropped: it would show the cursor once more, and panic where neither that nor a message about it can be written (ratatui-core 0.1,
    /// `Terminal::drop`).
    terminal: ManuallyDrop<Terminal<CrosstermBackend<Stdout>>>,
}

impl Screen {
    /// Takes the terminal: raw mode, alternate screen, no cursor.
    ///
    /// # Errors
    /// If the terminal refuses; it is as it was then.
    pub fn take() -> io::Result<Self> {
        restore_on_panic();
        input::guard()?;
        TAKEN.store(true, Ordering::SeqCst);
        let taken = enable_raw_mode()
            .and_then(|()| execute!(io::stdout(), EnterAlternateScreen, cursor::Hide))
            .and_then(|()| Terminal::new(CrosstermBackend::new(io::stdout())));
        taken.map(|terminal| Self { terminal: ManuallyDrop::new(terminal) }).inspect_err(|_| put_back())
    }

    /// As [`take`](Self::take), and the mouse's movements and clicks come as events.
    ///
    /// # Errors
    /// If the terminal refuses; it is as it was then.
    pub fn take_with_mouse() -> io::Result<Self> {
        let screen = Self::take()?;
        execute!(io::stdout(), EnableMouseCapture)?;
        Ok(screen)
    }

    /// Draws a frame.
    ///
    /// # Errors
    /// If the terminal is gone, or was put back by a panic.
    pub fn draw(&mut self, draw: impl FnOnce(&mut ratatui::Frame<'_>)) -> io::Result<()> {
        if !TAKEN.load(Ordering::SeqCst) {
            return Err(io::Error::other("a thread of this program failed"));
        }
        self.terminal.draw(draw).map(drop)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        put_back();
    }
}

/// Puts the terminal back, if it is taken.
fn put_back() {
    if TAKEN.swap(false, Ordering::SeqCst) {
        // A terminal that is gone cannot be put back, and there is nobody to tell.
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
