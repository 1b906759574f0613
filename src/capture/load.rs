//! Loads the BPF object in the best form that this kernel accepts.
//!
//! Kernel features are determined by trying them, never by the version number: 6.1 loads `uprobe.multi` programs and refuses to attach
//! them, distributions backport features, and lockdown and missing capabilities disable them.

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::sync::{Mutex, PoisonError};

use libbpf_rs::{Link, Map, MapCore as _, Object, ObjectBuilder, OpenObject, PrintLevel, ProgramMut};

use super::{Config, Error, Result, trial};
use crate::bpf;
use crate::machine::{self, Machine};
use crate::probe::features::Attach;

/// A compiled object with the alignment that the ELF reader needs.
macro_rules! aligned_object {
    ($name:literal) => {{
        #[repr(C, align(8))]
        struct Aligned<T: ?Sized>(T);
        static ALIGNED: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/", $name)));
        &ALIGNED.0
    }};
}
pub(super) use aligned_object;

/// The compiled programs.
static OBJECT: &[u8] = aligned_object!("fragprof.bpf.o");
/// The same, for kernels before 5.17.
static LEGACY_OBJECT: &[u8] = aligned_object!("fragprof_legacy.bpf.o");

/// The object that contains a method's programs.
pub(super) fn object(method: Attach) -> &'static [u8] {
    if method == Attach::ByAddress { LEGACY_OBJECT } else { OBJECT }
}

/// The programs that a method needs.
pub(super) fn programs(method: Attach) -> &'static [&'static str] {
    match method {
        Attach::Session => &["alloc_session", "free_entry_multi", "usdt_alloc_multi", "usdt_free_multi"],
        Attach::Multi => &["alloc_entry_multi", "alloc_return_multi", "free_entry_multi", "usdt_alloc_multi", "usdt_free_multi"],
        Attach::PerfEvents => &["alloc_entry", "alloc_return", "free_entry", "usdt_alloc", "usdt_free"],
        Attach::ByAddress => &["alloc_entry", "alloc_return", "free_entry"],
    }
}

/// The additional size-selective programs, which windows need.
fn large_programs(method: Attach) -> &'static [&'static str] {
    match method {
        Attach::Session => &["large_session"],
        Attach::Multi => &["large_entry_multi", "large_return_multi"],
        Attach::PerfEvents | Attach::ByAddress => &["large_entry", "large_return"],
    }
}

/// The features that the kernel supports, with the reasons for those it does not.
#[derive(Debug, Clone)]
pub struct Offer {
    /// How probes are attached.
    pub method: Attach,
    /// Better methods that were tried, and why they failed.
    pub refused: Vec<(Attach, String)>,
    /// Whether a process's probes also see vfork children that run in its memory.
    pub sees_vfork_children: bool,
}

/// Programs that run for every process of the machine: address space changes and process life cycle.
const MACHINE_WIDE: [&str; 4] = ["vm_change", "life_exec", "life_fork", "life_exit"];

/// Additional programs for windows: their own program if the kernel has sessions, and the first touches of pages.
const FOR_WINDOWS: [&str; 2] = ["window_session", TOUCHES];
const TOUCHES: &str = "page_touch";

/// libbpf's messages of the current load, which contain the verifier's reason for a refusal.
static MESSAGES: Mutex<String> = Mutex::new(String::new());
/// Only the end of a verifier log is kept, which has the reason.
const MESSAGES_KEPT: usize = 64 << 10;

fn keep_message(level: PrintLevel, text: String) {
    if level == PrintLevel::Debug {
        return;
    }
    tracing::debug!(target: "libbpf", "{}", text.trim_end());
    let mut messages = MESSAGES.lock().unwrap_or_else(PoisonError::into_inner);
    if messages.len() < MESSAGES_KEPT {
        messages.push_str(&text);
    }
}

/// The line of libbpf's messages that states the cause.
pub(super) fn cause(messages: &str) -> Option<String> {
    // libbpf's guess if nothing at all may be loaded: the error and the hint are more precise.
    if messages.contains("bpf_object__probe_loading") {
        return None;
    }
    let line = messages.lines().map(str::trim).rfind(|line| {
        !line.is_empty() && !line.contains("END PROG LOAD LOG") && !line.starts_with("processed ") && !line.contains("failed to load")
    })?;
    Some(line.trim_start_matches("libbpf: ").to_owned())
}

/// Tries the methods in order (or only the one requested) until an object loads and a probe on this process reports its hit.
pub fn load(config: &Config) -> Result<(Object, Offer)> {
    let wanted = config.method;
    libbpf_rs::set_print(Some((PrintLevel::Info, keep_message)));
    let mut refused = Vec::new();
    for method in Attach::ALL.into_iter().filter(|m| wanted.is_none_or(|w| w == *m)) {
        MESSAGES.lock().unwrap_or_else(PoisonError::into_inner).clear();
        match trial::glance(method).and_then(|()| try_load(method, config)) {
            Ok((object, sees_vfork_children)) => return Ok((object, Offer { method, refused, sees_vfork_children })),
            Err(error) => {
                let messages = std::mem::take(&mut *MESSAGES.lock().unwrap_or_else(PoisonError::into_inner));
                refused.push((method, cause(&messages).map_or_else(|| format!("{error:#}"), |cause| format!("{error:#} ({cause})"))));
            }
        }
    }
    let reason = reasons(&refused);
    let hint = hint_of_files(&reason).unwrap_or_else(hint);
    Err(Error::Load { reason, hint })
}

/// Why no method works: each distinct reason once, with its methods if the reasons differ.
fn reasons(refused: &[(Attach, String)]) -> String {
    match refused {
        [(_, first), rest @ ..] if rest.iter().all(|(_, reason)| reason == first) => first.clone(),
        several => several.iter().map(|(method, reason)| format!("{method}: {reason}")).collect::<Vec<_>>().join("; "),
    }
}

/// A hint if the limit of open files is too low, which says nothing about the kernel. The system-wide limit (ENFILE) is not covered.
fn hint_of_files(reason: &str) -> Option<String> {
    let allowed = crate::machine::open_files::allowed()?;
    reason.contains("os error 24").then(|| {
        format!(
            "this process may have at most {allowed} open files (`ulimit -n`): a recording needs about 50, and 3 more per process; raise \
             the limit"
        )
    })
}

/// A hint for the case that nothing can be loaded.
pub fn hint() -> String {
    // SAFETY: geteuid has no preconditions.
    let root = unsafe { libc::geteuid() } == 0;
    let lockdown = std::fs::read_to_string("/sys/kernel/security/lockdown").unwrap_or_default();
    hint_for(root, &lockdown).to_owned()
}

/// `lockdown`: the content of the file of that name, with the current state in brackets (security/lockdown/lockdown.c, `lockdown_read`).
fn hint_for(root: bool, lockdown: &str) -> &'static str {
    match root {
        true if lockdown.contains("[confidentiality]") => {
            "this kernel is locked down for confidentiality (/sys/kernel/security/lockdown): not even root may load BPF programs that read \
             memory; the census works (`fragprof census`, the agent), recording needs a kernel booted with lockdown=integrity or none"
        }
        true => {
            "this kernel or this container does not permit BPF: fragprof needs CAP_BPF, CAP_PERFMON and CAP_SYS_PTRACE (CAP_SYS_ADMIN before \
             kernel 6.6, CAP_SYS_RESOURCE before 5.11), BTF at /sys/kernel/btf/vmlinux and a kernel of 5.10 or later; `fragprof doctor` names what is missing"
        }
        false => "fragprof needs CAP_BPF, CAP_PERFMON and CAP_SYS_PTRACE (CAP_SYS_ADMIN before kernel 6.6): run it as root (sudo)",
    }
}

fn try_load(method: Attach, config: &Config) -> libbpf_rs::Result<(Object, bool)> {
    let mut open: OpenObject = ObjectBuilder::default().name("fragprof")?.open_memory(object(method))?;
    set_constant(&mut open, FRAMES_SECTION, &config.frames_max.clamp(1, bpf::FRAMES_DEEP_MAX).to_ne_bytes())?;
    if Machine::HOST == Machine::Aarch64 {
        let mask = (1u64 << machine::user_space::address_bits()) - 1;
        set_constant(&mut open, CODE_MASK_SECTION, &mask.to_ne_bytes())?;
    }
    for mut program in open.progs_mut() {
        let name = program.name().to_owned();
        let name = name.to_string_lossy();
        let of_windows = FOR_WINDOWS.contains(&&*name) && (method == Attach::Session || name != "window_session");
        let wanted = config.windows && (of_windows || large_programs(method).contains(&&*name));
        program.set_autoload(programs(method).contains(&&*name) || MACHINE_WIDE.contains(&&*name) || wanted);
    }
    let object = open.load()?;
    let sees_vfork_children = trial::run(&object, method)?;
    Ok((object, sees_vfork_children))
}

/// The section with the programs' limit of frames (`fp_frames_limit`).
const FRAMES_SECTION: &str = ".rodata.frames";

/// The section with the bits of an address of code (`fp_code_mask`, on arm64).
const CODE_MASK_SECTION: &str = ".rodata.code";

/// Sets the value of a section with one constant.
fn set_constant(open: &mut OpenObject, section: &str, value: &[u8]) -> libbpf_rs::Result<()> {
    let map = open.maps_mut().find(|map| map.name() == section);
    map.ok_or_else(|| libbpf_rs::Error::from(std::io::Error::other(format!("the programs have no section {section}"))))?
        .set_initial_value(value)
}

/// A program by name.
pub fn program<'o>(object: &'o Object, name: &str) -> libbpf_rs::Result<ProgramMut<'o>> {
    object
        .progs_mut()
        .find(|program| program.name() == name)
        .ok_or_else(|| libbpf_rs::Error::from(std::io::Error::new(std::io::ErrorKind::NotFound, format!("no BPF program {name}"))))
}

/// A map by name. The names are those in maps.bpf.h; a test loads the object and looks up each.
pub fn map<'o>(object: &'o Object, name: &'static str) -> Map<'o> {
    match object.maps().find(|map| map.name() == name) {
        Some(map) => map,
        None => unreachable!("the BPF object has no map {name}"),
    }
}

/// Attaches the programs that run for every process of the machine and return early for unwatched ones.
pub fn attach_machine_wide(object: &Object) -> Result<Vec<Link>> {
    MACHINE_WIDE.iter().map(|name| program(object, name)?.attach_trace()).collect::<libbpf_rs::Result<Vec<Link>>>().map_err(|error| {
        Error::Load { reason: format!("cannot attach to the kernel's life-cycle and mapping events: {error:#}"), hint: hint() }
    })
}

/// Attaches the program that counts first touches of pages.
pub fn attach_touches(object: &Object) -> Result<Link> {
    program(object, TOUCHES)
        .and_then(|program| program.attach())
        .map_err(|error| Error::Load { reason: format!("cannot attach to page faults: {error:#}"), hint: hint() })
}

/// Events that the kernel did not deliver to programs at its tracepoints: of the address space, and of the process life cycle. It skips
/// such a program if it is already running there, for example if one thread's run was preempted by another's (`recursion_misses` of struct
/// bpf_prog_info). The events may belong to any process of the machine. 0 if the kernel does not report them.
pub fn missed_events(object: &Object) -> (u64, u64) {
    let of = |names: &[&str]| -> u64 {
        let named = object.progs().filter(|program| names.iter().any(|name| program.name() == *name));
        named.map(|program| missed_by(program.as_fd())).fold(0, u64::saturating_add)
    };
    (of(&[MACHINE_WIDE[0], TOUCHES]), of(&MACHINE_WIDE[1..]))
}

fn missed_by(program: BorrowedFd<'_>) -> u64 {
    // SAFETY: plain numbers. Padding must be 0 too, or an older kernel takes it for an unknown field.
    let mut info: libbpf_sys::bpf_prog_info = unsafe { std::mem::zeroed() };
    let mut length = size_of_val(&info) as u32;
    // SAFETY: the structure is a local of the length passed; all its pointers to further arrays are null.
    let answer = unsafe { libbpf_sys::bpf_prog_get_info_by_fd(program.as_raw_fd(), &raw mut info, &raw mut length) };
    if answer == 0 { info.recursion_misses } else { 0 }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_cause_is_the_last_meaningful_line_of_the_log() {
        let log = "libbpf: prog 'x': BPF program load failed: Invalid argument\nlibbpf: prog 'x': -- BEGIN PROG LOAD LOG --\n0: R1=ctx()\n\
                   invalid mem access 'scalar'\nprocessed 12 insns (limit 1000000)\n-- END PROG LOAD LOG --\nlibbpf: failed to load object 'fragprof'\n";
        assert_eq!(cause(log).as_deref(), Some("invalid mem access 'scalar'"));
        assert_eq!(cause("\n"), None);
        assert_eq!(cause("libbpf: Error in bpf_object__probe_loading(): -EPERM. Couldn't load trivial BPF program.\n"), None);
    }

    #[test]
    fn lockdown_of_the_kernel_is_named_as_the_reason() {
        assert!(hint_for(true, "none integrity [confidentiality]\n").contains("locked down"));
        for other in ["none [integrity] confidentiality\n", "[none] integrity confidentiality\n", ""] {
            assert!(hint_for(true, other).contains("does not permit BPF"));
        }
        assert!(hint_for(false, "none integrity [confidentiality]\n").contains("sudo"));
    }

    #[test]
    fn a_reason_that_all_methods_share_is_reported_once() {
        let denied = "Operation not permitted".to_owned();
        let all: Vec<(Attach, String)> = Attach::ALL.into_iter().map(|method| (method, denied.clone())).collect();
        assert_eq!(reasons(&all), "Operation not permitted");
        let differ = [(Attach::Session, denied), (Attach::Multi, "Invalid argument".to_owned())];
        assert_eq!(reasons(&differ).matches("; ").count(), 1);
    }

    /// Linux 5.12 added atomic operations that return the old value, and operations other than ADD (kernel commits 5ca419f2864a,
    /// 981f94c3e921). Compilers may generate them implicitly. Linux 5.10 then refuses the whole program ("BPF_STX uses reserved fields").
    #[test]
    fn the_programs_for_old_kernels_use_only_the_atomic_operation_of_those() {
        const BPF_STX_ATOMIC: u8 = libbpf_sys::BPF_STX as u8 | 0xc0;
        let object = ObjectBuilder::default().open_memory(LEGACY_OBJECT).unwrap();
        for program in object.progs() {
            for (at, instruction) in program.insns().iter().enumerate() {
                let is_atomic = matches!(instruction.code & !0x18, BPF_STX_ATOMIC);
                assert!(!is_atomic || instruction.imm == 0, "{:?}, instruction {at}: {:#x}", program.name(), instruction.imm);
            }
        }
    }
}
