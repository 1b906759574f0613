#!/usr/bin/env bash
# arm64 on another machine: builds fragprof with the cross compiler, BPF programs and sampler included, runs the unit tests in emulation,
# and the sampler under a program; then the unwinder on stacks that arm64 programs recorded of themselves.
set -euo pipefail
cd "$(dirname "$0")/.."
target=aarch64-unknown-linux-gnu
dpkg --print-foreign-architectures | grep -qx arm64 || { dpkg --add-architecture arm64 && apt-get update -qq; }
scripts/install-packages.sh gcc-aarch64-linux-gnu g++-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static libelf-dev:arm64 zlib1g-dev:arm64
rustup target add "$target"

export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64-static -cpu max"
export PKG_CONFIG_ALLOW_CROSS=1 PKG_CONFIG_PATH=/usr/lib/aarch64-linux-gnu/pkgconfig
# Modules whose tests need no program of the machine that they run on, no ptrace, no page map, no process_vm_readv and no BPF: the
# emulator has none of these.
cargo test --lib --target "$target" -- machine:: unwind:: probe::flow probe::placement_arm64 target::usdt target::maps ledger:: heap:: governor:: \
	fragmentation:: profile::
cargo test --test integration unwind::arm64 -- --nocapture
