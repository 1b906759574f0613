#!/usr/bin/env bash
# Tests the census of CPython's heap, its frames and its objects with the CPython of another Debian suite, which runs here with that suite's
# own loader and libraries.
#   python.sh [SUITE [VERSION]]     forky 3.14
set -euo pipefail
cd "$(dirname "$0")/.."
suite=${1:-forky} version=${2:-3.14}
scripts/install-packages.sh patchelf
root=$PWD/target/suites/$suite-python
scripts/fetch-suite.sh "$suite" "$root" libc6 libexpat1 zlib1g libffi8 "python$version-minimal" "libpython$version-minimal" "libpython$version-stdlib"
libraries=$root/usr/lib/x86_64-linux-gnu
python=$root/usr/bin/python$version-here
cp "$root/usr/bin/python$version" "$python.new"
patchelf --set-interpreter "$libraries/ld-linux-x86-64.so.2" --force-rpath --set-rpath "$libraries" "$python.new"
mv "$python.new" "$python"
"$python" -c 'import sys; print("CPython", sys.version)'
export FRAGPROF_TEST_PYTHON=$python
cargo test --test integration -- census::python managed::python
cargo test --test integration objects_of_every_python -- --ignored --nocapture
