#!/bin/sh
# Builds Google's tcmalloc from the sources in a crate and runs the tests with it: as a library to preload, and linked into a program, with
# pages of 8 KiB and, for the program, of 32 and 256 KiB. usage: scripts/google-tcmalloc.sh [DIRECTORY [VERSION]]
set -eu
cd "$(dirname "$0")/.."
directory=$(mkdir -p "${1:-target/google-tcmalloc}" && cd "${1:-target/google-tcmalloc}" && pwd)
version=${2:-0.1.14}

# The crate's own build makes a library without malloc and operator new.
crate=$(scripts/crate-sources.sh libtcmalloc-sys "$version" "$directory/sources")
echo "libtcmalloc-sys $version in $crate"

# The build script names the files; malloc_bridge.cc stands for tcmalloc.cc.
files=$(sed -n 's/^ *"c_src\/\(.*\.\(cc\|S\)\)",$/\1/p' "$crate/build.rs" | grep -v bridge)
make_objects() { # NAME PAGES
	objects=$directory/$1
	mkdir -p "$objects"
	{
		printf 'FLAGS := -std=c++17 -O2 -g1 -fPIC -w -DNDEBUG -D%s -I%s -I%s\n' "$2" "$crate/c_src/abseil-cpp" "$crate/c_src/tcmalloc"
		printf 'all:'
		for file in $files tcmalloc/tcmalloc/tcmalloc.cc; do printf ' %s' "$(echo "$file" | tr / _).o"; done
		printf '\n'
		for file in $files tcmalloc/tcmalloc/tcmalloc.cc; do
			printf '%s: ; $(CXX) $(FLAGS) -c -o $@.new %s && mv $@.new $@\n' "$(echo "$file" | tr / _).o" "$crate/c_src/$file"
		done
	} >"$objects/Makefile"
	make -s -C "$objects" -j"$(nproc)" all
}
make_objects 8k TCMALLOC_INTERNAL_8K_PAGES
g++ -shared -o "$directory/libgoogle_tcmalloc.so" "$directory"/8k/*.o -lpthread
rm -f "$directory/libgoogle_tcmalloc.a"
ar rcs "$directory/libgoogle_tcmalloc.a" "$directory"/8k/*.o
all=$directory/libgoogle_tcmalloc.so:$directory/libgoogle_tcmalloc.a
for pages in 8k 32k 256k; do
	case $pages in
	8k) ;;
	32k) make_objects 32k TCMALLOC_INTERNAL_32K_PAGES ;;
	256k) make_objects 256k TCMALLOC_INTERNAL_256K_PAGES ;;
	esac
	gcc -O1 -w -c -o "$directory/program.o" tests/census/google_tcmalloc.c
	g++ -rdynamic -o "$directory/with-$pages" "$directory/program.o" "$directory/$pages"/*.o -lpthread -ldl
	all=$all:$directory/with-$pages
done
strip -o "$directory/with-8k-stripped" "$directory/with-8k"
all=$all:$directory/with-8k-stripped

FRAGPROF_TEST_GOOGLE_TCMALLOC=$all ${CARGO:-cargo} test --test integration google_tcmalloc -- --nocapture --test-threads=1
