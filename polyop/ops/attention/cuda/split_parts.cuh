// Where parts of rows that several blocks share lie, and which block is the last to have its own ready.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "polyop/ops/attention/cuda/row_results.cuh"
#include "polyop/ops/attention/cuda/split_plan.cuh"

namespace polyop::cuda {

inline constexpr int kBlockThreads = 32 * kWarps;

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

/// The arguments of the kernel, for all its parts.
struct SplitCall : AttentionCall {
  const SplitPlan& plan;
  const SplitScratch& scratch;

  [[nodiscard]] __device__ int64_t wide_slot(const SequenceItems& s, int32_t kv_head, int32_t row,
                                             int32_t chunk) const {
    return scratch.wide_slot(s, plan.group_size, num_kv_heads(), row, kv_head, chunk);
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

}  // namespace polyop::cuda
