#!/usr/bin/env bash
# What a budget of 1 %, and the census alone, cost four programs: each runs next to a copy of itself that is not watched; medians.
set -euo pipefail
fragprof=$(realpath "$1")
cd "$(dirname "$0")"
rounds=${2:-7}
built=$(mktemp -d)
redis=()
trap 'kill "${redis[@]}" 2>/dev/null || true; rm -rf "$built"' EXIT
for program in pairs server; do
	cc -O2 -fno-builtin -pthread -o "$built/$program" "$program.c"
done

echo "== tight loop of malloc and free"
"$fragprof" bench --governed --rounds "$rounds" -- "$built/pairs" 1500
echo "== factor (coreutils, GMP) of a number of 56 digits"
"$fragprof" bench --governed --rounds "$rounds" -- factor 37544792355231806353818023694784742350892036815934164507
echo "== two threads as in a server"
"$fragprof" bench --governed --rounds "$rounds" -- "$built/server" 2000
echo "== redis under load"
load=""
for copy in 1 2; do
	redis-server --port 0 --unixsocket "$built/$copy.sock" --save "" --appendonly no --dir "$built" >/dev/null &
	redis+=($!)
	until redis-cli -s "$built/$copy.sock" ping 2>/dev/null | grep -q PONG; do sleep 0.05; done
	load+="redis-benchmark -s $built/$copy.sock -q -n 4000000 -c 20 -P 8 -r 100000 -d 100 -t set & "
done
"$fragprof" bench --governed --rounds "$rounds" --pid "${redis[0]}" --pid "${redis[1]}" -- sh -c "$load wait"
