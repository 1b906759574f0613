#!/bin/sh
# Shows the main features: starts a small service that leaks in one place and fragments in another, records it, and shows which stacks hold
# what.
#
# Usage: demo/run.sh [FRAGPROF], the binary to run, target/release/fragprof by default. Output goes to target/demo/.
# SECONDS_RECORDED sets the length of the recording.
set -eu

cd "$(dirname "$0")/.."
fragprof=${1:-target/release/fragprof}
out=target/demo
seconds=${SECONDS_RECORDED:-10}

if [ ! -x "$fragprof" ]; then
    echo "demo: $fragprof is not built: run 'cargo build --release' first, or 'make demo', which does both" >&2
    exit 1
fi

# Loading BPF programs needs root or its capabilities.
as_root=
if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
        echo "demo: recording needs root, and there is no sudo: run this as root" >&2
        exit 4
    fi
    as_root=sudo
fi

step() {
    printf '\n\033[1m%s\033[0m\n' "$*"
}
if [ ! -t 1 ] || [ -n "${NO_COLOR:-}" ]; then
    step() {
        printf '\n%s\n' "$*"
    }
fi

mkdir -p "$out"
step "1. Build and start the service: demo/shopd.cpp"
# The map keeps this machine's paths out of what the reports print.
${CXX:-c++} -std=c++17 -O2 -g -ffile-prefix-map="$PWD"=. -o "$out/shopd" demo/shopd.cpp

"$out/shopd" $((seconds + 20)) >"$out/shopd.log" &
pid=$!
trap 'kill "$pid" 2>/dev/null || :' EXIT
trap 'exit 130' INT TERM
until grep -q "serving" "$out/shopd.log"; do
    if ! kill -0 "$pid" 2>/dev/null; then
        echo "demo: the service did not start: see $out/shopd.log" >&2
        exit 1
    fi
    sleep 0.05
done
cat "$out/shopd.log"

step "2. Record it for $seconds s: fragprof record -p $pid --duration ${seconds}s -o $out/demo.pb.gz"
$as_root "$fragprof" record -p "$pid" --duration "${seconds}s" -o "$out/demo.pb.gz"

# If a recording could not measure something, that is printed and the demo continues.
show() {
    "$fragprof" "$@" || echo "(not in this recording)"
}
show_process() {
    $as_root "$fragprof" "$@" || echo "(not possible here)"
}

step "3. The stacks that hold live memory: fragprof report $out/demo.pb.gz --by live"
show report "$out/demo.pb.gz" --by live --top 3

step "4. The stacks that keep free memory from being returned: fragprof report $out/demo.pb.gz --by pinned"
show report "$out/demo.pb.gz" --by pinned --top 3

step "5. The verdict on the recording, and on the process as it is now: fragprof explain $out/demo.pb.gz; fragprof explain $pid"
show explain "$out/demo.pb.gz"
echo
show_process explain "$pid"

step "6. Images for a browser: the stacks, and the heap page by page (fragprof census $pid --map $out/address-space.svg)"
for value in live pinned; do
    show flamegraph "$out/demo.pb.gz" --by "$value" -o "$out/$value.svg"
done
show_process census "$pid" --map "$out/address-space.svg"

kill "$pid" 2>/dev/null || :
wait "$pid" 2>/dev/null || :
tail -n 1 "$out/shopd.log"

step "Your own service"
cat <<END
  ${as_root:+sudo }$fragprof record -p PID --duration 30s -o service.pb.gz
  $fragprof report service.pb.gz --by live          # or allocated, pinned, growth, peak
  $fragprof flamegraph service.pb.gz -o service.svg
  go tool pprof -http : service.pb.gz               # it is an ordinary pprof file
END
