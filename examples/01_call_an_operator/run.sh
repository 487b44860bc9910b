#!/usr/bin/env bash
# Installs the built library into an empty folder, builds this example against it far from the tree, and runs both
# programs. Needs `make build`.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$here/../.."
place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT

cmake --install "$root/build/${PRESET:-cpu}" --prefix "$place/prefix" >"$place/log"
cp "$here/main.cpp" "$here/CMakeLists.txt" "$place"
cmake -S "$place" -B "$place/build" -DCMAKE_PREFIX_PATH="$place/prefix" -DCMAKE_BUILD_TYPE=Release >>"$place/log"
cmake --build "$place/build" >>"$place/log"

echo "C++:"
"$place/build/call_an_operator"
echo "Python:"
"$root/.venv/bin/python" "$here/call_from_python.py"
