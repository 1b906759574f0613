#!/usr/bin/env bash
# Builds the image of the static binary with each installed builder and runs it: test-image.sh PROGRAM.
set -euo pipefail
cd "$(dirname "$0")/.."
directory=$(mktemp -d)
docker_pid=
cleanup() {
	if [ -n "$docker_pid" ]; then
		kill "$docker_pid"
		wait "$docker_pid" 2>/dev/null || true
	fi
	grep -o " $directory[^ ]*" /proc/mounts | sort -r | xargs -r umount -l || true
	rm -rf "$directory"
}
trap cleanup EXIT
storage=(--storage-driver overlay --root "$directory/storage" --runroot "$directory/run")

BUILDER=buildah scripts/build-image.sh "$1" localhost/fragprof:test "${storage[@]}"
podman "${storage[@]}" --runtime runc --cgroup-manager cgroupfs run --rm --network none --ulimit nofile=20000:20000 \
	--ulimit nproc=4096:4096 --read-only --cap-drop ALL localhost/fragprof:test --version
echo "buildah and podman: the image runs, read-only and without a capability"

export DOCKER_HOST=unix://$directory/docker.sock
dockerd --data-root "$directory/docker" --exec-root "$directory/exec" --pidfile "$directory/pid" -H "$DOCKER_HOST" --iptables=false \
	--ip6tables=false --bridge=none --storage-driver overlay2 >"$directory/log" 2>&1 &
docker_pid=$!
for _ in $(seq 100); do
	docker version >/dev/null 2>&1 && break
	kill -0 "$docker_pid" || { cat "$directory/log" >&2; exit 1; }
	sleep 0.2
done
BUILDER=docker DOCKER_BUILDKIT=0 scripts/build-image.sh "$1" localhost/fragprof:test
docker run --rm --network none --read-only --cap-drop ALL localhost/fragprof:test --version
docker image inspect --format '{{.Size}} bytes' localhost/fragprof:test
# A docker container is identified by its id, and shows its limit.
docker run --detach --name target --network none --memory 64m localhost/fragprof:test agent >/dev/null
pid=$(docker inspect --format '{{.State.Pid}}' target)
"$1" census "$pid" --json | tee "$directory/census" | grep -q "\"id\": \"$(docker inspect --format '{{.Id}}' target)\""
grep -q '"engine": "docker"' "$directory/census"
grep -q "\"limit_bytes\": $((64 << 20))" "$directory/census"
docker rm --force target >/dev/null
echo "docker: the image runs, and its containers are found with their limits"
