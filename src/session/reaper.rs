//! Detaches probes on separate threads: the kernel waits about 90 ms for running probes to finish, during which the driver has other
//! windows to open and other processes to examine. Threads that wait at the same time share one grace period.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use crate::capture::Attached;

/// Tells when probes are detached.
#[derive(Debug, Clone, Default)]
pub struct Ticket(Arc<AtomicBool>);

impl Ticket {
    /// Whether they are detached.
    pub fn is_out(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

type Work = (Attached, Ticket);

/// The detaching threads.
pub struct Reaper {
    sender: Option<Sender<Work>>,
    threads: Vec<JoinHandle<()>>,
}

impl Reaper {
    /// Starts this many threads.
    pub fn start(threads: usize) -> std::io::Result<Self> {
        let (sender, receiver) = channel::<Work>();
        let receiver = Arc::new(Mutex::new(receiver));
        let start = |_| {
            let receiver = Arc::clone(&receiver);
            std::thread::Builder::new().name("fragprof-detach".into()).spawn(move || work(&receiver))
        };
        Ok(Self { sender: Some(sender), threads: (0..threads).map(start).collect::<Result<_, _>>()? })
    }

    /// Detaches probes soon.
    pub fn take_out(&self, attached: Attached) -> Ticket {
        let ticket = Ticket::default();
        let sent = self.sender.as_ref().map(|sender| sender.send((attached, ticket.clone())));
        // Without a thread they are detached here, when the unsent message is dropped.
        if !matches!(sent, Some(Ok(()))) {
            ticket.0.store(true, Ordering::Release);
        }
        ticket
    }
}

fn work(receiver: &Mutex<Receiver<Work>>) {
    loop {
        let next = receiver.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok((attached, ticket)) = next else { return };
        drop(attached);
        ticket.0.store(true, Ordering::Release);
    }
}

impl Drop for Reaper {
    /// Waits until all probes are detached.
    fn drop(&mut self) {
        self.sender = None;
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread that detaches probes panicked");
            }
        }
    }
}
