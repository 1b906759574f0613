#!/usr/bin/env bash
# Installs the given Debian or Ubuntu packages and prints their names; skips those that are installed.
set -euo pipefail

# A toolchain that was not installed from the distribution's packages counts as installed.
present() {
	case "$1" in
	golang-go) command -v go >/dev/null ;;
	nodejs) command -v node >/dev/null ;;
	default-jdk-headless) command -v javac >/dev/null ;;
	python3 | clang | gcc | g++ | make | gdb | valgrind | pkg-config) command -v "$1" >/dev/null ;;
	*) dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null | grep -qx installed ;;
	esac
}

missing=()
for package in "$@"; do
	present "$package" || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if ! command -v apt-get >/dev/null; then
	echo "please install the contents of these Debian packages: ${missing[*]}" >&2
	exit 1
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
	if ! command -v sudo >/dev/null; then
		echo "please install these packages as root: apt-get install ${missing[*]}" >&2
		exit 1
	fi
	as_root=(sudo)
fi
echo "installing: ${missing[*]}"
"${as_root[@]}" apt-get update -qq
# Services that come with a package (redis) must not be started for a test.
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
