//! A recording of a process that runs, by the library that is attached to it and taken away at the end.

use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use super::{InProcess, of_memory};
use crate::attach::{self, AttachRefusal, AttachReport, Plan};
use crate::process::Process;
use crate::ring::Memory;
use crate::sampler::library::Flavour;
use crate::session::walks::walker::Purpose;
use crate::session::{Error, Options, monotonic_ns};

/// Longest time for which the library is tried to be taken away, where no thread of the process waits at the moment.
const TAKE_AWAY_MAX: Duration = Duration::from_secs(5);
/// Time between two attempts.
const AGAIN: Duration = Duration::from_millis(50);

/// The process, and what can be done in it.
pub(super) struct Attached {
    pub(super) process: Process,
}

impl Attached {
    /// Takes the library away; a note for the profile if that was not possible.
    pub(super) fn take_away(self) -> Option<String> {
        let pid = self.process.pid();
        let from = Instant::now();
        loop {
            let mut report = AttachReport::of(&self.process);
            let done =
                attach::plan(&self.process, Flavour::AttachedRecorder).and_then(|plan| attach::detach(&self.process, &plan, &mut report));
            match done {
                Ok(()) => return None,
                Err(_) if !self.process.is_alive() => return None,
                Err(refusal) if refusal.is_of_the_moment() && from.elapsed() < TAKE_AWAY_MAX => std::thread::sleep(AGAIN),
                Err(refusal) => {
                    return Some(format!(
                        "the library that recorded process {pid} was not taken away ({refusal}); it does nothing, and costs a nanosecond per \
                         call: fragprof attach-sampler --detach {pid}"
                    ));
                }
            }
        }
    }
}

impl InProcess {
    /// Begins to record a process that runs. `library`: its path in the process's root directory, `None` = a place of this user.
    ///
    /// # Errors
    /// Why the library is not attached; the process is then as it was, except for a library that does nothing.
    pub fn attach(options: Options, process: Process, library: Option<&Path>, report: &mut AttachReport) -> Result<Self, Error> {
        let plan = attach::plan(&process, Flavour::AttachedRecorder)?;
        let path = attach::place(&process, Flavour::AttachedRecorder, library)?;
        let (plan, file) = attach::prepare_recorder(&process, plan, &path, report)?;
        let (bytes, flags) = of_memory(&options);
        let mut recording = Self::reading(options, Memory::adopt(file, bytes, flags)?)?;
        let again = Process::open(process.pid())?;
        recording.attached = Some(Attached { process });
        recording.notes.extend(plan.unseen().map(|allocator| attach::unseen_text(allocator.name())));
        recording.admit_while(&again, &plan, report)?;
        recording.started = Instant::now();
        recording.started_at = SystemTime::now();
        recording.started_ns = monotonic_ns();
        // From now on every new block is recorded: memory that is live now and not recorded later is from before.
        if let Some(walker) = &recording.walker {
            for target in recording.targets.values() {
                walker.ask(target.walk_target(), Purpose::Start);
            }
        }
        Ok(recording)
    }

    /// Has the process begin, and admits it, for which it waits.
    fn admit_while(&mut self, process: &Process, plan: &Plan, report: &mut AttachReport) -> Result<(), AttachRefusal> {
        std::thread::scope(|scope| {
            let call = scope.spawn(|| attach::begin_recording(process, plan, report));
            while !call.is_finished() {
                self.turn(Duration::from_millis(1));
            }
            call.join().unwrap_or(Err(AttachRefusal::UnknownState))
        })
    }
}
