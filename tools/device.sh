#!/usr/bin/env bash
# Everything that needs a GPU, in one call: configure, build, test, sanitize, measure. Results go to $OUT.
#
#   tools/device.sh [step...]     steps: build test sanitize bench profile; without arguments all of them
#
#   OUT=folder                    results, default build/device
#   CUDA_ARCHITECTURES=90a-real   GPUs to compile for, default that of this machine
#   BUILD=folder                  build folder, default build/cuda; CONFIGURE_ARGS: more arguments for CMake
#   PYTHON=python3                an interpreter with torch, apache-tvm-ffi and pytest; flashinfer is a peer when it has it
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

: "${OUT:=$PWD/build/device}" "${BUILD:=$PWD/build/cuda}" "${PYTHON:=python3}"
: "${CUDA_ARCHITECTURES:=90a-real}"
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$OUT"
status=0

step() { printf '\n==== %s (%d s)\n' "$*" "$SECONDS"; }

build() {
  step "build for $CUDA_ARCHITECTURES"
  cmake --preset cuda -B "$BUILD" -DPOLYOP_TESTS=OFF -DPOLYOP_HOST_TVM_FFI=ON -DPython_EXECUTABLE="$(command -v "$PYTHON")" \
    "-DCMAKE_CUDA_ARCHITECTURES=$CUDA_ARCHITECTURES" ${CONFIGURE_ARGS:-} >"$OUT/configure.log" 2>&1 &&
    cmake --build "$BUILD" -j "$(nproc)" >"$OUT/build.log" 2>&1 || {
    tail -n 40 "$OUT/configure.log" "$OUT/build.log"
    exit 1
  }
}

tests() {
  step "tests"
  "$PYTHON" -m pytest -q -x --maxfail=15 -p no:cacheprovider tests/python/cuda 2>&1 | tee "$OUT/test.log" | tail -n 60 || status=1
}

sanitize() {
  step "sanitize"
  local tool
  for tool in memcheck racecheck synccheck; do
    timeout 150 compute-sanitizer --tool "$tool" --error-exitcode 9 "$PYTHON" tests/python/cuda/reduced_sweep.py \
      >"$OUT/sanitize_$tool.log" 2>&1 || status=1
    echo "$tool: $(tail -n 1 "$OUT/sanitize_$tool.log")"
  done
}

bench() {
  step "bench"
  "$PYTHON" benchmarks/gpu_kernels.py --output "$OUT/gpu_kernels.json" || status=1
}

profile() {
  step "profile"
  timeout 120 ncu --clock-control none --set full --kernel-name regex:split_kv --launch-skip 2 --launch-count 1 \
    "$PYTHON" benchmarks/gpu_kernels.py --profile attention >"$OUT/ncu_attention.txt" 2>&1 || status=1
  grep -E "Throughput|Registers Per|Achieved Occ|Duration|Issue Slots|No Eligible|stall|Local|Est\. Speedup|cycles being" "$OUT/ncu_attention.txt"
}

nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem --format=csv,noheader
for name in ${*:-build test sanitize bench profile}; do
  case $name in
    test) tests ;;
    build | sanitize | bench | profile) $name ;;
    *) echo "unknown step $name" >&2; exit 2 ;;
  esac
done
step "done"
exit $status
