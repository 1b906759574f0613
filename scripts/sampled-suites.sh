#!/usr/bin/env bash
# Runs the test suites of two programs that allocate much under the sampler with a consumer attached: CPython's own tests with every object
# on malloc, and those of Redis's types and scripts from Debian's source with Debian's redis-server. Argument: the fragprof program. Needs
# the network once.
set -euo pipefail
fragprof=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# An agent listens the whole time, if permitted.
cat >"$work/agent.toml" <<END
[discovery]
scan_interval_s = 1
rss_min_mib = 0
include = ["python*", "redis-server"]
[listening]
profile_interval_s = 2
[server]
listen = "127.0.0.1:0"
END
"$fragprof" agent --config "$work/agent.toml" >"$work/agent.out" 2>&1 &
agent=$!
trap 'kill $agent 2>/dev/null || true; rm -rf "$work"' EXIT

python=$(/usr/bin/env python3 -c 'import sys; print(sys.executable)')
echo "CPython's tests under the sampler"
PYTHONMALLOC=malloc "$fragprof" run --sample-bytes 65536 -- "$python" -m test -q \
	test_dict test_list test_set test_json test_re test_unicode test_bytes test_struct test_collections test_itertools test_zlib test_sqlite3

echo "Redis's tests under the sampler"
mkdir -p "$work/lists/partial"
echo "deb-src http://deb.debian.org/debian $(. /etc/os-release && echo "$VERSION_CODENAME") main" >"$work/sources.list"
from=(-o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=/dev/null -o Dir::State::Lists="$work/lists" -o APT::Sandbox::User=root)
apt-get -qq "${from[@]}" update
(cd "$work" && apt-get -qq "${from[@]}" source --download-only redis && tar xf redis_*.orig.tar.*)
cd "$work"/redis-*/
for program in redis-server redis-cli redis-benchmark redis-check-aof redis-check-rdb; do
	printf '#!/bin/sh\nexec %s\n' "$(command -v $program) \"\$@\"" >"src/$program"
done
# Only the server is sampled.
printf '#!/bin/sh\nexec %s run --sample-bytes 65536 -- %s "$@"\n' "$fragprof" "$(command -v redis-server)" >src/redis-server
chmod +x src/redis-*
./runtest --clients 2 --single unit/type/string --single unit/type/list --single unit/type/hash --single unit/type/set \
	--single unit/type/zset --single unit/scripting --single unit/expire
url=$(sed -n 's/^fragprof agent: \(http[^ ]*\).*/\1/p' "$work/agent.out" | head -1)
echo "both suites passed; samples received meanwhile: $(curl -sf "$url" | sed -n 's/^fragprof_listener_samples_total //p')"
