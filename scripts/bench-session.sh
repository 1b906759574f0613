#!/usr/bin/env bash
# An agent's resources with three recordings at once: windows (redis under load), an emitter (python3 with the sampler), and every call of
# redis on request. Prints BPF programs, maps and their memory, resident memory, threads, open files, and the CPU time of some 35 s.
#
#   scripts/bench-session.sh PROGRAM...    each in turn; as root
set -euo pipefail

readonly PORT=17777 LISTEN=127.0.0.1:19746
place=$(mktemp -d)
started=()

finish() {
    kill "${started[@]}" 2>/dev/null || true
    wait 2>/dev/null || true
    started=()
}
trap 'finish; rm -rf "$place"' EXIT

cat >"$place/agent.toml" <<TOML
[server]
listen = "$LISTEN"
[history]
directory = "$place/history"
[profile]
on_demand = true
[governed]
enabled = true
[listening]
enabled = true
TOML

# Sums over the open files of a process that are BPF programs, links or maps.
held() {
    cat /proc/"$1"/fdinfo/* 2>/dev/null | awk '
        /^map_id:/ { map = $2 } /^memlock:/ { memory = $2 } /^prog_id:/ { programs[$2] = 1 }
        /^pos:/ { if (map) maps[map] = memory; map = 0; memory = 0 }
        END {
            if (map) maps[map] = memory
            for (id in programs) count++
            for (id in maps) { number++; sum += maps[id] }
            printf "%d BPF programs, %d maps with %.1f MiB\n", count, number, sum / 1048576
        }'
}

measure() {
    local program=$1 redis agent recording
    redis-server --port $PORT --save "" --dir "$place" >"$place/redis.log" & redis=$!
    sleep 1
    redis-benchmark -p $PORT -n 1000000000 -r 100000 -t set -d 200 -q >"$place/load.log" & started+=("$redis" $!)
    "$program" run -- python3 -c '
import time
kept = []
while True:
    kept.extend(bytes(2000) for _ in range(50))
    time.sleep(0.01)
    if len(kept) > 20000:
        kept = kept[10000:]
' & started+=($!)
    "$program" agent --config "$place/agent.toml" >"$place/agent.log" & agent=$!
    started+=("$agent")
    sleep 20
    curl --silent --fail --output /dev/null "http://$LISTEN/api/v1/processes/$redis/profile?seconds=6&by=allocated&format=stacks" & recording=$!
    sleep 4
    printf '%s\n  ' "$program"
    held "$agent"
    awk '/^VmRSS/ { rss = $2 / 1024 } /^Threads/ { threads = $2 } END { printf "  %.0f MiB resident, %d threads, ", rss, threads }' "/proc/$agent/status"
    find "/proc/$agent/fd" -mindepth 1 2>/dev/null | wc -l | sed 's/$/ open files/'
    wait "$recording"
    sleep 10
    awk '{ printf "  %.2f s of CPU time\n", ($14 + $15) / 100 }' "/proc/$agent/stat"
    finish
}

for program in "$@"; do
    measure "$program"
done
