//! Takes probes out on a thread of its own: the kernel waits some 90 ms for running probes to finish, in which the driver has other
//! windows to open.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use crate::capture::Attached;

/// Says when probes are out.
#[derive(Debug, Clone, Default)]
pub struct Ticket(Arc<AtomicBool>);

impl Ticket {
    /// Whether they are.
    pub fn is_out(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// The thread.
pub struct Reaper {
    sender: Option<Sender<(Attached, Ticket)>>,
    thread: Option<JoinHandle<()>>,
}

impl Reaper {
    /// Starts the thread.
    pub fn start() -> std::io::Result<Self> {
        let (sender, receiver) = channel::<(Attached, Ticket)>();
        let thread = std::thread::Builder::new().name("fragprof-detach".into()).spawn(move || {
            for (attached, ticket) in receiver {
                drop(attached);
                ticket.0.store(true, Ordering::Release);
            }
        })?;
        Ok(Self { sender: Some(sender), thread: Some(thread) })
    }

    /// Takes probes out soon.
    pub fn take_out(&self, attached: Attached) -> Ticket {
        let ticket = Ticket::default();
        let sent = self.sender.as_ref().map(|sender| sender.send((attached, ticket.clone())));
        // Without the thread they go out here and now, with the message.
        if !matches!(sent, Some(Ok(()))) {
            ticket.0.store(true, Ordering::Release);
        }
        ticket
    }
}

impl Drop for Reaper {
    /// Waits until all probes are out.
    fn drop(&mut self) {
        self.sender = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that takes probes out ended in a panic");
        }
    }
}
