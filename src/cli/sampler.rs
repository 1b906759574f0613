//! `fragprof sampler`: systemd's services started with the sampler.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::{Args, Subcommand};
use serde::Serialize;

use super::audit;
use super::help::examples;
use super::output::{self, say};
use crate::allocator::is_own_library;
use crate::error::{ExitStatus, Failed};
use crate::process::Process;
use crate::sampler::library::{self, Flavour};
use crate::sampler::root::Root;
use crate::sampler::unit::drop_in::{self, Distances, Enabled, Place};
use crate::sampler::unit::{Unit, UnitName, UnitRefusal};
use crate::sampler::{SAMPLE_BYTES_MAX, SAMPLE_BYTES_MIN, SAMPLES_PER_SECOND_MAX};
use crate::sanitize::terminal;
use crate::units::Pid;

/// Start systemd services with the in-process sampler
///
/// `enable` writes a drop-in for a unit that puts the sampler's library in front of what the unit preloads already (LD_PRELOAD), and makes
/// systemd read it; the unit itself is not changed. From its next start on, `fragprof record`, `top` and the agent know the stacks of what
/// it allocates, as with `fragprof run`. `disable` removes exactly what was written. A unit whose program cannot run with the sampler is
/// refused with the reason; the exit status is then 3.
#[derive(Debug, Args)]
#[command(after_help = examples(&[
    ("sudo fragprof sampler enable nginx", "Write the drop-in; the unit has the sampler from its next start on"),
    ("sudo fragprof sampler enable nginx --restart", "Also restart the unit now"),
    ("sudo fragprof sampler enable worker@ --runtime", "All instances of a template, until the next reboot"),
    ("fragprof sampler status", "Units that are enabled, and which of them run with the sampler"),
    ("sudo fragprof sampler disable nginx", "Remove what was written"),
]))]
pub struct SamplerArgs {
    #[command(subcommand)]
    command: SamplerCommand,
}

#[derive(Debug, Subcommand)]
enum SamplerCommand {
    Enable(EnableArgs),
    Disable(DisableArgs),
    Status(StatusArgs),
}

/// Start a unit with the sampler from its next start on
#[derive(Debug, Args)]
#[command(after_help = examples(&[
    ("sudo fragprof sampler enable nginx", "Write the drop-in; the unit has the sampler from its next start on"),
    ("sudo fragprof sampler enable nginx --restart", "Also restart the unit now"),
    ("fragprof sampler enable nginx --root /mnt/image", "A unit of an image that is not running"),
]))]
struct EnableArgs {
    /// Name of a service; without a suffix, .service is meant. A template (name@) stands for all of its instances
    #[arg(value_name = "UNIT")]
    unit: String,
    /// Only until the next reboot: write the drop-in below /run
    #[arg(long)]
    runtime: bool,
    /// Restart the unit if it is running
    #[arg(long, conflicts_with = "root")]
    restart: bool,
    /// Mean distance between samples, in allocated bytes [default: 524288]
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(SAMPLE_BYTES_MIN..=SAMPLE_BYTES_MAX))]
    sample_bytes: Option<u64>,
    /// Samples per second, on a CPU or in a thread, above which the distance grows; 0 = no limit [default: 250]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(..=SAMPLES_PER_SECOND_MAX))]
    samples_per_second: Option<u64>,
    /// Directory for the library, which must stay where it is as long as a unit is enabled
    #[arg(long, value_name = "FOLDER", default_value = "/usr/lib/fragprof")]
    folder: PathBuf,
    /// Root directory of the system, for images; systemd is then not called
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
}

/// Remove what enable wrote
#[derive(Debug, Args)]
#[command(after_help = examples(&[("sudo fragprof sampler disable nginx", "Remove the drop-in; the unit is without the sampler from its next start on")]))]
struct DisableArgs {
    /// Name of the service
    #[arg(value_name = "UNIT")]
    unit: String,
    /// Restart the unit if it is running
    #[arg(long, conflicts_with = "root")]
    restart: bool,
    /// Root directory of the system, for images; systemd is then not called
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
}

/// List the units that are enabled
#[derive(Debug, Args)]
#[command(after_help = examples(&[
    ("fragprof sampler status", "Units that are enabled, and which of them run with the sampler"),
    ("fragprof sampler status nginx", "One of them; exit status 3 if it is not enabled"),
]))]
struct StatusArgs {
    /// Only this unit
    #[arg(value_name = "UNIT")]
    unit: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Root directory of the system, for images; systemd is then not called
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
}

/// Runs the command.
///
/// # Errors
/// If the unit is refused, a file cannot be written, or systemd does not answer.
pub fn run(args: &SamplerArgs) -> anyhow::Result<()> {
    match &args.command {
        SamplerCommand::Enable(args) => enable(args),
        SamplerCommand::Disable(args) => disable(args),
        SamplerCommand::Status(args) => status(args),
    }
}

fn enable(args: &EnableArgs) -> anyhow::Result<()> {
    let (root, name) = (root(args.root.as_deref()), name(&args.unit)?);
    let is_here = args.root.is_none();
    let refused = |refusal: UnitRefusal| refused(&name, "enabled", &refusal);
    let plan = Unit::load(&root, &name).and_then(|unit| unit.examine(&root, is_here)).map_err(refused)?;
    for doubt in &plan.doubts {
        say!("fragprof: {doubt}");
    }
    let library = install(&root, &args.folder, plan.flavour, is_here).map_err(|error| Failed::new(ExitStatus::Failure, error))?;
    let distances = Distances { sample_bytes: args.sample_bytes, samples_per_second: args.samples_per_second };
    let place = if args.runtime { Place::Runtime } else { Place::Persistent };
    let was_enabled = drop_in::list(&root).iter().any(|one| one.unit == name.as_str());
    let path = drop_in::write(&root, &name, &plan, &library, distances, place).map_err(refused)?;
    if is_here {
        audit::write(&format!("sampler enable {name}: {} ({})", path.display(), audit::user()));
        if let Err(error) = systemctl(&["daemon-reload"]) {
            // Nothing is left that would take effect by surprise; what was there before stays.
            if !was_enabled {
                let _ = drop_in::remove(&root, &name);
            }
            return Err(error.context(format!("{name} is not enabled: systemd did not read {}", path.display())));
        }
    }
    println!("{name}: {} preloads {}", path.display(), library.display());
    if let Some(preloaded) = &plan.preloaded {
        println!("  in front of {}", terminal(preloaded));
    }
    after(&name, args.restart, is_here, "with the sampler")
}

fn disable(args: &DisableArgs) -> anyhow::Result<()> {
    let (root, name) = (root(args.root.as_deref()), name(&args.unit)?);
    let removed = drop_in::remove(&root, &name).map_err(|refusal| refused(&name, "disabled", &refusal))?;
    for path in &removed {
        println!("{name}: {} is removed", path.display());
    }
    let is_here = args.root.is_none();
    if is_here {
        audit::write(&format!("sampler disable {name} ({})", audit::user()));
        systemctl(&["daemon-reload"])
            .map_err(|error| error.context("the drop-in is removed, but systemd did not notice it: systemctl daemon-reload"))?;
    }
    after(&name, args.restart, is_here, "without it")
}

/// What remains to be done.
fn after(name: &UnitName, restart: bool, is_here: bool, how: &str) -> anyhow::Result<()> {
    if !is_here {
        return Ok(());
    }
    let (pattern, instances) =
        if name.is_template() { (format!("{}@*.service", name.prefix()), "its instances run") } else { (name.to_string(), "it runs") };
    if restart {
        // Only what is running.
        systemctl(&["try-restart", &pattern])?;
        println!("  {instances} {how} now, if running before");
    } else {
        println!("  {instances} {how} after a restart: systemctl try-restart '{pattern}'");
    }
    Ok(())
}

/// A line of the list.
#[derive(Debug, Serialize)]
struct Line {
    #[serde(flatten)]
    enabled: Enabled,
    /// Its main process, if it is running.
    main_pid: Option<u32>,
    /// Whether that has the library; `None`: it is not running, or cannot be read.
    is_sampled: Option<bool>,
}

#[derive(Debug, Serialize)]
struct Status {
    units: Vec<Line>,
}

fn status(args: &StatusArgs) -> anyhow::Result<()> {
    let root = root(args.root.as_deref());
    let wanted = args.unit.as_deref().map(name).transpose()?;
    let listed = drop_in::list(&root);
    // An instance is enabled by its template's drop-in too.
    let fits = |one: &Enabled| {
        wanted
            .as_ref()
            .is_none_or(|name| one.unit == name.as_str() || name.template().is_some_and(|template| one.unit == template.as_str()))
    };
    let units: Vec<Line> = listed.into_iter().filter(fits).map(|enabled| line(enabled, wanted.as_ref(), args.root.is_none())).collect();
    if let Some(name) = wanted.filter(|_| units.is_empty()) {
        return Err(refused(&name, "enabled", &UnitRefusal::NotEnabled(name.clone())).into());
    }
    let status = Status { units };
    output::to_stdout(|out| {
        if args.json {
            serde_json::to_writer_pretty(&mut *out, &status)?;
            return writeln!(out);
        }
        for one in &status.units {
            let state = match (one.main_pid, one.is_sampled) {
                (Some(pid), Some(true)) => format!("pid {pid} runs with the sampler"),
                (Some(pid), Some(false)) => format!("pid {pid} runs without it: restart the unit"),
                (Some(pid), None) => format!("pid {pid}; whether it has the sampler cannot be read (root?)"),
                (None, _) => "not running".to_owned(),
            };
            let until = if one.enabled.runtime { ", until the next reboot" } else { "" };
            writeln!(out, "{}  {state}{until}", terminal(&one.enabled.unit))?;
            writeln!(out, "  {} preloads {}", terminal(&one.enabled.drop_in.display().to_string()), terminal(&one.enabled.library))?;
        }
        if status.units.is_empty() {
            writeln!(out, "no unit is enabled")?;
        }
        Ok(())
    })
}

fn line(enabled: Enabled, wanted: Option<&UnitName>, is_here: bool) -> Line {
    let unit = wanted.map_or(enabled.unit.as_str(), UnitName::as_str);
    // A template has no process.
    let main_pid = if is_here && !unit.ends_with("@.service") { main_pid(unit) } else { None };
    let is_sampled = main_pid.and_then(|pid| {
        let maps = Process::open(Pid(pid)).ok()?.maps().ok()?;
        Some(maps.executable_files().any(|mapping| is_own_library(mapping.file_name().as_bytes())))
    });
    Line { enabled, main_pid, is_sampled }
}

/// The main process of a unit that is running; `None` without systemd.
fn main_pid(unit: &str) -> Option<u32> {
    let done = Command::new("systemctl").args(["show", "--property=MainPID", "--value", "--", unit]).stderr(Stdio::null()).output().ok()?;
    String::from_utf8_lossy(&done.stdout).trim().parse().ok().filter(|pid| *pid != 0)
}

/// Writes the library. Returns its path as the unit sees it.
fn install(root: &Root, folder: &Path, flavour: Flavour, is_here: bool) -> Result<PathBuf, String> {
    if is_here {
        return library::place_at(folder, flavour).map_err(|error| format!("{error} (--folder)"));
    }
    let here = drop_in::directory(root, folder).map_err(|error| error.to_string())?;
    library::place_at(&here, flavour).map_err(|error| error.to_string())?;
    Ok(folder.join(flavour.file_name()))
}

fn root(directory: Option<&Path>) -> Root {
    Root::directory(directory.unwrap_or(Path::new("/")))
}

fn name(text: &str) -> Result<UnitName, Failed> {
    text.parse().map_err(|error: crate::sampler::unit::NameError| Failed::new(ExitStatus::Usage, error.to_string()))
}

fn refused(name: &UnitName, what: &str, refusal: &UnitRefusal) -> Failed {
    Failed::new(ExitStatus::Target, format!("{name} is not {what} ({}): {refusal}", refusal.name()))
}

fn systemctl(words: &[&str]) -> anyhow::Result<()> {
    let failed = |reason: &str| {
        let text = format!("systemctl {}: {}; is this system run by systemd, and are you root?", words.join(" "), reason.trim());
        anyhow::Error::from(Failed::new(ExitStatus::Failure, text))
    };
    match Command::new("systemctl").args(words).stdin(Stdio::null()).output() {
        Ok(done) if done.status.success() => Ok(()),
        Ok(done) => Err(failed(&String::from_utf8_lossy(&done.stderr))),
        Err(error) => Err(failed(&error.to_string())),
    }
}
