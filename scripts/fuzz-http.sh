#!/usr/bin/env bash
# Tests a running agent with requests that schemathesis generates from the agent's description of its API,
# EXAMPLES (100) per path: no 5xx, no panic, and every answer matches its description.
set -euo pipefail
cd "$(dirname "$0")/.."
fragprof=${1:?usage: fuzz-http.sh FRAGPROF}
tools=target/schemathesis
[ -x $tools/bin/schemathesis ] || { python3 -m venv $tools; $tools/bin/pip install --quiet 'schemathesis>=4,<5'; }
place=$(mktemp -d)
trap 'kill "${agent:-}" 2>/dev/null || true; wait; rm -rf "$place"' EXIT
cat >"$place/agent.toml" <<TOML
[discovery]
rss_min_mib = 0
[history]
sample_interval_s = 1
[server]
listen = "127.0.0.1:0"
TOML
"$fragprof" agent --config "$place/agent.toml" >"$place/out" 2>"$place/err" &
agent=$!
until address=$(sed -n 's|^fragprof agent: \(http://[^/]*\)/.*|\1|p' "$place/out") && [ -n "$address" ]; do
    kill -0 $agent || { cat "$place/err" >&2; exit 1; }
    sleep 0.1
done
# Arbitrary pids, and then an existing one: this shell's.
printf '[parameters]\npid = %s\n' $$ >"$place/there.toml"
: >"$place/any.toml"
for config in any there; do
    $tools/bin/schemathesis --config-file "$place/$config.toml" run "$address/api/v1/openapi.json" \
        --checks not_a_server_error,response_schema_conformance --phases examples,coverage,fuzzing \
        --max-examples "${EXAMPLES:-100}" --request-timeout 60
done
kill -0 $agent || { echo "the agent has ended" >&2; cat "$place/err" >&2; exit 1; }
if grep -q panicked "$place/err"; then cat "$place/err" >&2; exit 1; fi
echo "no 5xx, no panic: the agent is still running"
