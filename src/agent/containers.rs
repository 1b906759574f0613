//! The containers of the watched processes. Called by the census thread; it reads `/proc` and the cgroup file system, some ten small
//! files a process.

use std::path::PathBuf;
use std::sync::Arc;

use super::config::CriSocket;
use super::cri::{Cri, Directory};
use crate::model::counters::CriStatus;
use crate::target::container::{CgroupFile, CgroupMemory, Hierarchies, Surroundings};
use crate::units::Pid;

/// What is needed to tell the surroundings of a process.
#[derive(Debug)]
pub struct Containers {
    hierarchies: Hierarchies,
    socket: CriSocket,
    cri: Option<Cri>,
    directory: Arc<Directory>,
}

impl Containers {
    /// Finds the cgroup hierarchies, and starts asking the runtime for names.
    #[must_use]
    pub fn start(socket: CriSocket) -> Self {
        let hierarchies = Hierarchies::find();
        for doubt in &hierarchies.doubts {
            tracing::warn!("{doubt}");
        }
        let cri = ask(&socket);
        Self { hierarchies, socket, cri, directory: Arc::default() }
    }

    /// Goes on with another socket.
    pub fn reload(&mut self, socket: CriSocket) {
        if socket != self.socket {
            self.cri = ask(&socket);
            self.socket = socket;
            self.directory = Arc::default();
        }
    }

    /// Takes the newest names. Call it before a round over the processes.
    pub fn refresh(&mut self) {
        if let Some(cri) = &self.cri {
            self.directory = cri.directory();
        }
    }

    /// What is known of the runtime.
    #[must_use]
    pub fn status(&self) -> CriStatus {
        self.cri.as_ref().map(Cri::status).unwrap_or_default()
    }

    /// The surroundings of a process that is seen for the first time: if its container has no name, the runtime is asked.
    #[must_use]
    pub fn of_new(&self, pid: Pid) -> Surroundings {
        let surroundings = self.of(pid);
        let nameless = surroundings.container.as_ref().is_some_and(|container| container.pod.is_none());
        if let Some(cri) = self.cri.as_ref().filter(|_| nameless) {
            cri.want();
        }
        surroundings
    }

    /// The memory of a cgroup that a process was in, also after the process is gone.
    #[must_use]
    pub fn memory(&self, cgroup: &CgroupFile) -> Option<CgroupMemory> {
        self.hierarchies.memory(cgroup)
    }

    /// The surroundings of a process.
    #[must_use]
    pub fn of(&self, pid: Pid) -> Surroundings {
        let mut surroundings = Surroundings::of(pid, &self.hierarchies);
        self.name(&mut surroundings);
        surroundings
    }

    /// Gives a container its names, if they have come meanwhile.
    pub fn name(&self, surroundings: &mut Surroundings) {
        let Some(container) = surroundings.container.as_deref() else { return };
        if let Some(named) = self.directory.named(container).filter(|named| named != container) {
            surroundings.container = Some(Arc::new(named));
        }
    }
}

fn ask(socket: &CriSocket) -> Option<Cri> {
    let path: Option<PathBuf> = match socket {
        CriSocket::Off => return None,
        CriSocket::Auto => None,
        CriSocket::Path(path) => Some(path.clone()),
    };
    match Cri::start(path) {
        Ok(cri) => Some(cri),
        Err(error) => {
            tracing::warn!("no names of containers: cannot start a thread: {error}");
            None
        }
    }
}
