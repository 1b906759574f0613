#!/usr/bin/env bash
# Prints the directory of the static libraries that the static program is linked with (libelf.a, libz.a).
set -euo pipefail
for name in libelf.a libz.a; do
	path=$(${CC:-cc} -print-file-name="$name")
	[ "$path" != "$name" ] || {
		echo "$name is not installed (Debian: libelf-dev, zlib1g-dev)" >&2
		exit 1
	}
done
dirname "$(realpath "$path")"
