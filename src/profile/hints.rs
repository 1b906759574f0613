//! Hints on rows and frames that name no function: what they are, and how to get the names. Pure.

use std::collections::BTreeSet;

use super::kind::ValueKind;
use super::model::{BEFORE_ATTACH, Profile, UNATTRIBUTED};
use super::rows::Row;
use crate::sanitize;

/// Name of a frame in generated code without a perf map.
const UNNAMED: &str = "[jit]";
/// Processes that a hint names.
const PIDS_NAMED: usize = 4;

/// Hints on rows that are not stacks, by the names of the rows shown.
pub(super) fn of_rows(names: &[&str], kind: ValueKind) -> Vec<String> {
    let hints = [
        (BEFORE_ATTACH, "in use when the recording began and not freed during it; start the program with record -- CMD to get its stacks"),
        (UNATTRIBUTED, unattributed(kind)),
    ];
    hints.into_iter().filter(|(name, _)| names.contains(name)).map(|(name, hint)| format!("{name}: {hint}")).collect()
}

/// What [`UNATTRIBUTED`] is.
fn unattributed(kind: ValueKind) -> &'static str {
    match kind {
        ValueKind::ConfirmedSpace => "live by the census, but not confirmed: only some survivors of windows are checked again",
        ValueKind::LargeSpace => {
            "live by the census: smaller blocks, and those allocated before large ones were tracked; record --mode exact gives their stacks"
        }
        _ => {
            "without a recorded stack: the C library's own blocks, freed ones that look live in the thread caches of jemalloc before 5.3 and of \
             gperftools' tcmalloc, blocks allocated after the recording ended, code that was not probed yet, or lost records; losses, doubts and notes say which"
        }
    }
}

/// How to get names for generated code that has none in the rows.
pub(super) fn unnamed_code(profile: &Profile, rows: &[Row<'_>]) -> Option<String> {
    let has_unnamed = |row: &&Row<'_>| row.frames.iter().any(|frame| frame.flags.jit && &*frame.function == UNNAMED);
    let of: Vec<&Row<'_>> = rows.iter().filter(has_unnamed).collect();
    if of.is_empty() {
        return None;
    }
    // A JVM is recognised by its library in the same stacks.
    let is_jvm = |row: &Row<'_>| row.frames.iter().any(|frame| frame.module.ends_with("/libjvm.so"));
    let jvms: BTreeSet<u32> = of.iter().filter(|row| is_jvm(row)).map(|row| row.pid).collect();
    let what = format!("{UNNAMED}: code from a just-in-time compiler, for which no perf map gives names");
    if jvms.is_empty() {
        return Some(format!(
            "{what}: start node with --perf-basic-prof, python with -X perf; another runtime writes /tmp/perf-PID.map by its own option"
        ));
    }
    let commands: Vec<String> = jvms.iter().take(PIDS_NAMED).map(|pid| format!("jcmd {pid} Compiler.perfmap")).collect();
    let whose = jvms
        .iter()
        .find_map(|pid| profile.meta.process(*pid))
        .map_or_else(String::new, |process| format!(" of {}", sanitize::terminal(&process.comm)));
    let has_map = rows.iter().flat_map(|row| &row.frames).any(|frame| frame.flags.jit && &*frame.function != UNNAMED);
    let what = if has_map { format!("{what}, for example because it was compiled after the map was written") } else { what };
    Some(format!("{what}: run `{}`{whose} (Java 17 and later) shortly before the recording ends", commands.join("; ")))
}

/// Why a kind may be 0 everywhere without an error.
pub(super) fn nothing(kind: ValueKind) -> &'static str {
    match kind {
        ValueKind::BlockedSpace => {
            ": no heap has a whole free page below its highest live block, or the allocator can return memory from anywhere in the heap"
        }
        ValueKind::PinnedSpace => ": no page holds both free and live bytes, or there was no census",
        ValueKind::GrowthSpace => ": the heap never grew while enough free bytes were available",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::profile::{Frame, FrameFlags, Process, Values, rows};

    fn hint(module: &str, function: &str) -> Option<String> {
        let mut profile = Profile::default();
        profile.meta.processes.push(Process { pid: 77, comm: "java".into(), ..Process::default() });
        let jit = Frame { module: "[jit]".into(), flags: FrameFlags { jit: true, ..FrameFlags::default() }, ..Frame::named(function) };
        let library = Frame { module: module.into(), ..Frame::named("os::malloc") };
        profile.add(77, &[library, jit], None, &Values::default().with(ValueKind::InuseSpace, 9));
        unnamed_code(&profile, &rows::ranked(&profile, ValueKind::InuseSpace, 12))
    }

    #[test]
    fn a_jvms_frames_without_names_come_with_the_command_that_names_them() {
        let java = hint("/usr/lib/jvm/java-17/lib/server/libjvm.so", "[jit]").unwrap();
        assert!(java.contains("`jcmd 77 Compiler.perfmap` of java"), "{java}");
        let other = hint("/usr/bin/node", "[jit]").unwrap();
        assert!(other.contains("--perf-basic-prof") && !other.contains("jcmd"), "{other}");
        assert_eq!(hint("/usr/lib/jvm/java-17/lib/server/libjvm.so", "Shop.render()"), None, "a perf map gave the name");
    }
}
