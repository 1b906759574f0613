#!/usr/bin/env bash
# Builds the release: a static binary, built twice in different directories and compared byte by byte, stripped, with its SBOM, in a tarball
# that is reproducible from the commit; its debug information is in a file beside the tarball (gdb finds it by the build id, or by its name
# next to the program).
#
#   release.sh          everything
#   release.sh once     one build without comparison, to try the rest
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
machine=$(uname -m)
target=$machine-unknown-linux-gnu
name=fragprof-$version-$machine-linux
dist=target/dist
export SOURCE_DATE_EPOCH
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)

grep -q "^## $version" CHANGELOG.md || { echo "CHANGELOG.md has no section for $version" >&2; exit 1; }
[ -z "$(git status --porcelain --untracked-files=no)" ] || echo "note: the tree has uncommitted changes" >&2

flags=$(scripts/static-flags.sh)

# Builds the working tree's tracked files in a directory of another name; prints the binary's path.
build() {
	local folder=$1
	rm -rf "$folder/source"
	mkdir -p "$folder/source"
	git ls-files -z | xargs -0 cp -P --parents -t "$folder/source"
	# The binary must depend neither on paths of the machine nor on the order in which codegen units finish.
	(
		cd "$folder/source"
		here=$(pwd -P)
		cargo_home=$(realpath "${CARGO_HOME:-$HOME/.cargo}")
		RUSTFLAGS="$flags -C link-arg=-Wl,--build-id=sha1 --remap-path-prefix=$here=/fragprof --remap-path-prefix=$cargo_home=/cargo" \
			CFLAGS="-ffile-prefix-map=$here=/fragprof -ffile-prefix-map=$cargo_home=/cargo" \
			LIBBPF_SYS_LIBRARY_PATH=$(dirname "$(realpath "$(cc -print-file-name=libelf.a)")") \
			CARGO_TARGET_DIR=$here/../target CARGO_INCREMENTAL=0 \
			cargo build --quiet --profile dist --locked --features static --target "$target" --bin fragprof
	) >&2
	echo "$folder/target/$target/dist/fragprof"
}

mkdir -p "$dist"
first=$(build target/release-one)
if [ "${1:-}" != once ]; then
	second=$(build target/release-the-other)
	cmp "$first" "$second" || { echo "two builds of the same sources differ" >&2; exit 1; }
	echo "built twice with identical bytes: $(sha256sum <"$first" | cut -d' ' -f1)"
fi
if readelf -lW "$first" | grep -q INTERP; then echo "the binary is not static" >&2; exit 1; fi
"$first" --version | grep -q "$version" || { echo "the binary has another version than Cargo.toml" >&2; exit 1; }

# Bytes of the stripped program.
size_max=20000000
stage=$dist/$name
debug=$name.debug
rm -rf "$stage" "$dist/$debug"
mkdir -p "$stage"
objcopy --only-keep-debug --compress-debug-sections "$first" "$dist/$debug"
chmod 644 "$dist/$debug"
# The link has the name and checksum of the debug file, so it is looked for in the directory where that is.
program=$(realpath "$stage")/fragprof
strip -o "$program" "$first"
(cd "$dist" && objcopy --add-gnu-debuglink="$debug" "$program")
chmod 755 "$program"
size=$(stat -c %s "$program")
[ "$size" -le "$size_max" ] || { echo "the stripped program has $size bytes, more than $size_max" >&2; exit 1; }
build_id() { readelf -n "$1" 2>/dev/null | sed -n 's/.*Build ID: //p'; }
[ -n "$(build_id "$program")" ] && [ "$(build_id "$program")" = "$(build_id "$dist/$debug")" ] ||
	{ echo "the debug file does not belong to the program" >&2; exit 1; }
"$program" --version | grep -q "$version" || { echo "the stripped program does not run" >&2; exit 1; }
echo "stripped: $size bytes"
cp LICENSE-APACHE LICENSE-MIT README.md CHANGELOG.md "$stage/"
cp -r docs deploy "$stage/"
scripts/sbom.py >"$stage/fragprof.cdx.json"
cp "$stage/fragprof.cdx.json" "$dist/$name.cdx.json"
tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode=go=rX,u+rw -C "$dist" -c "$name" | gzip -n -9 >"$dist/$name.tar.gz"
rm -rf "$stage"
(cd "$dist" && sha256sum "$name.tar.gz" "$debug" "$name.cdx.json" >"$name.sha256")
ls -l "$dist"
cat "$dist/$name.sha256"
