// How split_kv cuts a batch: sequence -> row tiles x kv heads x chunks of keys. Every number depends on the sequence
// alone (and on the device), so that its bits do not depend on its neighbours.
#pragma once

#include <cstdint>

#include "polyop/cuda/workspace.h"
#include "polyop/ops/attention/cuda/sequence_geometry.cuh"

namespace polyop::cuda {

inline constexpr int kRowsPerWarp = 16;  // M of the matrix instruction
inline constexpr int kKeysPerTile = 64;  // keys of one pipeline stage
inline constexpr int kLeastChunk = 128;  // keys; below, joining the parts costs more than the parallelism gives
inline constexpr int kMostChunk = 1024;  // keys of a narrow tile; above, the last wave of blocks gets long
inline constexpr int kConsumerWarps = 4;

/// The host's part of the plan, the same for all sequences.
struct SplitPlan {
  int32_t group_size = 1;      // G
  int32_t rows_per_tile = 64;  // of a sequence with more than 16 rows; 16: wide tiles do not fit the registers
  int32_t target_items = 132;  // row tiles x kv heads x chunks that fill the device
  int32_t num_stages = 2;
  bool splits_wide = true;  // false: sequences of more than 16 rows are one chunk
};

__host__ __device__ inline int32_t divide_up(int32_t a, int32_t b) { return (a + b - 1) / b; }

/// Keys of one chunk of a sequence with `num_tiles` row tiles.
__host__ __device__ inline int32_t chunk_keys(const SplitPlan& plan, int32_t num_kv_heads, int32_t num_tiles,
                                              bool narrow, int32_t kv_length) {
  const int32_t wanted = narrow || plan.splits_wide ? divide_up(plan.target_items, num_kv_heads * num_tiles) : 1;
  if (wanted <= 1) return divide_up(kv_length > 0 ? kv_length : 1, kKeysPerTile) * kKeysPerTile;
  int32_t keys = divide_up(divide_up(kv_length, wanted), kKeysPerTile) * kKeysPerTile;
  if (narrow && keys > kMostChunk) keys = kMostChunk;
  return keys < kLeastChunk ? kLeastChunk : keys;
}

/// A sequence's share of the items.
struct SequenceItems {
  SequenceGeometry geometry;
  int32_t num_rows = 0;  // query rows x G
  int32_t tile_rows = 16;
  int32_t num_tiles = 0;
  int32_t chunk = 0;        // keys
  int32_t first_chunk = 0;  // the first one that any row sees
  int32_t num_chunks = 0;   // from there on
  int32_t count = 0;
};

__device__ inline SequenceItems read_items(const AttentionProblem& p, const SplitPlan& plan, int32_t sequence,
                                           const AttentionFlags& flags) {
  SequenceItems s;
  s.geometry = read_geometry(p, sequence, flags);
  s.num_rows = s.geometry.allotted * plan.group_size;
  if (s.num_rows == 0) return s;
  const bool narrow = s.num_rows <= kRowsPerWarp;
  s.tile_rows = narrow ? kRowsPerWarp : plan.rows_per_tile;
  s.num_tiles = divide_up(s.num_rows, s.tile_rows);
  const auto heads = static_cast<int32_t>(p.num_kv_heads);
  s.chunk = chunk_keys(plan, heads, s.num_tiles, narrow, s.geometry.kv_length);
  // A semaphore for each tile and head; where they run out, one chunk needs none.
  const int64_t semaphores = (sequence + (int64_t{s.geometry.row_begin} * plan.group_size) / kRowsPerWarp +
                              divide_up(s.num_rows, kRowsPerWarp)) *
                             int64_t{heads};
  if (semaphores > kNumSemaphores) s.chunk = divide_up(max(s.geometry.kv_length, 1), kKeysPerTile) * kKeysPerTile;
  const int32_t begin = s.geometry.query_rows > 0 ? s.geometry.visible(p, 0).begin : 0;
  const int32_t end = s.geometry.query_rows > 0 ? s.geometry.visible(p, s.geometry.query_rows - 1).end : 0;
  s.first_chunk = begin / s.chunk;
  s.num_chunks = max(1, divide_up(max(end, 0), s.chunk) - s.first_chunk);
  s.count = s.num_tiles * heads * s.num_chunks;
  return s;
}

/// One piece of work: the rows of one tile against one chunk of one kv head.
struct SplitItem {
  int32_t kv_head = 0;
  int32_t chunk = 0;      // 0 .. num_chunks
  int32_t row_begin = 0;  // first row of the tile in its sequence, in rows x G
  int32_t key_begin = 0;  // first key that a row of the tile may see in the chunk
  int32_t key_end = 0;
  int32_t tile_begin = 0;  // key_begin rounded down to the stages' grid

  [[nodiscard]] __device__ int32_t num_stages() const {
    return key_end > key_begin ? divide_up(key_end - tile_begin, kKeysPerTile) : 0;
  }
};

/// Walks the items [first, first + count) of the batch.
class ItemCursor {
 public:
  /// `sequence` holds item `local` of it as the first one.
  __device__ ItemCursor(const AttentionProblem& p, const SplitPlan& plan, const AttentionFlags& flags, int32_t sequence,
                        int32_t local, int32_t count)
      : left_(count), local_(local) {
    if (left_ <= 0) return;
    items_ = read_items(p, plan, sequence, flags);
    set_item(p, plan);
  }

  [[nodiscard]] __device__ bool done() const { return left_ <= 0; }
  [[nodiscard]] __device__ bool is_final() const { return left_ == 1; }
  [[nodiscard]] __device__ const SequenceItems& sequence() const { return items_; }
  [[nodiscard]] __device__ const SplitItem& item() const { return item_; }

  __device__ void advance(const AttentionProblem& p, const SplitPlan& plan, const AttentionFlags& flags) {
    if (--left_ <= 0) return;
    if (++local_ == items_.count) {
      local_ = 0;
      do {
        items_ = read_items(p, plan, items_.geometry.sequence + 1, flags);
      } while (items_.count == 0);
    }
    set_item(p, plan);
  }

 private:
  __device__ void set_item(const AttentionProblem& p, const SplitPlan& plan) {
    const int32_t tile_head = local_ / items_.num_chunks;
    item_.chunk = local_ - tile_head * items_.num_chunks;
    const int32_t tile = tile_head / static_cast<int32_t>(p.num_kv_heads);
    item_.kv_head = tile_head - tile * static_cast<int32_t>(p.num_kv_heads);
    item_.row_begin = tile * items_.tile_rows;
    const SequenceGeometry& g = items_.geometry;
    const int32_t first = item_.row_begin / plan.group_size;
    const int32_t last =
        min(min(item_.row_begin + items_.tile_rows, items_.num_rows) - 1, g.query_rows * plan.group_size - 1) /
        plan.group_size;
    item_.key_begin = item_.key_end = 0;
    if (first < g.query_rows && last >= first) {
      const int32_t chunk_begin = (items_.first_chunk + item_.chunk) * items_.chunk;
      const int32_t chunk_end = min(chunk_begin + items_.chunk, g.kv_length);
      item_.key_begin = max(g.visible(p, first).begin, chunk_begin);
      item_.key_end = min(g.visible(p, last).end, chunk_end);
    }
    item_.tile_begin = item_.key_begin / kKeysPerTile * kKeysPerTile;
  }

  int32_t left_;
  int32_t local_;
  SequenceItems items_;
  SplitItem item_;
};

/// First item of a block and how many it takes: equal counts, the first blocks one more.
struct BlockShare {
  int32_t sequence = 0;
  int32_t local = 0;
  int32_t count = 0;
};

/// Every warp computes it alone, with all lanes.
__device__ inline BlockShare find_share(const AttentionProblem& p, const SplitPlan& plan, const AttentionFlags& flags) {
  const int lane = threadIdx.x % 32;
  const auto num_sequences = static_cast<int32_t>(p.num_sequences);
  const auto count_of = [&](int32_t sequence) {
    return sequence < num_sequences ? read_items(p, plan, sequence, flags).count : 0;
  };
  int32_t total = 0;
  int32_t first_count = 0;  // of sequence `lane`: a second pass over up to 32 sequences reads nothing again
  for (int32_t sequence = lane; sequence < num_sequences; sequence += 32) {
    const int32_t count = count_of(sequence);
    if (sequence == lane) first_count = count;
    total += count;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
  const auto blocks = static_cast<int32_t>(gridDim.x);
  const auto block = static_cast<int32_t>(blockIdx.x);
  const int32_t base = total / blocks;
  const int32_t extra = total - base * blocks;
  BlockShare share;
  share.count = base + (block < extra ? 1 : 0);
  if (share.count == 0) return share;
  const int32_t start = block * base + min(block, extra);
  int32_t before = 0;
  for (int32_t first = 0; first < num_sequences; first += 32) {
    int32_t sum = first == 0 ? first_count : count_of(first + lane);
    const int32_t own = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    const uint32_t reached = __ballot_sync(0xffffffffu, before + sum > start);
    if (reached != 0) {
      const int at = __ffs(static_cast<int>(reached)) - 1;
      share.sequence = first + at;
      share.local = start - before - __shfl_sync(0xffffffffu, sum - own, at);
      return share;
    }
    before += __shfl_sync(0xffffffffu, sum, 31);
  }
  share.count = 0;
  return share;
}

}  // namespace polyop::cuda
