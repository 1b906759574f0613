//! What all recordings of one fragprof process share: the loaded programs with their unwind tables, and what is known of modules.
//!
//! ```text
//!            ┌── Recorder (every call, or an emitter)
//! Session ───┼── Recorder (another one, on demand)
//!            └── Governed (windows)
//! ```
//!
//! A recording is a policy on top of it: it opens its own ring, assigns targets to the processes that it watches, decides when their probes
//! are attached, and says what may be concluded. When it ends, it leaves nothing behind except what was learned about modules
//! (docs/design/0017).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::capture::{self, Capture};
use crate::session::Error;
use crate::symbol::{Known, Snapshots, Symbolizer};

/// The shared part of recordings.
#[derive(Debug)]
pub struct Session {
    /// The programs.
    pub(in crate::session) capture: Capture,
    snapshots: Mutex<Snapshots>,
    known: Mutex<Known>,
    /// Why processes cannot be watched in windows; `None` if they can.
    no_windows: Option<String>,
}

/// A session that several recordings share; dropping the last reference unloads the programs.
pub type SharedSession = Arc<Session>;

impl Session {
    /// Loads the programs.
    ///
    /// # Errors
    /// If BPF is not permitted or the kernel lacks a required feature.
    pub fn load(config: &capture::Config) -> Result<SharedSession, Error> {
        let no_windows = (!config.windows).then(|| "the programs were loaded without them".to_owned());
        Ok(Self::of(Capture::load(config)?, no_windows))
    }

    /// Loads the programs for every kind of recording; without windows if the kernel or the machine refuses those.
    ///
    /// # Errors
    /// As [`Session::load`].
    pub fn load_for_all(tables_bytes: u64) -> Result<SharedSession, Error> {
        let config = capture::Config { tables_bytes, windows: true, ..capture::Config::default() };
        match Capture::load(&config) {
            Ok(capture) => Ok(Self::of(capture, None)),
            Err(error) => {
                let capture = Capture::load(&capture::Config { windows: false, ..config })?;
                Ok(Self::of(capture, Some(error.to_string())))
            }
        }
    }

    fn of(capture: Capture, no_windows: Option<String>) -> SharedSession {
        Arc::new(Self { capture, snapshots: Mutex::default(), known: Mutex::default(), no_windows })
    }

    /// Checks that processes can be watched in windows.
    ///
    /// # Errors
    /// [`Error::NoWindows`].
    pub(in crate::session) fn check_windows(&self) -> Result<(), Error> {
        self.no_windows.as_ref().map_or(Ok(()), |reason| Err(Error::NoWindows { reason: reason.clone() }))
    }

    /// The programs.
    #[must_use]
    pub fn capture(&self) -> &Capture {
        &self.capture
    }

    /// The modules that processes map, each opened once.
    pub(in crate::session) fn snapshots(&self) -> MutexGuard<'_, Snapshots> {
        self.snapshots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Symbolizes stacks with a shared cache. Files are closed afterwards, names are kept. Recordings take turns.
    pub(in crate::session) fn name<T>(&self, name: impl FnOnce(&mut Symbolizer) -> T) -> T {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let mut symbolizer = Symbolizer::with_known(std::mem::take(&mut *known));
        let named = name(&mut symbolizer);
        *known = symbolizer.into_known();
        named
    }
}

/// A session that is loaded when the first recording needs it, and unloaded with the last.
#[derive(Debug)]
pub struct LazySession {
    tables_bytes: u64,
    loaded: Mutex<Weak<Session>>,
}

impl LazySession {
    /// Nothing is loaded yet. `tables_bytes`: kernel memory for unwind tables, of all recordings together.
    #[must_use]
    pub fn new(tables_bytes: u64) -> Self {
        Self { tables_bytes, loaded: Mutex::default() }
    }

    /// The session, loaded for every kind of recording.
    ///
    /// # Errors
    /// As [`Session::load`].
    pub fn get(&self) -> Result<SharedSession, Error> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(session) = loaded.upgrade() {
            return Ok(session);
        }
        let session = Session::load_for_all(self.tables_bytes)?;
        *loaded = Arc::downgrade(&session);
        Ok(session)
    }

    /// A session for a recording of every call of a process that others may watch too: on a kernel without attach cookies only one
    /// recording's probes of a process can be distinguished, so there it is a separate session.
    ///
    /// # Errors
    /// As [`Session::load`].
    pub fn get_for_every_call(&self) -> Result<SharedSession, Error> {
        let session = self.get()?;
        if session.capture.hears_emitters() {
            return Ok(session);
        }
        Session::load(&capture::Config { tables_bytes: self.tables_bytes, ..capture::Config::default() })
    }
}
