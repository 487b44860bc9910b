// Where parts of rows that several blocks share lie, and which block is the last to have its own ready.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "polyop/cuda/ptx.cuh"
#include "polyop/ops/attention/cuda/row_results.cuh"
#include "polyop/ops/attention/cuda/split_queue.cuh"

namespace polyop::cuda {

inline constexpr int kBlockThreads = 32 * kWarps;

/// Where parts lie: sums of a tile's rows over one chunk, or over all chunks that a block had from the first one on.
/// Narrow tiles: for each block its leading chunks, whose tile another block began, and one place more for the part of
/// a tile that another block ends. A part is f32 [narrow_rows, D] sums, then for each row reference (base 2) and
/// denominator. Wide tiles: f32 [slots, D] sums and [slots] such pairs.
struct SplitScratch {
  float* narrow = nullptr;
  int32_t narrow_rows = 0;   // of a part
  int32_t most_leading = 0;  // chunks
  float* wide = nullptr;
  float2* wide_sums = nullptr;
  uint32_t* semaphores = nullptr;
  int64_t wide_slots_each = 0;  // of one sequence; 0: counted by row
  int32_t most_wide_chunks = 1;

  /// Number of a block's part; leading: number of the chunk in its block's share, or most_leading.
  [[nodiscard]] __device__ int32_t narrow_slot(int32_t block, int32_t leading) const {
    return block * (most_leading + 1) + leading;
  }

  [[nodiscard]] __device__ float* narrow_part(int32_t slot, int head_dim) const {
    return narrow + int64_t{slot} * narrow_rows * (head_dim + 2);
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

  /// Four channels of one row of a tile to out, and its log-sum-exp.
  __device__ void store_result(const SplitWork& work, int32_t row, int32_t channel, float4 total, RowSum sum) const {
    const SequenceGeometry& g = work.sequence.geometry;
    const int32_t kv_head = work.segment.kv_head;
    const int32_t in_sequence = work.segment.row_begin + row;
    const float factor = finish_row(g, kv_head, in_sequence, sum, channel == 0);
    store_scaled(out_offset(g, kv_head, in_sequence) + channel, total, factor, sum.is_empty());
  }

  /// Counter of the segment's tile and head.
  [[nodiscard]] __device__ uint32_t* semaphore(const SplitWork& work) const {
    const SequenceGeometry& g = work.sequence.geometry;
    const int64_t tile = g.sequence + (int64_t{g.row_begin} * plan.group_size) / kLeastTileRows +
                         work.segment.row_begin / kLeastTileRows;
    return scratch.semaphores + tile * p.num_kv_heads + work.segment.kv_head;
  }

  /// Whether other blocks have items of the segment's tile, and the tile is narrow.
  [[nodiscard]] __device__ bool shares_narrow(const SplitWork& work) const {
    return work.sequence.tile_rows <= plan.narrow_rows && !work.has_tile();
  }

  /// Counts the segment's chunks, whose parts the block has written before a barrier; by one thread. Returns the count
  /// so far, which takes its time only where it is used.
  [[nodiscard]] __device__ uint32_t count_parts(const SplitWork& work) const {
    const auto count = static_cast<uint32_t>(work.segment.chunk_end - work.segment.chunk_begin);
    return fetch_add_released(semaphore(work), count) + count;
  }

  /// Whether nothing is missing of the tile: then the parts of other blocks are there, and the counter is zero again.
  [[nodiscard]] __device__ bool takes_tile(const SplitWork& work, uint32_t counted) const {
    if (counted != static_cast<uint32_t>(work.sequence.num_chunks)) return false;
    fence_device();        // reads of parts stay behind the count
    *semaphore(work) = 0;  // for the next launch
    return true;
  }

  /// Both for a segment of a wide tile; called by all threads, `is_last` is a word of shared memory.
  [[nodiscard]] __device__ bool count_chunks(const SplitWork& work, int* is_last) const {
    __syncthreads();  // parts of all warps to thread 0
    if (threadIdx.x == 0) *is_last = takes_tile(work, count_parts(work)) ? 1 : 0;
    __syncthreads();  // is_last to all
    return *is_last != 0;
  }
};

}  // namespace polyop::cuda
