#!/usr/bin/env bash
# Runs the test programs with every C library and allocator (tests/matrix/), and writes the table of docs/allocators.md.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p target/allocator-matrix
log=target/allocator-matrix/log
status=0
if [ -n "${INTEGRATION:-}" ]; then
	"$INTEGRATION" matrix::every_call_site --ignored --nocapture >"$log" 2>&1 || status=$?
else
	cargo test --test integration matrix::every_call_site -- --ignored --nocapture >"$log" 2>&1 || status=$?
fi
python3 scripts/matrix/allocators.py "$log"
grep -P '^@@cell\t.*\twrong\t' "$log" >&2 || true
[ "$status" -eq 0 ] || echo "see $log" >&2
exit "$status"
