// What becomes of an item's sums: results of rows that have one chunk, parts of rows that have several, and the joining
// of parts by the block that finishes last.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "polyop/cuda/convert.cuh"
#include "polyop/cuda/ptx.cuh"
#include "polyop/ops/attention/cuda/split_plan.cuh"

namespace polyop::cuda {

inline constexpr int kBlockThreads = 32 * kWarps;
inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

/// Where parts lie: sums of a tile's rows over one chunk, or over all chunks that a block had from the first one on.
/// Narrow tiles: for each block its leading chunks, whose tile another block began, and one place more for the part of
/// a tile that another block ends; for each of them and each warp `narrow_floats`, as the lanes hold them. Wide tiles:
/// f32 [slots, D] sums and [slots] pairs (reference in base 2, denominator).
struct SplitScratch {
  float* narrow = nullptr;
  int32_t narrow_floats = 0;
  int32_t most_leading = 0;  // chunks
  float* wide = nullptr;
  float2* wide_sums = nullptr;
  uint32_t* semaphores = nullptr;
  int64_t wide_slots_each = 0;  // of one sequence; 0: counted by row
  int32_t most_wide_chunks = 1;

  /// Part of this warp; leading: number of the chunk in its block's share, or most_leading.
  [[nodiscard]] __device__ float4* narrow_part(int32_t block, int32_t leading) const {
    const int64_t slot =
        (int64_t{block} * (most_leading + 1) + leading) * kWarps + static_cast<int64_t>(threadIdx.x / 32);
    return reinterpret_cast<float4*>(narrow + slot * narrow_floats);
  }

  [[nodiscard]] __device__ int64_t wide_slot(const SequenceItems& s, int32_t group_size, int32_t num_kv_heads,
                                             int32_t row, int32_t kv_head, int32_t chunk) const {
    if (wide_slots_each > 0) {
      return s.geometry.sequence * wide_slots_each + (int64_t{row} * num_kv_heads + kv_head) * s.num_chunks + chunk;
    }
    const int64_t global_row = int64_t{s.geometry.row_begin} * group_size + row;
    return (global_row * num_kv_heads + kv_head) * most_wide_chunks + chunk;
  }
};

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

/// The arguments of the kernel, for all its parts.
struct SplitCall {
  const AttentionProblem& p;
  const SplitPlan& plan;
  const AttentionFlags& flags;
  const SplitScratch& scratch;

  [[nodiscard]] __device__ int32_t num_kv_heads() const { return static_cast<int32_t>(p.num_kv_heads); }

  /// Query head of a row (query row x G + head in the group).
  [[nodiscard]] __device__ int64_t head_of(int32_t kv_head, int32_t row) const {
    return int64_t{kv_head} * plan.group_size + row % plan.group_size;
  }

  [[nodiscard]] __device__ int64_t wide_slot(const SequenceItems& s, int32_t kv_head, int32_t row,
                                             int32_t chunk) const {
    return scratch.wide_slot(s, plan.group_size, num_kv_heads(), row, kv_head, chunk);
  }

  __device__ void store_lse(const SequenceItems& s, int32_t query_row, int64_t head, float value) const {
    if (p.lse.data != nullptr)
      static_cast<float*>(p.lse.data)[row_offset(p, p.lse, s.geometry, query_row, head)] = value;
  }

  /// What a row's sums are multiplied by to become its output; writes lse when `writes_lse`.
  [[nodiscard]] __device__ float finish_row(const SequenceItems& s, int32_t kv_head, int32_t row, RowSum sum,
                                            bool writes_lse) const {
    const int32_t query_row = row / plan.group_size;
    const int64_t head = head_of(kv_head, row);
    if (sum.is_empty()) {
      if (writes_lse) store_lse(s, query_row, head, -INFINITY);
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
    if (writes_lse) store_lse(s, query_row, head, (sum.reference + log2f(sum.denominator)) * kLn2);
    const float v_scale = p.v_scale.data == nullptr ? 1.0f : __ldg(p.v_scale.data + kv_head * p.v_scale.head_stride);
    return __fdiv_rn(factor * v_scale, p.output_scale == nullptr ? sum.denominator : sum.denominator * *p.output_scale);
  }

  /// Element offset in out of channel 0 of a row.
  [[nodiscard]] __device__ int64_t out_offset(const SequenceItems& s, int32_t kv_head, int32_t row) const {
    return row_offset(p, p.out, s.geometry, row / plan.group_size, head_of(kv_head, row));
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

  /// Counts the segment's chunks, whose parts the block has written; true when none is missing of the tile and head.
  /// Called by all threads; `is_last` is a word of shared memory.
  [[nodiscard]] __device__ bool count_chunks(const SplitWork& work, int* is_last) const {
    __syncthreads();  // parts of all warps to thread 0
    if (threadIdx.x == 0) {
      __threadfence();  // parts to whoever counts last
      const SequenceGeometry& g = work.sequence.geometry;
      const int64_t tile = g.sequence + (int64_t{g.row_begin} * plan.group_size) / kLeastTileRows +
                           work.segment.row_begin / kLeastTileRows;
      uint32_t* semaphore = scratch.semaphores + tile * p.num_kv_heads + work.segment.kv_head;
      const auto count = static_cast<uint32_t>(work.segment.chunk_end - work.segment.chunk_begin);
      const bool last = fetch_add(semaphore, count) + count == static_cast<uint32_t>(work.sequence.num_chunks);
      if (last) *semaphore = 0;  // for the next launch
      *is_last = last ? 1 : 0;
    }
    __syncthreads();  // is_last to all
    return *is_last != 0;
  }
};

/// Packed rows behind the last sequence: 0 and -inf. Called by the block's first kWarps warps.
template <int kHeadDim>
__device__ void clear_rows_of_nobody(const SplitCall& call) {
  const AttentionProblem& p = call.p;
  if (p.query_form != AttentionQueryForm::kPacked) return;
  const int64_t owned = min(max(int64_t{__ldg(p.query_offsets + p.num_sequences)}, int64_t{0}), p.num_query_rows);
  const int64_t count = (p.num_query_rows - owned) * p.num_query_heads;
  for (int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; i < count; i += int64_t{gridDim.x} * kWarps) {
    const int64_t row = owned + i / p.num_query_heads;
    const int64_t head = i % p.num_query_heads;
    const int64_t offset = row * p.out.row_stride + head * p.out.head_stride;
    const float zero[1] = {};
    for (int channel = threadIdx.x % 32; channel < kHeadDim; channel += 32) call.store_out(offset + channel, zero);
    if (threadIdx.x % 32 == 0 && p.lse.data != nullptr) {
      static_cast<float*>(p.lse.data)[row * p.lse.row_stride + head * p.lse.head_stride] = -INFINITY;
    }
  }
}

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
