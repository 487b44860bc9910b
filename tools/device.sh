#!/usr/bin/env bash
# Everything that needs a GPU, in one call: configure, build, test, sanitize, measure. Results go to $OUT.
#
#   tools/device.sh [--prebuilt] [--only operator] [step...]
#
#   steps                         build test sanitize bench profile; without arguments all of them
#   --prebuilt                    leaves build out: python/polyop/lib holds a module with CUDA kernels already
#   --only operator               bench and profile of this operator alone
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
only=()
steps=()
prebuilt=
while [ $# -gt 0 ]; do
  case $1 in
    --prebuilt) prebuilt=1 ;;
    --only) only=(--only "${2:?--only wants an operator}") && shift ;;
    build | test | sanitize | bench | profile) steps+=("$1") ;;
    *) echo "device.sh: unknown step or option $1" >&2 && exit 2 ;;
  esac
  shift
done
[ ${#steps[@]} -gt 0 ] || steps=(build test sanitize bench profile)

step() { printf '\n==== %s (%d s)\n' "$*" "$SECONDS"; }

build() {
  if [ -n "$prebuilt" ]; then
    "$PYTHON" -c 'from polyop import cuda; assert cuda.has_kernels(), "the module was built without CUDA kernels"' || exit 1
    return
  fi
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
  "$PYTHON" -m pytest -q --maxfail=15 -p no:cacheprovider tests/python/cuda 2>&1 | tee "$OUT/test.log" | tail -n 60 || status=1
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
  "$PYTHON" benchmarks/gpu_kernels.py "${only[@]}" --output "$OUT/gpu_kernels.json" || status=1
}

profile() {
  step "profile"
  local match=()
  [ ${#only[@]} -gt 0 ] || match=(--only attention --match "B=64 length=4096 rows=1 Hq=32 Hkv=8 D=128 page=16 kv=bf16")
  timeout 120 ncu --clock-control none --set full --profile-from-start off --launch-skip 2 --launch-count 4 \
    "$PYTHON" benchmarks/gpu_kernels.py "${only[@]}" "${match[@]}" --profile >"$OUT/ncu.txt" 2>&1 || status=1
  grep -E "Throughput|Registers Per|Achieved Occ|Duration|Issue Slots|No Eligible|stall|Local|Est\. Speedup|cycles being" "$OUT/ncu.txt"
}

nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem --format=csv,noheader
for name in "${steps[@]}"; do
  [ "$name" != test ] || name=tests
  $name
done
step "done"
exit $status
