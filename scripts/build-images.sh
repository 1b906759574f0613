#!/usr/bin/env bash
# Builds the agent's image for both architectures under one name, an index of two manifests, with podman or buildah:
# build-images.sh NAME PROGRAM_X86_64 PROGRAM_ARM64. Nothing runs in these builds, so no emulator is needed. To publish it:
#
#   podman manifest push --all NAME docker://REGISTRY/fragprof:VERSION
#
# OPTIONS are given to each call of the builder, for example the place of its storage.
set -euo pipefail
cd "$(dirname "$0")/.."
name=$1
read -ra options <<<"${OPTIONS:-}"
for builder in podman buildah; do
	command -v "$builder" >/dev/null && break
done
command -v "$builder" >/dev/null || { echo "neither podman nor buildah is installed; docker needs its own buildx for two architectures" >&2; exit 1; }
"$builder" "${options[@]}" manifest rm "$name" 2>/dev/null || "$builder" "${options[@]}" rmi "$name" 2>/dev/null || true
# Adds a program, which must be for this machine (readelf's name of it), as the image of a platform.
add() {
	LC_ALL=C readelf -h "$3" | grep -q "Machine:.*$2" || { echo "$3 is not a program for $1" >&2; exit 1; }
	BUILDER=$builder MANIFEST=1 scripts/build-image.sh "$3" "$name" --platform "$1" "${options[@]}"
}
add linux/amd64 X86-64 "$2"
add linux/arm64 AArch64 "$3"
"$builder" "${options[@]}" manifest inspect "$name"
