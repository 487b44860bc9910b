// What a row's sums become: chunks joined in their order, the sink, the log-sum-exp and the output. Shared by the
// kernels that split the keys.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "polyop/cuda/convert.cuh"
#include "polyop/cuda/ptx.cuh"
#include "polyop/ops/attention/cuda/sequence_geometry.cuh"

namespace polyop::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

/// What a row has gathered beside its sums: exp2(score - reference) is what its weights are counted in. reference is
/// -inf where no key was visible.
struct RowSum {
  float reference = -INFINITY;
  float denominator = 0.0f;

  [[nodiscard]] __device__ bool is_empty() const { return reference == -INFINITY && denominator == 0.0f; }

  /// Takes the next chunk's in; returns what this row's sums and the chunk's are multiplied by.
  __device__ float2 join(RowSum next) {
    const float largest = fmaxf(reference, next.reference);
    const float common = largest == -INFINITY ? 0.0f : largest;
    const float2 factors = {exp2_approximate(reference - common), exp2_approximate(next.reference - common)};
    denominator = fmaf(next.denominator, factors.y, __fmul_rn(denominator, factors.x));
    reference = largest;
    return factors;
  }
};

/// Chunks are joined in their order, by the same operations wherever it happens: the bits do not depend on which blocks
/// had which chunks.
[[nodiscard]] __device__ inline float join_sums(float sum, float next, float2 factors) {
  return fmaf(next, factors.y, __fmul_rn(sum, factors.x));
}

[[nodiscard]] __device__ inline float4 join_quads(float4 sum, float4 next, float2 factors) {
  return {join_sums(sum.x, next.x, factors), join_sums(sum.y, next.y, factors), join_sums(sum.z, next.z, factors),
          join_sums(sum.w, next.w, factors)};
}

/// The arguments of a kernel that all its parts need. A row is query row x G + head in the group.
struct AttentionCall {
  const AttentionProblem& p;
  const AttentionFlags& flags;
  int32_t group_size;  // G

  [[nodiscard]] __device__ int32_t num_kv_heads() const { return static_cast<int32_t>(p.num_kv_heads); }

  /// Query head of a row (query row x G + head in the group).
  [[nodiscard]] __device__ int64_t head_of(int32_t kv_head, int32_t row) const {
    return int64_t{kv_head} * group_size + row % group_size;
  }

  /// What q k^T is multiplied by to become a score in base 2.
  [[nodiscard]] __device__ float score_scale(int32_t kv_head) const {
    const float k_scale = p.k_scale.data == nullptr ? 1.0f : __ldg(p.k_scale.data + kv_head * p.k_scale.head_stride);
    return p.scale * k_scale * kLog2E;
  }

  __device__ void store_lse(const SequenceGeometry& g, int32_t query_row, int64_t head, float value) const {
    if (p.lse.data != nullptr) static_cast<float*>(p.lse.data)[row_offset(p, p.lse, g, query_row, head)] = value;
  }

  /// What a row's sums are multiplied by to become its output; writes lse when `writes_lse`.
  [[nodiscard]] __device__ float finish_row(const SequenceGeometry& g, int32_t kv_head, int32_t row, RowSum sum,
                                            bool writes_lse) const {
    const int32_t query_row = row / group_size;
    const int64_t head = head_of(kv_head, row);
    if (sum.is_empty()) {
      if (writes_lse) store_lse(g, query_row, head, -INFINITY);
      return 0.0f;
    }
    float factor = 1.0f;
    if (p.sinks != nullptr) {
      const float sink = __ldg(p.sinks + head) * kLog2E;
      const float reference = fmaxf(sum.reference, sink);
      factor = exp2_approximate(sum.reference - reference);
      sum.denominator = fmaf(sum.denominator, factor, exp2_approximate(sink - reference));
      sum.reference = reference;
    }
    if (writes_lse) store_lse(g, query_row, head, (sum.reference + log2f(sum.denominator)) * kLn2);
    const float v_scale = p.v_scale.data == nullptr ? 1.0f : __ldg(p.v_scale.data + kv_head * p.v_scale.head_stride);
    return __fdiv_rn(factor * v_scale, p.output_scale == nullptr ? sum.denominator : sum.denominator * *p.output_scale);
  }

  /// Element offset in out of channel 0 of a row.
  [[nodiscard]] __device__ int64_t out_offset(const SequenceGeometry& g, int32_t kv_head, int32_t row) const {
    return row_offset(p, p.out, g, row / group_size, head_of(kv_head, row));
  }

  /// kCount neighbouring channels of out, which is of q's dtype or f8e4m3.
  template <int kCount>
  __device__ void store_out(int64_t offset, const float (&values)[kCount]) const {
    if (p.out.dtype == DType::kF8E4M3) {
      auto* out = static_cast<Fp8*>(p.out.data) + offset;
#pragma unroll
      for (int i = 0; i < kCount; ++i) out[i] = from_float<Fp8>(values[i]);
    } else if (p.out.dtype == DType::kF16) {
      auto* out = static_cast<__half*>(p.out.data) + offset;
#pragma unroll
      for (int i = 0; i < kCount; ++i) out[i] = from_float<__half>(values[i]);
    } else {
      auto* out = static_cast<__nv_bfloat16*>(p.out.data) + offset;
#pragma unroll
      for (int i = 0; i < kCount; ++i) out[i] = from_float<__nv_bfloat16>(values[i]);
    }
  }

  /// Four channels of a row's output; a row without keys gives 0 whatever its sums are.
  __device__ void store_scaled(int64_t offset, float4 sum, float factor, bool is_empty) const {
    if (is_empty) sum = {0.0f, 0.0f, 0.0f, 0.0f};
    const float values[4] = {sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor};
    store_out(offset, values);
  }

  /// Packed rows behind the first `owned` ones, which sequences own: 0 and -inf. Called by the first `warps` warps of
  /// every block.
  __device__ void clear_rows_of_nobody(int warps, int64_t owned) const {
    if (p.query_form != AttentionQueryForm::kPacked) return;
    const int64_t count = (p.num_query_rows - owned) * p.num_query_heads;
    for (int64_t i = int64_t{blockIdx.x} * warps + threadIdx.x / 32; i < count; i += int64_t{gridDim.x} * warps) {
      const int64_t row = owned + i / p.num_query_heads;
      const int64_t head = i % p.num_query_heads;
      const int64_t offset = row * p.out.row_stride + head * p.out.head_stride;
      const float zero[1] = {};
      for (int64_t channel = threadIdx.x % 32; channel < p.value_head_dim; channel += 32)
        store_out(offset + channel, zero);
      if (threadIdx.x % 32 == 0 && p.lse.data != nullptr) {
        static_cast<float*>(p.lse.data)[row * p.lse.row_stride + head * p.lse.head_stride] = -INFINITY;
      }
    }
  }
};

/// Two 32-bit floats as a pair of the type that the matrix units multiply.
template <class Compute>
__device__ inline uint32_t narrow_pair(float low, float high) {
  if constexpr (std::is_same_v<Compute, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

/// A pair of q's channels, f16 or bf16, as floats.
__device__ inline float2 widen_query(bool is_f16, uint32_t pair) {
  const float2 as_f16 = __half22float2(*reinterpret_cast<const __half2*>(&pair));
  const float2 as_bf16 = {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  return {is_f16 ? as_f16.x : as_bf16.x, is_f16 ? as_f16.y : as_bf16.y};
}

/// The power of two that brings the largest of a row of q near f16's 2^14, and its inverse. Exact for all that counts:
/// what falls below f16's least is under 2^-38 of the largest. `most`: of the lanes that share the row.
struct QueryScale {
  float factor = 1.0f;
  float inverse = 1.0f;

  __device__ explicit QueryScale(float most) {
    const int exponent = min(max(most > 0.0f && most < INFINITY ? ilogbf(most) : 14, -100), 114);
    factor = exp2f(static_cast<float>(14 - exponent));
    inverse = exp2f(static_cast<float>(exponent - 14));
  }
};

}  // namespace polyop::cuda
