#!/usr/bin/env bash
# Mounts tracefs and the BPF file system at their usual paths, if permitted and not mounted yet; tests that need them report it otherwise.
set -u
mounted() { awk -v at="$1" '$2 == at { found = 1 } END { exit !found }' /proc/mounts; }
[ "$(id -u)" -eq 0 ] || exit 0
mounted /sys/kernel/tracing || mount -t tracefs tracefs /sys/kernel/tracing 2>/dev/null
mounted /sys/fs/bpf || mount -t bpf bpf /sys/fs/bpf 2>/dev/null
exit 0
