//! Loads each BPF program separately through this kernel's verifier, and reports its cost or why it is refused. For `doctor` and for the
//! table of kernels.

use std::sync::{Mutex, PoisonError};

use libbpf_rs::{ObjectBuilder, PrintLevel};
use serde::Serialize;

use super::load;
use crate::probe::features::Attach;

/// The verifier's result for a program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Verified {
    /// Its object: `ordinary`, or `legacy` for kernels before 5.17.
    pub object: &'static str,
    /// Its name.
    pub name: String,
    /// Instructions that the verifier processed, of the million that it allows; `None` if it did not report them.
    pub instructions: Option<u64>,
    /// CPU milliseconds that it took, which depend on more than the number of instructions; `None` if it did not report them.
    pub milliseconds: Option<u64>,
    /// Why it was refused; `None` if it loads.
    pub refused: Option<String>,
}

/// The log level for the verifier's statistics only (`BPF_LOG_STATS`, include/linux/bpf_verifier.h).
const LOG_STATS: u32 = 4;

static LOG: Mutex<String> = Mutex::new(String::new());
/// A refused program's log may be long; the reason is at its end.
const LOG_KEPT: usize = 1 << 20;

fn keep(_: PrintLevel, text: String) {
    let mut log = LOG.lock().unwrap_or_else(PoisonError::into_inner);
    if log.len() < LOG_KEPT {
        log.push_str(&text);
    }
}

/// Loads each program without the others, and unloads it.
#[must_use]
pub fn verify_each() -> Vec<Verified> {
    let before = libbpf_rs::set_print(Some((PrintLevel::Debug, keep)));
    let verified = [("ordinary", Attach::Session), ("legacy", Attach::ByAddress)]
        .into_iter()
        .flat_map(|(object, method)| verify_object(object, load::object(method)))
        .collect();
    libbpf_rs::set_print(before);
    verified
}

fn verify_object(object: &'static str, bytes: &'static [u8]) -> Vec<Verified> {
    let open = || ObjectBuilder::default().name("fragprof")?.open_memory(bytes);
    let names: Vec<String> = match open() {
        Ok(opened) => opened.progs().map(|program| program.name().to_string_lossy().into_owned()).collect(),
        Err(error) => {
            return vec![Verified {
                object,
                name: "all".into(),
                instructions: None,
                milliseconds: None,
                refused: Some(format!("{error:#}")),
            }];
        }
    };
    let verify = |name: String| {
        LOG.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let loaded = open().and_then(|mut opened| {
            for mut program in opened.progs_mut() {
                let this = program.name() == name.as_str();
                program.set_autoload(this);
                program.set_log_level(if this { LOG_STATS } else { 0 });
            }
            opened.load()
        });
        let log = std::mem::take(&mut *LOG.lock().unwrap_or_else(PoisonError::into_inner));
        let refused = loaded.err().map(|error| load::cause(&log).unwrap_or_else(|| format!("{error:#}")));
        let milliseconds = number_after(&log, "verification time ").map(|microseconds| microseconds / 1000);
        let verified = Verified { object, name, instructions: number_after(&log, "processed "), milliseconds, refused };
        tracing::debug!("{verified:?}");
        verified
    };
    names.into_iter().map(verify).collect()
}

/// A number in the verifier's log: `processed N insns (limit …`, `verification time N usec` (kernel/bpf/verifier.c,
/// print_verification_stats).
fn number_after(log: &str, words: &str) -> Option<u64> {
    let (_, rest) = log.rsplit_once(words)?;
    rest.split_ascii_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_and_time_are_read_from_the_verifiers_last_lines() {
        let log = "libbpf: prog 'a': -- BEGIN PROG LOAD LOG --\nverification time 815 usec\nstack depth 8\nprocessed 4711 insns (limit 1000000) max_states_per_insn 4\n-- END\n";
        assert_eq!(number_after(log, "processed "), Some(4711));
        assert_eq!(number_after(log, "verification time "), Some(815));
        assert_eq!(number_after("processed many insns", "processed "), None);
        assert_eq!(number_after("", "processed "), None);
    }
}
