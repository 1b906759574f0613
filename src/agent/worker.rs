//! A thread of the agent with a configuration, which is sent to it again when it changes, and a sample that others read.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The thread. It ends when its [`Worker`] is dropped or stopped, which disconnects its receiver.
pub struct Worker<C> {
    orders: Sender<C>,
    thread: JoinHandle<()>,
}

impl<C: Send + 'static> Worker<C> {
    /// Starts it.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(name: &str, work: impl FnOnce(&Receiver<C>) + Send + 'static) -> std::io::Result<Self> {
        let (orders, receiver) = channel();
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || work(&receiver))?;
        Ok(Self { orders, thread })
    }

    /// Continues with this configuration.
    pub fn reload(&self, config: C) {
        // A thread that has ended is noticed by `is_finished`.
        let _ = self.orders.send(config);
    }

    /// Whether it has ended by itself.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Detaches all probes and ends it, within a time. What is not detached by then is detached when the process ends.
    pub fn stop(self, within: Duration) {
        drop(self.orders);
        let deadline = Instant::now() + within;
        while !self.thread.is_finished() && Instant::now() < deadline {
            std::thread::park_timeout(Duration::from_millis(10));
        }
    }
}

/// Takes the lock of a sample; a panic of the holder leaves an older one.
pub fn lock<T>(sample: &Mutex<T>) -> MutexGuard<'_, T> {
    sample.lock().unwrap_or_else(PoisonError::into_inner)
}
