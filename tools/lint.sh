#!/usr/bin/env bash
# make lint: what can be checked without building. With --fix the formatters rewrite instead.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"
export PYTHONPATH="$PWD/python"  # the stubs of this checkout, whichever one is installed

cpp_files() { git ls-files -z --cached --others --exclude-standard -- '*.cpp' '*.h' '*.cu' '*.cuh'; }

if [ "${1:-}" = --fix ]; then
  ruff check -q --fix-only .
  ruff format -q .
  cpp_files | xargs -0 -r clang-format -i
  [ ! -e python/polyop/lib/libpolyop_ffi.so ] || python -m polyop.ops.stubs
  exit
fi

status=0
ruff check -q . || status=1
ruff format -q --check . || status=1
cpp_files | xargs -0 -r clang-format --dry-run -Werror || status=1
python tools/check_rooms.py || status=1
if [ -e python/polyop/lib/libpolyop_ffi.so ]; then
  python -m polyop.ops.stubs --check || status=1
else
  echo "lint: python/polyop/ops/__init__.pyi not checked against the schemas (needs make build)"
fi
exit $status
