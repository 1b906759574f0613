#!/usr/bin/env bash
# arm64 on another machine: builds fragprof with the cross compiler, BPF programs and sampler included, runs the unit tests in emulation,
# and the sampler under a program; then the unwinder on stacks that arm64 programs recorded of themselves.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/arm64-toolchain.sh
# Modules whose tests need no program of the machine that they run on, no ptrace, no page map, no process_vm_readv and no BPF: the
# emulator has none of these.
cargo test --lib --target "$target" -- machine:: unwind:: probe::flow probe::placement_arm64 target::usdt target::maps ledger:: heap:: governor:: \
	fragmentation:: profile:: --skip tui::
cargo test --test integration unwind::arm64 -- --nocapture
