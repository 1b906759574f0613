//! BPF programs of uprobes run preemptibly, and share no stack with the thread that preempts them (docs/design/0014).

use fragprof::capture::{Capture, Config};
use fragprof::probe::features::Attach;
use libbpf_rs::ProgramType;
use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions};

use crate::support::{bpf, serial};

/// `add r9, gs:[this_cpu_off]` up to the address: how x86-64's JIT finds a program's per-CPU stack (emit_priv_frame_ptr,
/// arch/x86/net/bpf_jit_comp.c, since 6.13).
const STACK_OF_THE_CPU: [u8; 5] = [0x65, 0x4c, 0x03, 0x0c, 0x25];

/// The programs that are loaded, and whether each has a per-CPU stack.
fn loaded() -> Vec<(u32, ProgramType, String, bool)> {
    let options = ProgInfoQueryOptions::default().include_jited_prog_insns(true);
    ProgInfoIter::with_query_opts(options)
        .map(|info| {
            let shared = info.jited_prog_insns.windows(STACK_OF_THE_CPU.len()).any(|bytes| bytes == STACK_OF_THE_CPU);
            (info.id, info.ty, info.name.to_string_lossy().into_owned(), shared)
        })
        .collect()
}

#[test]
#[cfg(target_arch = "x86_64")]
fn no_program_of_a_uprobe_has_a_stack_that_threads_share() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    for method in Attach::ALL {
        let before: Vec<u32> = loaded().into_iter().map(|(id, ..)| id).collect();
        let config = Config { method: Some(method), windows: true, ..Config::default() };
        let Ok(_capture) = Capture::load(&config) else {
            println!("{method:?}: not on this kernel");
            continue;
        };
        let ours: Vec<_> = loaded().into_iter().filter(|(id, ..)| !before.contains(id)).collect();
        let of_uprobes: Vec<_> = ours.iter().filter(|(_, kind, ..)| *kind == ProgramType::Kprobe).collect();
        assert!(of_uprobes.len() >= 2, "{method:?}: {ours:?}");
        assert!(of_uprobes.iter().all(|(_, _, _, shared)| !shared), "{method:?}: {of_uprobes:?}");
        // If the kernel has such stacks, programs at its tracepoints use them: it never runs two of those on one CPU at the same time.
        let others = ours.iter().filter(|(_, kind, _, shared)| *kind == ProgramType::Tracing && *shared).count();
        println!("{method:?}: {} programs of uprobes without such a stack, {others} others with one", of_uprobes.len());
    }
}
