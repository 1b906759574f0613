#!/usr/bin/env bash
# Formatting, lints, unit, property and integration tests: what `make test` runs. On two cores their time is what matters: packages are
# installed while the tests are compiled, and clippy compiles in the time that the running tests leave; for the scheduler it is idle work.
set -uo pipefail
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
log=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null; rm -rf "$log"' EXIT

# Waits for a job, and prints its output if it failed.
finish() { # JOB NAME
	wait "$1" && return
	echo "$2 failed:" >&2
	cat "$log/$2" >&2
	exit 1
}

"$cargo" fmt --check || exit
make -s deps || exit
make -s test-deps >"$log/packages" 2>&1 &
packages=$!
"$cargo" test --no-run || exit
finish $packages packages
scripts/mount-kernel-filesystems.sh || exit
"$cargo" test -- --test-threads=2 &
tests=$!
# By then cargo runs the tests, and no longer locks the directory of what is built.
sleep 10
chrt --idle 0 "$cargo" clippy --all-targets -- -D warnings >"$log/clippy" 2>&1 &
lints=$!
wait $tests || exit
finish $lints clippy
