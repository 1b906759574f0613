#!/usr/bin/env bash
# Runs packaged programs with a ledger preloaded into them (tests/truth/) and writes docs/truth.md. PROGRAMS=redis,perl: only those.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install-packages.sh redis-server redis-tools sqlite3 postgresql mariadb-server memcached nginx-light lighttpd apache2 curl jq gawk tcl lua5.4 \
	ripgrep fd-find bat python3-numpy zsh ruby php-cli gnuplot-nox bc cmake poppler-utils sassc protobuf-compiler guile-3.0 \
	golang-github-mattn-go-sqlite3-dev libsqlite3-dev libtcmalloc-minimal4 libjemalloc2 git xsltproc graphviz m4 haproxy vim nodejs perl rustc cargo g++ \
	golang-go default-jdk-headless
# Without a selection, every row is measured again.
[ -n "${PROGRAMS:-}" ] || rm -rf target/truth-matrix
mkdir -p target/truth-matrix
log=target/truth-matrix.log
status=0
if [ -n "${INTEGRATION:-}" ]; then
	"$INTEGRATION" truth::every_cell --ignored --nocapture >"$log" 2>&1 || status=$?
else
	cargo test --test integration truth::every_cell -- --ignored --nocapture >"$log" 2>&1 || status=$?
fi
grep -P '^@@cell\t.*\twrong\t' "$log" | sort -u >&2 || true
[ "$status" -eq 0 ] || echo "wrong cells: see docs/truth.md and $log" >&2
exit "$status"
