// The way of keys and values into shared memory: one warpgroup copies, some tiles ahead of those that multiply.
#pragma once

#include <cstdint>

#include "polyop/cuda/ptx.cuh"
#include "polyop/ops/attention/cuda/split_parts.cuh"
#include "polyop/ops/attention/cuda/wgmma_plan.cuh"

namespace polyop::cuda {

/// Tiles in shared memory: panels of 64 channels, a row of 128 bytes in each, its 16-byte units swizzled as the matrix
/// units want them.
template <int kHeadDim, int kRows>
struct SwizzledTile {
  static constexpr int kPanelBytes = kRows * 128;
  static constexpr int kBytes = kHeadDim / 64 * kPanelBytes;
  static constexpr int kRowUnits = kHeadDim / 8;

  [[nodiscard]] __device__ static uint32_t unit_offset(uint32_t row, uint32_t unit) {
    return unit / 8 * kPanelBytes + row * 128 + ((unit ^ row) % 8) * 16;
  }
};

template <int kHeadDim>
struct WgmmaRing {
  using Tile = SwizzledTile<kHeadDim, kWgmmaTileKeys>;
  static constexpr int kStages = kHeadDim == 64 ? 4 : 2;
  static constexpr int kBytes = kStages * 2 * Tile::kBytes;

  uint32_t tiles;     // stages of a tile of k and one of v
  uint32_t barriers;  // full of each k, full of each v, free of each k, free of each v
  int32_t stage = 0;
  uint32_t parity = 0;

  static constexpr int kBarriers = 4 * kStages;

  __device__ void init() const {
    for (int i = 0; i < kBarriers; ++i) {
      barrier_init(barriers + i * 8, i < 2 * kStages ? kGroupThreads : kRowGroups * (kGroupThreads / 32));
    }
  }

  [[nodiscard]] __device__ uint32_t k_tile() const { return tiles + stage * 2 * Tile::kBytes; }
  [[nodiscard]] __device__ uint32_t v_tile() const { return k_tile() + Tile::kBytes; }
  [[nodiscard]] __device__ uint32_t k_full() const { return barriers + stage * 8; }
  [[nodiscard]] __device__ uint32_t v_full() const { return barriers + (kStages + stage) * 8; }
  [[nodiscard]] __device__ uint32_t k_free() const { return barriers + (2 * kStages + stage) * 8; }
  [[nodiscard]] __device__ uint32_t v_free() const { return barriers + (3 * kStages + stage) * 8; }

  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// The copying warpgroup. Thread i knows the row of key i of a tile; a warp copies the rows that its lanes know.
template <int kHeadDim>
class WgmmaCopier {
 public:
  using Ring = WgmmaRing<kHeadDim>;
  using Tile = typename Ring::Tile;

  __device__ WgmmaCopier(const SplitCall& call, Ring ring)
      : call_(call), keys_(ring), values_(ring), is_dense_(call.plan.page_size % kRunRows == 0) {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < kPeriod; ++step) {
      const uint32_t row = threadIdx.x / 32 * 32 + step * kRowsPerStep + lane / Tile::kRowUnits;
      to_[step] = Tile::unit_offset(row, lane % Tile::kRowUnits);
    }
  }

  /// All tiles of the walk's segment.
  __device__ void copy_segment(const WgmmaWalk& walk) {
    const AttentionProblem& p = call_.p;
    const SequenceGeometry& g = walk.sequence.geometry;
    const SplitSegment& segment = walk.segment;
    int64_t elems = segment.kv_head * p.k.head_stride;
    if (p.kv_form == AttentionKvForm::kPadded) elems += g.sequence * p.k.outer_stride;
    if (p.kv_form == AttentionKvForm::kPacked) elems += g.kv_begin * p.k.row_stride;
    const char* k = static_cast<const char*>(p.k.data) + 2 * elems;
    const char* v = static_cast<const char*>(p.v.data) + 2 * elems;
    const int32_t* table = p.page_table + g.sequence * p.page_table_stride;
    const int32_t first = walk.first_tile();
    const int32_t end = walk.end_tile();
    if (first >= end) return;
    // Keys of a tile go ahead of the values of the one before, whose place is free later.
    int64_t offset = tile_offset(segment, first, table);
    copy_keys(k, offset);
    for (int32_t tile = first; tile < end; ++tile) {
      const int64_t next = tile + 1 < end ? tile_offset(segment, tile + 1, table) : -1;
      if (tile + 1 < end) copy_keys(k, next);
      barrier_wait(values_.v_free(), values_.parity ^ 1);
      copy_rows(v, offset, values_.v_tile());
      barrier_arrive_after_copies(values_.v_full());
      values_.advance();
      offset = next;
    }
  }

 private:
  __device__ void copy_keys(const char* k, int64_t offset) {
    barrier_wait(keys_.k_free(), keys_.parity ^ 1);
    copy_rows(k, offset, keys_.k_tile());
    barrier_arrive_after_copies(keys_.k_full());
    keys_.advance();
  }

  /// row_offset_bytes of the thread's key in a tile; -1 outside the segment's keys, which are not read.
  [[nodiscard]] __device__ int64_t tile_offset(const SplitSegment& segment, int32_t tile, const int32_t* table) const {
    const int32_t key = tile * kWgmmaTileKeys + static_cast<int32_t>(threadIdx.x);
    return key >= segment.key_begin && key < segment.key_end ? row_offset_bytes(key, table) : -1;
  }

  /// Bytes from row 0 (of page 0) to the key's row; -1: its page is outside the pool (flagged).
  [[nodiscard]] __device__ int64_t row_offset_bytes(int32_t key, const int32_t* table) const {
    const SplitPlan& plan = call_.plan;
    const auto at = static_cast<uint32_t>(key);
    if (plan.page_size == 0) return at * plan.row_bytes;
    const uint32_t column = plan.page_shift >= 0 ? at >> plan.page_shift : at / plan.page_size;
    const auto page = static_cast<uint32_t>(__ldg(table + column));
    if (page >= plan.num_pages) {
      raise_flag(call_.flags.page_table);
      return -1;
    }
    return page * plan.page_bytes + (at - column * plan.page_size) * plan.row_bytes;
  }

  /// Copies the 32 rows of a warp, whose offsets the lanes know; those at -1 are zeros.
  __device__ void copy_rows(const char* base, int64_t row_offset, uint32_t tile) const {
    const bool all_valid = __all_sync(0xffffffffu, row_offset >= 0);
    const auto lane = static_cast<int>(threadIdx.x % 32);
    const char* own = base + lane % Tile::kRowUnits * 16;
    const int own_row = lane / Tile::kRowUnits;
    if (all_valid && is_dense_) {
      const int64_t distance = kRowsPerStep * call_.plan.row_bytes;
#pragma unroll
      for (int step = 0; step < kSteps;) {
        const char* from =
            own + __shfl_sync(0xffffffffu, row_offset, step * kRowsPerStep) + own_row * call_.plan.row_bytes;
#pragma unroll
        for (int in_run = 0; in_run < kRunRows / kRowsPerStep; ++in_run, ++step, from += distance)
          copy_async_16(tile + to(step), from, true);
      }
    } else if (all_valid) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int64_t offset = __shfl_sync(0xffffffffu, row_offset, step * kRowsPerStep + own_row);
        copy_async_16(tile + to(step), own + offset, true);
      }
    } else {
#pragma unroll 4
      for (int step = 0; step < kSteps; ++step) {
        const int64_t offset = __shfl_sync(0xffffffffu, row_offset, step * kRowsPerStep + own_row);
        copy_async_16(tile + to(step), own + (offset < 0 ? 0 : offset), offset >= 0);
      }
    }
  }

  /// Where the lane's unit of a step goes; the swizzle repeats every eight rows.
  [[nodiscard]] __device__ uint32_t to(int step) const { return to_[step % kPeriod] + step / kPeriod * 8 * 128; }

  static constexpr int kRunRows = 16;  // a size of pages that is common; copies of a run need one address
  static constexpr int kRowsPerStep = 32 / Tile::kRowUnits;
  static constexpr int kSteps = 32 / kRowsPerStep;  // of a warp
  static constexpr int kPeriod = 8 / kRowsPerStep;

  const SplitCall& call_;
  Ring keys_;
  Ring values_;
  const bool is_dense_;  // kRunRows keys from a multiple of kRunRows on lie at equal distances
  uint32_t to_[kPeriod];
};

}  // namespace polyop::cuda
