#!/usr/bin/env bash
# What a budget of 1 % costs: the CPU time of the same work alone, watched under the budget, and under the census alone, round after
# round in turn; medians. Prints ratios to the first.
set -euo pipefail
cd "$(dirname "$0")"
fragprof=$(realpath "$1")
rounds=${2:-7}
built=$(mktemp -d)
trap 'kill "${redis:-}" 2>/dev/null || true; rm -rf "$built"' EXIT
for program in pairs server; do
	cc -O2 -fno-builtin -pthread -o "$built/$program" "$program.c"
done

echo "== tight loop of malloc and free"
"$fragprof" bench --governed --rounds "$rounds" -- "$built/pairs" 1200
echo "== factor (coreutils, GMP) of a number of 56 digits"
"$fragprof" bench --governed --rounds "$rounds" -- factor 37544792355231806353818023694784742350892036815934164507
echo "== two threads as in a server"
"$fragprof" bench --governed --rounds "$rounds" -- "$built/server" 1200
echo "== redis under load"
redis-server --port 0 --unixsocket "$built/redis.sock" --save "" --appendonly no --dir "$built" >/dev/null &
redis=$!
until redis-cli -s "$built/redis.sock" ping 2>/dev/null | grep -q PONG; do sleep 0.05; done
"$fragprof" bench --governed --rounds "$rounds" --pid "$redis" -- \
	redis-benchmark -s "$built/redis.sock" -q -n 1000000 -c 20 -P 8 -r 100000 -d 100 -t set
