#!/usr/bin/env bash
# Runs Python tests on the module that the preset asan has built.
#
#   tools/sanitize_python.sh [pytest arguments]    default: the operators and the ONNX host
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ $# -gt 0 ] || set -- tests/python/ops tests/python/onnx
module="$PWD/build/asan/libpolyop_ffi.so"
[ -f "$module" ] || {
  echo "sanitize_python: $module is missing; run: cmake --preset asan && cmake --build --preset asan" >&2
  exit 1
}
# The interpreter is not instrumented: the run-time libraries have to be there before it starts. It frees little at its
# end, so leaks are not looked for; the C++ tests do that.
export LD_PRELOAD="$(c++ -print-file-name=libasan.so):$(c++ -print-file-name=libubsan.so)"
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
export POLYOP_LIBRARY="$module"
exec .venv/bin/python -m pytest -q "$@"
