//! The destination of log lines: standard error, or, while the live view uses the terminal, a buffer that is printed afterwards.

use std::io::{self, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tracing_subscriber::fmt::MakeWriter;

use super::progress;

/// Bytes kept while the terminal is in use; later lines are dropped and counted.
const HELD_BYTES_MAX: usize = 64 << 10;

#[derive(Default)]
struct Held {
    holding: bool,
    text: Vec<u8>,
    dropped: u64,
}

static HELD: Mutex<Held> = Mutex::new(Held { holding: false, text: Vec::new(), dropped: 0 });

fn held() -> MutexGuard<'static, Held> {
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Holds log lines back until it is dropped.
#[must_use]
pub struct Hold(());

/// Holds log lines back until the result is dropped; then they are printed.
pub fn hold() -> Hold {
    held().holding = true;
    Hold(())
}

impl Drop for Hold {
    fn drop(&mut self) {
        let Held { text, dropped, .. } = std::mem::take(&mut *held());
        // If standard error is closed, there is nowhere to report it.
        let _ = io::stderr().write_all(&text);
        if dropped > 0 {
            let _ = writeln!(io::stderr(), "fragprof: {dropped} more log lines were dropped");
        }
    }
}

/// The log's writer.
#[derive(Debug, Clone, Copy, Default)]
pub struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut held = held();
        if !held.holding {
            drop(held);
            progress::make_room();
            // The subscriber reports a failed write on standard error, and panics if that fails too.
            let _ = io::stderr().write_all(line);
            return Ok(line.len());
        }
        if held.text.len() + line.len() <= HELD_BYTES_MAX {
            held.text.extend_from_slice(line);
        } else {
            held.dropped += 1;
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let _ = io::stderr().flush();
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for LogWriter {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        Self
    }
}
