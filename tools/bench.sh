#!/usr/bin/env bash
# make bench: the programs of benchmarks/, each measuring ours and a peer in one run. The peer of the model benchmark,
# llama-cpp-python, is built here with the vector instructions of this processor (the published source build knows only
# what the compiler's default target has). C++ programs of benchmarks/ run after the Python one of the same operator.
#
#   BENCH="attention int4_groupwise_gemm"   only these programs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly python=.venv/bin/python

has_flags() { local flag; for flag; do grep -qw -m1 "$flag" /proc/cpuinfo || return 1; done; }

if ! $python -c 'import llama_cpp' 2>/dev/null; then
  options="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON"
  has_flags avx512f avx512bw avx512vl avx512dq avx512cd && options+=" -DGGML_AVX512=ON"
  has_flags avx512_vnni && options+=" -DGGML_AVX512_VNNI=ON"
  has_flags avx512vbmi && options+=" -DGGML_AVX512_VBMI=ON"
  has_flags avx512_bf16 && options+=" -DGGML_AVX512_BF16=ON"
  echo "==> building the peer llama-cpp-python ($options)"
  CMAKE_ARGS="$options" CMAKE_BUILD_PARALLEL_LEVEL="$(nproc)" $python -m pip install -q llama-cpp-python
fi

cmake --build --preset "${PRESET:-cpu}" --target benchmarks
names="${BENCH:-circular_pad kv_cache_update rotary_embedding qk_norm_rope_append attention int4_groupwise_gemm call_overhead model}"
for name in $names; do
  echo "==> $name"
  $python "benchmarks/bench_$name.py"
  program="build/${PRESET:-cpu}/benchmarks/${name}_benchmark"
  if [ -x "$program" ]; then "$program"; fi
done
