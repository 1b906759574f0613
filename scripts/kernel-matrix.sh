#!/usr/bin/env bash
# Boots Debian's kernels, and one of Ubuntu's, in emulation and runs in each: `fragprof doctor`, every BPF program by itself through the
# verifier, and a short form of the integration tests (scripts/matrix/plan). Writes the table of docs/kernels.md.
#
#   kernel-matrix.sh [SUITE...]     default: bullseye bookworm trixie sid lockdown, arm64-bookworm arm64 arm64-16k arm64-64k arm64-backports
#                                   arm64-sid
#
# lockdown is the kernel of trixie with lockdown=confidentiality; its tests are plan-lockdown.
# arm64 is the kernel of trixie for arm64, arm64-16k the same with pages of 16 KiB, arm64-64k Ubuntu's with pages of 64 KiB,
# arm64-bookworm an older one, arm64-backports and arm64-sid newer ones (scripts/matrix/arm64.sh); their tests are plan-arm64.
#
# A kernel that is not named keeps its columns in the tables.
#
# Emulation (TCG), not KVM: nested virtualisation does not boot stock kernels everywhere, and this takes some minutes per kernel.
# GUESTS=2 at a time, GUEST_SECONDS=1800 at most each.
set -euo pipefail
cd "$(dirname "$0")/.."
out=target/kernel-matrix
kernels=target/kernels
mkdir -p "$out"

# Packages are named by version; the newest of each suite is taken.
declare -A package=(
	[bullseye]='linux-image-5.10.0-*-cloud-amd64'
	[bookworm]='linux-image-6.1.0-*-cloud-amd64'
	[trixie]='linux-image-6.12.*-cloud-amd64'
	[sid]='linux-binary-*-cloud-amd64'
)
all=("$@")
[ ${#all[@]} -gt 0 ] || all=(bullseye bookworm trixie sid lockdown arm64-bookworm arm64 arm64-16k arm64-64k arm64-backports arm64-sid)
suites=() arm64=()
for suite in "${all[@]}"; do
	case $suite in arm64*) arm64+=("$suite") ;; *) suites+=("$suite") ;; esac
done
[ ${#arm64[@]} -eq 0 ] || scripts/matrix/arm64.sh "${arm64[@]}"
if [ ${#suites[@]} -eq 0 ]; then
	logs=("${arm64[@]/#/$out/}")
	exec python3 scripts/matrix/table.py "${logs[@]/%/.log}"
fi

# INTEGRATION=FILE uses an existing test binary, with the fragprof next to it.
integration=${INTEGRATION:-$(cargo test --quiet --no-run --test integration --message-format=json |
	python3 -c 'import json,sys
for line in sys.stdin:
    m = json.loads(line)
    if m.get("executable") and m["target"]["name"] == "integration": print(m["executable"])')}
mapfile -t plan < <(grep -v '^$' scripts/matrix/plan)

# The host's kernel is a row of the table, and its run compiles the test programs for the guests.
scripts/mount-kernel-filesystems.sh
host=$out/host.log
[ -n "${GUESTS_ONLY:-}" ] || {
	echo "@@ kernel $(uname -r)"
	target/debug/fragprof doctor --programs --json | sed 's/^/@@doctor /'
	for name in "${plan[@]}"; do
		log=$("$integration" --exact "$name" --include-ignored --nocapture 2>&1) && result=ok || result=FAILED
		grep -q '^test result: ok. 1 passed' <<<"$log" || result=FAILED
		echo "@@ test $result $name 0 0"
		[ "$result" = ok ] || tail -n 60 <<<"$log"
	done
} >"$host"
if grep '@@ test FAILED' "$host"; then echo "failed on the host: see $host" >&2; fi

# The root file system of a guest: the binaries at their own paths with the libraries they need, the test programs, busybox.
root=$out/root
rm -rf "$root"
mkdir -p "$root"/{bin,dev,matrix,proc,sys,tmp,root}
install -m 755 scripts/matrix/guest-init "$root/init"
cp scripts/matrix/plan scripts/matrix/plan-lockdown "$root/matrix/"
busybox=$(command -v busybox)
cp "$busybox" "$root/bin/busybox"
with_libraries() {
	local file library
	for file in "$@"; do
		mkdir -p "$root$(dirname "$file")"
		cp -L --preserve=timestamps,mode "$file" "$root$file"
		for library in $(ldd "$file" 2>/dev/null | sed -nE 's,^(.* => )?[[:space:]]*(/[^ ]+) \(0x.*,\2,p' || true); do
			mkdir -p "$root$(dirname "$library")"
			[ -e "$root$library" ] || cp -L "$library" "$root$library"
		done
	done
}
lib=/usr/lib/x86_64-linux-gnu
with_libraries "$PWD/target/debug/fragprof" "$integration" "$lib"/libjemalloc.so.2 "$lib"/libtcmalloc_minimal.so.4 "$lib"/libmimalloc.so.2
mapfile -t programs < <(find "$PWD/target/testprogs" "$PWD/target/tmp/census" -type f -perm -u+x)
with_libraries "${programs[@]}"
cp --preserve=timestamps target/testprogs/*.key "$root$PWD/target/testprogs/"
mkdir -p "$root$PWD/tests"
cp -r --preserve=timestamps tests/testprogs tests/census tests/trim "$root$PWD/tests/"
# Programs linked dynamically against musl name its loader, which is also its library.
mkdir -p "$root/lib"
cp -L /lib/ld-musl-x86_64.so.1 "$root/lib/"
strip --strip-debug "$root$integration" "$root$PWD/target/debug/fragprof"
cat >"$root/matrix/environment" <<END
ROOT=$PWD
INTEGRATION=$integration
FRAGPROF=$PWD/target/debug/fragprof
export CI=true
END
(cd "$root" && find . -print0 | cpio --null --quiet -o -H newc) | gzip -1 >"$out/initramfs.gz"

suite_of() { [ "$1" = lockdown ] && echo trixie || echo "$1"; }
boot() {
	local suite=$1 kernel more="" log=$out/$1.log
	[ "$suite" != lockdown ] || more="lockdown=confidentiality"
	kernel=$(find "$kernels/$(suite_of "$suite")" -name 'vmlinuz*' -type f | sort -V | tail -1)
	echo "booting $(basename "$kernel") of $suite"
	# One CPU with everything TCG can do; two CPUs with cx16 were seen to double-fault a guest. Its clock counts instructions (icount), so
	# that a busy host does not use up the tests' time limits, and idle time passes at once. The timer check is off: a guest that is
	# delayed at the wrong moment would panic in it.
	timeout "${GUEST_SECONDS:-1800}" nice -n 5 qemu-system-x86_64 -accel tcg -icount shift=1,sleep=off -cpu max -smp 1 -m 3072 \
		-kernel "$kernel" -initrd "$out/initramfs.gz" -append "console=ttyS0 quiet panic=-1 no_timer_check $more" -nographic -nodefaults \
		-no-reboot -serial stdio -net none </dev/null 2>&1 | stdbuf -oL tr -d '\r' >"$log" || echo "$suite did not finish: see $log" >&2
	grep -oE '@@ (kernel|test|dmesg).*' "$log" || echo "$suite did not boot: see $log" >&2
}
for suite in $(for one in "${suites[@]}"; do suite_of "$one"; done | sort -u); do
	scripts/fetch-suite.sh "$suite" "$kernels/$suite" "${package[$suite]}"
done
# GUESTS at a time, 3 GB of memory each.
for suite in "${suites[@]}"; do
	while [ "$(jobs -rp | wc -l)" -ge "${GUESTS:-2}" ]; do wait -n; done
	boot "$suite" &
done
wait

logs=("$host")
for suite in "${all[@]}"; do logs+=("$out/$suite.log"); done
python3 scripts/matrix/table.py "${logs[@]}"
