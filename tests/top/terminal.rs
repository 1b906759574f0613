//! A program on a pseudo terminal: its output, the resulting screen, and the state of the terminal afterwards.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};
use rustix::termios::{LocalModes, Termios, tcgetattr};

use crate::support::LIMIT;

/// Rows and columns of the emulated screen; larger than any terminal of the tests.
const ROWS: usize = 80;
const COLUMNS: usize = 250;
/// Timeout of one wait for output.
const READ_FOR: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

type Written = Arc<(Mutex<Vec<u8>>, Condvar)>;

/// A program on a terminal of its own, killed when dropped.
pub struct Terminal {
    master: Option<File>,
    /// Kept open, so that the terminal's state can be checked after the program has ended.
    slave: OwnedFd,
    before: Termios,
    child: Child,
    written: Written,
    has_ended: Arc<AtomicBool>,
    reader: Option<JoinHandle<()>>,
}

/// The contents of a terminal.
pub struct Screen {
    /// Its lines, without trailing blanks.
    pub lines: Vec<String>,
    /// Whether the alternate screen is shown.
    pub alternate: bool,
    /// Whether the cursor is hidden.
    pub cursor_hidden: bool,
    /// Whether a colour was ever set.
    pub coloured: bool,
}

impl Terminal {
    /// Starts a command on a terminal of this size, which is its controlling terminal.
    pub fn start(command: &mut Command, columns: u16, rows: u16) -> Self {
        Self::start_with(command, columns, rows, true)
    }

    /// Like [`Terminal::start`], in a session without a terminal: the command gets no signal when this one ends.
    pub fn start_unsignalled(command: &mut Command, columns: u16, rows: u16) -> Self {
        Self::start_with(command, columns, rows, false)
    }

    fn start_with(command: &mut Command, columns: u16, rows: u16, is_of_session: bool) -> Self {
        let (mut master, mut slave) = (-1, -1);
        let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        // SAFETY: the descriptors and the size outlive the call; name and termios may be null.
        let opened = unsafe { libc::openpty(&mut master, &mut slave, std::ptr::null_mut(), std::ptr::null_mut(), &size) };
        assert_eq!(opened, 0, "no pseudo terminal: {}", std::io::Error::last_os_error());
        // SAFETY: both were just opened and have no other owner.
        let (master, slave) = unsafe { (File::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) };
        rustix::io::fcntl_setfd(&master, rustix::io::FdFlags::CLOEXEC).unwrap();
        let before = tcgetattr(&slave).unwrap();
        let side = || std::process::Stdio::from(slave.try_clone().unwrap());
        command.stdin(side()).stdout(side()).stderr(side()).env("TERM", "xterm-256color").env_remove("NO_COLOR");
        // SAFETY: between fork and exec only async-signal-safe system calls are made.
        unsafe {
            command.pre_exec(move || {
                if libc::setsid() < 0 || is_of_session && libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            });
        }
        let child = command.spawn().unwrap();
        let written = Written::default();
        let (mut from, into) = (master.try_clone().unwrap(), Arc::clone(&written));
        let has_ended = Arc::<AtomicBool>::default();
        let ended = Arc::clone(&has_ended);
        let read = move || {
            let mut buffer = [0; 4096];
            while !ended.load(Ordering::Relaxed) {
                let mut polled = [PollFd::new(&from, PollFlags::IN)];
                if poll(&mut polled, Some(&READ_FOR)).unwrap_or(0) == 0 {
                    continue;
                }
                let Ok(got @ 1..) = from.read(&mut buffer) else { return };
                into.0.lock().unwrap().extend_from_slice(&buffer[..got]);
                into.1.notify_all();
            }
        };
        let reader = std::thread::Builder::new().name("test-terminal".into()).spawn(read).unwrap();
        Self { master: Some(master), slave, before, child, written, has_ended, reader: Some(reader) }
    }

    /// Hangs up the terminal, like closing a window.
    pub fn hang_up(&mut self) {
        self.has_ended.store(true, Ordering::Relaxed);
        self.reader.take().unwrap().join().unwrap();
        self.master = None;
    }

    /// Types keys.
    pub fn press(&mut self, keys: &str) {
        self.master.as_ref().unwrap().write_all(keys.as_bytes()).unwrap();
    }

    /// Resizes the terminal.
    pub fn resize(&self, columns: u16, rows: u16) {
        let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        // SAFETY: the size outlives the call.
        assert_eq!(unsafe { libc::ioctl(self.master.as_ref().unwrap().as_raw_fd(), libc::TIOCSWINSZ, &size) }, 0);
    }

    /// Sends the program a signal.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Its current contents.
    pub fn screen(&self) -> Screen {
        Screen::of(&String::from_utf8_lossy(&self.written.0.lock().unwrap()))
    }

    /// The entire output.
    pub fn written(&self) -> String {
        String::from_utf8_lossy(&self.written.0.lock().unwrap()).into_owned()
    }

    /// Waits until its contents satisfy `wanted`.
    pub fn wait_for(&self, what: &str, wanted: impl Fn(&Screen) -> bool) -> Screen {
        let deadline = Instant::now() + LIMIT;
        let mut written = self.written.0.lock().unwrap();
        loop {
            let screen = Screen::of(&String::from_utf8_lossy(&written));
            if wanted(&screen) {
                return screen;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "timed out waiting for {what}:\n{}", screen.lines.join("\n"));
            written = self.written.1.wait_timeout(written, left.min(Duration::from_secs(1))).unwrap().0;
        }
    }

    /// Waits for the program's end and its last output.
    pub fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + LIMIT;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < deadline, "it does not end:\n{}", self.screen().lines.join("\n"));
            std::thread::park_timeout(Duration::from_millis(5));
        }
    }

    /// Asserts that the terminal is restored to its state before the program: its modes, its screen, its cursor.
    pub fn assert_restored(&self) {
        let after = tcgetattr(&self.slave).unwrap();
        assert!(after.local_modes.contains(LocalModes::ECHO | LocalModes::ICANON | LocalModes::ISIG), "{:?}", after.local_modes);
        assert_eq!(after.local_modes, self.before.local_modes);
        assert_eq!(after.input_modes, self.before.input_modes);
        assert_eq!(after.output_modes, self.before.output_modes);
        let screen = self.wait_for("the terminal to be restored", |screen| !screen.alternate && !screen.cursor_hidden);
        assert!(!screen.alternate);
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // Both fail only for a child that is already reaped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Screen {
    /// The screen after this output: cursor moves, clearing, colours and the alternate screen, as defined by ECMA-48 and xterm.
    fn of(written: &str) -> Self {
        let mut cells = vec![vec![' '; COLUMNS]; ROWS];
        let mut screen = Self { lines: Vec::new(), alternate: false, cursor_hidden: false, coloured: false };
        let (mut row, mut column) = (0usize, 0usize);
        let mut chars = written.chars().peekable();
        while let Some(c) = chars.next() {
            match c {
                '\u{1b}' if chars.next_if_eq(&'[').is_some() => {
                    let mut parameters = String::new();
                    while let Some(c) = chars.next_if(|c| !('\u{40}'..='\u{7e}').contains(c)) {
                        parameters.push(c);
                    }
                    let numbers: Vec<usize> = parameters.trim_start_matches('?').split(';').map(|n| n.parse().unwrap_or(0)).collect();
                    match (chars.next(), parameters.as_str()) {
                        (Some('H'), _) => {
                            row = numbers[0].max(1) - 1;
                            column = numbers.get(1).copied().unwrap_or(1).max(1) - 1;
                        }
                        (Some('K'), _) => {
                            if let Some(line) = cells.get_mut(row) {
                                line.iter_mut().skip(column).for_each(|cell| *cell = ' ');
                            }
                        }
                        (Some('J'), _) => cells.iter_mut().for_each(|line| line.fill(' ')),
                        (Some(mode @ ('h' | 'l')), "?1049") => {
                            screen.alternate = mode == 'h';
                            cells.iter_mut().for_each(|line| line.fill(' '));
                        }
                        (Some(mode @ ('h' | 'l')), "?25") => screen.cursor_hidden = mode == 'l',
                        (Some('m'), _) => screen.coloured |= numbers.iter().any(|n| matches!(n, 30..=38 | 40..=48 | 90..=107)),
                        _ => {}
                    }
                }
                '\r' => column = 0,
                '\n' => row += 1,
                c if !c.is_control() => {
                    if let Some(cell) = cells.get_mut(row).and_then(|line| line.get_mut(column)) {
                        *cell = c;
                    }
                    column += 1;
                }
                _ => {}
            }
        }
        screen.lines = cells.iter().map(|line| line.iter().collect::<String>().trim_end().to_owned()).collect();
        screen
    }

    /// Whether a text is on it.
    pub fn has(&self, text: &str) -> bool {
        self.lines.iter().any(|line| line.contains(text))
    }

    /// The text after a label at the start of a line.
    pub fn field(&self, label: &str) -> Option<&str> {
        self.lines.iter().find_map(|line| line.strip_prefix(label)).map(str::trim_start)
    }
}
