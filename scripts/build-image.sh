#!/usr/bin/env bash
# Builds the agent's image from deploy/Containerfile with podman, buildah or docker, whichever is installed: build-image.sh PROGRAM NAME.
# Further arguments go to the builder, for example --build-arg BASE=…. With MANIFEST=1 the image is added to the index of that name
# (podman, buildah).
set -euo pipefail
cd "$(dirname "$0")/.."
program=$1 name=$2
shift 2
context=target/image
rm -rf "$context" && mkdir -p "$context"
# The program does not need its own line tables and symbols.
case $(LC_ALL=C readelf -h "$program") in
*AArch64*) strip=aarch64-linux-gnu-strip ;;
*) strip=strip ;;
esac
[ "$(uname -m)" != aarch64 ] || strip=strip
"$strip" -o "$context/fragprof" "$program"
cp deploy/agent.toml "$context/"
as=-t
[ -z "${MANIFEST:-}" ] || as=--manifest
for builder in ${BUILDER:-podman buildah docker}; do
	command -v "$builder" >/dev/null || continue
	case $builder in
	# No process runs in this build, so no isolation is needed.
	buildah) exec buildah bud --isolation chroot -f deploy/Containerfile "$as" "$name" "$@" "$context" ;;
	podman) exec podman build --isolation chroot -f deploy/Containerfile "$as" "$name" "$@" "$context" ;;
	*) exec "$builder" build --network=host -f deploy/Containerfile -t "$name" "$@" "$context" ;;
	esac
done
echo "none of podman, buildah and docker is installed" >&2
exit 1
