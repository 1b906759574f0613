#!/usr/bin/env bash
# Tests arm64 on another machine: builds fragprof with the cross compiler, including BPF programs and sampler, runs the unit tests in
# emulation, and a program with the sampler; then the unwinder on stacks recorded by arm64 programs.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/arm64-toolchain.sh
# Modules whose tests need no native program, no ptrace, no page map, no process_vm_readv and no BPF: the
# emulator has none of these.
cargo test --lib --target "$target" -- machine:: unwind:: probe::flow probe::placement_arm64 emitter::usdt process::maps ledger:: heap:: governor:: \
	fragmentation:: profile:: --skip tui::
cargo test --test integration unwind::arm64 -- --nocapture
