#!/usr/bin/env bash
# Formatting, lints, unit, property and integration tests: what `make test` runs. The tests' packages are installed meanwhile, as long as
# something is compiled. Nothing is compiled while the tests run: some measure what a busy machine would change.
set -uo pipefail
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo}
log=$(mktemp)
trap 'kill $(jobs -p) 2>/dev/null; rm -f "$log"' EXIT

"$cargo" fmt --check || exit
make -s deps || exit
make -s test-deps >"$log" 2>&1 &
packages=$!
"$cargo" clippy --all-targets -- -D warnings || exit
"$cargo" test --no-run || exit
if ! wait $packages; then
	cat "$log" >&2
	exit 1
fi
scripts/mount-kernel-filesystems.sh || exit
"$cargo" test -- --test-threads=2
