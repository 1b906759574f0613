#!/bin/sh
# Builds releases of jemalloc from the sources in crates, each with size classes 16 bytes apart and 8 (as redis and valkey configure their
# own), and runs the census's tests with them. usage: scripts/jemalloc.sh [DIRECTORY]
set -eu
cd "$(dirname "$0")/.."
directory=$(mkdir -p "${1:-target/jemalloc}" && cd "${1:-target/jemalloc}" && pwd)

all=
build() { # CRATE VERSION RELEASE QUANTUM...: RELEASE as jemalloc calls it, QUANTUM as powers of 2
	crate=$directory/$1-$2
	mkdir -p "$crate/src"
	cat >"$crate/Cargo.toml" <<END
[package]
name = "sources"
version = "0.0.0"
edition = "2021"
[dependencies]
$1 = "=$2"
[workspace]
END
	: >"$crate/src/lib.rs"
	manifest=$(cargo metadata --format-version 1 --manifest-path "$crate/Cargo.toml" |
		python3 -c 'import json, sys; print(*[p["manifest_path"] for p in json.load(sys.stdin)["packages"] if p["name"] == sys.argv[1]])' "$1")
	sources=$(dirname "$manifest")
	release=$3
	shift 3
	for quantum; do
		tree=$directory/$release-quantum-$quantum
		library=$tree/lib/libjemalloc.so.2
		all=${all:+$all:}$library
		test -e "$library" && continue
		rm -rf "$tree"
		cp -r "$sources/jemalloc" "$tree"
		test -e "$tree/configure" || cp "$sources/configure/configure" "$tree/configure"
		# As redis does it.
		options="--with-lg-quantum=$quantum"
		test "$quantum" = 4 || options="$options --disable-cache-oblivious"
		(
			cd "$tree"
			chmod +x configure
			# shellcheck disable=SC2086 # A list of options.
			./configure --with-version="$release-0-g0" --disable-cxx $options >configure.log 2>&1
			make -s -j"$(nproc)" lib/libjemalloc.so.2 >make.log 2>&1
		) || {
			tail "$tree"/*.log >&2
			exit 1
		}
	done
}

# 5.0.1 with its default options at times counts free memory that its page map does not have (docs/allocators.md).
build jemalloc-sys 0.1.5 5.0.1 3
build jemalloc-sys 0.1.8 5.1.0 4 3
build tikv-jemalloc-sys 0.4.3 5.2.1 4 3
build tikv-jemalloc-sys 0.5.4 5.3.0 4 3

FRAGPROF_TEST_JEMALLOC=$all ${CARGO:-cargo} test --test integration census::others::jemalloc -- --nocapture --test-threads=1
