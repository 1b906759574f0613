//! `fragprof doctor`: what this kernel, these permissions and a process allow; for bug reports.

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use clap::Args;
use serde_json::{Value, json};

use super::help::examples;
use super::past::DEFAULT_DIRECTORY;
use crate::capture;
use crate::capture::tables::{FileStatus, TableState};
use crate::emitter::{Emitter, Emitters, Finder};
use crate::error::{ExitStatus, Failed};
use crate::machine::register::Register;
use crate::managed::{self, Managed};
use crate::probe::features::{Attach, Capability, Features, Support};
use crate::probe::plan::{FilePlan, Plan, PlanError, SitePlan, plan};
use crate::process::handle::{Process, ProcessError};
use crate::sanitize::terminal;
use crate::selective::SEEN_FROM_BYTES;
use crate::session::tier::windows::large_places;
use crate::units::{Pid, grouped};

/// Show what this kernel and these permissions allow, and how a process would be probed
#[derive(Debug, Args)]
#[command(after_help = examples(&[
    ("sudo fragprof doctor", "What this kernel and these permissions allow"),
    ("sudo fragprof doctor -p PID", "The probe sites in a process"),
]))]
pub struct DoctorArgs {
    /// Also show this process's allocators, and where each of their functions would be probed
    #[arg(short, long)]
    pub pid: Option<u32>,
    /// Also load each BPF program by itself, and show how many instructions this kernel's verifier counts
    #[arg(long)]
    pub programs: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Prints the report.
///
/// # Errors
/// If the process cannot be watched (the kernel's part is printed first), or the output cannot be written.
pub fn run(args: &DoctorArgs, features: &Features, out: &mut dyn Write) -> anyhow::Result<()> {
    let target = args.pid.map(|pid| inspect(Pid(pid), features));
    let emitters = args.pid.and_then(|pid| Finder::new(features.emulation()).find(&Process::open(Pid(pid)).ok()?).ok());
    // Without permission to load programs there are no tables to show; the kernel's part of the report says why.
    let tables = target.as_ref().and_then(|target| target.as_ref().ok()).and_then(|(process, _)| capture::unwind_tables(process).ok());
    let walks_managed = !matches!(features.attach(), Ok(Attach::ByAddress));
    let programs = args.programs.then(capture::programs::verify_each);
    // A build that is not in the table takes seconds in the sandbox.
    let large = target.as_ref().and_then(|target| target.as_ref().ok());
    let large = large.map(|(process, plan)| large_places(process, plan, Some(Path::new(DEFAULT_DIRECTORY))));
    if args.json {
        let mut page = json!({ "kernel": kernel_json(features) });
        if let (Some(programs), Some(page)) = (&programs, page.as_object_mut()) {
            page.insert("programs".into(), json!(programs));
        }
        if let (Some(Ok((process, plan))), Some(large), Some(page)) = (&target, &large, page.as_object_mut()) {
            let mut process_page = process_json(process, plan, large.as_ref(), tables.as_deref());
            if let (Some(object), Some(found)) = (process_page.as_object_mut(), &emitters) {
                object.insert("emitters".into(), emitters_json(found));
            }
            if let Some(object) = process_page.as_object_mut() {
                object.insert("managed_frames".into(), json!(managed_frames(process, walks_managed)));
            }
            page.insert("process".into(), process_page);
        }
        serde_json::to_writer_pretty(&mut *out, &page)?;
        writeln!(out)?;
    } else {
        write_kernel(features, out)?;
        write_programs(programs.as_deref().unwrap_or_default(), out)?;
        if let (Some(Ok((process, plan))), Some(large)) = (&target, &large) {
            write_process(process, plan, large.as_ref(), out)?;
            if let Some(sentence) = managed_frames(process, walks_managed) {
                writeln!(out, "  {sentence}")?;
            }
            write_emitters(&emitters.unwrap_or_default(), out)?;
            write_tables(tables.as_deref().unwrap_or_default(), out)?;
        }
    }
    match target {
        Some(Err(error)) => Err(failed(&error).into()),
        _ => Ok(()),
    }
}

fn inspect(pid: Pid, features: &Features) -> Result<(Process, Plan), PlanError> {
    let process = Process::open(pid)?;
    let plan = plan(&process, features.emulation())?;
    Ok((process, plan))
}

/// The exit status of a process that cannot be watched.
fn failed(error: &PlanError) -> Failed {
    let status = match error {
        PlanError::Target(ProcessError::Denied { .. }) => ExitStatus::Unsupported,
        _ => ExitStatus::Target,
    };
    Failed::new(status, error.to_string())
}

/// The kernel's features, in the order of the report.
fn offers(features: &Features) -> [(&'static str, &'static str, &Support); 11] {
    [
        ("uprobe_session", "uprobe_multi session", &features.uprobe_session),
        ("uprobe_multi", "uprobe_multi", &features.uprobe_multi),
        ("perf_uprobe", "perf-event uprobes", &features.perf_uprobe),
        ("perf_uprobe_by_address", "perf-event uprobes by address", &features.perf_uprobe_by_address),
        ("attach_cookie", "attach cookies", &features.attach_cookie),
        ("ring_buffer", "ring buffers", &features.ring_buffer),
        ("unwind_tables", "unwind tables", &features.unwind_tables),
        ("task_storage", "task storage", &features.task_storage),
        ("bpf_loop", "bpf_loop", &features.bpf_loop),
        ("btf", "kernel types (BTF)", &features.btf),
        ("tracefs", "tracefs", &features.tracefs),
    ]
}

fn write_kernel(features: &Features, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "kernel {}", features.kernel_release)?;
    for (_, name, support) in offers(features) {
        match support {
            Support::Yes => writeln!(out, "  {name:<22} yes")?,
            Support::No(reason) => writeln!(out, "  {name:<22} no: {reason}")?,
            Support::Unknown => writeln!(out, "  {name:<22} not tried")?,
        }
    }
    writeln!(out, "  {:<22} {}", "long nops emulated", if features.long_nops_emulated { "yes" } else { "no" })?;
    match features.attach() {
        Ok(method) => writeln!(out, "  probes are attached by {}", attach_name(method))?,
        Err(missing) => writeln!(out, "  nothing can be recorded: {missing}")?,
    }
    writeln!(out, "permissions")?;
    for capability in Capability::ALL {
        // CAP_SYS_ADMIN includes what the single capabilities allow (user_namespaces(7), capabilities(7)).
        let within = [Capability::Bpf, Capability::Perfmon, Capability::CheckpointRestore].contains(&capability);
        match features.capabilities.contains(&capability) {
            true => writeln!(out, "  {:<22} yes", capability.name())?,
            false if within && features.capabilities.contains(&Capability::SysAdmin) => {
                writeln!(out, "  {:<22} no; CAP_SYS_ADMIN serves", capability.name())?
            }
            false => writeln!(out, "  {:<22} no: {}", capability.name(), capability.without())?,
        }
    }
    match features.perf_event_paranoid {
        Some(level) => writeln!(out, "  {:<22} {level}", "perf_event_paranoid"),
        None => writeln!(out, "  {:<22} cannot be read", "perf_event_paranoid"),
    }
}

/// The verifier's result for each program.
fn write_programs(programs: &[capture::programs::Verified], out: &mut dyn Write) -> io::Result<()> {
    if programs.is_empty() {
        return Ok(());
    }
    writeln!(out, "programs")?;
    for program in programs {
        let name = format!("{} {}", program.object, program.name);
        match (&program.refused, program.instructions) {
            (Some(reason), _) => writeln!(out, "  {name:<32} refused: {}", terminal(reason))?,
            (None, Some(instructions)) => {
                let time = program.milliseconds.map_or_else(String::new, |milliseconds| format!(" in {milliseconds} ms"));
                writeln!(out, "  {name:<32} {instructions} instructions verified{time}")?;
            }
            (None, None) => writeln!(out, "  {name:<32} loads")?,
        }
    }
    Ok(())
}

fn attach_name(method: Attach) -> &'static str {
    match method {
        Attach::Session => "uprobe_multi sessions",
        Attach::Multi => "uprobe_multi, entries and returns attached separately",
        Attach::PerfEvents => "perf-event uprobes, one per site",
        Attach::ByAddress => "perf-event uprobes, one per site, distinguished by address (kernel before 5.17)",
    }
}

/// `large`: the number of instructions that only large blocks reach, or why large blocks cannot be traced separately.
fn write_process(process: &Process, plan: &Plan, large: Result<&usize, &String>, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "process {} ({})", process.pid(), terminal(process.comm()))?;
    if process.inner_pid() != process.pid() {
        writeln!(out, "  is pid {} in its own pid namespace", process.inner_pid())?;
    }
    for file in &plan.files {
        write_file(file, out)?;
    }
    for note in &plan.notes {
        writeln!(out, "  note: {}", terminal(note))?;
    }
    let from = format!("blocks of {} bytes or more", grouped(SEEN_FROM_BYTES));
    match large {
        Ok(places) => writeln!(
            out,
            "  {from} can be traced without the small ones: each reaches one of {places} instructions that small blocks do not, or a probed function"
        ),
        Err(reason) => writeln!(out, "  {from} cannot be traced without the small ones: {}", terminal(reason)),
    }
}

/// The process's emitters, or the consequence of having none.
fn write_emitters(found: &Emitters, out: &mut dyn Write) -> io::Result<()> {
    for emitter in &found.emitters {
        let sites = format!("{} alloc and {} free sites", emitter.sites.allocs.len(), emitter.sites.frees.len());
        writeln!(out, "  emitter: {} ({sites})", terminal(&emitter.describe()))?;
        match emitter.stats {
            Some(stats) if stats.in_front => {
                let taken = format!(
                    "{} samples so far, {} of them counted as freed at once because the table of live samples was full",
                    stats.samples, stats.overflows
                );
                writeln!(out, "    one sample per {} allocated bytes on average; {taken}", stats.sample_bytes)?;
                match (stats.samples_per_second, stats.lengthened) {
                    (0, _) => writeln!(out, "    no limit on the sample rate")?,
                    (limit, 0) => writeln!(out, "    at most {limit} per second on a CPU or in a thread; the limit was never reached")?,
                    (limit, lengthened) => writeln!(
                        out,
                        "    at most {limit} per second on a CPU or in a thread: {lengthened} were taken at a longer distance, up to {} bytes",
                        stats.longest_sample_bytes
                    )?,
                }
            }
            Some(_) => writeln!(out, "    it sees no allocations: another malloc is in front of it")?,
            None => {}
        }
    }
    for refused in &found.refused {
        writeln!(out, "  emitter refused: {}", terminal(refused))?;
    }
    if found.emitters.iter().any(Emitter::hears) {
        writeln!(out, "    record, top and agent use it: live bytes by stack, continuously, for a few nanoseconds per call")?;
    } else {
        writeln!(
            out,
            "  emitter: none (no otel_memory or ddheap probes). Without one, live bytes by stack need a trace of every malloc and free, at\n    \
             about 2 µs per pair: at 100,000 pairs per second a fifth of a CPU. Started with `fragprof run -- CMD`, the program reports\n    \
             them itself, for a few nanoseconds per call."
        )?;
    }
    Ok(())
}

fn emitters_json(found: &Emitters) -> Value {
    let one = |emitter: &Emitter| {
        json!({
            "provider": emitter.provider,
            "path": emitter.display_path,
            "alloc_sites": emitter.sites.allocs.len(),
            "free_sites": emitter.sites.frees.len(),
            "hears": emitter.hears(),
            "sample_bytes": emitter.stats.map(|stats| stats.sample_bytes),
            "samples_per_second": emitter.stats.map(|stats| stats.samples_per_second),
            "samples": emitter.stats.map(|stats| stats.samples),
            "lengthened": emitter.stats.map(|stats| stats.lengthened),
            "longest_sample_bytes": emitter.stats.map(|stats| stats.longest_sample_bytes).filter(|&bytes| bytes > 0),
            "overflows": emitter.stats.map(|stats| stats.overflows),
        })
    };
    json!({ "found": found.emitters.iter().map(one).collect::<Vec<_>>(), "refused": found.refused })
}

/// Which frames of managed runtimes will be named, or why not; `None` = the process has none that is known.
fn managed_frames(process: &Process, walks_managed: bool) -> Option<String> {
    let maps = process.maps().ok()?;
    let managed = Managed::shared(Arc::default(), false);
    let (_, notes) = managed::refresh(&managed, process, &maps, walks_managed);
    let described = managed::lock(&managed).describe();
    let sentences = if walks_managed { described } else { notes };
    (!sentences.is_empty()).then(|| sentences.join("; "))
}

/// The unwind table of each mapped file.
fn write_tables(files: &[FileStatus], out: &mut dyn Write) -> io::Result<()> {
    if files.is_empty() {
        return Ok(());
    }
    writeln!(out, "  unwind tables")?;
    writeln!(out, "    {:>9} {:>11} {:>11}  file", "rows", "table bytes", "unsupported")?;
    for file in files {
        let path = terminal(&file.path.to_string_lossy()).into_owned();
        writeln!(out, "    {:>9} {:>11} {:>11}  {path}{}", file.rows, file.bytes, file.counts.rows_unsupported, state(file))?;
    }
    Ok(())
}

/// Why a file's table is not in the kernel, as a suffix of its line.
fn state(file: &FileStatus) -> String {
    match &file.state {
        TableState::Loaded => String::new(),
        TableState::Pending => " (being converted)".into(),
        TableState::Evicted => " (evicted for lack of memory)".into(),
        state @ (TableState::NoRoom | TableState::Refused(_)) => format!(" ({})", state.refusal().unwrap_or_default()),
    }
}

fn write_file(file: &FilePlan, out: &mut dyn Write) -> io::Result<()> {
    let serves = if file.serves_malloc { ", serves malloc" } else { "" };
    writeln!(out, "  {} in {}{serves}", file.allocator.name(), terminal(&file.display_path.to_string_lossy()))?;
    if let Some(build_id) = &file.identity.build_id {
        writeln!(out, "    build id {build_id}")?;
    }
    let instruction = |site: &SitePlan| format!("{:#x}+{:<3} {}", site.entry_vaddr, site.placement.offset, site.placement.instruction);
    let names = file.sites.iter().map(|site| site.function.name()).chain(file.unprobed.iter().map(|without| without.function.name()));
    let name_columns = names.map(str::len).max().unwrap_or(0);
    let instruction_columns = file.sites.iter().map(|site| instruction(site).chars().count()).max().unwrap_or(0);
    for site in &file.sites {
        writeln!(
            out,
            "    {:<name_columns$}  {:<instruction_columns$}  {}{} ({})",
            site.function.name(),
            instruction(site),
            site.placement.reason.text(),
            if site.cookie.stepped { "; single-stepped, which takes several times as long" } else { "" },
            arguments(site).iter().map(|(role, register)| format!("{role} in {}", register.name())).collect::<Vec<_>>().join(", "),
        )?;
    }
    for without in &file.unprobed {
        writeln!(out, "    {:<name_columns$}  no probe: {}", without.function.name(), without.reason)?;
    }
    Ok(())
}

fn arguments(site: &SitePlan) -> Vec<(&'static str, Register)> {
    let roles = [("size", site.placement.size), ("count", site.placement.count), ("pointer", site.placement.pointer)];
    roles.into_iter().filter_map(|(role, register)| Some((role, register?))).collect()
}

fn kernel_json(features: &Features) -> Value {
    let mut value = json!({
        "release": features.kernel_release,
        "long_nops_emulated": features.long_nops_emulated,
        "perf_event_paranoid": features.perf_event_paranoid,
        "capabilities": features.capabilities,
        "attach": features.attach().ok(),
    });
    if let Some(object) = value.as_object_mut() {
        for (key, _, support) in offers(features) {
            object.insert(key.into(), json!(support));
        }
    }
    value
}

fn process_json(process: &Process, plan: &Plan, large: Result<&usize, &String>, tables: Option<&[FileStatus]>) -> Value {
    let table = |file: &FileStatus| {
        json!({
            "path": file.path,
            "rows": file.rows,
            "table_bytes": file.bytes,
            "rows_unsupported": file.counts.rows_unsupported,
            "functions_corrupt": file.counts.functions_corrupt,
            "refused": file.state.refusal(),
        })
    };
    json!({
        "unwind_tables": tables.map(|files| files.iter().map(table).collect::<Vec<_>>()),
        "pid": process.pid(),
        "inner_pid": process.inner_pid(),
        "comm": process.comm(),
        "notes": plan.notes,
        "large_blocks": match large {
            Ok(places) => json!({ "from_bytes": SEEN_FROM_BYTES, "places": places }),
            Err(reason) => json!({ "from_bytes": SEEN_FROM_BYTES, "refused": reason }),
        },
        "files": plan.files.iter().map(file_json).collect::<Vec<_>>(),
    })
}

fn file_json(file: &FilePlan) -> Value {
    let site = |site: &SitePlan| {
        let registers: serde_json::Map<_, _> =
            arguments(site).into_iter().map(|(role, register)| (role.to_owned(), json!(register.name()))).collect();
        json!({
            "function": site.function.name(),
            "symbols": site.symbols,
            "allocator": site.allocator,
            "entry_vaddr": site.entry_vaddr,
            "offset_bytes": site.placement.offset,
            "file_offset_bytes": site.offset,
            "instruction": site.placement.instruction,
            "emulated": site.placement.reason.is_emulated(),
            "reason": site.placement.reason.text(),
            "arguments": registers,
            "pushed_words": site.placement.sp_words,
            "return_probe": site.placement.has_return,
        })
    };
    json!({
        "path": file.display_path.to_string_lossy(),
        "attach_path": file.attach_path.to_string_lossy(),
        "build_id": file.identity.build_id.as_ref().map(ToString::to_string),
        "allocator": file.allocator,
        "serves_malloc": file.serves_malloc,
        "sites": file.sites.iter().map(site).collect::<Vec<_>>(),
        "unprobed": file.unprobed.iter().map(|u| json!({
            "function": u.function.name(), "symbols": u.symbols, "reason": u.reason,
        })).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn page(args: &DoctorArgs) -> (String, anyhow::Result<()>) {
        let mut out = Vec::new();
        let result = run(args, &Features::of_host(), &mut out);
        (String::from_utf8(out).unwrap(), result)
    }

    #[test]
    fn the_page_of_a_process_names_its_allocator_and_the_instructions() {
        // This very process: a Rust program on the C library's malloc.
        let (text, result) = page(&DoctorArgs { pid: Some(std::process::id()), programs: false, json: false });
        result.unwrap();
        assert!(text.contains("glibc in ") && text.contains("serves malloc"), "{text}");
        assert!(
            text.lines().any(|l| l.trim().starts_with("free ") && l.contains("emulated by the kernel") && l.contains("pointer in rdi"))
        );
        let (json, result) = page(&DoctorArgs { pid: Some(std::process::id()), programs: false, json: true });
        result.unwrap();
        let json: Value = serde_json::from_str(&json).unwrap();
        let sites = json["process"]["files"][0]["sites"].as_array().unwrap();
        assert!(sites.iter().any(|s| s["function"] == "malloc" && s["arguments"]["size"] == "rdi" && s["return_probe"] == true));
    }

    #[test]
    fn a_missing_process_is_a_target_failure_behind_the_kernel_s_page() {
        let (text, result) = page(&DoctorArgs { pid: Some(1 << 23), programs: false, json: false });
        assert!(text.starts_with("kernel "));
        let error = result.unwrap_err();
        assert_eq!(error.downcast_ref::<Failed>().unwrap().status, ExitStatus::Target);
    }
}
