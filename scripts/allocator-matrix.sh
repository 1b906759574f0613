#!/usr/bin/env bash
# Runs the test programs with every C library and allocator (tests/matrix/), and writes the tables of docs/allocators.md.
#   allocator-matrix.sh [x86-64 | arm64]...     default: both; arm64 in emulation
# PLACES='musl;Rust' runs only rows with one of these in their name, and leaves the others as they are.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- x86-64 arm64
test=matrix::every_call_site_is_recorded_and_counted
status=0

# Of this machine.
own() {
	mkdir -p target/allocator-matrix
	log=target/allocator-matrix/log
	if [ -n "${INTEGRATION:-}" ]; then
		"$INTEGRATION" --exact "$test" --ignored --nocapture >"$log" 2>&1
	else
		cargo test --test integration "$test" -- --exact --ignored --nocapture >"$log" 2>&1
	fi
}

emulated() {
	log=target/kernel-matrix/arm64-allocators.log
	rm -f "$log" # that of an earlier run
	scripts/matrix/arm64.sh arm64-allocators && grep -q "@@ test ok $test" "$log"
}

for architecture in "$@"; do
	result=0
	case $architecture in
	x86-64) own || result=1 ;;
	arm64) emulated || result=1 ;;
	*) echo "no such architecture: $architecture" >&2 && exit 2 ;;
	esac
	[ -e "$log" ] || { echo "no guest was booted: see above" >&2 && exit 1; }
	python3 scripts/matrix/allocators.py "$log" "$architecture"
	[ "$result" -eq 0 ] || grep -oP '@@cell\t.*\twrong\t.*' "$log" >&2 || echo "see $log" >&2
	status=$((status | result))
done
exit "$status"
