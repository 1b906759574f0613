//! Ends a run that takes too long.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// Kills the process when its time is up.
pub(super) struct Watchdog {
    barked: Arc<AtomicBool>,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    pub(super) fn start(pid: i32, time: Duration) -> io::Result<Self> {
        let process = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
        // By descriptor: the pid may have been reused by then.
        let process: OwnedFd = pidfd_open(process, PidfdFlags::empty())?;
        let (stop, stopped) = channel::<()>();
        let barked = Arc::new(AtomicBool::new(false));
        let shared = Arc::clone(&barked);
        let thread = std::thread::Builder::new().name("fragprof-scratch".into()).spawn(move || {
            if stopped.recv_timeout(time) == Err(RecvTimeoutError::Timeout) {
                shared.store(true, Ordering::SeqCst);
                // It may have ended at this moment.
                let _ = pidfd_send_signal(&process, Signal::KILL);
            }
        })?;
        Ok(Self { barked, stop: Some(stop), thread: Some(thread) })
    }

    /// Whether it killed the process.
    pub(super) fn barked(&self) -> bool {
        self.barked.load(Ordering::SeqCst)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // The thread does nothing that panics.
            let _ = thread.join();
        }
    }
}
