#!/usr/bin/env bash
# Unpacks packages of another suite of Debian, or of Ubuntu (resolute), into a directory, without changing this machine's own packages.
#   fetch-suite.sh SUITE DIRECTORY PACKAGE...
# A name with a * selects the newest matching package. ARCHITECTURE=arm64 selects another architecture.
set -euo pipefail
suite=$1 into=$2
shift 2
state=${FETCH_STATE:-target/suites}/$suite${ARCHITECTURE:+-$ARCHITECTURE}
mkdir -p "$state/lists/partial" "$state/archives/partial" "$into"
state=$(realpath "$state")
into=$(realpath "$into")

case $suite in
resolute) mirror=${UBUNTU_MIRROR:-http://archive.ubuntu.com/ubuntu} ;;
*) mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian} ;;
esac
# apt has the archive's keys, but older or newer suites may be signed with others.
echo "deb [trusted=yes] $mirror $suite main" >"$state/sources.list"
: >"$state/status" # packages installed here are ignored
apt=(apt-get -qq -o "Dir::Etc::sourcelist=$state/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::Lists=$state/lists"
	-o "Dir::State::status=$state/status" -o "Dir::Cache::archives=$state/archives" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root
	${ARCHITECTURE:+-o "APT::Architecture=$ARCHITECTURE" -o "APT::Architectures=$ARCHITECTURE"})
cache=(apt-cache "${apt[@]:2}")

# Once a day is enough.
if [ -z "$(find "$state/updated" -mmin -1440 2>/dev/null)" ]; then
	"${apt[@]}" update
	touch "$state/updated"
fi
for name in "$@"; do
	package=$name
	if [[ $name == *'*'* ]]; then
		package=$("${cache[@]}" pkgnames "${name%%\**}" | grep -E "^${name//\*/.*}\$" | grep -vE -- '-(dbg|unsigned|rt-|signed-template)' | sort -V | tail -1)
		[ -n "$package" ] || { echo "no package of $suite matches $name" >&2; exit 1; }
	fi
	mark="$into/.unpacked-$package"
	[ -e "$mark" ] && continue
	(cd "$state/archives" && rm -f "${package}_"*.deb && "${apt[@]}" download "$package")
	dpkg -x "$state/archives/${package}_"*.deb "$into"
	rm -f "$state/archives/${package}_"*.deb
	touch "$mark"
	echo "$suite: $package"
done

# Absolute links would point outside the directory.
find "$into" -type l -lname '/*' | while read -r link; do
	to=$into$(readlink "$link")
	[ ! -e "$to" ] || ln -sfr "$to" "$link"
done
