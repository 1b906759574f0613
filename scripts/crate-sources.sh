#!/bin/sh
# Fetches a crate for the sources in it, whose build script is not run, and prints their directory.
# usage: scripts/crate-sources.sh CRATE VERSION DIRECTORY, in which a package that depends on it is made
set -eu
crate=$1 version=$2 directory=$3
mkdir -p "$directory/src"
cat >"$directory/Cargo.toml" <<END
[package]
name = "sources"
version = "0.0.0"
edition = "2021"
[dependencies]
$crate = "=$version"
[workspace]
END
: >"$directory/src/lib.rs"
manifest=$(${CARGO:-cargo} metadata --format-version 1 --manifest-path "$directory/Cargo.toml" |
	python3 -c 'import json, sys; print(*[p["manifest_path"] for p in json.load(sys.stdin)["packages"] if p["name"] == sys.argv[1]])' "$crate")
dirname "$manifest"
