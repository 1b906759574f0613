#!/bin/sh
# Builds releases of jemalloc from the sources in crates, with size classes 16 bytes apart and 8 (as redis and valkey configure their own),
# and runs the census's tests with them. usage: scripts/jemalloc.sh [DIRECTORY]
set -eu
cd "$(dirname "$0")/.."
directory=$(mkdir -p "${1:-target/jemalloc}" && cd "${1:-target/jemalloc}" && pwd)

all=
build() { # CRATE VERSION RELEASE: RELEASE as jemalloc calls it
	sources=$(scripts/crate-sources.sh "$1" "$2" "$directory/$1-$2")
	for quantum in 4 3; do
		tree=$directory/$3-quantum-$quantum
		library=$tree/lib/libjemalloc.so.2
		all=${all:+$all:}$library
		test -e "$library" && continue
		rm -rf "$tree"
		cp -r "$sources/jemalloc" "$tree"
		test -e "$tree/configure" || cp "$sources/configure/configure" "$tree/configure"
		options="--with-lg-quantum=$quantum"
		# As redis does it.
		test "$quantum" = 4 || options="$options --disable-cache-oblivious"
		(
			cd "$tree"
			chmod +x configure
			# shellcheck disable=SC2086 # A list of options.
			./configure --with-version="$3-0-g0" --disable-cxx $options >configure.log 2>&1
			make -s -j"$(nproc)" lib/libjemalloc.so.2 >make.log 2>&1
		) || {
			tail "$tree"/*.log >&2
			exit 1
		}
	done
}

build jemalloc-sys 0.1.5 5.0.1
build jemalloc-sys 0.1.8 5.1.0
build tikv-jemalloc-sys 0.4.3 5.2.1
build tikv-jemalloc-sys 0.5.4 5.3.0

FRAGPROF_TEST_JEMALLOC=$all ${CARGO:-cargo} test --test integration census::others::jemalloc -- --nocapture --test-threads=1
