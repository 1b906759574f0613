//! `fragprof record --in-process`: a command, or a process that runs, recorded by a library in it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::audit;
use super::output::say;
use super::progress::{self, Said};
use super::record::{RecordArgs, conclude, create_trace, failed};
use crate::attach::{AttachRefusal, AttachReport};
use crate::error::{ExitStatus, Failed};
use crate::process::Process;
use crate::session::tier::in_process::InProcess;
use crate::session::{self, Options};
use crate::units::Pid;

/// Longest wait for a thread of a process in which a call can be made, and the time between two attempts.
const WAITS_WITHIN: Duration = Duration::from_secs(5);
const AGAIN: Duration = Duration::from_millis(20);

/// Makes a process that runs load the library, and records it from then on.
fn attach(args: &RecordArgs, options: Options) -> anyhow::Result<InProcess> {
    let &[pid] = args.pid.as_slice() else {
        let text = "--in-process records one running process at a time: give one --pid";
        return Err(Failed::new(ExitStatus::Usage, text.to_owned()).into());
    };
    let open = || Process::open(Pid(pid)).map_err(|error| failed(error.into()));
    let line = |report: &AttachReport, result: &str| audit::write(&report.audit_line(audit::user(), "record --in-process", result));
    let mut report = AttachReport::of(&open()?);
    line(&report, "begins");
    let from = Instant::now();
    let begun = loop {
        match InProcess::attach(options.clone(), open()?, args.library.as_deref(), &mut report) {
            // A program of one thread waits now and then.
            Err(session::Error::Attach(refusal))
                if matches!(refusal, AttachRefusal::Call(_)) && refusal.is_of_the_moment() && from.elapsed() < WAITS_WITHIN =>
            {
                std::thread::sleep(AGAIN);
            }
            done => break done,
        }
    };
    line(&report, if begun.is_ok() { "done" } else { "refused" });
    begun.map_err(failed)
}

/// Records a command, or a process, by the library in it.
///
/// # Errors
/// If it cannot be recorded so, or the profile not written.
pub(super) fn run(args: &RecordArgs, stop: &AtomicBool) -> anyhow::Result<()> {
    let trace = args.trace.as_deref().map(|path| create_trace(path, args.trace_max)).transpose()?;
    let options = Options {
        trace,
        follow_children: args.children || !args.command.is_empty(),
        free_stacks: args.free_stacks,
        ring_bytes: args.buffer_kib.map(|kib| kib << 10),
        censuses: true,
        owners: args.owners,
        ..Options::default()
    };
    let (mut recorder, who) = match args.command.first() {
        Some(program) => {
            let mut recorder = InProcess::new(options).map_err(failed)?;
            recorder.launch(&args.command).map_err(failed)?;
            (recorder, program.to_string_lossy().into_owned())
        }
        None => (attach(args, options)?, "1 process".to_owned()),
    };
    let until = args.duration.map_or_else(|| "until Ctrl-C or its end".to_owned(), |d| format!("for {:.1} s", d.as_secs_f64()));
    say!("fragprof: recording {who} from inside {until}");
    while !stop.load(Ordering::Relaxed) {
        let left = args.duration.map_or(Duration::MAX, |d| d.saturating_sub(recorder.elapsed()));
        if left.is_zero() || !recorder.step(left.min(Duration::from_millis(100))) {
            break;
        }
    }
    let ended = recorder.command_status();
    let shown = progress::show(|| Said { what: "finishing: last census, function names".into(), share: None });
    let profile = recorder.finish().map_err(failed)?;
    drop(shown);
    conclude(profile, args, &who, ended)
}
