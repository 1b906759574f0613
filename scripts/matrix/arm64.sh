#!/usr/bin/env bash
# Boots arm64 kernels of distributions in full emulation, with a cross-built fragprof, and runs scripts/matrix/plan-arm64 in each. For
# kernel-matrix.sh, which names the suites and reads the logs, and for allocator-matrix.sh.
#
#   arm64.sh SUITE...     arm64 (trixie's kernel), arm64-16k (the same with pages of 16 KiB), arm64-64k (Ubuntu's with pages of 64 KiB),
#                         arm64-bookworm, arm64-backports (a kernel with sessions) or arm64-sid (Debian's newest)
#                         arm64-allocators runs scripts/matrix/plan-allocators-arm64 on the kernel of arm64-backports
#
# GUEST_SECONDS=3600 at most each, one after the other.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=target/kernel-matrix
kernels=target/kernels
mkdir -p "$out"
scripts/install-packages.sh qemu-system-arm cpio zstd
. scripts/arm64-toolchain.sh

# Suite of the kernel, its package, suite of the libraries, and the plan if it is another.
declare -A suites=(
	[arm64-bookworm]='bookworm linux-image-6.1.0-*-cloud-arm64 bookworm'
	[arm64]='trixie linux-image-6.12.*-cloud-arm64 trixie'
	[arm64-16k]='trixie linux-image-6.12.*-arm64-16k trixie'
	[arm64-64k]='resolute linux-image-7.*-generic-64k trixie'
	[arm64-backports]='trixie-backports linux-image-6.18.*-cloud-arm64 trixie'
	[arm64-allocators]='trixie-backports linux-image-6.18.*-cloud-arm64 trixie plan-allocators-arm64'
	[arm64-sid]='sid linux-binary-*-cloud-arm64 trixie'
)
declare -A libelf=([bookworm]=libelf1 [trixie]=libelf1t64) python=([bookworm]=python3.11 [trixie]=python3.13)
declare -A java=([bookworm]=openjdk-17-jre-headless [trixie]='openjdk-21-jre-headless openjdk-25-jre-headless')
export ARCHITECTURE=arm64
for suite in "$@"; do
	read -r from package libraries _ <<<"${suites[$suite]}"
	scripts/fetch-suite.sh "$from" "$kernels/$suite" "$package"
	scripts/fetch-suite.sh "$libraries" "$kernels/$libraries-arm64" "${libelf[$libraries]}" libc6 libgcc-s1 libstdc++6 zlib1g libzstd1 busybox-static dash \
		"${python[$libraries]}-minimal" "lib${python[$libraries]}-minimal" python3-minimal libexpat1
	[ "$suite" = arm64-allocators ] || # shellcheck disable=SC2086 # names of packages
		scripts/fetch-suite.sh "$libraries" "$kernels/$libraries-arm64" "lib${python[$libraries]}-stdlib" libffi8 ${java[$libraries]}
done
# The allocators, and what static programs are linked with.
others=$kernels/others-arm64
scripts/fetch-suite.sh bookworm "$others" libjemalloc2 libtcmalloc-minimal4 libmimalloc2.0 musl musl-dev
# Without it programs would be linked with the static library, and have a dynamic linker all the same.
ln -sfr "$others/lib/aarch64-linux-musl/libc.so" "$others/usr/lib/aarch64-linux-musl/libc.so"

executable() {
	cargo test --quiet --no-run --test integration "$@" --message-format=json | python3 -c 'import json,sys
for line in sys.stdin:
    m = json.loads(line)
    if m.get("executable") and m["target"]["name"] == "integration": print(m["executable"])'
}
integration=$(executable --target "$target")
host_integration=${INTEGRATION:-$(executable)}
fragprof=$PWD/target/$target/debug/fragprof

# The tests compile their programs; here under emulation, with compilers of the usual names that compile for arm64.
compilers=$out/arm64-compilers
mkdir -p "$compilers"
sed "s,/usr/\(include\|lib\)/aarch64-linux-musl,$PWD/$others&,g" "$others/usr/lib/aarch64-linux-musl/musl-gcc.specs" >"$compilers/musl-gcc.specs"
# With signed return addresses and landing pads, as Debian builds its own programs from trixie on.
printf '#!/bin/sh\nexec aarch64-linux-gnu-gcc -mbranch-protection=standard "$@"\n' >"$compilers/cc"
printf '#!/bin/sh\nexec aarch64-linux-gnu-g++ -mbranch-protection=standard "$@"\n' >"$compilers/g++"
# libgcc's functions for atomic operations need one that musl's shared library does not export.
printf '#!/bin/sh\nexec aarch64-linux-gnu-gcc -mno-outline-atomics "$@" -specs %s\n' "$PWD/$compilers/musl-gcc.specs" >"$compilers/musl-gcc"
chmod +x "$compilers"/{cc,g++,musl-gcc}
compile() {
	# Programs of this machine, which build scripts of crates are, have another compiler.
	CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_LINKER=gcc PATH="$PWD/$compilers:$PATH" \
		qemu-aarch64-static -cpu max "$integration" --exact "matrix::arm64::$1" --ignored --nocapture
}
compile its_programs_are_compiled
[[ " $* " != *' arm64-allocators '* ]] || compile the_programs_of_all_allocators_are_compiled

# Core files of this machine, which the guests read.
cores() {
	local written=$1 read=$2 test=$3
	FRAGPROF_CORES_WRITTEN=$written FRAGPROF_CORES_READ=$read "$host_integration" --exact "matrix::cores::$test" --ignored --nocapture
}
rm -rf "$out/cores-x86_64"
cores "$PWD/$out/cores-x86_64" "" core_files_are_written
gzip -1 "$out/cores-x86_64"/*.core

# The root file system of a guest, by the suite of its libraries, its kernel's version and its plan: the binaries at their own paths, the
# test programs and their sources, and the libraries.
make_root() {
	local root=$1 files=$kernels/$2-arm64 lib=usr/lib/aarch64-linux-gnu place name from seconds=240
	rm -rf "$root"
	mkdir -p "$root"/{bin,dev,matrix,proc,sys,tmp,root} "$root/$lib"
	ln -s usr/lib "$root/lib"
	install -m 755 scripts/matrix/guest-init "$root/init"
	# The oldest kernel for which a test makes sense follows its name.
	while read -r name from; do
		[ "$(printf '%s\n' "${from:-0}" "$3" | sort -V | head -1)" != "${from:-0}" ] || echo "$name"
	done <"scripts/matrix/$4" >"$root/matrix/plan"
	cp "$(find "$files/bin" "$files/usr/bin" -name busybox 2>/dev/null | head -1)" "$root/bin/busybox"
	cp "$(find "$files/bin" "$files/usr/bin" -name dash 2>/dev/null | head -1)" "$root/bin/sh" # dynamic, with an allocator that is found
	for place in "$files/lib/aarch64-linux-gnu" "$files/$lib" "$others/$lib"; do
		[ ! -d "$place" ] || find "$place" -maxdepth 1 -name '*.so*' -exec cp -a -t "$root/$lib" {} +
	done
	cp -a "$files"/usr/bin/python3* "$root/bin/"
	cp -a "$files"/usr/lib/python3* "$root/usr/lib/"
	mkdir -p "$root/usr/bin" && ln -s /bin/python3 "$root/usr/bin/python3"
	if [ "$4" != plan-allocators-arm64 ]; then
		mkdir -p "$root/etc"
		cp -a "$files/usr/lib/jvm" "$root/usr/lib/"
		cp -a "$files"/etc/java-* "$root/etc/" # to which links lead
		from=$(find "$files/usr/lib/jvm" -path '*/bin/java' | sort -V | tail -1)
		ln -s "${from#"$files"}" "$root/bin/java"
	fi
	ln -s aarch64-linux-gnu/ld-linux-aarch64.so.1 "$root/lib/ld-linux-aarch64.so.1"
	cp -L "$others/lib/ld-musl-aarch64.so.1" "$root/lib/" # musl's loader is also its library
	mkdir -p "$root$(dirname "$fragprof")" "$root$(dirname "$integration")" "$root$PWD/target/$target/testprogs" "$root$PWD/tests"
	aarch64-linux-gnu-strip --strip-debug -o "$root$fragprof" "$fragprof"
	aarch64-linux-gnu-strip --strip-debug -o "$root$integration" "$integration"
	find "target/$target/testprogs" -maxdepth 1 -type f -exec cp -a -t "$root$PWD/target/$target/testprogs" {} +
	mkdir -p "$root$PWD/target/$target/tmp/census"
	cp -a "target/$target/tmp/census/." "$root$PWD/target/$target/tmp/census/"
	cp -r --preserve=timestamps tests/testprogs tests/census tests/managed tests/trim "$root$PWD/tests/"
	if [ "$4" = plan-allocators-arm64 ]; then
		# One test for all of them, which needs their libraries.
		seconds=3600
		(cd target/suite-roots && find ./*-arm64 \( -name '*.so*' -o -type l \) -not -path '*/gconv/*' -print0 | cpio --null --quiet -o -H newc) |
			(mkdir -p "$root$PWD/target/suite-roots" && cd "$root$PWD/target/suite-roots" && cpio --quiet -idm)
		# And of the folders of its Rust programs these.
		for name in rust_on_jemalloc rust_on_mimalloc rust_on_snmalloc; do
			from=target/$target/testprogs/$name/$target/release
			mkdir -p "$root$PWD/$from"
			aarch64-linux-gnu-strip --strip-debug -o "$root$PWD/$from/$name" "$from/$name"
		done
	fi
	cat >"$root/matrix/environment" <<END
ROOT=$PWD
TEST_SECONDS=$seconds
INTEGRATION=$integration
FRAGPROF=$fragprof
export ${PLACES:+PLACES='$PLACES'} CI=true FRAGPROF_CORES_WRITTEN=/tmp/cores FRAGPROF_CORES_READ=/matrix/cores
END
	cp -r "$out/cores-x86_64" "$root/matrix/cores"
	(cd "$root" && find . -print0 | cpio --null --quiet -o -H newc) | gzip -1 >"$root.gz"
}

for suite in "$@"; do
	read -r _ _ libraries plan <<<"${suites[$suite]}"
	log=$out/$suite.log
	kernel=$(find "$kernels/$suite" -name 'vmlinuz*' -type f | sort -V | tail -1)
	# The version is in the file's name, or in that of the folder of its modules.
	release=$(grep -oE '[0-9]+\.[0-9]+\.[0-9]+[^/]*' <<<"${kernel#"$kernels"}" | tail -1)
	make_root "$out/root-$suite" "$libraries" "$(grep -oE '^[0-9]+\.[0-9]+' <<<"$release")" "${plan:=plan-arm64}"
	scripts/matrix/kernel-image.py "$kernel" "$out/kernel-$suite"
	echo "booting $release of $suite"
	# A CPU with everything that TCG supports: signed return addresses (by a cipher that is cheaper to emulate), landing pads, SVE. The
	# clock counts instructions, as on x86-64.
	timeout "${GUEST_SECONDS:-3600}" nice -n 5 qemu-system-aarch64 -machine virt,gic-version=3 -accel tcg -icount shift=1,sleep=off \
		-cpu max,pauth-impdef=on -smp 1 -m 3072 -kernel "$out/kernel-$suite" -initrd "$out/root-$suite.gz" -append "console=ttyAMA0 quiet panic=-1" \
		-nographic -nodefaults -no-reboot -serial stdio -net none </dev/null 2>&1 | stdbuf -oL tr -d '\r' >"$log" ||
		echo "$suite did not finish: see $log" >&2
	grep -oE '@@ (kernel|test|dmesg).*' "$log" || echo "$suite did not boot: see $log" >&2
	[ "$plan" = plan-arm64 ] || continue
	# Its core files, read here.
	rm -rf "$out/cores-$suite"
	mkdir -p "$out/cores-$suite"
	awk -v into="$out/cores-$suite" '$1 == "@@file" { print $3 >(into "/" $2 ".base64") }' "$log"
	for file in "$out/cores-$suite"/*.base64; do
		[ ! -e "$file" ] || base64 -d "$file" >"${file%.base64}"
	done
	test=core_files_of_the_other_architecture_are_read result=ok
	cores "" "$PWD/$out/cores-$suite" $test || result=FAILED
	echo "@@ test $result matrix::cores::$test::ON_X86_64 0 0" | tee -a "$log"
done
